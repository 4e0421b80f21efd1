"""Regular expressions of RE2, whose time is linear in the text: checking, quoting and locating matches."""

import pyarrow as pa
import pyarrow.compute as pc


class RegexError(ValueError):
    """An invalid regular expression; `fragment` is the part that RE2 objects to."""

    def __init__(self, message: str, fragment: str):
        super().__init__(message)
        self.fragment = fragment


def check_regex(pattern: str) -> None:
    """Check a regular expression.

    Raises:
        RegexError: RE2 cannot compile it.
    """
    try:
        pc.match_substring_regex(pa.array([""]), pattern)
    except pa.ArrowInvalid as error:
        reason = str(error).removeprefix("Invalid regular expression: ")
        fragment = reason.partition(": ")[2]
        raise RegexError(reason, fragment) from None


def quote_regex(text: str) -> str:
    """Return a regular expression that matches this text, regardless of case."""
    quoted = (c if c.isalnum() or c == "_" or ord(c) > 127 else f"\\x{{{ord(c):x}}}" for c in text)
    return f"(?i:{''.join(quoted)})"


def find_spans(text: str, pattern: str, *, from_: int, most: int) -> list[tuple[int, int]]:
    """Return start and end, in characters, of the first `most` matches from a position that are not empty."""
    opening, closing = _unused_characters(text)
    # not with max_replacements, which lets ^ match again after each match
    marked = pc.replace_substring_regex(pa.scalar(text), f"({pattern})", f"{opening}\\1{closing}").as_py()
    spans: list[tuple[int, int]] = []
    end = 0
    found = 0
    while len(spans) < most:
        start = marked.find(opening, end)
        if start < 0:
            break
        end = marked.find(closing, start)
        if start + 1 < end and start - 2 * found >= from_:
            spans.append((start - 2 * found, end - 2 * found - 1))
        found += 1
    return spans


def _unused_characters(text: str) -> tuple[str, str]:
    """Return two characters of the private use area that are not in the text."""
    used = set(text)
    unused = (chr(c) for c in range(0xE000, 0xF900) if chr(c) not in used)
    return next(unused), next(unused)
