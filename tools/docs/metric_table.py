"""Write what docs/metrics.md says about metrics as TOML: `python tools/docs/metric_table.py docs/metrics.md`."""

import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_HEADER = "# Generated from docs/metrics.md by `make docs`; do not edit.\n"
_ROW = re.compile(r"^\| (`[^|]*`) \| (.*) \|$", re.MULTILINE)
_OPTIONS = re.compile(r"\{(\w+(?:,\w+)+)\}")
_SENTENCE_END = re.compile(r"(?<=\S)(\.|;)(?= |$)| \((?=this |only |with |see |`completions/)")


def render(page: str) -> str:
    """Return the TOML: a short description by name. Names may have placeholders, such as `rewards/{name}/mean`."""
    table = page.partition("\n## ")[0]
    lines = [
        f"{json.dumps(name)} = {json.dumps(short_description(meaning), ensure_ascii=False)}"
        for cell, meaning in _ROW.findall(table)
        for name in names_in(cell)
    ]
    return "\n".join([_HEADER, *lines, ""])


def names_in(cell: str) -> Iterator[str]:
    """Yield the names in a cell: `a/{x,y}_s` stands for two, and `/b` after `a/c` for `a/b`."""
    before = ""
    for name in re.findall(r"`([^`]+)`", cell):
        before = f"{before.rpartition('/')[0]}{name}" if name.startswith("/") else name
        parts = _OPTIONS.split(before)  # every second one lists options
        choices = [part.split(",") if n % 2 else [part] for n, part in enumerate(parts)]
        for chosen in itertools.product(*choices):
            yield "".join(chosen)


def short_description(meaning: str) -> str:
    """Return the first clause, as plain text that begins with a capital letter."""
    end = _SENTENCE_END.search(meaning)
    clause = (meaning if end is None else meaning[: end.start()]).strip()
    return (clause[:1].upper() + clause[1:]).replace("`", "")


if __name__ == "__main__":
    print(render(Path(sys.argv[1]).read_text(encoding="utf-8")), end="")
