"""Write the table of findings into docs/check.md: `python tools/docs/check_findings.py docs/check.md`."""

import re
import sys
from pathlib import Path

from cohort_check.findings import RULES

_MARKED = re.compile(r"(<!-- findings, made by `make docs` -->\n).*?(<!-- end of findings -->)", re.DOTALL)


def with_findings(page: str) -> str:
    """Return the page with the table between its markers regenerated."""
    rows = [f"| `{code}` | {rule.severity} | {rule.title} | {rule.explanation} |" for code, rule in RULES.items()]
    table = "\n".join(["| code | severity | finding | explanation |", "| --- | --- | --- | --- |", *rows])
    return _MARKED.sub(lambda found: f"{found[1]}{table}\n{found[2]}", page)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_findings(path.read_text(encoding="utf-8")), encoding="utf-8")
