"""Evaluation of a search over rows of a completions file, column by column."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cohort_view.search.grammar import And, Compare, Contains, IsIn, IsNull, Leaf, Matches, Node, Not, Or, Value
from cohort_view.search.text import RegexError, check_regex, quote_regex

BoolArray = NDArray[np.bool_]
_LONG = ("text", "messages", "prompt", "error")
_COMPARE = {
    "==": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}


@dataclass(frozen=True, slots=True)
class Constant:
    """A column that has one value in all rows; None is null."""

    value: Value | None


@dataclass(frozen=True, slots=True)
class Range:
    """The statistics of a column of numbers."""

    minimum: float
    maximum: float


def simplify(node: Node, known: Callable[[str], Constant | Range | None]) -> Node | bool:
    """Decide the conditions that what is known of the columns decides, without reading them.

    Args:
        node: a search.
        known: what is known of a column in the rows in question, by name.

    Returns:
        True or False if no row can be otherwise, else what is left to evaluate.
    """
    match node:
        case Not(condition):
            part = simplify(condition, known)
            return not part if isinstance(part, bool) else Not(part)
        case And(conditions) | Or(conditions):
            deciding = isinstance(node, Or)  # a true part decides "or", a false one "and"
            left = []
            for condition in conditions:
                part = simplify(condition, known)
                if part is deciding:
                    return deciding
                if not isinstance(part, bool):
                    left.append(part)
            if len(left) < 2:
                return left[0] if left else not deciding
            return type(node)(tuple(left))
        case leaf:
            return _decide(leaf, known(leaf.column))


def _decide(leaf: Leaf, known: Constant | Range | None) -> Leaf | bool:
    if isinstance(known, Constant):
        if known.value is None:
            return isinstance(leaf, IsNull)
        return bool(evaluate_leaf(leaf, pa.array([known.value]))[0])
    if isinstance(known, Range) and not _may_hold(leaf, known):
        return False
    return leaf


def _may_hold(leaf: Leaf, known: Range) -> bool:
    match leaf:
        case Compare(_, "<", float(value)):
            return known.minimum < value
        case Compare(_, "<=", float(value)):
            return known.minimum <= value
        case Compare(_, ">", float(value)):
            return known.maximum > value
        case Compare(_, ">=", float(value)):
            return known.maximum >= value
        case Compare(_, "==", float(value)):
            return known.minimum <= value <= known.maximum
        case IsIn(_, values):
            return any(isinstance(value, float) and known.minimum <= value <= known.maximum for value in values)
    return True


def evaluate(node: Node, leaf_rows: Callable[[Leaf], BoolArray]) -> BoolArray:
    """Return which rows a search holds for.

    Args:
        node: the search.
        leaf_rows: evaluates one condition over all rows. It is not called for conditions that cannot change the result;
            those that read text come last.
    """
    match node:
        case Not(condition):
            return ~evaluate(condition, leaf_rows)
        case And(conditions) | Or(conditions):
            ordered = sorted(conditions, key=_cost)
            rows = evaluate(ordered[0], leaf_rows)
            for condition in ordered[1:]:
                if isinstance(node, And):
                    if not rows.any():
                        break
                    rows = rows & evaluate(condition, leaf_rows)
                else:
                    if rows.all():
                        break
                    rows = rows | evaluate(condition, leaf_rows)
            return rows
        case leaf:
            return leaf_rows(leaf)


def _cost(node: Node) -> int:
    """Order of evaluation: numbers, then lengths (of lists of tokens), then text."""
    match node:
        case Not(condition):
            return _cost(condition)
        case And(conditions) | Or(conditions):
            return max(map(_cost, conditions))
        case leaf if leaf.column == "length":
            return 1
        case leaf:
            return 2 if leaf.column in _LONG or leaf.column.startswith("details/") else 0


def _may_be_json(column: str) -> bool:
    return column in ("messages", "prompt") or column.startswith("details/")


def evaluate_leaf(leaf: Leaf, values: pa.Array) -> BoolArray:
    """Return which values a condition holds for. Null holds for `IsNull` only.

    Args:
        leaf: the condition.
        values: [rows] float64 or strings, by the type of the condition's column.
    """
    match leaf:
        case IsNull():
            result = pc.is_null(values)
        case Compare(_, comparator, value):
            result = _COMPARE[comparator](values, pa.scalar(value, values.type))
        case IsIn(_, wanted):
            result = pc.is_in(values, pa.array(wanted, values.type))
        case Contains() | Matches():
            result = pc.match_substring_regex(values, pattern_of(leaf))
    return np.asarray(pc.fill_null(result, False).to_numpy(zero_copy_only=False))


def pattern_of(leaf: Contains | Matches) -> str:
    """Return the regular expression of a condition on text."""
    if isinstance(leaf, Matches):
        return leaf.pattern
    escaped = json.dumps(leaf.text)[1:-1]
    if escaped != leaf.text and _may_be_json(leaf.column):
        return f"{quote_regex(leaf.text)}|{quote_regex(escaped)}"
    return quote_regex(leaf.text)


def positive_patterns(node: Node) -> dict[str, str]:
    """Return a regular expression per column whose matches are why a row is found."""
    patterns: dict[str, list[str]] = {}

    def visit(node: Node) -> None:
        match node:
            case And(conditions) | Or(conditions):
                for condition in conditions:
                    visit(condition)
            case Contains() | Matches():
                patterns.setdefault(node.column, []).append(pattern_of(node))

    visit(node)
    return {column: _any_of(of_one) for column, of_one in patterns.items()}


def _any_of(patterns: Sequence[str]) -> str:
    """Join regular expressions, or return the first if together they are too large for RE2."""
    joined = "|".join(f"(?:{pattern})" for pattern in patterns)
    try:
        check_regex(f"({joined})")
    except RegexError:
        return patterns[0]
    return joined
