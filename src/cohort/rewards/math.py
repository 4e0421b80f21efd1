"""Rewards by math-verify: `math`, and `trl.accuracy` and its kin. A child process grades answers, with a deadline each.

Answers are parsed and compared by math-verify in a separate process (`math_worker.py`): symbolic mathematics on model
output can take forever, and math-verify's own timeouts only work in a main thread.

`trl.accuracy` and its kin differ from `math` in what counts as an answer: LaTeX only, a box first, reasoning included.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, Literal

from cohort.errors import UserError, excerpt
from cohort.rewards.completion_text import answer_text, completion_text
from cohort.rewards.function import check_number, column_values

Grade = Literal[
    "correct", "wrong", "answer_unparsable", "gold_unparsable", "timeout", "crashed", "out_of_time"
]  # fmt: skip
Grader = Literal["math", "trl", "open_r1", "open_r1_latex"]  # see `math_worker.GRADERS`
# -P: the working directory must not hide a module of the standard library.
WORKER_COMMAND = (sys.executable, "-P", "-m", "cohort.rewards.math_worker")


class MathWorker:
    """Grades answers in a child process, which is started for the first answer and ends with this object.

    A child that dies (such as killed from outside) is replaced and the answer graded again, once. A child that misses
    the deadline is killed. It exits when its standard input closes, so it does not outlive a killed parent.
    """

    def __init__(self, command: Sequence[str] = WORKER_COMMAND, *, start_timeout_s: float = 120.0) -> None:
        """Create a client; the child starts with the first answer.

        Args:
            command: command line of a program with the protocol of `math_worker`.
            start_timeout_s: deadline for the child's imports.
        """
        self._command = tuple(command)
        self._start_timeout_s = start_timeout_s
        self._lock = threading.Lock()
        self._children: list[_Child] = []  # none or one; a list, because the finalizer must not hold `self`
        self._num_requests = 0
        weakref.finalize(self, _end_all, self._children)

    @property
    def pid(self) -> int | None:
        """Process id of the running child, or None."""
        return self._children[0].process.pid if self._children else None

    def grade(self, gold: str, text: str, *, deadline_s: float, grader: Grader = "math") -> Grade:
        """Grade the answer in `text`. Returns "timeout" past the deadline, and "crashed" if two children died of it.

        Raises:
            UserError: the child does not start.
        """
        with self._lock:
            for _ in range(2):
                child = self._running_child()
                self._num_requests += 1
                request = {"id": self._num_requests, "gold": gold, "text": text, "deadline_s": deadline_s}
                request["grader"] = grader
                reply, late = child.exchange(request, deadline_s)
                if reply is not None and not late:
                    verdict: Grade = reply["verdict"]
                    return verdict
                _end_all(self._children)
                if late:
                    return "timeout"
        return "crashed"

    def close(self) -> None:
        """Stop the child, if there is one."""
        with self._lock:
            _end_all(self._children)

    def _running_child(self) -> "_Child":
        if self._children and self._children[0].process.poll() is not None:
            _end_all(self._children)
        if not self._children:
            child = _Child(self._command)
            self._children.append(child)
            reply, late = child.exchange(None, self._start_timeout_s)
            if reply is None:
                _end_all(self._children)
                why = f"not ready within {self._start_timeout_s:g} s" if late else "it exited immediately"
                raise UserError(
                    f"the worker process of the math reward failed to start: {why}. Command: "
                    f"{' '.join(self._command)}. End of its stderr: {child.stderr_tail()}"
                )
        return self._children[0]


class _Child:
    """A child process."""

    def __init__(self, command: Sequence[str]) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the child)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # Ctrl-C is for the parent; and the whole group can be killed
        )

    def exchange(self, request: dict[str, Any] | None, deadline_s: float) -> tuple[dict[str, Any] | None, bool]:
        """Send a request (None: only wait for the ready message) and wait for the reply.

        Returns:
            The reply, or None if there is no valid one; and whether the deadline passed, which kills the child.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        with self._killed_after(deadline_s) as passed:
            try:
                if request is not None:
                    self.process.stdin.write(json.dumps(request).encode() + b"\n")
                    self.process.stdin.flush()
                reply = json.loads(self.process.stdout.readline() or b"null")
            except (OSError, ValueError):  # a broken pipe, or a line cut short
                reply = None
        expected = None if request is None else request["id"]
        is_right = isinstance(reply, dict) and reply.get("id", -1) == expected
        return (reply if is_right else None), passed.is_set()

    @contextlib.contextmanager
    def _killed_after(self, deadline_s: float) -> Iterator[threading.Event]:
        """Kill the child after a deadline: closed pipes then end any read or write of the parent."""
        passed = threading.Event()

        def kill() -> None:
            passed.set()
            self.kill()

        timer = threading.Timer(deadline_s, kill)
        timer.daemon = True
        timer.start()
        try:
            yield passed
        finally:
            timer.cancel()

    def kill(self) -> None:
        """Kill the child and its process group."""
        if self.process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the child and close its pipes."""
        self.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # unwritten data
                    pipe.close()

    def stderr_tail(self) -> str:
        """Return the end of its standard error."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-600:].strip() or "(none)"


def _end_all(children: list[_Child]) -> None:
    while children:
        children.pop().end()


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
    """Grades completions against gold answers in a worker process, which starts with the first call that needs it."""

    def __init__(
        self,
        grader: Grader = "math",
        *,
        worker: MathWorker | None = None,
        budget_s: float = 240.0,
        shortcut: Callable[[str, str], Grade | None] = lambda gold, text: None,
    ) -> None:
        """Create a grader.

        Args:
            grader: how the worker reads and compares answers.
            worker: default a `MathWorker()`.
            budget_s: seconds for all completions of a call; the rest is not graded.
            shortcut: the verdict on a gold answer and a text where it is known without the worker, else None.
        """
        self.last_counts: dict[Grade, int] = {}  # verdicts of the last call other than "correct" and "wrong"
        self._grader = grader
        self.worker = worker or MathWorker()
        self._budget_s = budget_s
        self._shortcut = shortcut

    def grade_all(self, golds: Sequence[str], texts: Sequence[str], *, deadline_s: float) -> list[Grade]:
        """Return one verdict per completion; `deadline_s` is for each.

        Raises:
            UserError: the worker does not start.
        """
        end = time.monotonic() + self._budget_s
        verdicts: dict[tuple[str, str], Grade] = {}  # completions of a group repeat: grade each answer once
        pairs = list(zip(golds, texts, strict=True))
        for pair in pairs:
            if pair not in verdicts:
                verdicts[pair] = self._shortcut(*pair) or self._grade(*pair, min(deadline_s, end - time.monotonic()))
        counts = Counter(verdicts[pair] for pair in pairs)
        self.last_counts = {kind: n for kind, n in counts.items() if kind not in ("correct", "wrong")}
        return [verdicts[pair] for pair in pairs]

    def close(self) -> None:
        """Stop the worker; the next call starts another."""
        self.worker.close()

    def _grade(self, gold: str, text: str, deadline_s: float) -> Grade:
        if deadline_s <= 0:
            return "out_of_time"
        if not gold:
            return "gold_unparsable"
        return self.worker.grade(gold, text, deadline_s=deadline_s, grader=self._grader)


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


def plain_verdict(gold: str, text: str) -> Grade | None:
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


class GradedReward:
    """Base of rewards that grade answers in a worker process."""

    def __init__(self, grader: AnswerGrader) -> None:
        self.grader = grader

    @property
    def last_counts(self) -> Mapping[Grade, int]:
        """Verdicts of the last call other than "correct" and "wrong"."""
        return self.grader.last_counts

    def close(self) -> None:
        """Stop the worker; the next call starts another."""
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
