"""Rewards by math-verify: `math`, and `trl.accuracy` and its kin. Child processes grade answers, with a deadline each.

Answers are parsed and compared by math-verify in separate processes (`math_worker.py`): symbolic mathematics on model
output can take forever, and math-verify's own timeouts only work in a main thread.

`trl.accuracy` and its kin differ from `math` in what counts as an answer: LaTeX only, a box first, reasoning included.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import LifoQueue
from typing import Any, Literal

from cohort.errors import UserError
from cohort.processes.child import PYTHON, Child, ChildFailed, ChildLate
from cohort.processes.this_process import usable_cores
from cohort.rewards.completion_text import answer_text, completion_text, excerpt
from cohort.rewards.function import check_number, column_values

Grade = Literal[
    "correct", "wrong", "answer_unparsable", "gold_unparsable", "timeout", "crashed", "out_of_time"
]  # fmt: skip
Grader = Literal["math", "trl", "open_r1", "open_r1_latex"]  # see `math_worker.GRADERS`
WORKER_COMMAND = (*PYTHON, str(Path(__file__).with_name("math_worker.py")))
_MAX_WORKERS = 16  # of 100 MB each; they grade thousands of answers in a second


class MathWorkers:
    """Child processes that grade answers, one per core. They start as they are needed, and end with this object.

    A child that dies (such as killed from outside) is replaced and the answer graded again, once. A child that misses
    the deadline is killed.
    """

    def __init__(
        self, command: Sequence[str] = WORKER_COMMAND, *, count: int | None = None, start_timeout_s: float = 120.0
    ) -> None:
        """Create them without starting any.

        Args:
            command: command line of a program with the protocol of `math_worker`.
            count: how many. Default: one per core, at most 16.
            start_timeout_s: deadline for a child's imports.
        """
        self.count = count or min(usable_cores(), _MAX_WORKERS)
        self._command = tuple(command)
        self._start_timeout_s = start_timeout_s
        self._children: list[Child | None] = [None] * self.count  # None: not started
        self._idle: LifoQueue[int] = LifoQueue()  # places in that list; those that run are taken first
        for place in range(self.count):
            self._idle.put(place)
        self._num_closed = 0

    @property
    def pids(self) -> list[int]:
        """Process ids of the running children."""
        return [child.process.pid for child in self._children if child is not None and child.is_alive]

    def grade(self, gold: str, text: str, *, deadline_s: float, grader: Grader = "math") -> Grade:
        """Grade the answer in `text`; waits for a child that is free. Threads may grade at the same time.

        Returns:
            "timeout" past the deadline, and "crashed" if two children died of it.

        Raises:
            UserError: the child does not start.
        """
        num_closed, place = self._num_closed, self._idle.get()
        try:
            for _ in range(2):
                child = self._children[place]
                if child is None or not child.is_alive:
                    child = self._children[place] = self._start()
                try:
                    verdict: Grade = child.call({"gold": gold, "text": text, "grader": grader}, deadline_s)
                    return verdict
                except ChildLate:
                    return "timeout"
                except ChildFailed:
                    if self._num_closed != num_closed:
                        break
            return "crashed"
        finally:
            self._idle.put(place)

    def close(self) -> None:
        """End the children, also those that grade; the next answer starts others."""
        self._num_closed += 1
        for child in self._children:
            if child is not None:
                child.kill()

    def _start(self) -> Child:
        child = Child(self._command)
        try:
            child.call(None, self._start_timeout_s)
            return child
        except ChildLate:
            why = f"not ready within {self._start_timeout_s:g} s{child.describe_output()}"
        except ChildFailed as failure:
            why = f"it {failure}"
        raise UserError(
            f"the worker process of the math reward failed to start: {why}. Command: {' '.join(self._command)}"
        )


VERDICT_REWARDS: Mapping[Grade, float | None] = {
    "correct": 1.0,
    "wrong": 0.0,
    "answer_unparsable": 0.0,
    "gold_unparsable": None,
    "timeout": None,
    "crashed": None,
    "out_of_time": None,
}


class AnswerGrader:
    """Grades completions against gold answers in worker processes, which start with the first call that needs them."""

    def __init__(
        self,
        grader: Grader = "math",
        *,
        workers: MathWorkers | None = None,
        budget_s: float = 240.0,
        shortcut: Callable[[str, str], Grade | None] = lambda gold, text: None,
    ) -> None:
        """Create a grader.

        Args:
            grader: how the workers read and compare answers.
            workers: default `MathWorkers()`.
            budget_s: seconds for all completions of a call; the rest is not graded.
            shortcut: the verdict on a gold answer and a text where it is known without a worker, else None.
        """
        self.last_counts: dict[Grade, int] = {}  # verdicts of the last call other than "correct" and "wrong"
        self._grader = grader
        self.workers = workers or MathWorkers()
        self._budget_s = budget_s
        self._shortcut = shortcut

    def grade_all(self, golds: Sequence[str], texts: Sequence[str], *, deadline_s: float) -> list[Grade]:
        """Return one verdict per completion; `deadline_s` is for each.

        Raises:
            UserError: a worker does not start.
        """
        end = time.monotonic() + self._budget_s
        pairs = list(zip(golds, texts, strict=True))
        verdicts: dict[tuple[str, str], Grade] = {}
        left = []
        for pair in dict.fromkeys(pairs):  # completions of a group repeat: grade each answer once
            known = self._shortcut(*pair) or (None if pair[0] else "gold_unparsable")
            if known is None:
                left.append(pair)
            else:
                verdicts[pair] = known
        verdicts.update(zip(left, self._grade(left, deadline_s, end), strict=True))
        counts = Counter(verdicts[pair] for pair in pairs)
        self.last_counts = {kind: n for kind, n in counts.items() if kind not in ("correct", "wrong")}
        return [verdicts[pair] for pair in pairs]

    def close(self) -> None:
        """Stop the workers; the next call starts others."""
        self.workers.close()

    def _grade(self, pairs: Sequence[tuple[str, str]], deadline_s: float, end: float) -> list[Grade]:
        """Grade answers in all workers at the same time; those that begin after `end` are "out_of_time"."""

        def grade(pair: tuple[str, str]) -> Grade:
            left_s = min(deadline_s, end - time.monotonic())
            if left_s <= 0:
                return "out_of_time"
            return self.workers.grade(*pair, deadline_s=left_s, grader=self._grader)

        with ThreadPoolExecutor(max(1, min(self.workers.count, len(pairs)))) as threads:
            futures = [threads.submit(grade, pair) for pair in pairs]
            try:
                return [future.result() for future in futures]
            except BaseException:  # the run stops, or the deadline of the call has passed
                threads.shutdown(wait=False, cancel_futures=True)
                self.workers.close()
                raise


_PLAIN_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,11}")
# Text without dollars, backslashes and brackets, then a number in a box, or the number alone: math-verify has only one
# place to look at, so it extracts that number.
_PLAIN_ANSWER = re.compile(r"(?:[^$\\\[\]{}]*?\\boxed\{([^{}]*)\}[\s.]*|\s*(-?[0-9]+)\s*)")


class MathReward:
    """1.0 if the answer is right, 0.0 if it is wrong or cannot be parsed, None if it was not graded.

    The answer is the last `\\boxed{...}`, else the last LaTeX expression, else the last number, after the last
    `</think>` if there is one. Adjacent boxes form a set of answers, as in math-verify. The gold answer is a number,
    LaTeX with or without dollars, or GSM8K's `... #### 42`. Not graded: rows whose gold answer cannot be parsed, and
    answers that miss the deadline or crash their worker; `last_counts` counts them.

    Arguments (in `rewards[i].args`):
        answer_column: dataset column with the gold answer. Default "answer".
        deadline_s: seconds per answer. Default 10.
    """

    __name__ = "math"

    def __init__(self, *, workers: MathWorkers | None = None, budget_s: float = 240.0) -> None:
        """Create the reward; worker processes start with the first call that needs them.

        Args:
            workers: grade answers that are not plain integers; default `MathWorkers()`.
            budget_s: seconds for all completions of a call; the rest is not graded.
        """
        self._grader = AnswerGrader(workers=workers, budget_s=budget_s, shortcut=plain_verdict)

    @property
    def last_counts(self) -> Mapping[Grade, int]:
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
            UserError: a gold answer is neither text nor a number, or a worker does not start.
        """
        golds = [gold_text(answer, answer_column) for answer in column_values(columns, answer_column)]
        texts = [answer_text(completion) for completion in completions]
        return [VERDICT_REWARDS[verdict] for verdict in self._grader.grade_all(golds, texts, deadline_s=deadline_s)]

    def close(self) -> None:
        """Stop the workers; the next call starts others."""
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


class GradedReward:
    """Base of rewards that grade answers in worker processes."""

    def __init__(self, grader: AnswerGrader) -> None:
        self.grader = grader

    @property
    def last_counts(self) -> Mapping[Grade, int]:
        """Verdicts of the last call other than "correct" and "wrong"."""
        return self.grader.last_counts

    def close(self) -> None:
        """Stop the workers; the next call starts others."""
        self.grader.close()

    def grade(self, completions: Sequence[Any], golds: Sequence[Any], *, deadline_s: float) -> list[Grade]:
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
