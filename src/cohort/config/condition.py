"""Conditions on rows: Python's syntax over columns of numbers and text, as expressions of Arrow.

`ast` parses a condition; only comparisons, `and`, `or`, `not`, `in`, `is None` and `matches` have a meaning. The search
of the page and `where` of the data use it.
"""

import ast
import json
import operator
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from cohort.errors import did_you_mean

MAX_CHARACTERS = 1000
TYPES = {"number": pa.float64(), "text": pa.string()}
_COMPARE = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class ConditionError(ValueError):
    """A condition that cannot be understood. `position` counts its characters from 0."""

    def __init__(self, message: str, position: int | None = None):
        super().__init__(message)
        self.position = position


@dataclass(frozen=True, slots=True)
class Column:
    """A column, as a condition names it."""

    name: str
    type: Literal["number", "text"]
    description: str = ""
    is_json: bool = False  # text in which special characters are escaped


class Columns(Protocol):
    """The columns that a condition may use."""

    def find(self, name: str) -> Column | None:
        """Return a column by its name in a condition; None if there is none."""

    def names(self) -> Iterable[str]:
        """Return the names of all columns, as a condition spells them."""

    def expression(self, name: str) -> ds.Expression:
        """Return a column's values as an expression."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on a row of a completions file; a comparison with null is not true.

    Attributes:
        rows: true for the rows in question.
        possible: true wherever `rows` may be true, to skip files and row groups by their names and statistics. They say
            nothing about NaN, so what may hold for NaN is true here.
        patterns: regular expressions by column of text whose matches are why a row is found.
    """

    rows: ds.Expression
    possible: ds.Expression
    patterns: Sequence[tuple[str, str]] = ()

    def __and__(self, other: "Condition") -> "Condition":
        """Both conditions hold."""
        patterns = (*self.patterns, *other.patterns)
        return Condition(self.rows & other.rows, self.possible & other.possible, patterns)

    def __or__(self, other: "Condition") -> "Condition":
        """At least one of the conditions holds."""
        patterns = (*self.patterns, *other.patterns)
        return Condition(self.rows | other.rows, self.possible | other.possible, patterns)

    def __invert__(self) -> "Condition":
        """The condition does not hold, also because of a null."""
        return Condition(~pc.coalesce(self.rows, False), ds.scalar(True))

    def pattern_by_column(self) -> Mapping[str, str]:
        """Return one regular expression per column of `patterns`."""
        names = dict.fromkeys(name for name, _ in self.patterns)
        return {name: "|".join(f"(?:{p})" for of, p in self.patterns if of == name) for name in names}


def parse_condition(where: str, columns: Columns, *, text: str = "", text_column: str = "") -> Condition:
    """Parse a condition.

    Args:
        where: the condition; empty for none.
        columns: the columns that it may use.
        text: what `text_column` contains too, in any case; empty for anything.
        text_column: a column of text.

    Raises:
        ConditionError: the condition has no meaning, or is too large.
    """
    if max(len(text), len(where)) > MAX_CHARACTERS:
        raise ConditionError(f"a condition has at most {MAX_CHARACTERS:,} characters")
    parser = _Parser(where, columns)
    try:
        condition = Condition(ds.scalar(True), ds.scalar(True))
        if text:
            condition &= parser.matches(text_column, f"(?i:{re.escape(text)})")
        if where.strip():
            condition &= parser.parse()
        for pattern in condition.pattern_by_column().values():
            check_regex(pattern)
    except (UnicodeEncodeError, OverflowError):
        raise ConditionError("the condition has a text or number that no row can have") from None
    except pa.ArrowInvalid:
        raise ConditionError("the regular expressions are too large together") from None
    return condition


def read_syntax(where: str) -> ast.expr:
    """Read the syntax of a condition, which need not have a meaning.

    Raises:
        ConditionError: it is no expression of Python.
    """
    start = len(where) - len(where.lstrip())
    try:
        with warnings.catch_warnings(action="ignore"):  # "\d" is fine here
            return ast.parse(where.lstrip(), mode="eval").body
    except SyntaxError as error:
        message = re.sub(r" or ':='| \(detected at line \d+\)", "", error.msg)
        position = (error.offset or len(where) - start + 1) - 1
        raise ConditionError(message, start + min(position, len(where) - start)) from None


def check_regex(pattern: str) -> None:
    """Raise pyarrow.ArrowInvalid if RE2 cannot compile a regular expression."""
    pc.match_substring_regex(pa.array([""]), pattern)


class _Parser:
    """Turns the nodes of Python's syntax tree that a condition may have into expressions."""

    def __init__(self, where: str, columns: Columns):
        self._start = len(where) - len(where.lstrip())
        self._whole, self._where = where, where.lstrip()
        self._columns = columns

    def parse(self) -> Condition:
        return self._condition(read_syntax(self._whole))

    def _error(self, node: ast.expr, message: str) -> ConditionError:
        before = self._where.encode()[: node.col_offset].decode(errors="ignore")
        return ConditionError(message, self._start + len(before))

    def _condition(self, node: ast.expr) -> Condition:
        match node:
            case ast.BoolOp(ast.And(), parts):
                return reduce(operator.and_, map(self._condition, parts))
            case ast.BoolOp(ast.Or(), parts):
                return reduce(operator.or_, map(self._condition, parts))
            case ast.UnaryOp(ast.Not(), part):
                return ~self._condition(part)
            case ast.Compare(first, operators, others):
                pairs = zip([first, *others], operators, others, strict=False)
                return reduce(operator.and_, (self._comparison(*pair) for pair in pairs))
            case ast.Call(ast.Name("matches"), [column, ast.Constant(str(pattern)) as constant], []):
                name = self._text_column(column).name
                try:
                    check_regex(pattern)
                except pa.ArrowInvalid as error:
                    raise self._error(constant, str(error)[0].lower() + str(error)[1:]) from None
                return self.matches(name, pattern)
        raise self._error(node, 'expected a comparison such as reward < 0.2, "a" in text or matches(text, r"\\d+")')

    def _comparison(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Condition:
        match op, right:
            case ast.NotIn(), _:
                return ~self._comparison(left, ast.In(), right)
            case (ast.IsNot() | ast.NotEq(), ast.Constant(None)):
                return ~self._comparison(left, ast.Is(), right)
            case (ast.Is() | ast.Eq(), ast.Constant(None)):
                rows = self._value(left)[1].is_null()
                return Condition(rows, rows)
            case ast.In(), ast.Tuple(values) | ast.List(values):
                equal = (self._comparison(left, ast.Eq(), value) for value in values)
                return reduce(operator.or_, equal, Condition(ds.scalar(False), ds.scalar(False)))
            case ast.In(), _:
                return self._contains(left, right)
            case (ast.Is() | ast.IsNot(), _):
                raise self._error(right, "is compares with None only: write ==")
        (left_type, a), (right_type, b) = self._value(left), self._value(right)
        if left_type != right_type:
            raise self._error(right, f"cannot compare {left_type} with {right_type}; text is in quotes")
        rows = _COMPARE[type(op)](a, b)
        return Condition(rows, ds.scalar(True) if isinstance(op, ast.NotEq) and left_type == "number" else rows)

    def _contains(self, part: ast.expr, column: ast.expr) -> Condition:
        match part:
            case ast.Constant(str(text)):
                found = self._text_column(column)
                written = [json.dumps(text, ensure_ascii=ascii_only)[1:-1] for ascii_only in (False, True)]
                spellings = [text, *written] if found.is_json else [text]
                return self.matches(found.name, "|".join(map(re.escape, dict.fromkeys(spellings))))
        raise self._error(part, "expected text in quotes before in, or values after it, as in step in (1, 2)")

    def matches(self, name: str, pattern: str) -> Condition:
        """Return the condition that a regular expression matches anywhere in a column of text."""
        rows = pc.match_substring_regex(self._columns.expression(name), pattern)
        return Condition(rows, rows, ((name, pattern),))

    def _value(self, node: ast.expr) -> tuple[str, ds.Expression]:
        """Return the type and the expression of a column or constant."""
        match node:
            case ast.Constant(bool() | None as value):
                raise self._error(node, f"expected a column, a number or text in quotes, found {value}")
            case ast.Constant(int() | float() as number):
                return "number", ds.scalar(float(number))
            case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as number)):
                return "number", ds.scalar(-float(number))
            case ast.Constant(str(text)):
                return "text", ds.scalar(text)
        column = self._column(node)
        return column.type, self._columns.expression(column.name)

    def _text_column(self, node: ast.expr) -> Column:
        column = self._column(node)
        if column.type != "text":
            raise self._error(node, f"{column.name} is a number: compare it, as in {column.name} > 0")
        return column

    def _column(self, node: ast.expr) -> Column:
        name = ast.get_source_segment(self._where, node) or ""
        match node:
            case ast.Subscript(ast.Name(family), ast.Constant(str(rest))):
                name = f"{family}/{rest}"
        if (column := self._columns.find(name)) is None:
            hint = did_you_mean(name, self._columns.names()) or "; text is in quotes"
            raise self._error(node, f"there is no column {name}{hint}")
        return column
