"""Tasksets of verifiers v1 (https://github.com/PrimeIntellect-ai/verifiers), as agents in front of Cohort's endpoint.

verifiers talks to the endpoint with its client for chat completions. Its training client would render messages itself,
by a `renderer` that falls back to one without tools for models that it does not know; here the endpoint renders them
with the model's own chat template, and keeps the exact tokens.
"""

import asyncio
import os
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from cohort.config.user_code import importable
from cohort.errors import UserError, describe_error
from cohort.rollout.endpoint.agent import AgentProgram
from cohort.rollout.environments.libraries.common import column, import_library
from cohort.rollout.environments.model import EnvironmentFailure, RolloutModel
from cohort.rollout.environments.sources import EnvironmentSource, Rows
from cohort.rollout.environments.trajectory import Outcome

# Nothing is run in the cloud, and no command of the model on this machine, unless `args` say so.
_AGENT = {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}
_LIMIT = "max_trajectory_tokens"  # verifiers' stop condition of episodes that a limit of the run has ended


def load(name: str, args: Mapping[str, Any], *, field: str) -> EnvironmentSource:
    """Return the environment of a taskset. `args` are the keys of verifiers' `[env]`, such as `taskset` and `agent`.

    Raises:
        UserError: the library or the taskset does not exist, `args` are wrong, or there are several agents.
    """
    library = import_library("verifiers.v1", extra="verifiers", field=field)
    loaders = import_library("verifiers.v1.utils.loaders", extra="verifiers", field=field)
    importable(Path.cwd())
    try:
        config, roles = _config(library, loaders, name, args)
        tasks = _Tasks(loaders.load_environment(config).taskset)
    except Exception as error:  # of a taskset's package, or of its configuration
        raise UserError(f"{field}: the taskset {name!r} cannot be loaded: {describe_error(error)}") from error
    if len(roles) != 1:
        raise UserError(
            f"{field}: {name!r} has the agents {', '.join(roles)}; a trajectory has the reward of one agent"
        )
    create = partial(Verifiers, library=library, loaders=loaders, config=config, role=roles[0], tasks=tasks, name=name)
    return EnvironmentSource(kind=Verifiers, name=name, create=create, rows=tasks.rows, has_own_processes=True)


def _config(library: Any, loaders: Any, name: str, args: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Return verifiers' configuration of the environment, and the names of its agents."""
    raw = {**args, "taskset": {**args.get("taskset", {}), "id": name}}
    kind = loaders.env_config_type(name, raw.get("id", ""))
    roles = [role for role, value in kind.model_fields.items() if isinstance(value.default, library.AgentConfig)]
    defaults = _AGENT if loaders.default_harness_id(name) == "bash" else {"runtime": _AGENT["runtime"]}
    return kind.model_validate({**raw, **{role: {**defaults, **raw.get(role, {})} for role in roles}}), roles


class _Tasks:
    """The tasks of a taskset, which may be infinite, by index."""

    def __init__(self, taskset: Any):
        self._taskset = taskset
        self._left = iter(taskset)
        self._tasks: list[Any] = []

    def __getitem__(self, index: int) -> Any:
        while len(self._tasks) <= index:
            task = next(self._left, None)
            if task is None:
                raise EnvironmentFailure(f"the taskset has {len(self._tasks)} tasks, and no task {index}")
            self._tasks.append(task)
        return self._tasks[index]

    def rows(self, count: int, seed: int) -> Rows:
        """Return a row for each task in random order, or for the first `count` if there is no end of them."""
        if not self._taskset.bounded:
            return [{"task": index} for index in range(count)]
        self._tasks += self._left
        indices = list(range(len(self._tasks)))
        random.Random(seed).shuffle(indices)
        return [{"task": index} for index in indices]


@dataclass(eq=False, kw_only=True)
class Verifiers:
    """Plays tasks. verifiers runs in a thread with an event loop of its own, which never stands still."""

    library: Any
    loaders: Any  # its module that loads environments
    config: Any  # of the environment
    role: str  # name of its agent
    tasks: _Tasks
    name: str

    def __post_init__(self) -> None:
        self._agents = AgentProgram(self._solve, name=self.name, batches_requests=True)

    async def run(self, row: Mapping[str, Any], model: RolloutModel) -> Outcome:
        """Play one row."""
        task = self.tasks[column(row, "task", library="verifiers")]
        traces: list[Any] = []

        def stop() -> None:
            """End the episode by a limit before verifiers sees an error, so that it scores what was played."""
            for trace in traces:
                trace.stop(_LIMIT)

        arguments = {"task": task, "max_turns": model.turns_left, "on_trace": traces.append}
        return await self._agents.run(arguments, model, on_limit=stop)

    def close(self) -> None:
        """Stop the endpoint and the event loop."""
        self._agents.close()
        if "_loop" in vars(self):
            self._loop.call_soon_threadsafe(self._loop.stop)

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name="verifiers", daemon=True).start()
        return loop

    async def _solve(self, row: Mapping[str, Any], base_url: str, api_key: str) -> dict[str, float]:
        episode = self._play(**row, base_url=base_url, api_key=api_key)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(episode, self._loop))

    async def _play(
        self, *, task: Any, max_turns: int, on_trace: Callable[[Any], None], base_url: str, api_key: str
    ) -> dict[str, float]:
        """Play a task in an environment of its own, whose servers and connections end with it."""
        agent = getattr(self.config, self.role)
        max_turns = max_turns if agent.max_turns is None else min(max_turns, agent.max_turns)
        config = self.config.model_copy(update={self.role: agent.model_copy(update={"max_turns": max_turns})})
        environment = self.loaders.load_environment(config)
        # verifiers reads keys from variables, and removes such from those of its programs
        variable = f"COHORT_API_KEY_{api_key}"
        os.environ[variable] = api_key
        try:
            client = self.library.EvalClientConfig(base_url=base_url, api_key_var=variable)
            async with environment.serving():
                context = self.library.ModelContext(model="policy", client=client)
                episode = await environment.run_episode(task, context, on_trace=on_trace)
        finally:
            del os.environ[variable]
        if not episode.ok:
            errors = [error for record in (episode, *episode.traces) for error in record.errors]
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors))
        (trace,) = episode.traces
        metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
        return {**metrics, "reward": float(trace.reward)}
