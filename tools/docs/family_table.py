"""Write the table of families into docs/tool-formats.md: `python tools/docs/family_table.py docs/tool-formats.md`."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests" / "helpers"))

from cohort.chat import ChatTemplate, ResponseParser
from cohort.chat.formats import FORMATS
from tool_families import FAMILIES, TOOLS, tokenizer_of

_MARKED = re.compile(r"(<!-- families, made by `make docs` -->\n).*?(<!-- end of families -->)", re.DOTALL)


def with_families(page: str) -> str:
    """Return the page with the table between its markers regenerated."""
    return _MARKED.sub(lambda found: found[1] + "\n".join(_table()) + "\n" + found[2], page)


def _table() -> Iterator[str]:
    thoughts: dict[str | None, set[str]] = {}
    history: dict[str | None, set[str]] = {}
    for family in FAMILIES:
        tokenizer = tokenizer_of(family.name)
        name = ResponseParser(tokenizer).family
        markers = ResponseParser(tokenizer).thought_markers
        thoughts.setdefault(name, set()).update(["`" + " ".join(markers) + "`"] if markers else [])
        change = ChatTemplate(tokenizer, kwargs=family.kwargs).rewrites(TOOLS)
        history.setdefault(name, set()).add(change or "kept")
    yield from ("| family | a call | thoughts | history |", "| --- | --- | --- | --- |")
    for form in {form.family: form for form in FORMATS}.values():
        example = form.example.replace("|", "\\|")
        written = ", ".join(sorted(thoughts.get(form.family, ()))).replace("|", "\\|") or "none"
        changes = "; or ".join(sorted(history.get(form.family, ()), key=lambda text: (text != "kept", text)))
        yield f"| {form.family} | `{example}` | {written} | {changes or 'not tested'} |"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_families(path.read_text(encoding="utf-8")), encoding="utf-8")
