"""The rewards `trl.accuracy`, `trl.reasoning_accuracy` and `open_r1.accuracy`: math-verify with their settings.

They differ from `math` in what counts as an answer: LaTeX only, a box first, reasoning included.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from cohort.rewards.answer_grader import VERDICT_REWARDS, AnswerGrader
from cohort.rewards.arguments import check_number
from cohort.rewards.describe import answer_text, completion_text
from cohort.rewards.function import column_values
from cohort.rewards.math_client import Verdict


class GradedReward:
    """Base of rewards that grade answers in a worker process."""

    def __init__(self, grader: AnswerGrader) -> None:
        self.grader = grader

    @property
    def last_counts(self) -> Mapping[Verdict, int]:
        """Verdicts of the last call other than "correct" and "wrong"."""
        return self.grader.last_counts

    def close(self) -> None:
        """Stop the worker; the next call starts another."""
        self.grader.close()

    def grade(self, completions: Sequence[Any], golds: Sequence[Any], *, deadline_s: float) -> list[Verdict]:
        """Return one verdict per completion; a gold answer of None cannot be parsed."""
        texts = [answer_text(completion) for completion in completions]
        return self.grader.grade_all(
            ["" if gold is None else str(gold) for gold in golds], texts, deadline_s=deadline_s
        )


class AccuracyReward(GradedReward):
    """1.0 if the answer equals the gold answer, 0.0 if it differs or cannot be parsed, None if it was not graded.

    Arguments (in `rewards[i].args`):
        answer_column: dataset column with the gold answer, as LaTeX or a number. Default "solution".
        deadline_s: seconds per answer. Default 10.
    """

    def required_columns(self, *, answer_column: str = "solution", deadline_s: float = 10.0) -> Sequence[str]:
        """See `ChecksArguments`."""
        check_number("deadline_s", deadline_s, above=0)
        return (answer_column,)

    def __call__(
        self,
        completions: Sequence[Any],
        *,
        answer_column: str = "solution",
        deadline_s: float = 10.0,
        **columns: Sequence[Any],
    ) -> list[float | None]:
        """Return one reward per completion."""
        verdicts = self.grade(completions, column_values(columns, answer_column), deadline_s=deadline_s)
        return [VERDICT_REWARDS[verdict] for verdict in verdicts]


class ReasoningAccuracyReward(GradedReward):
    """Like `trl.accuracy`, for the text after the reasoning; 0.0 if the reasoning does not end.

    Arguments (in `rewards[i].args`):
        answer_column: dataset column with the gold answer, as LaTeX or a number. Default "solution".
        reasoning_delimiters: texts that end the reasoning; the answer follows the last occurrence of the first one
            that the completion has. Default ["</think>"].
        deadline_s: seconds per answer. Default 10.
    """

    def required_columns(
        self,
        *,
        answer_column: str = "solution",
        reasoning_delimiters: Sequence[str] = ("</think>",),
        deadline_s: float = 10.0,
    ) -> Sequence[str]:
        """See `ChecksArguments`."""
        check_number("deadline_s", deadline_s, above=0)
        is_list = isinstance(reasoning_delimiters, list | tuple) and bool(reasoning_delimiters)
        if not is_list or not all(isinstance(text, str) and text for text in reasoning_delimiters):
            raise ValueError(f"reasoning_delimiters must be a list of texts, got {reasoning_delimiters!r}")
        return (answer_column,)

    def __call__(
        self,
        completions: Sequence[Any],
        *,
        answer_column: str = "solution",
        reasoning_delimiters: Sequence[str] = ("</think>",),
        deadline_s: float = 10.0,
        **columns: Sequence[Any],
    ) -> list[float | None]:
        """Return one reward per completion."""
        texts = [completion_text(completion) for completion in completions]
        ends = [next((end for end in reasoning_delimiters if end in text), None) for text in texts]
        finished = [i for i, end in enumerate(ends) if end is not None]
        answers = [texts[i].rpartition(ends[i] or "")[2] for i in finished]
        solutions = column_values(columns, answer_column)
        golds = [solutions[i] for i in finished]
        rewards: list[float | None] = [0.0] * len(texts)
        for i, verdict in zip(finished, self.grade(answers, golds, deadline_s=deadline_s), strict=True):
            rewards[i] = VERDICT_REWARDS[verdict]
        return rewards
