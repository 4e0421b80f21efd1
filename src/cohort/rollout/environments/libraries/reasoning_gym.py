"""Tasks of Reasoning Gym: rows, reward and a scorer in the sandbox (https://github.com/open-thought/reasoning-gym)."""

import asyncio
import math
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from cohort.errors import UserError, describe_error, suggest
from cohort.rollout.environments.libraries.common import column, import_library, with_system
from cohort.rollout.environments.model import EnvironmentFailure, RolloutModel
from cohort.rollout.environments.sources import EnvironmentSource, Rows
from cohort.sandbox import Job, JobResult, Sandbox, SharedSandbox

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


def _has_begun(outcome: JobResult) -> bool:
    """Whether the library was imported: the guest says so before it scores anything."""
    return bool(outcome.records) and outcome.records[0] == {"begun": True}


def _score(record: Mapping[str, Any]) -> float | None:
    value = record.get("value")
    is_score = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
    return float(value) if is_score else None  # type: ignore[arg-type]


_COLUMNS = ("question", "answer", "metadata")  # of a task
_SYSTEM_PROMPT = "default"
_SCORE_S = 60.0  # to score one answer, with the start of its process


def load(name: str, args: Mapping[str, Any], *, field: str, sandbox: SharedSandbox) -> EnvironmentSource:
    """Return the environment of a dataset. `args` are those of its configuration, and `system_prompt`.

    Answers are scored in the sandbox, in processes of their own, with or without `rollout.isolate`.

    Raises:
        UserError: the library or the dataset does not exist, `args` are wrong, or the sandbox has no reasoning-gym.
    """
    library = import_library("reasoning_gym", extra="reasoning-gym", field=field)
    datasets = library.factory.DATASETS
    if name not in datasets:
        raise UserError(f"{field}: Reasoning Gym has no {name!r}{suggest(name, sorted(datasets), 'Datasets')}")
    if "seed" in args:
        raise UserError(f"{field}.args.seed: the run's seed decides which tasks there are; remove it")
    options = {key: value for key, value in args.items() if key != "system_prompt"}
    create = partial(library.create_dataset, name, **options)
    try:
        create(seed=0)
    except Exception as error:  # the configuration of a dataset may raise anything
        raise UserError(f"{field}.args: {name}: {describe_error(error)}") from error
    prompt = args.get("system_prompt", _SYSTEM_PROMPT)
    opened = sandbox.open()
    scorer = SandboxScorer(opened)
    try:
        scorer.check()
    except ValueError as error:
        raise UserError(f"{field}: reasoning_gym:{name}: {error}") from error

    def rows(count: int, seed: int) -> Rows:
        # Task n of a dataset depends on seed + n: datasets of near seeds would share most tasks.
        tasks = create(seed=random.Random(seed).getrandbits(31), size=options.get("size", count))
        return [{key: task[key] for key in _COLUMNS} for task in tasks]

    program = partial(
        ReasoningGym,
        scorer=scorer,
        pool=ThreadPoolExecutor(opened.max_concurrent, thread_name_prefix="reasoning_gym"),
        name=name,
        extract_answer=library.utils.extract_answer,
        system_prompt=library.utils.SYSTEM_PROMPTS.get(prompt, prompt),
    )
    return EnvironmentSource(kind=ReasoningGym, name=name, create=program, rows=rows, has_own_processes=True)


@dataclass(eq=False, kw_only=True)
class ReasoningGym:
    """Asks the question of a task once, and scores the answer."""

    scorer: SandboxScorer
    pool: ThreadPoolExecutor  # bounds how many answers are scored at once
    name: str  # of the dataset
    extract_answer: Callable[[str], str | None]  # finds the answer in a reply; None if it has none
    system_prompt: str | None  # says how replies mark the answer

    async def run(self, row: Mapping[str, Any], model: RolloutModel) -> float:
        """Play one row."""
        entry = {name: column(row, name, library="reasoning_gym") for name in _COLUMNS}
        reply = await model.chat(with_system(self.system_prompt, entry["question"]))
        answer = Answer(self.name, self.extract_answer(reply.content), entry)
        score_all = partial(self.scorer.score_all, [answer], budget_s=_SCORE_S)
        [score] = await asyncio.get_running_loop().run_in_executor(self.pool, score_all)
        if score is None:
            raise EnvironmentFailure(f"Reasoning Gym's scorer of {self.name} did not score the answer {answer.text!r}")
        return score
