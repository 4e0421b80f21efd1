"""The `regex` reward: 1.0 if a regular expression matches the completion."""

import re
from collections.abc import Sequence
from typing import Any

from cohort.rewards.arguments import check_flag
from cohort.rewards.describe import completion_text
from cohort.rewards.patterns import compile_pattern


class RegexReward:
    """1.0 if the pattern is found in the completion, else 0.0.

    Arguments (in `rewards[i].args`):
        pattern: regular expression; a dot does not match a line break, and `^` and `$` match at each line. Use the
            inline flags `(?s)` and `(?i)` for others.
        whole: the pattern must match the whole completion, stripped. Default false.
        negate: 1.0 if the pattern does not match. Default false.
    """

    def required_columns(self, *, pattern: str, whole: bool = False, negate: bool = False) -> Sequence[str]:
        """See `ChecksArguments`."""
        compile_pattern(pattern, flags=re.MULTILINE)
        check_flag("whole", whole)
        check_flag("negate", negate)
        return ()

    def __call__(
        self, completions: Sequence[Any], *, pattern: str, whole: bool = False, negate: bool = False
    ) -> list[float]:
        """Return one reward per completion."""
        regex = compile_pattern(pattern, flags=re.MULTILINE)
        texts = [completion_text(completion) for completion in completions]
        matches = [regex.fullmatch(text.strip()) if whole else regex.search(text) for text in texts]
        return [float((match is not None) != negate) for match in matches]
