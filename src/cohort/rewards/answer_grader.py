"""Grade a step's answers with math-verify: a deadline for each, a budget for all, equal answers graded once."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from cohort.rewards.math_client import Grader, MathWorker, Verdict

VERDICT_REWARDS: Mapping[Verdict, float | None] = {
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
        shortcut: Callable[[str, str], Verdict | None] = lambda gold, text: None,
    ) -> None:
        """Create a grader.

        Args:
            grader: how the worker reads and compares answers.
            worker: default a `MathWorker()`.
            budget_s: seconds for all completions of a call; the rest is not graded.
            shortcut: the verdict on a gold answer and a text where it is known without the worker, else None.
        """
        self.last_counts: dict[Verdict, int] = {}  # verdicts of the last call other than "correct" and "wrong"
        self._grader = grader
        self.worker = worker or MathWorker()
        self._budget_s = budget_s
        self._shortcut = shortcut

    def grade_all(self, golds: Sequence[str], texts: Sequence[str], *, deadline_s: float) -> list[Verdict]:
        """Return one verdict per completion; `deadline_s` is for each.

        Raises:
            UserError: the worker does not start.
        """
        end = time.monotonic() + self._budget_s
        verdicts: dict[tuple[str, str], Verdict] = {}  # completions of a group repeat: grade each answer once
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

    def _grade(self, gold: str, text: str, deadline_s: float) -> Verdict:
        if deadline_s <= 0:
            return "out_of_time"
        if not gold:
            return "gold_unparsable"
        return self.worker.grade(gold, text, deadline_s=deadline_s, grader=self._grader)
