"""The `exact_set` reward: 1.0 if the completion lists exactly the items of the answer column, in any order."""

from collections.abc import Sequence
from typing import Any

from cohort.rewards.arguments import check_flag
from cohort.rewards.describe import answer_text
from cohort.rewards.function import column_values
from cohort.rewards.patterns import compile_pattern


class ExactSetReward:
    """1.0 if both sets of items are equal, else 0.0; None if the row has no answer. Order and repetitions do not count.

    Arguments (in `rewards[i].args`):
        answer_column: dataset column with a list, or with text that is split at the separator. Default "answer".
        separator: text between items. Default ",".
        pattern: regular expression with one group, the list of items; the last match counts, and no match scores 0.0.
            Default None: the whole completion after the last `</think>`.
        ignore_case: compare without upper and lower case. Default false.
    """

    def required_columns(
        self,
        *,
        answer_column: str = "answer",
        separator: str = ",",
        pattern: str | None = None,
        ignore_case: bool = False,
    ) -> Sequence[str]:
        """See `ChecksArguments`."""
        if not isinstance(separator, str) or not separator:
            raise ValueError(f"separator must be a text, got {separator!r}")
        if pattern is not None:
            compile_pattern(pattern, num_groups=1)
        check_flag("ignore_case", ignore_case)
        return (answer_column,)

    def __call__(
        self,
        completions: Sequence[Any],
        *,
        answer_column: str = "answer",
        separator: str = ",",
        pattern: str | None = None,
        ignore_case: bool = False,
        **columns: Sequence[Any],
    ) -> list[float | None]:
        """Return one reward per completion."""
        regex = None if pattern is None else compile_pattern(pattern, num_groups=1)

        def items(given: Any) -> set[str]:
            parts = given if isinstance(given, list | tuple | set) else str(given).split(separator)
            texts = {str(part).strip() for part in parts} - {""}
            return {text.casefold() for text in texts} if ignore_case else texts

        rewards: list[float | None] = []
        for completion, gold in zip(completions, column_values(columns, answer_column), strict=True):
            text: str | None = answer_text(completion).rpartition("</think>")[2]
            if regex is not None:
                text = ([match[1] for match in regex.finditer(text or "")] or [None])[-1]
            rewards.append(None if gold is None else float(text is not None and items(text) == items(gold)))
        return rewards
