"""Arithmetic on plain numbers, in Python and in the shell's `$((...))`."""

import ast
import operator
from collections.abc import Callable
from typing import Any

OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
UNREADABLE = (ValueError, TypeError, ArithmeticError, RecursionError, SyntaxError, MemoryError)


def compute(node: ast.expr, value: Callable[[ast.expr], Any]) -> Any:
    """The value of an operation on two plain numbers, which `value` gives.

    Raises:
        ValueError: it is anything else, or the numbers are too large. Further errors are in `UNREADABLE`.
    """
    if not isinstance(node, ast.BinOp) or type(node.op) not in OPERATORS:
        raise ValueError("not arithmetic")
    left, right = value(node.left), value(node.right)
    if not all(isinstance(part, int | float) and abs(part) < 1e12 for part in (left, right)):
        raise ValueError("not plain numbers")
    return OPERATORS[type(node.op)](left, right)
