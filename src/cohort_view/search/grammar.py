"""The language of a search: columns, tokens, a typed syntax tree, its parser and its text.

    query   = or
    or      = and {"or" and}
    and     = not {["and"] not}                       terms side by side must all hold
    not     = "not" not | "(" or ")" | condition | word | string
    condition = column ("<" | "<=" | ">" | ">=" | "==" | "!=") value
            | column ["not"] "contains" value         case-insensitive
            | column ("~" | "!~") string              a regular expression of RE2
            | column ["not"] "in" "(" value {"," value} ")"
            | column "is" ["not"] "null"

A word or string by itself means that the text contains it.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from cohort.errors import did_you_mean
from cohort_view.search.text import RegexError, check_regex

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


ColumnType = Literal["number", "text"]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the completions files, as a search names it."""

    name: str
    type: ColumnType
    description: str


_FIXED = (
    Column("text", "text", "text that the policy sampled"),
    Column("prompt", "text", "the prompt; chat messages as JSON"),
    Column("reward", "number", "weighted sum of the rewards; null if not scored"),
    Column("advantage", "number", "mean over the sampled tokens"),
    Column("length", "number", "tokens that the policy sampled, over all turns"),
    Column("end", "text", "answer, max_turns, length, timeout or environment_error"),
    Column("finish_reason", "text", "stop or length, of the last turn"),
    Column("step", "number", "training step"),
    Column("kind", "text", "step, replaced, dropped or eval: the kind of file"),
    Column("prompt_id", "number", "row of the prompt in the dataset"),
    Column("policy_version", "number", "optimizer steps done when the oldest token was sampled"),
    Column("error", "text", "message of a broken trajectory"),
    Column("messages", "text", "the conversation after the prompt, as JSON"),
    Column("tool_calls", "number", "tool calls"),
    Column("tool_errors", "number", "tool calls that failed"),
    Column("malformed_calls", "number", "tool calls that could not be parsed"),
    Column("attempts", "number", "1 plus the number of times that the environment was replaced"),
    Column("model_s", "number", "seconds in which a model call was waiting"),
    Column("environment_s", "number", "seconds of everything else"),
)
_FAMILIES = (
    Column("rewards/", "number", "one reward, unweighted"),
    Column("environment/", "number", "a metric of the environment or agent"),
    Column("details/", "text", "how a reward scored, as JSON"),
)
_NOT_AS_NAMED = frozenset({"text", "length", "end", "kind"})  # of columns of another name, or of the file's name


class Columns:
    """The known columns of a run.

    Without names, any column of a family (`rewards/...`, `environment/...`, `details/...`) is known.
    """

    def __init__(self, in_files: Iterable[str] | None = None):
        """Collect the columns.

        Args:
            in_files: column names in the run's Parquet files, or None if there are none yet.
        """
        self._in_files = None if in_files is None else frozenset(in_files)
        self._columns: Mapping[str, Column] = {column.name: column for column in _FIXED} | {
            name: Column(name, family.type, family.description)
            for name in sorted(self._in_files or ())
            if (family := _family(name)) is not None
        }

    def __iter__(self) -> Iterator[Column]:
        """Iterate over the known columns: the fixed ones first."""
        return iter(self._columns.values())

    def find(self, name: str) -> Column | None:
        """Return the column of this name, or None. `rewards.x` is short for `rewards/x`, and `completion` is `text`."""
        if name == "completion":
            name = "text"
        family, dot, rest = name.partition(".")
        for spelling in (name, f"{family}/{rest}" if dot else name):
            if spelling in self._columns:
                return self._columns[spelling]
            if self._in_files is None and (column := _family(spelling)) is not None:
                return Column(spelling, column.type, column.description)
        return None

    def in_files(self) -> list[Column]:
        """Return the known columns that files have, all if that is not known."""
        return [c for c in self if self._in_files is None or c.name in _NOT_AS_NAMED or c.name in self._in_files]

    def names(self) -> list[str]:
        """Names of the known columns."""
        return list(self._columns)


def _family(name: str) -> Column | None:
    return next((f for f in _FAMILIES if name.startswith(f.name) and len(name) > len(f.name)), None)


MAX_DEPTH = 50  # nested parentheses and negations
MAX_CONDITIONS = 100
Comparator = Literal["==", "!=", "<", "<=", ">", ">="]
Value = float | str


@dataclass(frozen=True, slots=True)
class Compare:
    """A column compared with a value; false if the column is null."""

    column: str
    comparator: Comparator
    value: Value


@dataclass(frozen=True, slots=True)
class Contains:
    """Whether a text column contains a string, regardless of case."""

    column: str
    text: str


@dataclass(frozen=True, slots=True)
class Matches:
    """Whether a regular expression matches anywhere in a text column."""

    column: str
    pattern: str


@dataclass(frozen=True, slots=True)
class IsIn:
    """Whether a column is one of several values."""

    column: str
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class IsNull:
    """Whether a column has no value."""

    column: str


@dataclass(frozen=True, slots=True)
class Not:
    """The negation of a condition: true where the condition is false, also because of a null."""

    condition: "Node"


@dataclass(frozen=True, slots=True)
class And:
    """Two or more conditions that all hold."""

    conditions: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Or:
    """Two or more conditions of which at least one holds."""

    conditions: tuple["Node", ...]


Leaf = Compare | Contains | Matches | IsIn | IsNull
Node = Leaf | Not | And | Or


def parse_query(text: str, columns: Columns) -> Node:
    """Parse a search.

    Args:
        text: what the user typed.
        columns: the columns that it may use.

    Raises:
        QuerySyntaxError: the text is no query; the message says what is expected at the position.
    """
    parser = _Parser(tokenize(text), columns)
    return parser.parse()


def to_text(node: Node) -> str:
    """Return the query as text, which `parse_query` reads as the same tree."""
    match node:
        case Compare(column, comparator, value):
            return f"{_column_text(column)} {comparator} {_value_text(value)}"
        case Contains("text", text):
            return quote(text)
        case Contains(column, text):
            return f"{_column_text(column)} contains {quote(text)}"
        case Matches(column, pattern):
            return f"{_column_text(column)} ~ {quote(pattern)}"
        case IsIn(column, values):
            return f"{_column_text(column)} in ({', '.join(map(_value_text, values))})"
        case IsNull(column):
            return f"{_column_text(column)} is null"
        case Not(condition):
            return f"not {_in_parentheses(condition, And | Or)}"
        case And(conditions):
            return " and ".join(_in_parentheses(c, And | Or) for c in conditions)
        case Or(conditions):
            return " or ".join(_in_parentheses(c, Or) for c in conditions)


def _in_parentheses(node: Node, kinds: object) -> str:
    text = to_text(node)
    return f"({text})" if isinstance(node, kinds) else text  # type: ignore[arg-type]


def _column_text(name: str) -> str:
    return name if is_word(name) else quote(name, "`")


def _value_text(value: Value) -> str:
    if isinstance(value, str):
        return quote(value)
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)


class _Parser:
    """A recursive-descent parser over tokens, the last of which is the end."""

    def __init__(self, tokens: list[Token], columns: Columns):
        self._tokens = tokens
        self._columns = columns
        self._next = 0
        self._depth = 0
        self._conditions = 0

    def parse(self) -> Node:
        if self._token.kind == "end":
            raise QuerySyntaxError("the query is empty: enter text to find or a condition such as reward < 0.2", 0)
        node = self._or()
        if self._token.kind != "end":
            raise self._expected("the end of the query, 'and' or 'or'")
        return node

    @property
    def _token(self) -> Token:
        return self._tokens[self._next]

    def _after(self, count: int) -> Token:
        return self._tokens[min(self._next + count, len(self._tokens) - 1)]

    def _take(self) -> Token:
        token = self._token
        self._next = min(self._next + 1, len(self._tokens) - 1)
        return token

    def _take_if(self, *texts: str) -> bool:
        if self._token.is_one_of(*texts):
            self._take()
            return True
        return False

    def _expected(self, what: str) -> QuerySyntaxError:
        return QuerySyntaxError(f"expected {what}, found {self._token.shown}", self._token.position)

    def _or(self) -> Node:
        parts = [self._and()]
        while self._take_if("or"):
            parts.append(self._and())
        return parts[0] if len(parts) == 1 else Or(tuple(parts))

    def _and(self) -> Node:
        parts = [self._not()]
        while self._take_if("and") or not (self._token.kind == "end" or self._token.is_one_of("or", ")")):
            parts.append(self._not())
        return parts[0] if len(parts) == 1 else And(tuple(parts))

    def _not(self) -> Node:
        if self._token.is_one_of("not"):
            return self._nested(lambda: Not(self._not()))
        if self._token.is_one_of("("):
            return self._nested(self._parentheses)
        return self._term()

    def _nested(self, parse: Callable[[], Node]) -> Node:
        opening = self._take()
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise QuerySyntaxError(f"nested more than {MAX_DEPTH} levels deep", opening.position)
        node = parse()
        self._depth -= 1
        return node

    def _parentheses(self) -> Node:
        opening = self._tokens[self._next - 1]
        node = self._or()
        if self._token.kind == "end":
            raise QuerySyntaxError("this parenthesis is never closed: expected ')'", opening.position)
        if not self._take_if(")"):
            raise self._expected("')', 'and' or 'or'")
        return node

    def _term(self) -> Node:
        token = self._token
        self._conditions += 1
        if self._conditions > MAX_CONDITIONS:
            raise QuerySyntaxError(f"more than {MAX_CONDITIONS} conditions", token.position)
        if token.kind in ("word", "number", "column") and self._is_condition():
            return self._condition()
        if token.kind == "column":
            self._take()
            raise self._expected(f"a comparison after the column {token.text!r}")
        if token.kind == "string" and self._after(1).kind == "operator":
            raise QuerySyntaxError("a comparison begins with a column, such as reward < 0.2", token.position)
        if token.kind == "string" or (token.kind in ("word", "number") and not token.is_one_of("and", "or")):
            self._take()
            return Contains("text", token.text)
        hint = '; put text to search for in quotes, as in "<b>"' if token.kind == "operator" else ""
        raise QuerySyntaxError(f"expected a condition or text to find, found {token.shown}{hint}", token.position)

    def _is_condition(self) -> bool:
        after = self._after(1)
        if after.is_one_of("not"):
            after = self._after(2)
            return after.is_one_of("contains", "in")
        return after.kind == "operator" or after.is_one_of("contains", "in", "is")

    def _condition(self) -> Node:
        column = self._column()
        negated = self._take_if("not")
        operator = self._take()
        if operator.is_one_of("is"):
            return self._is_null(column)
        if operator.is_one_of("in"):
            node: Node = IsIn(column.name, self._values(column))
        elif operator.is_one_of("contains"):
            self._need_text(column, operator)
            node = Contains(column.name, str(self._value(column)))
        elif operator.is_one_of("~", "!~"):
            self._need_text(column, operator)
            node = Matches(column.name, self._pattern())
            negated = operator.text == "!~"
        else:
            node = self._comparison(column, operator)
        return Not(node) if negated else node

    def _column(self) -> Column:
        token = self._take()
        if token.kind == "number":
            raise QuerySyntaxError("a comparison begins with a column, such as reward < 0.2", token.position)
        column = self._columns.find(token.text)
        if column is None:
            hint = did_you_mean(token.text, self._columns.names())
            hint = hint or "; put text to search for in quotes"
            raise QuerySyntaxError(f"unknown column {token.text!r}{hint}", token.position)
        return column

    def _is_null(self, column: Column) -> Node:
        negated = self._take_if("not")
        if not self._take_if("null"):
            raise self._expected("'null' or 'not null' after 'is'")
        return Not(IsNull(column.name)) if negated else IsNull(column.name)

    def _values(self, column: Column) -> tuple[Value, ...]:
        if not self._take_if("("):
            raise self._expected(f"'(' after {column.name} in")
        values = [self._value(column)]
        while self._take_if(","):
            values.append(self._value(column))
        if not self._take_if(")"):
            raise self._expected("',' or ')'")
        return tuple(values)

    def _comparison(self, column: Column, operator: Token) -> Node:
        if column.type == "text" and operator.text not in ("==", "!="):
            raise QuerySyntaxError(f"{column.name} is text: use ==, !=, contains or ~", operator.position)
        if self._token.is_one_of("null"):
            known = "is not null" if operator.text == "!=" else "is null"
            raise QuerySyntaxError(f"nothing compares with null: write {column.name} {known}", self._token.position)
        return Compare(column.name, operator.text, self._value(column))  # type: ignore[arg-type]

    def _need_text(self, column: Column, operator: Token) -> None:
        if column.type == "number":
            message = f"{column.name} is a number: use <, <=, >, >=, == or !="
            raise QuerySyntaxError(message, operator.position)

    def _value(self, column: Column) -> Value:
        token = self._token
        if column.type == "number":
            if token.kind != "number":
                raise self._expected(f"a number, since {column.name} is one")
            if math.isinf(value := float(token.text)):
                raise QuerySyntaxError(f"{token.text} is too large for a number", token.position)
            self._take()
            return value
        if token.kind not in ("word", "number", "string") or token.is_one_of("and", "or", "not"):
            raise self._expected(f"text to compare {column.name} with")
        return self._take().text

    def _pattern(self) -> str:
        token = self._token
        if token.kind != "string":
            raise self._expected("a regular expression in quotes")
        try:
            check_regex(token.text)
        except RegexError as error:
            position = token.position + 1 + max(0, token.text.find(error.fragment))
            raise QuerySyntaxError(f"invalid regular expression: {error}", position) from None
        return self._take().text
