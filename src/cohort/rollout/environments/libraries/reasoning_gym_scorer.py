"""Score answers by Reasoning Gym's scorers in the sandbox, because some of them evaluate the answer as Python."""

import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cohort.sandbox import Job, Outcome, Sandbox

_GUEST = Path(__file__).with_name("reasoning_gym_guest.py")
_ANSWER_S = 10.0  # for one answer
_START_S = 60.0  # to import the library, which takes seconds
_MAX_PER_JOB = 1000  # answers, so that their records fit into the output


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, and the entry of the dataset that it belongs to."""

    dataset: str
    text: str | None  # None: the reply has no answer
    entry: Mapping[str, Any]  # question, answer, metadata


class SandboxScorer:
    """Scores answers in the sandbox. Each is scored in a fork of a process that has read the library only."""

    def __init__(self, sandbox: Sandbox) -> None:
        """Create a scorer; `sandbox` has the package reasoning-gym among its packages."""
        self._sandbox = sandbox

    def check(self) -> None:
        """Check that the scorers run in the sandbox.

        Raises:
            ValueError: they do not.
        """
        token = secrets.token_hex(16)
        outcome = self._sandbox.run(self._job([], token, wall_s=_START_S))
        if not outcome.started:
            raise ValueError(f"the sandbox does not start: {outcome.errors[:300]}")
        if not _has_begun(outcome):
            error = outcome.records[0].get("error") if outcome.records else outcome.ending
            raise ValueError(
                f"its scorers run in the sandbox, where reasoning_gym does not import ({str(error)[:300]}); set "
                "sandbox.packages: [reasoning-gym]"
            )

    def score_all(self, answers: Sequence[Answer], *, budget_s: float) -> list[float | None]:
        """Return one score from 0 to 1 per answer; None if it was not scored.

        Args:
            answers: answers with their entries.
            budget_s: seconds after which the rest is not scored.
        """
        scores: list[float | None] = [None] * len(answers)
        waiting = list(range(len(answers)))
        end = time.monotonic() + budget_s
        while waiting and (left_s := end - time.monotonic()) > 0:
            size = min(_MAX_PER_JOB, math.ceil(len(waiting) / self._sandbox.max_concurrent))
            chunks = [waiting[i : i + size] for i in range(0, len(waiting), size)]
            token = secrets.token_hex(16)
            jobs = [self._job([answers[i] for i in chunk], token, wall_s=left_s) for chunk in chunks]
            waiting = []
            for chunk, outcome in zip(chunks, self._sandbox.run_all(jobs, budget_s=left_s), strict=True):
                if outcome is None or not outcome.started or not _has_begun(outcome):
                    continue
                records = [record for record in outcome.records[1:] if record.get("token") == token]
                for i, record in zip(chunk, records, strict=False):
                    scores[i] = _score(record)
                # the answer after the last record has ended the process: those behind it are tried in another
                waiting += chunk[len(records) + 1 :]
        return scores

    def _job(self, answers: Sequence[Answer], token: str, *, wall_s: float) -> Job:
        cases = [{"function": "score", "arguments": [a.dataset, a.text, dict(a.entry), _ANSWER_S]} for a in answers]
        parts = {"before": _GUEST.read_text(encoding="utf-8"), "code": "", "after": ""}
        request = {"kind": "functions", "token": token, "parts": parts, "cases": cases}
        # the process that forks has to last for all answers
        return Job(request=request, limits=replace(self._sandbox.limits, wall_s=wall_s, cpu_s=math.ceil(wall_s)))


def _has_begun(outcome: Outcome) -> bool:
    """Whether the library was imported: the guest says so before it scores anything."""
    return bool(outcome.records) and outcome.records[0] == {"begun": True}


def _score(record: Mapping[str, Any]) -> float | None:
    value = record.get("value")
    is_score = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
    return float(value) if is_score else None  # type: ignore[arg-type]
