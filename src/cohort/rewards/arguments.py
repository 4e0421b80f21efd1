"""Checks of the arguments of built-in rewards."""

import importlib
import math


def check_number(
    name: str,
    value: object,
    *,
    minimum: float = -math.inf,
    maximum: float = math.inf,
    above: float = -math.inf,
    whole: bool = False,
) -> None:
    """Check an argument that must be a finite number.

    Args:
        name: the argument's name, for the message.
        value: what was given, of any type.
        minimum: smallest allowed value.
        maximum: largest allowed value.
        above: exclusive lower bound.
        whole: only integers.

    Raises:
        ValueError: `value` is not such a number.
    """
    kinds: tuple[type, ...] = (int,) if whole else (int, float)
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    if is_number and abs(value) < math.inf and minimum <= value <= maximum and value > above:  # type: ignore[arg-type,operator]
        return
    bounds = [f"above {above:g}"] * (above > -math.inf) + [f"at least {minimum:g}"] * (minimum > -math.inf)
    bounds += [f"at most {maximum:g}"] * (maximum < math.inf)
    kind = "a whole number" if whole else "a number"
    raise ValueError(f"{name} must be {' '.join([kind, ' and '.join(bounds)]).strip()}, got {value!r}")


def check_flag(name: str, value: object) -> None:
    """Check an argument that must be true or false.

    Raises:
        ValueError: it is neither.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Check an argument that must be one of a few words.

    Raises:
        ValueError: it is another.
    """
    if value not in choices:
        raise ValueError(f"{name} must be {' or '.join(choices)}, got {value!r}")


def require_package(name: str, *, extra: str) -> None:
    """Check that the package of an extra is installed.

    Raises:
        ValueError: it is not.
    """
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"needs the package {error.name}; install it with `pip install 'cohort-rl[{extra}]'`"
        ) from error
