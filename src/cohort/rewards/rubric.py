"""Scores in a judge's reply: one, or one for each criterion of a rubric."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cohort.errors import suggest
from cohort.rewards.arguments import check_number
from cohort.rewards.describe import excerpt
from cohort.rewards.patterns import compile_pattern

_NUMBER = r"(-?(?:\d+(?:\.\d+)?|(?<!\.)\.\d+))"
_MARKS = r"[^\w\n]"  # around names, such as ** and -
_COLON = rf"{_MARKS}*?(?:\([^()\n]*\){_MARKS}*?)?:{_MARKS}*?"  # behind a name, and a range such as (1-10)
_ANY_NAME = rf"(?im)^{_MARKS}*(?:overall |final )?(?:score|rating|grade){_COLON}"
_KEYS = ("weight", "pattern", "range", "values")


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """One score of a reply: the last match of a pattern's group."""

    name: str
    weight: float
    pattern: re.Pattern[str]
    range: tuple[float, float] | None  # mapped to [0, 1]; None: the score as it is
    values: Mapping[str, float] | None  # of words instead of numbers, in lower case

    def score(self, reply: str) -> float:
        """Return the score in a reply.

        Raises:
            ValueError: the pattern matches nowhere, or what it finds is no score.
        """
        found = [text for text in self.pattern.findall(reply) if text]
        if not found:
            raise ValueError(f"no match of {self.pattern.pattern!r}")
        text = found[-1].strip()
        if self.values is not None:
            if text.lower() not in self.values:
                raise ValueError(f"{text!r} is none of {', '.join(self.values)}")
            return self.values[text.lower()]
        try:
            score = float(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a number") from None
        if not math.isfinite(score):
            raise ValueError(f"{text!r} is not a finite number")
        if self.range is None:
            return score
        low, high = self.range
        if not low <= score <= high:
            raise ValueError(f"{score:g} is outside of range [{low:g}, {high:g}]")
        return (score - low) / (high - low)


@dataclass(frozen=True, slots=True)
class Rubric:
    """Criteria whose weighted mean is a completion's score."""

    criteria: tuple[Criterion, ...]

    def scores(self, reply: str) -> dict[str, float]:
        """Return the score of each criterion.

        Raises:
            ValueError: one of them is missing or invalid.
        """
        scores = {}
        for criterion in self.criteria:
            try:
                scores[criterion.name] = criterion.score(reply)
            except ValueError as error:
                raise ValueError(f"{criterion.name}: {error}") from None
        return scores

    def mean(self, scores: Mapping[str, float]) -> float:
        """Return the weighted mean of the criteria's scores."""
        total = sum(criterion.weight for criterion in self.criteria)
        return sum(criterion.weight * scores[criterion.name] for criterion in self.criteria) / total


def read_rubric(*, pattern: object, range: object, values: object, criteria: object) -> Rubric:
    """Read the arguments of a judge. What a criterion leaves out is as for all of them.

    Raises:
        ValueError: one of them is invalid.
    """
    given = {"pattern": pattern, "range": range, "values": values}
    if criteria is None:
        return Rubric((_criterion("score", {}, given, ""),))
    if not isinstance(criteria, Mapping) or not criteria:
        raise ValueError(
            f"criteria: {excerpt(criteria)} must be a mapping such as {{correctness: {{weight: 2}}, style: {{}}}}"
        )
    if pattern is not None and len(criteria) > 1:
        raise ValueError("pattern: would find the same score for all criteria; set criteria.NAME.pattern instead")
    return Rubric(tuple(_criterion(str(name), of_one, given, f"criteria.{name}.") for name, of_one in criteria.items()))


def _criterion(name: str, settings: Any, common: Mapping[str, Any], field: str) -> Criterion:
    settings = {} if settings is None else settings
    if not isinstance(settings, Mapping):
        raise ValueError(f"{field.removesuffix('.')}: {excerpt(settings)} must be a mapping of {', '.join(_KEYS)}")
    for key in settings:
        if key not in _KEYS:
            raise ValueError(f"{field}{key}: unknown key{suggest(str(key), _KEYS, 'Keys')}")
    chosen = {**common, **settings}
    weight = chosen.get("weight", 1.0)
    check_number(f"{field}weight", weight, above=0)
    if chosen["range"] is not None and chosen["values"] is not None:
        raise ValueError(f"{field}range: has no effect with values; remove one of them")
    values = _values(chosen["values"], f"{field}values")
    pattern = chosen["pattern"] if chosen["pattern"] is not None else _default_pattern(name, field, values)
    try:
        compiled = compile_pattern(pattern, num_groups=1)
    except ValueError as error:
        raise ValueError(f"{field}{error}") from None
    return Criterion(
        name=name,
        weight=weight,
        pattern=compiled,
        range=_range(chosen["range"], f"{field}range"),
        values=values,
    )


def _default_pattern(name: str, field: str, values: Mapping[str, float] | None) -> str:
    """Return the pattern of a line such as `Correctness: 7`."""
    what = _NUMBER if values is None else f"({'|'.join(map(re.escape, values))})\\b"
    start = rf"(?im)^{_MARKS}*{re.escape(name)}{_COLON}" if field else _ANY_NAME
    return start + what


def _range(value: object, field: str) -> tuple[float, float] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"{field}: {excerpt(value)} must be [low, high], such as [1, 10]")
    for bound in value:
        check_number(field, bound)
    if not value[0] < value[1]:
        raise ValueError(f"{field}: [{value[0]:g}, {value[1]:g}] must be [low, high] with low below high")
    return float(value[0]), float(value[1])


def _values(value: object, field: str) -> Mapping[str, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or not value:
        raise ValueError(f"{field}: {excerpt(value)} must be a mapping such as {{correct: 1, incorrect: 0}}")
    words = {}
    for word, number in value.items():
        if not isinstance(word, str):  # YAML reads yes and no as booleans
            raise ValueError(f"{field}: {word!r} must be a word; put it in quotes")
        check_number(f"{field}.{word}", number)
        words[word.lower()] = float(number)
    return words
