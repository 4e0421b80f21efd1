"""Text of completions and excerpts of values, for messages."""

from typing import Any


def completion_text(completion: Any) -> str:
    """Return the text of a completion, given as a string or a list of messages.

    Args:
        completion: argument of a reward function: a string, or `[{"role": "assistant", "content": text}]`.
    """
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


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
