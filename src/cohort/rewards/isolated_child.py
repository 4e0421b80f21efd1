"""What runs in the child process of an isolated reward: load the user's function, call it, and return plain values."""

import inspect
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from cohort.errors import UserError
from cohort.rewards.describe import excerpt
from cohort.rewards.function import ChecksArguments, keyword_parameters
from cohort.user_code import describe_error, error_location, load_function

_MAX_TRACEBACK_CHARACTERS = 4000


def describe(use: str, field: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Load the function and describe its signature; `error` if it cannot be used."""
    with suppress(OSError):  # if memory runs out, the kernel ends this process before the run's
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    try:
        function = load_function(use, field=field)
        parameters = keyword_parameters(function)
    except UserError as error:
        return {"error": str(error)}
    except ValueError as error:
        return {"error": f"{field}: the signature of reward {use!r} cannot be read ({error}); wrap it in a `def`"}
    inner = getattr(function, "func", function)  # functools.partial
    return {
        "name": str(getattr(inner, "__name__", type(inner).__name__)),
        "names": sorted(parameters.names),
        "required": parameters.required,
        "positional_only": parameters.positional_only,
        "has_var_keyword": parameters.has_var_keyword,
        "shapes": bool(getattr(function, "shapes", False)),
        "checks": isinstance(function, ChecksArguments),
    }


async def score(use: str, field: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Call the function, which may be asynchronous, and return its values: numbers, None, or text on others."""
    try:
        returned = load_function(use, field=field)(**arguments)
        if inspect.isawaitable(returned):
            returned = await returned
    except (SystemExit, KeyboardInterrupt) as error:
        return {"exited": describe_error(error)}
    except BaseException as error:
        frames = "".join(traceback.format_exception(error))[-_MAX_TRACEBACK_CHARACTERS:]
        return {"error": f"raised {describe_error(error)} (at {error_location(error)})", "traceback": frames}
    values = returned
    with suppress(Exception):  # arrays of NumPy or PyTorch
        values = returned.tolist()
    if not isinstance(values, list | tuple):
        return {"values": None, "kind": _kind(returned)}
    return {"values": [_plain(value) for value in values]}


def _plain(value: Any) -> float | str | None:
    """Return a number or None; text that describes anything else."""
    number = value
    if not isinstance(value, bool | int | float):
        with suppress(Exception):  # scalars of NumPy or PyTorch
            number = value.item()
    if isinstance(number, bool | int | float) and abs(number) <= 1e30:
        return float(number)
    return None if value is None else _kind(value)


def _kind(value: Any) -> str:
    return f"{excerpt(value)} ({type(value).__name__})"
