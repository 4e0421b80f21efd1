"""The language of a search: a typed syntax tree, its parser and its text.

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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from cohort.errors import did_you_mean
from cohort.view.search.columns import Column, Columns
from cohort.view.search.regex import RegexError, check_regex
from cohort.view.search.tokens import QuerySyntaxError, Token, is_word, quote, tokenize

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
