"""The demo's task: seeded word problems of 2 to 4 calculation steps.

    Mia has 17 shells. A goat eats 5. Mia buys 3 bags of 4 shells. How many shells does Mia have now?

    17-5=12
    3*4=12
    12+12=24
    #### 24

A problem is held out if a hash of its key (the calculation, without names and things) falls into one of eight buckets,
so no calculation occurs in both splits, whatever the seeds.
"""

import hashlib
import json
import operator
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from cohort.errors import UserError

Split = Literal["train", "heldout"]

NAMES = ("Mia", "Ben", "Zoe", "Leo", "Ada", "Sam", "Ivy", "Max")
THINGS = ("shells", "cards", "robots", "marbles", "kites", "comics")
FRUITS = ("plums", "pears", "lemons", "melons")
TREATS = ("muffins", "cookies", "pies", "buns")
BARGAINS = ("hat", "lamp", "drum", "cape")

_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
_NUM_BUCKETS = 8  # one of them is held out
_FRUITLESS_DRAWS = 20_000  # consecutive draws without a new held-out problem before giving up


class AnyProblem(Protocol):
    """A question with its answer."""

    @property
    def question(self) -> str: ...  # noqa: D102

    @property
    def answer(self) -> int | str: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Problem:
    """A word problem and the calculation that solves it."""

    question: str
    answer: int
    calculation: tuple[str, ...]  # lines like "17-5=12", in order; the last one gives the answer

    @property
    def key(self) -> str:
        """Key for the split: numbers and structure, without words."""
        return ";".join(self.calculation)


class _Sheet:
    """Does calculation steps and records them."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def step(self, a: int, sign: str, b: int) -> int:
        result: int = _OPERATORS[sign](a, b)
        self.lines.append(f"{a}{sign}{b}={result}")
        return result


# Each story draws numbers and words, calculates on the sheet (numbers can depend on earlier results: nobody loses more
# shells than they have) and returns the question.


def _collecting(rng: random.Random, sheet: _Sheet) -> str:
    """A collection that shrinks and grows by two or three events: 2 to 4 steps."""
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    total = rng.randint(10, 30)
    sentences = [f"{name} has {total} {things}."]
    for event in rng.sample(("loss", "gain", "bags"), rng.randint(2, 3)):
        if event == "loss":
            lost = rng.randint(2, 9)
            total = sheet.step(total, "-", lost)
            sentences.append(rng.choice((f"A goat eats {lost}.", f"{name} loses {lost}.")))
        elif event == "gain":
            found = rng.randint(2, 9)
            total = sheet.step(total, "+", found)
            sentences.append(f"{name} finds {found}.")
        else:
            bags, size = rng.randint(2, 5), rng.randint(2, 6)
            total = sheet.step(total, "+", sheet.step(bags, "*", size))
            sentences.append(f"{name} buys {bags} bags of {size}.")
    return " ".join([*sentences, f"How many {things} does {name} have now?"])


def _shopping(rng: random.Random, sheet: _Sheet) -> str:
    """Change at the till, with or without a coupon: 2 or 3 steps."""
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    count, price = rng.randint(2, 7), rng.randint(3, 9)
    cost = sheet.step(count, "*", price)
    coupon = ""
    if rng.random() < 0.5:
        off = rng.randint(2, 5)
        cost = sheet.step(cost, "-", off)
        coupon = f" A coupon takes off {off} dollars."
    paid = rng.choice([note for note in (20, 50, 70) if note > cost])
    sheet.step(paid, "-", cost)
    return (
        f"{name} buys {count} {things} for {price} dollars each.{coupon} {name} pays with {paid} dollars. "
        "How many dollars come back?"
    )


def _selling(rng: random.Random, sheet: _Sheet) -> str:
    """A fruit stall whose keeper eats the goods, and perhaps buys something silly: 2 or 3 steps."""
    name, fruits = rng.choice(NAMES), rng.choice(FRUITS)
    picked = rng.randint(8, 20)
    eaten = rng.randint(picked - 9 if picked > 11 else 2, picked - 3)
    price = rng.randint(2, 7)
    money = sheet.step(sheet.step(picked, "-", eaten), "*", price)
    sale = f"{name} picks {picked} {fruits}, eats {eaten} and sells the rest for {price} dollars each."
    if rng.random() < 0.5:
        return f"{sale} How many dollars does {name} get?"
    spent = rng.randint(2, min(money, 20))
    sheet.step(money, "-", spent)
    return f"{sale} Then {name} buys a {rng.choice(BARGAINS)} for {spent} dollars. How many dollars are left?"


def _baking(rng: random.Random, sheet: _Sheet) -> str:
    """Friends share what the oven left over: 3 steps, the last one a division without remainder."""
    name, treats = rng.choice(NAMES), rng.choice(TREATS)
    trays, size, friends = rng.randint(3, 7), rng.randint(4, 9), rng.randint(2, 6)
    baked = sheet.step(trays, "*", size)
    burnt = (baked % friends + friends * rng.randint(0, 1)) or friends
    sheet.step(sheet.step(baked, "-", burnt), "/", friends)
    return (
        f"{name} bakes {trays} trays of {size} {treats}. The dragon burns {burnt}. {friends} friends share the rest. "
        "How many does each get?"
    )


def _comparing(rng: random.Random, sheet: _Sheet) -> str:
    """Two collections, one a multiple of the other: 2 or 3 steps."""
    (name, other), things = rng.sample(NAMES, 2), rng.choice(THINGS)
    count, times = rng.randint(3, 15), rng.randint(2, 4)
    total = sheet.step(count, "+", sheet.step(count, "*", times))
    start = f"{name} has {count} {things}. {other} has {times} times as many."
    if rng.random() < 0.5:
        return f"{start} How many {things} do they have together?"
    lost = rng.randint(2, 9)
    sheet.step(total, "-", lost)
    return f"{start} Then a goat eats {lost} of all these. How many {things} are left?"


def _saving(rng: random.Random, sheet: _Sheet) -> str:
    """Pocket money, week by week: 2 or 3 steps."""
    name = rng.choice(NAMES)
    rate, weeks = rng.randint(2, 7), rng.randint(3, 9)
    saved = sheet.step(rate, "*", weeks)
    purse = ""
    if rng.random() < 0.5:
        first = rng.randint(2, 12)
        saved = sheet.step(saved, "+", first)
        purse = f"{name} has {first} dollars. "
    spent = rng.randint(2, min(saved, 20))
    sheet.step(saved, "-", spent)
    return (
        f"{purse}{name} saves {rate} dollars a week for {weeks} weeks, then buys a {rng.choice(BARGAINS)} for "
        f"{spent} dollars. How many dollars are left?"
    )


STORIES: tuple[Callable[[random.Random, _Sheet], str], ...] = (
    _collecting,
    _shopping,
    _selling,
    _baking,
    _comparing,
    _saving,
)


def generate(seed: int, count: int, split: Split = "train") -> list[Problem]:
    """Draw `count` problems of one split, deterministic in the seed.

    Held-out problems have distinct keys; training problems may repeat.

    Raises:
        UserError: there are fewer distinct held-out problems.
    """
    rng = random.Random(seed)
    problems: list[Problem] = []
    seen: set[str] = set()
    num_fruitless = 0
    while len(problems) < count:
        problem = _draw(rng)
        wanted = is_heldout(problem) == (split == "heldout")
        if not wanted or (split == "heldout" and problem.key in seen):
            num_fruitless += 1
            if num_fruitless > _FRUITLESS_DRAWS:
                raise UserError(f"count={count} exceeds the number of held-out problems; use about {len(problems)}")
            continue
        num_fruitless = 0
        seen.add(problem.key)
        problems.append(problem)
    return problems


def is_heldout(problem: Problem) -> bool:
    """Whether a problem belongs to the held-out split, by a platform-independent hash."""
    digest = hashlib.sha256(problem.key.encode()).digest()
    return digest[0] % _NUM_BUCKETS == 0


def write_jsonl(path: Path, problems: Iterable[AnyProblem]) -> None:
    """Write problems as JSON lines with the columns `question`, `answer` (a string) and, if they have any, `tests`."""
    with path.open("w", encoding="utf-8") as file:
        for problem in problems:
            row = {"question": problem.question, "answer": str(problem.answer)}
            if (tests := getattr(problem, "tests", None)) is not None:
                row["tests"] = json.dumps(tests)
            file.write(json.dumps(row) + "\n")


def _draw(rng: random.Random) -> Problem:
    sheet = _Sheet()
    question = rng.choice(STORIES)(rng, sheet)
    return Problem(question=question, answer=int(sheet.lines[-1].split("=")[1]), calculation=tuple(sheet.lines))
