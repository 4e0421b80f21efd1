"""The `math` reward: 1.0 if the completion's answer is mathematically equal to the answer column.

Answers are parsed and compared by math-verify in a separate process (see `math_client`): symbolic mathematics on model
output can take forever, and math-verify's own timeouts only work in a main thread.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cohort.errors import UserError
from cohort.rewards.answer_grader import VERDICT_REWARDS, AnswerGrader
from cohort.rewards.arguments import check_number
from cohort.rewards.describe import answer_text, excerpt
from cohort.rewards.function import column_values
from cohort.rewards.math_client import MathWorker, Verdict

_PLAIN_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,11}")
# Text without dollars, backslashes and brackets, then a number in a box, or the number alone: math-verify has only one
# place to look at, so it extracts that number.
_PLAIN_ANSWER = re.compile(r"(?:[^$\\\[\]{}]*?\\boxed\{([^{}]*)\}[\s.]*|\s*(-?[0-9]+)\s*)")


class MathReward:
    """1.0 if the answer is right, 0.0 if it is wrong or cannot be parsed, None if it was not graded.

    The answer is the last `\\boxed{...}`, else the last LaTeX expression, else the last number, after the last
    `</think>` if there is one. Adjacent boxes form a set of answers, as in math-verify. The gold answer is a number,
    LaTeX with or without dollars, or GSM8K's `... #### 42`. Not graded: rows whose gold answer cannot be parsed, and
    answers that miss the deadline or crash the worker; `last_counts` counts them.

    Arguments (in `rewards[i].args`):
        answer_column: dataset column with the gold answer. Default "answer".
        deadline_s: seconds per answer. Default 10.
    """

    __name__ = "math"

    def __init__(self, *, worker: MathWorker | None = None, budget_s: float = 240.0) -> None:
        """Create the reward; the worker process starts with the first call that needs it.

        Args:
            worker: grades answers that are not plain integers; default a `MathWorker()`.
            budget_s: seconds for all completions of a call; the rest is not graded.
        """
        self._grader = AnswerGrader(worker=worker, budget_s=budget_s, shortcut=plain_verdict)

    @property
    def last_counts(self) -> Mapping[Verdict, int]:
        """Verdicts of the last call other than "correct" and "wrong"."""
        return self._grader.last_counts

    def required_columns(self, *, answer_column: str = "answer", deadline_s: float = 10.0) -> Sequence[str]:
        """See `ChecksArguments`."""
        check_number("deadline_s", deadline_s, above=0)
        return (answer_column,)

    def __call__(
        self,
        completions: Sequence[Any],
        *,
        answer_column: str = "answer",
        deadline_s: float = 10.0,
        **columns: Sequence[Any],
    ) -> list[float | None]:
        """Return one reward per completion.

        Raises:
            UserError: a gold answer is neither text nor a number, or the worker does not start.
        """
        golds = [gold_text(answer, answer_column) for answer in column_values(columns, answer_column)]
        texts = [answer_text(completion) for completion in completions]
        return [VERDICT_REWARDS[verdict] for verdict in self._grader.grade_all(golds, texts, deadline_s=deadline_s)]

    def close(self) -> None:
        """Stop the worker; the next call starts another."""
        self._grader.close()


def gold_text(answer: Any, answer_column: str = "answer") -> str:
    """Return the gold answer as text: what follows the last `####` (GSM8K); empty if there is none.

    Raises:
        UserError: it is neither text nor a number nor None.
    """
    if answer is None:
        return ""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise UserError(
            f"the column {answer_column!r} holds {excerpt(answer)} ({type(answer).__name__}); it must hold text or "
            "numbers; set args.answer_column to the column with the answer"
        )
    return str(answer).rpartition("####")[2].strip()


def plain_verdict(gold: str, text: str) -> Verdict | None:
    """Return the verdict if both answers are plain integers, for which the worker would find the same; else None.

    Integers below 10^12 without leading zeros are equal exactly if their texts are, and math-verify compares them
    exactly.
    """
    match = _PLAIN_ANSWER.fullmatch(text)
    if match is None or "final answer" in text.lower():  # math-verify looks for these words before a box
        return None
    answer = (match[1] or match[2] or "").strip()
    if not (_PLAIN_INTEGER.fullmatch(gold) and _PLAIN_INTEGER.fullmatch(answer)):
        return None
    return "correct" if gold == answer else "wrong"
