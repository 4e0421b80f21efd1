"""The child processes that grade answers of math rewards, each with a deadline."""

import math
import os
import time
from collections.abc import Iterator, Sequence
from queue import LifoQueue
from typing import Literal

from cohort.errors import UserError
from cohort.processes.child import Child, ChildFailed, ChildLate, child_command
from cohort.processes.this_process import usable_cores

Grade = Literal[
    "correct", "wrong", "answer_unparsable", "gold_unparsable", "timeout", "crashed", "out_of_time"
]  # fmt: skip
Grader = Literal["math", "trl", "open_r1", "open_r1_latex"]  # see `math_worker.GRADERS`
WORKER_COMMAND = child_command("cohort.rewards.math_worker")
_MAX_WORKERS = 16  # of 100 MB each; they grade thousands of answers in a second


def workers_per_process(wanted: int | Literal["auto"] = "auto") -> int:
    """Return how many workers each of a machine's training processes has, at least one.

    Args:
        wanted: on the machine; auto: one per core, at most 16 per process.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(usable_cores() // processes, _MAX_WORKERS) if wanted == "auto" else wanted // processes)


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
            count: how many. Default: `workers_per_process()`.
            start_timeout_s: deadline for a child's imports.
        """
        self.count = count or workers_per_process()
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

    def grade(
        self, pairs: Sequence[tuple[str, str]], *, deadline_s: float, end: float = math.inf, grader: Grader = "math"
    ) -> list[Grade]:
        """Grade pairs (gold answer, text) one after another in a child; waits for one that is free.

        Threads may grade at the same time.

        Args:
            pairs: sent together: a message of its own for each would cost more than most verdicts.
            deadline_s: of each answer.
            end: of all, by `time.monotonic`.
            grader: how answers are read and compared.

        Returns:
            "timeout" past the deadline, "out_of_time" past `end`, and "crashed" if two children died of an answer.

        Raises:
            UserError: the child does not start.
        """
        num_closed, place = self._num_closed, self._idle.get()
        graded: list[Grade] = []
        num_died = 0  # children of the next answer
        try:
            while left := pairs[len(graded) :]:
                left_s = end - time.monotonic()
                if left_s <= 0:
                    graded += ["out_of_time"] * len(left)
                    break
                if self._num_closed != num_closed:
                    graded += ["crashed"] * len(left)
                    break
                child = self._children[place]
                if child is None or not child.is_alive:
                    child = self._children[place] = self._start()
                if self._num_closed != num_closed:  # while it started
                    child.kill()
                    continue
                try:
                    requests = [{"gold": gold, "text": text, "grader": grader} for gold, text in left]
                    for verdict in child.call_each(requests, _deadlines(left_s, deadline_s, end)):
                        graded.append(verdict)
                        num_died = 0
                except ChildLate:
                    graded.append("timeout")
                    num_died = 0
                except ChildFailed:
                    num_died += 1
                if num_died == 2:
                    graded.append("crashed")
                    num_died = 0
            return graded
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


def _deadlines(left_s: float, deadline_s: float, end: float) -> Iterator[float]:
    """Yield the seconds that each answer may take, until `end`; `left_s` were left before the child started."""
    while left_s > 0:
        yield min(deadline_s, left_s)
        left_s = end - time.monotonic()
