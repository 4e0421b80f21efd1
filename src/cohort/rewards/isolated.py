"""Reward functions of the user in a child process (`isolate: true`), which may crash or hang without ending the run."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cohort.config import RewardConfig
from cohort.errors import UserError
from cohort.rewards import isolated_child
from cohort.rewards.call import NotANumber
from cohort.rewards.function import ON_REQUEST, TRL_NAMES, KeywordParameters, Reports, TrainerProgress
from cohort.rollout.environments.child_process import START_TIMEOUT_S, ChildError, ChildProcess, UserCode
from cohort.rollout.environments.handle import DeadlineMissed
from cohort.rollout.environments.model import EnvironmentFailure

_CHILD_MODULE = isolated_child.__name__
_GRACE_S = 10.0  # to kill a child
_MAX_MESSAGES = 3  # in the summary


class IsolatedReward(Reports):
    """An asynchronous reward function that calls the user's function in a child process.

    Completions are not judged (None), and counted by `last_counts`, if the process ends or misses the deadline. The
    next call starts a new process. Exceptions of the function, and values that are not numbers, end the run as those of
    other functions do.
    """

    def __init__(self, config: RewardConfig, *, field: str) -> None:
        """Start the child process, load the function, and read its signature.

        Args:
            config: settings of the reward.
            field: name of the settings in messages.

        Raises:
            UserError: the function does not load, or cannot be isolated.
        """
        self._timeout_s = config.timeout_s
        self._use = config.use
        self._name = config.name or config.use
        self._code = UserCode(
            name=f"reward {self._name!r}",
            key=f"{field}.use",
            functions={name: f"{_CHILD_MODULE}:{name}" for name in ("describe", "score")},
        )
        self._child: ChildProcess | None = None
        described = self._describe_now(field)
        for refused in ON_REQUEST:
            if refused in described["names"]:
                raise UserError(
                    f"{field}.isolate: reward {config.use!r} takes {refused!r}, which stay in the run's process; "
                    "remove the parameter, or set isolate: false"
                )
        if described["checks"]:
            raise UserError(
                f"{field}.isolate: reward {config.use!r} has required_columns, which is called in the run's process; "
                "remove it, or set isolate: false"
            )
        self.__name__ = described["name"]
        self.shapes = described["shapes"]
        self._takes_completions = described["has_var_keyword"] or "completions" in described["names"]
        # `completions`, by which the values are counted, and TRL's names, whose functions stay in this process
        self.keyword_parameters = KeywordParameters(
            names=frozenset([*described["names"], "completions", *TRL_NAMES]),
            required=tuple(dict.fromkeys([*described["required"], "completions"])),
            positional_only=tuple(described["positional_only"]),
            has_var_keyword=described["has_var_keyword"],
        )

    @property
    def deadline_s(self) -> float:
        """Seconds that a call may take in all: of the function, and to start a process before it."""
        return START_TIMEOUT_S + self._timeout_s + _GRACE_S

    async def __call__(
        self,
        completions: Sequence[Any],
        *,
        trainer_state: TrainerProgress,
        log_metric: Callable[[str, float], None],
        log_extra: Callable[[str, Sequence[Any]], None],
        **arguments: Any,
    ) -> Any:
        """Return one reward per completion, as the function returned it.

        Raises:
            UserError: the function raised an exception, or does not load anymore.
        """
        self.last_warnings, self.last_caught, self.last_counts = [], None, {}
        content = {
            "name": self._name,
            "arguments": {**arguments, "completions": completions} if self._takes_completions else arguments,
            "count": len(completions),
            "progress": trainer_state,
            "timeout_s": self._timeout_s,
        }
        try:
            returned = await self._in_child("score", content, timeout_s=self._timeout_s + _GRACE_S)
        except DeadlineMissed:
            late = f"it did not return within {self._timeout_s:g} s (rewards[i].timeout_s)"
            return self._not_judged(completions, f"{late}{self._output()}")
        except EnvironmentFailure as failure:
            return self._not_judged(completions, str(failure))
        if "not_judged" in returned:
            return self._not_judged(completions, f"{returned['not_judged']}{self._output()}")
        if "error" in returned:
            error = UserError(str(returned["error"]).removeprefix(f"reward {self._name!r} "))
            raise error from RuntimeError(f"in the child process:\n\n{returned['traceback']}")
        for name, values in returned["metrics"].items():
            for value in values:
                log_metric(name, value)
        for column, texts in returned["details"].items():
            log_extra(column, texts)
        caught = Counter({(kind, line): number for kind, line, number in returned["caught"]})
        self.last_caught = caught, returned["num_watched"]
        if returned["values"] is None:
            return NotANumber(returned["kind"])
        return [NotANumber(v["kind"]) if isinstance(v, dict) else v for v in returned["values"]]

    def _describe_now(self, field: str) -> Mapping[str, Any]:
        """Describe the function, also where an event loop runs, as in a notebook."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self._describe(field))
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, self._describe(field)).result()

    async def _describe(self, field: str) -> Mapping[str, Any]:
        try:
            described: Mapping[str, Any] = await self._in_child("describe", {}, timeout_s=START_TIMEOUT_S)
        except (DeadlineMissed, EnvironmentFailure) as failure:
            raise UserError(f"{field}.use: {self._use!r} does not load: {failure}") from None
        if "error" in described:
            raise UserError(described["error"])
        return described

    async def _in_child(self, name: str, arguments: Mapping[str, Any], *, timeout_s: float) -> Any:
        """Call a function of `isolated_child`. Raises as `ChildProcess.call` does."""
        if self._child is None or not self._child.is_alive:
            self._child = await ChildProcess.start(self._code)
        content = {"use": self._use, "field": self._code.key, **arguments}
        try:
            return await self._child.call(name, content, timeout_s=timeout_s)
        except ChildError as error:  # of the child's program itself
            raise EnvironmentFailure(str(error)) from error

    def _output(self) -> str:
        return "" if self._child is None else self._child.describe_output()

    def _end(self) -> None:
        """Kill the process; the next call starts another."""
        if self._child is not None:
            self._child.kill()

    def _not_judged(self, completions: Sequence[Any], why: str) -> list[float | None]:
        self._end()
        self.last_counts = {"not_judged": len(completions)}
        text = f"warning: {self._code.name} did not judge {len(completions)} completions: {why}"
        self.last_warnings = [text]
        self.warnings = [*self.warnings, text][:_MAX_MESSAGES]
        return [None] * len(completions)
