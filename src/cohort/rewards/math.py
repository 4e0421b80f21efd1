"""The `math` reward: 1.0 where the completion's answer is mathematically the answer column.

Answers are parsed and compared by math-verify, in a process of its own (see `math_client`): symbolic mathematics on
what a model wrote can take for ever, and math-verify's own timeouts work in a main thread only.
"""

import re
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from cohort.errors import UserError
from cohort.rewards.describe import completion_text, excerpt
from cohort.rewards.math_client import MathWorker, Verdict

_REWARDS: dict[Verdict, float | None] = {
    "correct": 1.0,
    "wrong": 0.0,
    "answer_unparsable": 0.0,
    "gold_unparsable": None,
    "timeout": None,
    "crashed": None,
    "out_of_time": None,
}
_PLAIN_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,11}")
# Text without dollars, backslashes and brackets, then a number in a box, or the number alone: here math-verify has
# one place to look at only, so the number is what it extracts.
_PLAIN_ANSWER = re.compile(r"(?:[^$\\\[\]{}]*?\\boxed\{([^{}]*)\}[\s.]*|\s*(-?[0-9]+)\s*)")


class MathReward:
    """1.0 where the answer is right, 0.0 where it is wrong or cannot be parsed, None where it was not judged.

    The answer is the last `\\boxed{...}`, else the last LaTeX expression, else the last number, after the last
    `</think>` if there is one. Boxes close together are a set of answers, as in math-verify. The gold answer is a
    number, LaTeX with or without dollars, or GSM8K's form `... #### 42`. Not judged are rows whose gold answer cannot
    be parsed, and answers that take longer than the deadline or end the worker; `last_counts` counts them.

    Arguments (in `rewards[i].args`):
        answer_column: the dataset column with the gold answer. Default "answer".
        deadline_s: seconds for one answer. Default 10.
    """

    __name__ = "math"

    def __init__(self, *, worker: MathWorker | None = None, budget_s: float = 240.0) -> None:
        """Starts no process yet.

        Args:
            worker: judges what is not plain; default a `MathWorker()`.
            budget_s: seconds for all completions of a call; those not reached by then are not judged.
        """
        self.last_counts: dict[Verdict, int] = {}  # what happened in the last call, besides "correct" and "wrong"
        self._worker = worker or MathWorker()
        self._budget_s = budget_s

    def required_columns(self, *, answer_column: str = "answer", deadline_s: float = 10.0) -> Sequence[str]:
        """See `ChecksArguments`."""
        if isinstance(deadline_s, bool) or not isinstance(deadline_s, int | float) or not 0 < deadline_s < float("inf"):
            raise ValueError(f"deadline_s must be a number of seconds above 0, got {deadline_s!r}")
        return (answer_column,)

    def __call__(
        self,
        completions: Sequence[Any],
        *,
        answer_column: str = "answer",
        deadline_s: float = 10.0,
        **columns: Sequence[Any],
    ) -> list[float | None]:
        """One reward per completion.

        Raises:
            UserError: a gold answer is neither text nor a number, or the worker does not start.
        """
        end = time.monotonic() + self._budget_s
        verdicts: dict[tuple[str, str], Verdict] = {}  # a group repeats itself: each answer is judged once
        counts: Counter[Verdict] = Counter()
        rewards: list[float | None] = []
        for completion, answer in zip(completions, columns[answer_column], strict=True):
            pair = (gold_text(answer, answer_column), completion_text(completion))
            if pair not in verdicts:
                verdicts[pair] = plain_verdict(*pair) or self._judge(*pair, min(deadline_s, end - time.monotonic()))
            counts[verdicts[pair]] += 1
            rewards.append(_REWARDS[verdicts[pair]])
        self.last_counts = {kind: n for kind, n in counts.items() if kind not in ("correct", "wrong")}
        return rewards

    def close(self) -> None:
        """Ends the worker; the next call starts another."""
        self._worker.close()

    def _judge(self, gold: str, text: str, deadline_s: float) -> Verdict:
        if deadline_s <= 0:
            return "out_of_time"
        return self._worker.judge(gold, text, deadline_s=deadline_s) if gold else "gold_unparsable"


def gold_text(answer: Any, answer_column: str = "answer") -> str:
    """The gold answer as text: what follows the last `####` (GSM8K); empty where there is none.

    Raises:
        UserError: it is neither text nor a number nor None.
    """
    if answer is None:
        return ""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise UserError(
            f"the column {answer_column!r} holds {excerpt(answer)} ({type(answer).__name__}); it must hold text or "
            "numbers. Set args.answer_column to the column with the answer"
        )
    return str(answer).rpartition("####")[2].strip()


def plain_verdict(gold: str, text: str) -> Verdict | None:
    """The verdict where gold answer and answer are plain integers, equal to the worker's; None for all else.

    Integers without leading zeros and below 10^12 are equal exactly when their texts are, and math-verify compares
    them exactly.
    """
    match = _PLAIN_ANSWER.fullmatch(text)
    if match is None or "final answer" in text.lower():  # the words that math-verify looks for before a box
        return None
    answer = (match[1] or match[2] or "").strip()
    if not (_PLAIN_INTEGER.fullmatch(gold) and _PLAIN_INTEGER.fullmatch(answer)):
        return None
    return "correct" if gold == answer else "wrong"
