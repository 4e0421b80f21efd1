"""The `format` reward: 1.0 where the whole completion has the wanted form."""

import re
from collections.abc import Sequence
from typing import Any

from cohort.rewards.describe import completion_text
from cohort.rewards.patterns import compile_pattern

# One think block, then an answer with at least one character. The look-ahead keeps every other think tag out, and
# leaves one way to match, so the time is linear in the length of the completion.
THINK_PATTERN = r"<think>(?:(?!</?think>).)*</think>\s*(?!\s)(?:(?!</?think>).)+"


class FormatReward:
    """1.0 where the completion matches, else 0.0.

    Arguments (in `rewards[i].args`):
        pattern: a regular expression that the whole completion, without surrounding white space, must match; a dot
            matches a line break too. Default: exactly one `<think>...</think>`, then a non-empty answer.
    """

    __name__ = "format"

    def required_columns(self, *, pattern: str = THINK_PATTERN) -> Sequence[str]:
        """See `ChecksArguments`."""
        compile_pattern(pattern, flags=re.DOTALL)
        return ()

    def __call__(self, completions: Sequence[Any], *, pattern: str = THINK_PATTERN) -> list[float]:
        """One reward per completion."""
        regex = compile_pattern(pattern, flags=re.DOTALL)
        return [float(regex.fullmatch(completion_text(c).strip()) is not None) for c in completions]
