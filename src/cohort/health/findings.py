"""What rules find: a sentence with its level, and how it stands in the event `health` of `events.jsonl`."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from pydantic import TypeAdapter, ValidationError

Level = Literal["bad", "warning", "good", "info"]
HEALTH = "health"  # the event of `events.jsonl` that has findings
LEVELS: tuple[Level, ...] = get_args(Level)  # the most important first


class Sign:
    """That a rule's condition holds."""

    def __init__(self, level: Level, *, step: int | None = None, **values: Any):
        """Create a sign.

        Args:
            level: how good or bad it is.
            step: where it shows; None: at the last step.
            values: what the rule's sentence says.
        """
        self.level = level
        self.step = step
        self.values = values


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One sentence on how a run goes."""

    rule: str
    level: Level
    text: str
    advice: str | None
    step: int
    evidence: Sequence[str]  # metrics that show it

    @property
    def key(self) -> tuple[str, ...]:
        """The rule and its first metric, which tells apart what it finds of several rewards."""
        return self.rule, *self.evidence[:1]

    @property
    def is_warning(self) -> bool:
        """Whether something goes wrong."""
        return self.level in ("bad", "warning")

    @property
    def sentence(self) -> str:
        """The text with the advice."""
        return self.text if self.advice is None else f"{self.text}. {self.advice}"

    def as_json(self) -> dict[str, Any]:
        """Return the finding as in `events.jsonl`."""
        return asdict(self)


_FINDING = TypeAdapter(Finding)


def findings_in(event: Mapping[str, Any]) -> list[Finding]:
    """Return the findings of an event `health`, without those that cannot be read."""
    found = []
    for value in event["findings"] if isinstance(event.get("findings"), list) else ():
        with suppress(ValidationError):
            found.append(_FINDING.validate_python(value))
    return found


def number_text(value: float, digits: int = 3) -> str:
    """Write a number with about `digits` significant digits: 0.4123 -> "0.412", 0.000002 -> "2e\u22126"."""
    if 0 < abs(value) < 1e-3:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e-")
        if "." in mantissa:
            mantissa = mantissa.rstrip("0").rstrip(".")
        text = f"{mantissa}e-{int(exponent)}"
    elif 1000 <= abs(value) < 1e6:
        text = f"{value:,.0f}"
    elif 1e6 <= abs(value) < 1e9:
        text = f"{value / 1e6:.{digits}g}M"
    else:
        text = f"{value:.{digits}g}"
    return text.replace("-", "\u2212")
