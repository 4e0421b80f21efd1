"""What `cohort check` finds. Codes, severities and titles are in `findings.toml`."""

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

import yaml

_PARSERS: dict[str, Callable[[str], Any]] = {"json": json.loads, "toml": tomllib.loads, "yaml": yaml.safe_load}


@cache
def load_table(path: str) -> Any:
    """Return the content of a file, by its path in `cohort_check`. It is shared: do not change it."""
    text = resources.files("cohort_check").joinpath(path).read_text(encoding="utf-8")
    return _PARSERS[path.rpartition(".")[2]](text)


Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One kind of finding."""

    severity: Severity
    title: str
    explanation: str


RULES: Mapping[str, Rule] = {code: Rule(**entry) for code, entry in load_table("findings.toml").items()}


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem in one file."""

    code: str
    field: str | None  # the key it is about
    message: str
    nearest: tuple[str, ...] = ()  # changes that work, nearest first: `key=value`, several joined by " and "
    where: str | None = None  # the place of the field, such as "train.sh:12"
    says: str | None = None  # the framework's own message

    @property
    def severity(self) -> Severity:
        """The severity of its code."""
        return RULES[self.code].severity

    def as_json(self) -> dict[str, Any]:
        """The finding as `--json` prints it."""
        keys = ("code", "severity", "where", "field", "message", "says", "nearest")
        return {key: getattr(self, key) for key in keys}
