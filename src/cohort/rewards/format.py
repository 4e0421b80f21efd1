"""The `format` reward: 1.0 if the whole completion matches a pattern."""

import re
from collections.abc import Sequence
from typing import Any

from cohort.rewards.describe import completion_text
from cohort.rewards.patterns import compile_pattern

# One think block, then a non-empty answer. The lookahead excludes other think tags and leaves only one way to match, so
# matching takes linear time.
THINK_PATTERN = r"<think>(?:(?!</?think>).)*</think>\s*(?!\s)(?:(?!</?think>).)+"


class FormatReward:
    """1.0 if the completion matches, else 0.0.

    Arguments (in `rewards[i].args`):
        pattern: regular expression that must match the whole completion, stripped; a dot also matches a line break.
            Default: exactly one `<think>...</think>`, then a non-empty answer.
    """

    __name__ = "format"

    def required_columns(self, *, pattern: str = THINK_PATTERN) -> Sequence[str]:
        """See `ChecksArguments`."""
        compile_pattern(pattern, flags=re.DOTALL)
        return ()

    def __call__(self, completions: Sequence[Any], *, pattern: str = THINK_PATTERN) -> list[float]:
        """Return one reward per completion."""
        regex = compile_pattern(pattern, flags=re.DOTALL)
        return [float(regex.fullmatch(completion_text(c).strip()) is not None) for c in completions]
