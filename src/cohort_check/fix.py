"""`cohort check --fix`: write the nearest valid values into a file, where its text has the old ones literally."""

import re
from collections.abc import Sequence
from pathlib import Path

from cohort_check.findings import Finding
from cohort_check.rules.common import GPUS

_COMMENT = re.compile(r"(?m)(?:^|(?<=\s))#.*")
_VALUE = r"""(?P<quote>["']?)(?P<value>\$?\{?[\w.+-]+\}?)(?P=quote)"""


def fix_file(path: Path, findings: Sequence[Finding]) -> tuple[list[str], list[str]]:
    """Write the nearest fix of each error. Numbers of GPUs are not part of a file and are skipped.

    Return the changes that were written, and the fixes that have to be made by hand.
    """
    text = path.read_text(encoding="utf-8")
    written: list[str] = []
    by_hand: list[str] = []
    for finding in findings:
        if finding.severity == "error" and finding.nearest:
            applied = (_apply(text, path.suffix, proposal) for proposal in finding.nearest)
            text, changes = next(filter(None, applied), (text, []))
            written += changes
            by_hand += [] if changes else [f"{finding.code}: {finding.nearest[0]}"]
    if written:
        path.write_text(text, encoding="utf-8")
    return written, by_hand


def _apply(text: str, suffix: str, proposal: str) -> tuple[str, list[str]] | None:
    """The text with all values of `a=1 and b=2`, and a description of each change; None if one cannot be placed."""
    changes = []
    for part in proposal.split(" and "):
        key, _, value = part.partition("=")
        if key == GPUS or not (re.fullmatch(r"[\w.]+", key) and re.fullmatch(r"[\w.+-]+", value)):
            return None
        place = _place(text, key.rpartition(".")[2] if suffix in (".yaml", ".yml") else key)
        if place is None:
            return None
        start, end = place
        changes.append(f"line {text.count(chr(10), 0, start) + 1}: {key} {text[start:end]} -> {value}")
        text = text[:start] + value + text[end:]
    return text, changes


def _place(text: str, key: str) -> tuple[int, int] | None:
    """Where a key's only value is: `--key VALUE`, `key=VALUE`, `key: VALUE`, or the variable that it is read from."""
    name = re.escape(key).replace("_", "[_-]")
    option, assignment = rf"--{name}(?:=|\s+){_VALUE}", rf"(?<![\w.-]){name}\s*[:=]\s*{_VALUE}"
    code = _COMMENT.sub(lambda comment: " " * len(comment[0]), text)
    found = list(re.finditer(option, code)) or list(re.finditer(assignment, code))
    if len(found) != 1:
        return None
    value = found[0]["value"]
    if not value.startswith("$"):
        return found[0].span("value")
    variable = value.strip("${}")
    return _place(text, variable) if variable != key else None
