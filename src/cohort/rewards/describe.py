"""Text of completions and excerpts of values, for messages."""

from collections.abc import Sequence
from typing import Any

from cohort.rewards.conversation import Message, message_text


class TurnsText(str):
    """Text of all turns of a trajectory."""

    last: str  # text of its last assistant message

    def __new__(cls, text: str, last: str = "") -> "TurnsText":
        """Create the text of several turns."""
        self = super().__new__(cls, text)
        self.last = last
        return self


def completion_text(completion: Any) -> str:
    """Return the text of a completion: as it is, or of the last assistant message.

    Args:
        completion: argument of a reward function: a string, or messages such as
            `[{"role": "assistant", "content": text}]`. The last one may be a tool's.
    """
    return completion if isinstance(completion, str) else last_text(completion)


def answer_text(completion: Any) -> str:
    """Return the text that may hold the answer: of the last assistant message, also in a `TurnsText`."""
    return completion.last if isinstance(completion, TurnsText) else completion_text(completion)


def last_text(messages: Sequence[Message]) -> str:
    """Return the text of the last assistant message; "" if there is none, or it has no text."""
    own = [message for message in messages if message.get("role", "assistant") == "assistant"]
    return message_text(own[-1]) if own else ""


def first_paragraph(text: str) -> str:
    """Return the text before the first empty line: the reason, in errors of environments."""
    return text.partition("\n\n")[0]


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
