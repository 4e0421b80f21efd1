"""Words for messages: the text of a completion, and excerpts."""

from typing import Any


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
    try:
        text = repr(value)
    except Exception as error:  # of a user's class
        return f"<its repr raises {type(error).__name__}>"
    if len(text) <= limit:
        return text
    half = (limit - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"
