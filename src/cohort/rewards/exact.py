"""The `exact` reward: 1.0 if the extracted answer equals the answer column."""

import re
from collections.abc import Sequence
from typing import Any

from cohort.rewards.describe import answer_text
from cohort.rewards.function import column_values
from cohort.rewards.patterns import compile_pattern


class ExactReward:
    """1.0 if the extracted answer equals the answer column as text, else 0.0; None if the column is empty.

    Arguments (in `rewards[i].args`):
        answer_column: dataset column with the answer; numbers are compared as text. Default "answer".
        pattern: regular expression with one group, the answer; the last match counts, and no match scores 0.0. Default
            None: all of the completion behind the last `</think>`, stripped.
    """

    __name__ = "exact"

    def required_columns(self, *, answer_column: str = "answer", pattern: str | None = None) -> Sequence[str]:
        """See `ChecksArguments`."""
        if pattern is not None:
            compile_pattern(pattern, num_groups=1)
        return (answer_column,)

    def __call__(
        self,
        completions: Sequence[Any],
        *,
        answer_column: str = "answer",
        pattern: str | None = None,
        **columns: Sequence[Any],
    ) -> list[float | None]:
        """Return one reward per completion."""
        regex = None if pattern is None else compile_pattern(pattern, num_groups=1)
        return [
            None if answer is None else float(_extract(answer_text(completion), regex) == str(answer).strip())
            for completion, answer in zip(completions, column_values(columns, answer_column), strict=True)
        ]


def _extract(text: str, regex: re.Pattern[str] | None) -> str | None:
    text = text.rpartition("</think>")[2]
    if regex is None:
        return text.strip()
    found = regex.findall(text)  # one group: its texts, in order
    return found[-1].strip() if found else None
