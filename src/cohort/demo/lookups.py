"""The task of `cohort demo --task tools`: questions about people and things that only a tool knows.

    How many dollars do the wish of Mia Hill and the red kite cost together?

    look_up("Mia Hill") -> "old drum"
    look_up("old drum") -> "14"
    look_up("red kite") -> "8"
    14+8=22
    #### 22

A name is held out if a hash of it falls into one of four buckets. All names of a held-out problem are held out, and no
name of a training problem is.
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

from cohort.demo.tools import ADJECTIVES, FIRST_NAMES, LAST_NAMES, NOUNS, look_up
from cohort.demo.word_problems import Split

_NUM_BUCKETS = 4  # one of them is held out
_NOTES = (20, 50)  # dollars


@dataclass(frozen=True, slots=True)
class LookUpProblem:
    """A question and the look-ups that answer it."""

    question: str
    answer: int
    names: tuple[str, ...]  # what to look up, in order; the second may be the result of the first
    calculation: tuple[str, ...]  # lines like "14+8=22"; none if the answer is a look-up's result


# Each story draws names and returns a problem with 1 to 3 look-ups.


def _price(rng: random.Random, split: Split) -> LookUpProblem:
    thing = _thing(rng, split)
    return LookUpProblem(f"How many dollars does the {thing} cost?", _price_of(thing), (thing,), ())


def _several(rng: random.Random, split: Split) -> LookUpProblem:
    thing, count = _thing(rng, split), rng.randint(2, 4)
    cost = count * _price_of(thing)
    question = f"An order lists {count} x {thing}. How many dollars is that?"
    return LookUpProblem(question, cost, (thing,), (f"{count}*{_price_of(thing)}={cost}",))


def _change(rng: random.Random, split: Split) -> LookUpProblem:
    thing, note = _thing(rng, split), rng.choice(_NOTES)
    change = note - _price_of(thing)
    question = f"Somebody pays for the {thing} with {note} dollars. How many dollars come back?"
    return LookUpProblem(question, change, (thing,), (f"{note}-{_price_of(thing)}={change}",))


def _both(rng: random.Random, split: Split) -> LookUpProblem:
    one, two = _thing(rng, split), _thing(rng, split)
    return _sum(f"How many dollars do the {one} and the {two} cost together?", (one, two))


def _wish(rng: random.Random, split: Split) -> LookUpProblem:
    person = _person(rng, split)
    thing = look_up(person)
    return LookUpProblem(f"How many dollars does the wish of {person} cost?", _price_of(thing), (person, thing), ())


def _wish_and_thing(rng: random.Random, split: Split) -> LookUpProblem:
    person, thing = _person(rng, split), _thing(rng, split)
    question = f"How many dollars do the wish of {person} and the {thing} cost together?"
    return _sum(question, (person, look_up(person), thing))


STORIES: tuple[Callable[[random.Random, Split], LookUpProblem], ...] = (
    _price,
    _several,
    _change,
    _both,
    _wish,
    _wish_and_thing,
)


def generate(seed: int, count: int, split: Split = "train") -> list[LookUpProblem]:
    """Draw `count` problems of one split, deterministic in the seed. Held-out problems are distinct."""
    rng = random.Random(seed)
    problems: list[LookUpProblem] = []
    seen: set[str] = set()
    while len(problems) < count:
        problem = rng.choice(STORIES)(rng, split)
        if split == "train" or problem.question not in seen:
            problems.append(problem)
        seen.add(problem.question)
    return problems


def _thing(rng: random.Random, split: Split) -> str:
    while True:
        thing = f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
        if split_of(thing) == split:
            return thing


def _person(rng: random.Random, split: Split) -> str:
    """Draw a person who wants a thing of the same split."""
    while True:
        person = f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"
        if split_of(person) == split_of(look_up(person)) == split:
            return person


def _price_of(thing: str) -> int:
    return int(look_up(thing))


def _sum(question: str, names: tuple[str, ...]) -> LookUpProblem:
    """Build a problem that adds the prices of the last two names."""
    a, b = map(_price_of, names[-2:])
    return LookUpProblem(question, a + b, names, (f"{a}+{b}={a + b}",))


def split_of(name: str) -> Split:
    """Return the split in which a name occurs, by a platform-independent hash."""
    bucket = hashlib.sha256(f"split of {name}".encode()).digest()[0] % _NUM_BUCKETS
    return "heldout" if bucket == 0 else "train"
