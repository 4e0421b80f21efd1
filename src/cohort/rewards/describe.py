"""Words for messages: the text of a completion, excerpts, and the line of the user's code where something happened."""

import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_MACHINERY = tuple(str(Path(__file__).parent / name) for name in ("call.py", "load.py"))
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def completion_text(completion: Any) -> str:
    """The text of one completion, whether it is a string or a list of messages.

    Args:
        completion: what a reward function gets: a string, or `[{"role": "assistant", "content": text}]`.
    """
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def excerpt(value: object, limit: int = 80) -> str:
    """`repr(value)` on one line, with the middle left out where it is longer than `limit` characters."""
    # A long string is cut before repr, so that a completion of a megabyte costs nothing here.
    if isinstance(value, str) and len(value) > 2 * limit:
        value = value[:limit] + value[-limit:]
    text = repr(value)
    if len(text) <= limit:
        return text
    half = (limit - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def user_line(frames: Sequence[traceback.FrameSummary]) -> str | None:
    """`file:line` of the innermost frame that is the user's own code, else of the innermost frame, else None."""
    own = [frame for frame in frames if not frame.filename.startswith(("<frozen", *_MACHINERY, *_LIBRARIES))]
    return next((f"{frame.filename}:{frame.lineno}" for frame in reversed(own or list(frames))), None)


def raised_at(error: BaseException) -> str:
    """`file:line` in the user's code where `error` was raised; for a syntax error, the line that does not parse."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    return user_line(traceback.extract_tb(error.__traceback__)) or "an unknown line"
