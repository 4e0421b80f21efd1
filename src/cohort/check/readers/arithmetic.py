"""Arithmetic on plain numbers, in Python and in the shell's `$((...))`."""

import ast
import operator
from collections.abc import Callable
from typing import Any

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
UNREADABLE = (ValueError, TypeError, ArithmeticError, RecursionError, SyntaxError, MemoryError)


def compute(node: ast.expr, value: Callable[[ast.expr], Any] = ast.literal_eval) -> Any:
    """The value of arithmetic on plain numbers. `value` evaluates its operands.

    Raises:
        ValueError: an unknown operation, or the numbers are too large. Further errors are in `UNREADABLE`.
    """
    if not isinstance(node, ast.BinOp):
        return value(node)
    if type(node.op) not in _OPERATORS:
        raise ValueError("not arithmetic")
    left, right = compute(node.left, value), compute(node.right, value)
    if not all(isinstance(part, int | float) and abs(part) < 1e12 for part in (left, right)):
        raise ValueError("not plain numbers")
    return _OPERATORS[type(node.op)](left, right)
