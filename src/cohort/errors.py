"""Exceptions for user errors and failed runs, and how messages show values and exceptions."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in the user's input. The message names the field, the value, the rule and what works.

    The command line prints only the message and exits with code 2.
    """


class TrainingError(RuntimeError):
    """The run cannot continue, but its configuration was valid. Exit code 1."""


class StopRequested(TrainingError):  # noqa: N818
    """A requested stop of the run, raised where it is safe. The training loop catches it."""


class RankDesyncError(TrainingError):
    """This rank failed while other ranks may be waiting in a collective; the process must exit."""


class DoesNotFitError(RankDesyncError):
    """Memory ran out on this rank, and no smaller micro-batch would help."""


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Return "; did you mean x?" with the known name most like `wrong`, or "" if none is like it."""
    lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(wrong.lower(), lower, n=3)
    # prefer swapped letters: gpro is meant as grpo, not gspo
    near.sort(key=lambda name: sorted(name) != sorted(wrong.lower()))
    return f"; did you mean {lower[near[0]]}?" if near else ""


def suggest(wrong: str, known: Iterable[str], what: str) -> str:
    """Return "; did you mean x? What: x, y", the end of a message about a wrong name."""
    names = list(known)
    return f"{did_you_mean(wrong, names) or '.'} {what}: {', '.join(names) or 'none'}"


def describe_error(error: BaseException, limit: int | None = None) -> str:
    """Return an exception's type and message, even if its `__str__` raises.

    Args:
        limit: return only the first line, without a full stop, and at most this many characters.
    """
    name = type(error).__name__
    try:
        message = str(error).strip()
    except Exception as another:
        return f"{name} (whose message cannot be shown: its __str__ raises {type(another).__name__})"
    text = f"{name}: {message}" if message else name
    return text if limit is None else text.partition("\n")[0].rstrip(".")[:limit]


def excerpt(value: object, limit: int = 80) -> str:
    """Return `repr(value)` on one line, with the middle omitted if it is longer than `limit` characters."""
    # Truncate long strings before repr, so that a completion of a megabyte is cheap.
    if isinstance(value, str) and len(value) > 2 * limit:
        value = value[:limit] + value[-limit:]
    try:
        text = repr(value)
    except Exception as error:  # in the __repr__ of a user's class
        return f"<its repr raises {type(error).__name__}>"
    if len(text) <= limit:
        return text
    half = (limit - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"
