"""Texts of a search: regular expressions of RE2, and the part of a text that shows why it was found."""

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


Span = tuple[int, int]
_BEFORE = 80  # characters shown before the first match
_LINES_BEFORE = 2
_LENGTH = 280  # characters shown
_MAX_SPANS = 20
_LARGE_BYTES = 200_000  # of larger texts only a window is decoded
_WINDOW_BYTES = 8192


def snippet(text: pa.Scalar, pattern: str | None) -> tuple[str, tuple[Span, ...]] | None:
    """Return a part of a text around the first match, and the matches within it.

    Args:
        text: a string, which may be null or very long.
        pattern: a regular expression, or None for the beginning of the text.

    Returns:
        The part with "…" where it is cut, and start and end of matches in its characters; None if nothing matches.
    """
    if not text.is_valid:
        return None
    first = 0 if pattern is None else pc.find_substring_regex(text, pattern).as_py()
    if first < 0:
        return None
    data = memoryview(text.as_buffer())
    window = slice(0, len(data))
    if len(data) > _LARGE_BYTES:
        window = slice(max(0, first - _WINDOW_BYTES), first + _WINDOW_BYTES)
    before = _decode(data[window.start : first])
    whole = before + _decode(data[first : window.stop])
    start = max(0, len(before) - _BEFORE)
    if before.count("\n", start) > _LINES_BEFORE:
        start = len(before) - len("\n".join(before.rsplit("\n", _LINES_BEFORE + 1)[1:]))
    end = min(len(whole), start + _LENGTH)
    spans = () if pattern is None else find_spans(whole, pattern, from_=len(before), most=_MAX_SPANS)
    ahead = "…" if start > 0 or window.start > 0 else ""
    behind = "…" if end < len(whole) or window.stop < len(data) else ""
    shift = len(ahead) - start
    shown = tuple((a + shift, min(b, end) + shift) for i, (a, b) in enumerate(spans) if b <= end or i == 0)
    return f"{ahead}{whole[start:end]}{behind}", shown


def _decode(data: memoryview) -> str:
    return bytes(data).decode("utf-8", errors="ignore")
