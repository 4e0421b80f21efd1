"""Pages of the documentation: their headings, links and blocks."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCED = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)  # language, text


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return FENCED.sub("", text)


def anchors(text: str) -> list[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them; of the same heading again, with a number."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w -]", "", plain).strip().lower().replace(" ", "-")
        count = sum(re.fullmatch(rf"{re.escape(name)}(-\d+)?", other) is not None for other in found)
        found.append(f"{name}-{count}" if count else name)
    return found
