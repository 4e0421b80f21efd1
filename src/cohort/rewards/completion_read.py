"""Which completion a reward function was reading when it raised or hung, by the variables of its frames."""

from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from cohort.rewards.describe import completion_text, excerpt


def describe_completion_read(frames: Sequence[FrameType], arguments: Mapping[str, Any]) -> str:
    """Return ", reading completion i of n, 'text'", or "" if no variable of a frame is a completion.

    Args:
        frames: the function's frames, outermost first.
        arguments: what it was called with; `completions` are texts or lists of messages.
    """
    completions = arguments.get("completions")
    if not isinstance(completions, list):
        return ""
    numbers = {key: i for i, completion in enumerate(completions) for key in _identities(completion)}
    for frame in reversed(frames):
        found = [numbers[id(value)] for value in list(frame.f_locals.values()) if id(value) in numbers]
        if found:  # of several, loops have the current one last
            text = excerpt(completion_text(completions[found[-1]]))
            return f", reading completion {found[-1] + 1} of {len(completions)}, {text}"
    return ""


def _identities(completion: Any) -> list[int]:
    """Return the ids of a completion, its messages and their contents. Python shares short texts with other code."""
    if isinstance(completion, str):
        return [id(completion)] if len(completion) > 1 else []
    contents = [message.get("content") for message in completion if isinstance(message, Mapping)]
    long = [content for content in contents if isinstance(content, str) and len(content) > 1]
    return [id(value) for value in (completion, *completion, *long)]
