"""Tasks of Reasoning Gym: rows and reward (https://github.com/open-thought/reasoning-gym)."""

import asyncio
import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from cohort.errors import UserError, suggest
from cohort.rollout.environments.libraries.common import column, import_library, with_system
from cohort.rollout.environments.libraries.reasoning_gym_scorer import Answer, SandboxScorer
from cohort.rollout.environments.model import EnvironmentFailure, RolloutModel
from cohort.rollout.environments.sources import EnvironmentSource, Rows
from cohort.sandbox import SharedSandbox
from cohort.user_code import describe_error

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
    prompt = library.utils.SYSTEM_PROMPTS.get(prompt, prompt)
    opened = sandbox.open()
    scorer = SandboxScorer(opened)
    try:
        scorer.check()
    except ValueError as error:
        raise UserError(f"{field}: reasoning_gym:{name}: {error}") from error
    pool = ThreadPoolExecutor(opened.max_concurrent, thread_name_prefix="reasoning_gym")

    def rows(count: int, seed: int) -> Rows:
        # Task n of a dataset depends on seed + n: datasets of near seeds would share most tasks.
        tasks = create(seed=random.Random(seed).getrandbits(31), size=options.get("size", count))
        return [{key: task[key] for key in _COLUMNS} for task in tasks]

    def program() -> ReasoningGym:
        extract = library.utils.extract_answer
        return ReasoningGym(scorer, pool, name=name, extract_answer=extract, system_prompt=prompt)

    return EnvironmentSource(kind=ReasoningGym, name=name, create=program, rows=rows, has_own_processes=True)


class ReasoningGym:
    """Asks the question of a task once, and scores the answer."""

    def __init__(
        self,
        scorer: SandboxScorer,
        pool: ThreadPoolExecutor,
        *,
        name: str,
        extract_answer: Any,
        system_prompt: str | None,
    ):
        """Create the program.

        Args:
            scorer: scores answers.
            pool: bounds how many are scored at once.
            name: name of the dataset.
            extract_answer: finds the answer in a reply; None if it has none.
            system_prompt: says how replies mark the answer.
        """
        self._scorer = scorer
        self._pool = pool
        self._name = name
        self._extract_answer = extract_answer
        self._system_prompt = system_prompt

    async def run(self, row: Mapping[str, Any], model: RolloutModel) -> float:
        """Play one row."""
        entry = {name: column(row, name, library="reasoning_gym") for name in _COLUMNS}
        reply = await model.chat(with_system(self._system_prompt, entry["question"]))
        answer = Answer(self._name, self._extract_answer(reply.content), entry)
        [score] = await asyncio.get_running_loop().run_in_executor(self._pool, self._score, answer)
        if score is None:
            raise EnvironmentFailure(f"Reasoning Gym's scorer of {self._name} did not score the answer {answer.text!r}")
        return score

    def _score(self, answer: Answer) -> list[float | None]:
        return self._scorer.score_all([answer], budget_s=_SCORE_S)
