"""Tasks of Reasoning Gym: rows and reward (https://github.com/open-thought/reasoning-gym)."""

import random
from collections.abc import Mapping
from functools import partial
from typing import Any

from cohort.errors import UserError, suggest
from cohort.rollout.environments.libraries.common import column, import_library, opened, with_system
from cohort.rollout.environments.model import RolloutModel
from cohort.rollout.environments.sources import EnvironmentSource, Rows
from cohort.user_code import describe_error

_COLUMNS = ("question", "answer", "metadata")  # of a task
_SYSTEM_PROMPT = "default"


def load(name: str, args: Mapping[str, Any], *, field: str) -> EnvironmentSource:
    """Return the environment of a dataset. `args` are those of its configuration, and `system_prompt`.

    Raises:
        UserError: the library or the dataset does not exist, or `args` are wrong.
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
    extract = library.utils.extract_answer

    def rows(count: int, seed: int) -> Rows:
        # Task n of a dataset depends on seed + n: datasets of near seeds would share most tasks.
        tasks = create(seed=random.Random(seed).getrandbits(31), size=options.get("size", count))
        return [{key: task[key] for key in _COLUMNS} for task in tasks]

    program = partial(ReasoningGym, lambda: create(seed=0), name=name, extract_answer=extract, system_prompt=prompt)
    return EnvironmentSource(kind=ReasoningGym, name=name, create=program, rows=rows)


class ReasoningGym:
    """Asks the question of a task once, and scores the answer."""

    def __init__(self, create: Any, *, name: str, extract_answer: Any, system_prompt: str | None):
        """Create the program.

        Args:
            create: creates a dataset, of which only `score_answer` is used.
            name: name of the dataset.
            extract_answer: finds the answer in a reply; None if it has none.
            system_prompt: says how replies mark the answer.
        """
        self._create = create
        self._name = name
        self._extract_answer = extract_answer
        self._system_prompt = system_prompt

    async def run(self, row: Mapping[str, Any], model: RolloutModel) -> float:
        """Play one row."""
        question, _, _ = (column(row, name, library="reasoning_gym") for name in _COLUMNS)
        reply = await model.chat(with_system(self._system_prompt, question))
        async with opened(self._create, name=self._name) as call:
            answer = self._extract_answer(reply.content)
            return float(await call("score_answer", answer=answer, entry=dict(row)))
