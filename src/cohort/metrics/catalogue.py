"""What a metric is: its unit, its group on the page and its meaning, from `metrics.toml`."""

import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import resources


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric, or several of one meaning."""

    name: str  # as in the catalogue, such as `rewards/{name}/mean`
    group: str
    meaning: str = ""  # the first clause, in Markdown
    details: str = ""  # what follows it
    unit: str = ""  # empty for plain numbers; "share" is a number from 0 to 1

    @property
    def description(self) -> str:
        """The meaning as plain text that begins with a capital letter."""
        return (self.meaning[:1].upper() + self.meaning[1:]).replace("`", "")


def describe(name: str) -> Metric:
    """Return what the catalogue says about a metric; without a meaning, in the group "Other", if it is not in it."""
    found = next((metric for pattern, metric in _PATTERNS if pattern.fullmatch(name)), None)
    if found is None:
        return Metric(name=name, group="Other")
    if found.name == "eval/...":  # a metric of training, over held-out prompts
        inner = describe(name.removeprefix("eval/"))
        return replace(inner, group=found.group, meaning=inner.meaning and f"Held-out: {inner.meaning}")
    return found


def _load() -> Iterator[Metric]:
    text = resources.files("cohort.metrics").joinpath("metrics.toml").read_text(encoding="utf-8")
    for group, metrics in tomllib.loads(text).items():
        for name, values in metrics.items():
            yield Metric(name=name, group=group, **values)


def _pattern(name: str) -> re.Pattern[str]:
    """Return the regular expression of the metrics that a name of the catalogue stands for."""
    expression = re.sub(r"\\\{([^{}]+,[^{}]+)\\\}", lambda found: f"({found[1].replace(',', '|')})", re.escape(name))
    expression = re.sub(r"\\\{\w+\\\}", "[^/]+", expression)
    return re.compile(expression.replace("@k", r"@\d+").replace(r"\.\.\.", ".+"))


METRICS: Sequence[Metric] = tuple(_load())  # in the order of docs/metrics.md
_PATTERNS = [(_pattern(metric.name), metric) for metric in sorted(METRICS, key=lambda m: m.name.endswith("..."))]
