"""Tokens of a search."""

import re
from dataclasses import dataclass
from typing import Literal

MAX_CHARACTERS = 10_000
KEYWORDS = frozenset({"and", "or", "not", "contains", "in", "is", "null"})
TokenKind = Literal["word", "number", "string", "column", "operator", "punctuation", "end"]

_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_OPERATOR = re.compile(r"<=|>=|==|!=|!~|<>|[<>=~]")
_WORD = re.compile(r"[^\s()\"`,<>=~!]+")
_SAME = {"=": "==", "<>": "!="}
_QUOTED: dict[str, TokenKind] = {'"': "string", "'": "string", "`": "column"}


class QuerySyntaxError(ValueError):
    """A search that cannot be parsed. `position` counts characters of the query from 0."""

    def __init__(self, message: str, position: int):
        super().__init__(message)
        self.message = message
        self.position = position


@dataclass(frozen=True, slots=True)
class Token:
    """A token; `text` is without quotes."""

    kind: TokenKind
    text: str
    position: int

    def is_one_of(self, *texts: str) -> bool:
        """Whether this is one of these keywords, operators or punctuation marks."""
        if self.kind == "word":
            return self.text.lower() in KEYWORDS.intersection(texts)
        return self.kind in ("operator", "punctuation") and self.text in texts

    @property
    def shown(self) -> str:
        """The token for a message."""
        return "the end of the query" if self.kind == "end" else repr(self.text)


def tokenize(text: str) -> list[Token]:
    """Split a query into tokens; the last is the end.

    Strings are in double or single quotes, unusual column names in backquotes. A quote inside is written twice; a
    backslash has no meaning, so that regular expressions need no escapes.

    Raises:
        QuerySyntaxError: a quote is never closed, a character means nothing here, or the query is too long.
    """
    if len(text) > MAX_CHARACTERS:
        raise QuerySyntaxError(f"the query is longer than {MAX_CHARACTERS} characters", MAX_CHARACTERS)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise QuerySyntaxError("the query is not valid Unicode", error.start) from None
    tokens = []
    position = 0
    while position < len(text):
        if text[position].isspace():
            position += 1
            continue
        token, position = _token_at(text, position)
        tokens.append(token)
    return [*tokens, Token("end", "", len(text))]


def quote(text: str, mark: str = '"') -> str:
    """Return text in quotes, as `tokenize` reads it."""
    return f"{mark}{text.replace(mark, mark * 2)}{mark}"


def is_word(text: str) -> bool:
    """Whether text without quotes is one word, and no keyword or number."""
    return bool(_WORD.fullmatch(text)) and not _NUMBER.fullmatch(text) and text.lower() not in KEYWORDS


def _token_at(text: str, position: int) -> tuple[Token, int]:
    character = text[position]
    if character in _QUOTED:
        return _quoted(text, position)
    if character in "(),":
        return Token("punctuation", character, position), position + 1
    if match := _OPERATOR.match(text, position):
        return Token("operator", _SAME.get(match[0], match[0]), position), match.end()
    if match := _WORD.match(text, position):
        kind: TokenKind = "number" if _NUMBER.fullmatch(match[0]) else "word"
        return Token(kind, match[0], position), match.end()
    raise QuerySyntaxError(f"{character!r} means nothing here; put text to search for in quotes", position)


def _quoted(text: str, start: int) -> tuple[Token, int]:
    mark = text[start]
    end = start + 1
    while (end := text.find(mark, end)) >= 0 and text.startswith(mark, end + 1):
        end += 2
    if end < 0:
        raise QuerySyntaxError(f"this quote is never closed: expected {mark}", start)
    return Token(_QUOTED[mark], text[start + 1 : end].replace(mark * 2, mark), start), end + 1
