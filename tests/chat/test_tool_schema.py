"""JSON schemas of Python tools."""

from collections.abc import Iterator
from typing import Any, Literal

import pytest

from cohort.chat import tool_schema
from cohort.errors import UserError


async def lookup(city: str, days: int = 3, unit: Literal["C", "F"] = "C") -> dict[str, Any]:
    """Look up the weather.

    Args:
        city: name of the city,
            in English
        days: how many days
        unit: of temperatures
    """
    return {}


class Game:
    def guess(self, word: str) -> str:
        """Guess a word.

        Args:
            word: five letters
        """
        return word

    def give_up(self) -> None:
        """End the game."""


def test_schema_of_a_typed_function():
    assert tool_schema(lookup) == {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Look up the weather.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "name of the city, in English"},
                    "days": {"type": "integer", "description": "how many days"},
                    "unit": {"type": "string", "enum": ["C", "F"], "description": "of temperatures"},
                },
                "required": ["city"],
            },
            "return": {"type": "object", "additionalProperties": {}},
        },
    }


def test_schema_of_methods_has_no_self():
    guess = tool_schema(Game().guess)["function"]
    assert guess["name"] == "guess"
    assert list(guess["parameters"]["properties"]) == ["word"]
    assert tool_schema(Game().give_up)["function"]["parameters"] == {"type": "object", "properties": {}}


def undocumented(city: str) -> str:
    return city


def untyped(city) -> str:
    """Look up.

    Args:
        city: a city
    """
    return city


def half_described(city: str, days: int) -> str:
    """Look up.

    Args:
        city: a city
    """
    return city


def without_args(city: str) -> str:
    """Look up."""
    return city


def strange_type(city: Iterator[str]) -> str:
    """Look up.

    Args:
        city: a city
    """
    return ""


def unknown_type(city: str) -> str:
    """Look up.

    Args:
        city: a city
    """
    return ""


unknown_type.__annotations__["city"] = "Nothing"


def variadic(*cities: str) -> str:
    """Look up.

    Args:
        cities: all of them
    """
    return ""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (undocumented, "tool 'undocumented': has no docstring"),
        (untyped, "tool 'untyped': parameter 'city' has no type hint"),
        (half_described, "tool 'half_described': the docstring does not describe parameter 'days'"),
        (without_args, "tool 'without_args': the docstring does not describe parameter 'city'"),
        (strange_type, "tool 'strange_type': .*Iterator"),
        (unknown_type, "tool 'unknown_type': .*Nothing"),
        (variadic, r"tool 'variadic': parameter '\*cities: str' cannot be passed by name"),
        (7, "tool 'int': is not a Python function"),
    ],
)
def test_what_is_missing_is_named(function: Any, message: str):
    with pytest.raises(UserError, match=f"{message}.*Tools need type hints and a Google-style docstring"):
        tool_schema(function)
