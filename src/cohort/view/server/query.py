"""Query strings: parse values and say what is wrong with them."""

from collections.abc import Collection
from urllib.parse import unquote

from starlette.datastructures import QueryParams

_MAX_NAMES = 2000


class BadQueryError(ValueError):
    """A value of a query string is invalid. The message names the field, the value and the rule."""


class Query:
    """The values of one query string. Methods raise BadQueryError."""

    def __init__(self, params: QueryParams):
        self._params = params

    def text(self, name: str, default: str = "") -> str:
        """Return a value as it is."""
        return self._params.get(name, default)

    def integer(self, name: str, default: int, *, low: int, high: int) -> int:
        """Return a whole number from `low` to `high`."""
        given = self._params.get(name, "")
        if not given:
            return default
        value = _whole_number(given)
        if value is None or not low <= value <= high:
            raise BadQueryError(f"{name}: {given!r} is not a whole number from {low} to {high}")
        return value

    def optional_number(self, name: str) -> float | None:
        """Return a finite number, or None if it is not given."""
        given = self._params.get(name, "")
        if not given:
            return None
        try:
            value = float(given)
        except ValueError:
            value = float("nan")
        if not abs(value) < float("inf"):
            raise BadQueryError(f"{name}: {given!r} is not a number")
        return value

    def choice(self, name: str, default: str, allowed: Collection[str]) -> str:
        """Return one of the allowed values."""
        value = self._params.get(name) or default
        if value not in allowed:
            raise BadQueryError(f"{name}: {value!r} is not one of {', '.join(allowed)}")
        return value

    def names(self, name: str) -> list[str]:
        """Return values, repeated or separated by commas. A comma within a value is written as %2C."""
        found = [unquote(part) for value in self._params.getlist(name) for part in value.split(",") if part]
        if len(found) > _MAX_NAMES:
            raise BadQueryError(f"{name}: {len(found)} names are given; at most {_MAX_NAMES} work")
        return list(dict.fromkeys(found))


def _whole_number(text: str) -> int | None:
    """Return the number, or None. Longer texts than any number here are not parsed."""
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdecimal() and len(digits) <= 15 else None
