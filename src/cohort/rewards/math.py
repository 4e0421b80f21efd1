"""Rewards by math-verify: `math`, and `trl.accuracy` and its kin. Child processes grade answers, with a deadline each.

Answers are parsed and compared by math-verify in separate processes (`math_worker.py`): symbolic mathematics on model
output can take forever, and math-verify's own timeouts only work in a main thread.

`trl.accuracy` and its kin differ from `math` in what counts as an answer: LaTeX only, a box first, reasoning included.
"""

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from cohort.config.rewards import AccuracySettings, MathSettings, ReasoningAccuracySettings
from cohort.errors import UserError, excerpt
from cohort.rewards.builtin import BuiltinReward, Columns, RewardContext
from cohort.rewards.completion_text import answer_text, completion_text
from cohort.rewards.math_workers import Grade, Grader

G = TypeVar("G", bound=AccuracySettings | MathSettings)

_MAX_BATCH = 16  # answers of a message to a worker

VERDICT_REWARDS: Mapping[Grade, float | None] = {
    "correct": 1.0,
    "wrong": 0.0,
    "answer_unparsable": 0.0,
    "gold_unparsable": None,
    "timeout": None,
    "crashed": None,
    "out_of_time": None,
}


class GradedReward(BuiltinReward[G]):
    """Grades answers in worker processes, which start with the first call that needs them."""

    per_group = True

    def __init__(self, settings: G, context: RewardContext, *, grader: Grader) -> None:
        """Create the reward; `grader` says how the workers read and compare answers."""
        super().__init__(settings, context)
        self._grader = grader
        self.workers = context.math_workers

    def required_columns(self) -> Sequence[str]:
        """See `BuiltinReward`."""
        return (self.settings.answer_column,)

    def close(self) -> None:
        """Stop the workers; the next call starts others."""
        self.workers.close()

    def grade(self, completions: Sequence[Any], golds: Sequence[Any]) -> list[Grade]:
        """Return one verdict per completion; a gold answer of None cannot be parsed.

        Raises:
            UserError: a worker does not start.
        """
        texts = [answer_text(completion) for completion in completions]
        pairs = [("" if gold is None else str(gold), text) for gold, text in zip(golds, texts, strict=True)]
        known = {pair: self.known(*pair) for pair in pairs}  # completions of a group repeat: grade each answer once
        left = [pair for pair, verdict in known.items() if verdict is None]
        graded = {pair: verdict for pair, verdict in known.items() if verdict is not None}
        graded |= zip(left, self._grade(left), strict=True)
        counts: Counter[str] = Counter(graded[pair] for pair in pairs)
        self.last_counts = {kind: number for kind, number in counts.items() if kind not in ("correct", "wrong")}
        return [graded[pair] for pair in pairs]

    def known(self, gold: str, text: str) -> Grade | None:
        """Return the verdict on an answer if it is known without a worker."""
        return None if gold else "gold_unparsable"

    def _grade(self, pairs: Sequence[tuple[str, str]]) -> list[Grade]:
        """Grade answers in all workers at the same time, as long as the call may take."""
        end, count = time.monotonic() + self.context.budget_s, self.workers.count
        size = max(1, min(_MAX_BATCH, len(pairs) // (4 * count)))  # so that workers end at about the same time
        batches = [pairs[start : start + size] for start in range(0, len(pairs), size)]
        grade = partial(self.workers.grade, deadline_s=self.settings.deadline_s, end=end, grader=self._grader)
        with ThreadPoolExecutor(max(1, min(count, len(batches)))) as threads:
            futures = [threads.submit(grade, batch) for batch in batches]
            try:
                return [verdict for future in futures for verdict in future.result()]
            except BaseException:  # the run stops, or the deadline of the call has passed
                threads.shutdown(wait=False, cancel_futures=True)
                self.workers.close()
                raise


class AccuracyReward(GradedReward[G]):
    """1.0 if the answer equals the gold answer, 0.0 if it differs or cannot be parsed, None if it was not graded."""

    def __call__(self, completions: Sequence[Any], columns: Columns) -> list[float | None]:
        """Return one reward per completion.

        Raises:
            UserError: a worker does not start.
        """
        verdicts = self.grade(completions, columns[self.settings.answer_column])
        return [VERDICT_REWARDS[verdict] for verdict in verdicts]


class MathReward(AccuracyReward[MathSettings]):
    """1.0 if the answer is right, 0.0 if it is wrong or cannot be parsed, None if it was not graded.

    The answer is the last `\\boxed{...}`, else the last LaTeX expression, else the last number, after the last
    `</think>` if there is one. Adjacent boxes form a set of answers, as in math-verify. The gold answer is a number,
    LaTeX with or without dollars, or GSM8K's `... #### 42`. Not graded: rows whose gold answer cannot be parsed, and
    answers that miss the deadline or crash their worker; `last_counts` counts them.
    """

    def __init__(self, settings: MathSettings, context: RewardContext) -> None:
        super().__init__(settings, context, grader="math")

    def known(self, gold: str, text: str) -> Grade | None:
        """See `GradedReward`."""
        return super().known(gold, text) or plain_verdict(gold, text)

    def __call__(self, completions: Sequence[Any], columns: Columns) -> list[float | None]:
        """Return one reward per completion.

        Raises:
            UserError: a gold answer is neither text nor a number, or a worker does not start.
        """
        column = self.settings.answer_column
        golds = [gold_text(answer, column) for answer in columns[column]]
        return super().__call__(completions, {column: golds})


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


_PLAIN_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,11}")
# Text without dollars, backslashes and brackets, then a number in a box, or the number alone: math-verify has only one
# place to look at, so it extracts that number.
_PLAIN_ANSWER = re.compile(r"(?:[^$\\\[\]{}]*?\\boxed\{([^{}]*)\}[\s.]*|\s*(-?[0-9]+)\s*)")


def plain_verdict(gold: str, text: str) -> Grade | None:
    """Return the verdict if both answers are plain integers, for which a worker would find the same; else None.

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


class ReasoningAccuracyReward(GradedReward[ReasoningAccuracySettings]):
    """Like `trl.accuracy`, for the text after the reasoning; 0.0 if the reasoning does not end."""

    def __call__(self, completions: Sequence[Any], columns: Columns) -> list[float | None]:
        """Return one reward per completion."""
        texts = [completion_text(completion) for completion in completions]
        ends = [next((end for end in self.settings.reasoning_delimiters if end in text), None) for text in texts]
        finished = [i for i, end in enumerate(ends) if end is not None]
        answers = [texts[i].rpartition(ends[i] or "")[2] for i in finished]
        solutions = columns[self.settings.answer_column]
        rewards: list[float | None] = [0.0] * len(texts)
        for i, verdict in zip(finished, self.grade(answers, [solutions[i] for i in finished]), strict=True):
            rewards[i] = VERDICT_REWARDS[verdict]
        return rewards
