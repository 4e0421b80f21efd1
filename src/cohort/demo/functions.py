"""The task of `cohort demo --task code`: two-line Python functions, judged by running them on cases.

    Write scale(n): the larger of n and 7, minus 12.

    def scale(n):
        return max(n, 7) - 12

A hash of a function's key (the calculation, without names) decides its split, so no calculation occurs in two splits.
The base model and the settings were chosen on the split `development`, so that held-out functions were never looked at.
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Split = Literal["train", "development", "heldout"]

NAMES = ("scale", "shift", "rank", "price", "mark", "total", "level", "grade", "span", "load", "rate", "cost")
NUMBERS = ("n", "x", "k", "count")
PAIRS = (("a", "b"), ("x", "y"), ("left", "right"), ("low", "high"))
LISTS = ("items", "values", "numbers", "row")

_NUM_BUCKETS = 8
_SPLITS: dict[int, Split] = {1: "heldout", 2: "development"}  # by bucket; all others are for training
_STEPS = {"plus": "+", "minus": "-", "times": "*"}


@dataclass(frozen=True, slots=True)
class FunctionProblem:
    """A function to write, its source, and cases that tell right from wrong."""

    question: str
    name: str
    parameters: tuple[str, ...]
    expression: str
    key: str  # of the split: the calculation
    arguments: tuple[tuple[Any, ...], ...]  # of each case

    @property
    def answer(self) -> str:
        """Source of the function."""
        return f"def {self.name}({', '.join(self.parameters)}):\n    return {self.expression}"

    @property
    def tests(self) -> list[dict[str, Any]]:
        """Cases for the reward `code`."""
        calls = [f"{self.name}({', '.join(map(repr, values))})" for values in self.arguments]
        results = [self._evaluate(values) for values in self.arguments]
        return [{"call": call, "expected": result} for call, result in zip(calls, results, strict=True)]

    def _evaluate(self, values: tuple[Any, ...]) -> Any:
        return eval(self.expression, {}, dict(zip(self.parameters, values, strict=True)))  # an expression of this file


# Each story draws the parameters, and returns them with words, expression and key of the first part, and arguments.

_Part = tuple[tuple[str, ...], str, str, str, list[tuple[Any, ...]]]


def _one_number(rng: random.Random) -> _Part:
    n, constant = rng.choice(NUMBERS), rng.randint(2, 19)
    kind = rng.choice(("step", "larger", "smaller"))
    cases = [(rng.randint(-9, 40),), (constant - 3,), (constant + 3,)]
    if kind == "step":
        word = rng.choice(tuple(_STEPS))
        return (n,), f"{n} {word} {constant}", f"({n} {_STEPS[word]} {constant})", f"{word} {constant}", cases
    call = "max" if kind == "larger" else "min"
    return (n,), f"the {kind} of {n} and {constant}", f"{call}({n}, {constant})", f"{kind} {constant}", cases


def _two_numbers(rng: random.Random) -> _Part:
    a, b = rng.choice(PAIRS)
    cases = [(rng.randint(-9, 20), rng.randint(-9, 20)), (3, 8), (8, 3)]
    kind = rng.choice((*_STEPS, "larger", "smaller"))
    if kind in _STEPS:
        return (a, b), f"{a} {kind} {b}", f"({a} {_STEPS[kind]} {b})", kind, cases
    call = "max" if kind == "larger" else "min"
    return (a, b), f"the {kind} of {a} and {b}", f"{call}({a}, {b})", f"{kind} of two", cases


def _list(rng: random.Random) -> _Part:
    items = rng.choice(LISTS)
    words, call = rng.choice((("sum", "sum"), ("length", "len"), ("largest", "max"), ("smallest", "min")))
    cases = [([rng.randint(-9, 20) for _ in range(rng.randint(2, 5))],) for _ in range(3)]
    return (items,), f"the {words} of {items}", f"{call}({items})", f"{words} of a list", cases


STORIES: tuple[Callable[[random.Random], _Part], ...] = (_one_number, _two_numbers, _list)


def generate(seed: int, count: int, split: Split = "train") -> list[FunctionProblem]:
    """Draw `count` problems of one split, deterministic in the seed. All but training problems are distinct."""
    rng = random.Random(seed)
    problems: list[FunctionProblem] = []
    seen: set[str] = set()
    while len(problems) < count:
        problem = _draw(rng)
        if split_of(problem.key) == split and (split == "train" or problem.question not in seen):
            problems.append(problem)
            seen.add(problem.question)
    return problems


def split_of(key: str) -> Split:
    """Return the split of a calculation, by a platform-independent hash."""
    return _SPLITS.get(hashlib.sha256(key.encode()).digest()[0] % _NUM_BUCKETS, "train")


def _draw(rng: random.Random) -> FunctionProblem:
    parameters, words, expression, key, cases = rng.choice(STORIES)(rng)
    step, constant = rng.choice(tuple(_STEPS)), rng.randint(2, 19)
    name = rng.choice(NAMES)
    return FunctionProblem(
        question=f"Write {name}({', '.join(parameters)}): {words}, {step} {constant}.",
        name=name,
        parameters=parameters,
        expression=f"{expression} {_STEPS[step]} {constant}",
        key=f"{key}, {step} {constant}",
        arguments=tuple(cases),
    )
