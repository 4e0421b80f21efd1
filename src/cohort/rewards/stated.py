"""Find where a text states its answer: in boxes, in answer tags and in lines after `####`."""

import re
from dataclasses import dataclass
from typing import Literal, get_args

MAX_CHARS = 100_000  # at the end of a completion, in which `choice` and `number` look: that takes a tenth of a second
_INNER = r"(?:[^{}]++|\{(?:[^{}]++|\{(?:[^{}]++|\{[^{}]*+\})*+\})*+\})*+"
_MARKED = re.compile(
    rf"\\f?box(?:ed)?\s*\{{(?P<box>{_INNER})(?:\}}|$)"  # a completion that is cut may leave the box open
    r"|<answer>(?P<tags>(?:(?!<answer>).)*?)</answer>"
    r"|####(?P<line>[^\n]*)",
    re.DOTALL,
)
_BETWEEN = re.compile(r"[\s$.,;*&\\]*(?:(?:and|or|text\s*\{\s*(?:and|or)\s*\}|q?quad)[\s$*\\]*)?")


Kind = Literal["box", "tags", "line"]
_KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Mark:
    """A place where an answer is stated."""

    kind: Kind
    content: str
    start: int  # in the text


def find_marks(text: str) -> list[Mark]:
    """Return the marked answers in order. Different boxes side by side, as in "4 or 3", are one box without content."""
    marks: list[Mark] = []
    end = 0
    for match in _MARKED.finditer(text):
        kind: Kind
        kind, content = next((k, match[k]) for k in _KINDS if match[k] is not None)
        inner = find_marks(content) if kind != "line" else []
        is_inner = bool(inner) and inner[-1].kind == "box"
        mark = Mark("box", inner[-1].content, match.start()) if is_inner else Mark(kind, content, match.start())
        if marks and mark.kind == marks[-1].kind == "box" and _BETWEEN.fullmatch(text, end, match.start()):
            same = marks.pop().content.strip() == content.strip()
            mark = mark if same else Mark("box", "", match.start())
        marks.append(mark)
        end = match.end()
    return marks
