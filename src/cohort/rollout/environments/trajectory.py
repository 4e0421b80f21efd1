"""Roll out one trajectory with a program: an environment, an agent, or the user's own `run(row, model)`."""

import asyncio
import copy
import math
import traceback
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from cohort.chat import ChatTemplate, ResponseParser
from cohort.config.user_code import is_user_code
from cohort.errors import describe_error
from cohort.records import EndReason, ModelCall, Prompt, Trajectory, TurnStats, common_length, join_calls
from cohort.rollout.engines.base import CallKey, Generate, SamplingParams
from cohort.rollout.environments.model import EnvironmentFailure, RolloutModel, TurnLimits, limit_behind
from cohort.rollout.stop_strings import text_of

Row = Mapping[str, Any]  # one row of the dataset


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a program returns: everything about a trajectory that its model calls do not say."""

    name: str = "environment"  # name of the reward
    reward: float | None = None  # None: not scored by the environment
    metrics: Mapping[str, float] = field(default_factory=dict)
    environment: Any = None  # instance for reward functions
    observation: str = ""  # text of `reset`, appended to the prompt
    end: EndReason | None = None  # None: the limit that was reached; else "answer", or "length" if the reply was cut
    stats: TurnStats = field(default_factory=TurnStats)  # counts of the program; the runner adds times and its own


class Program(Protocol):
    """Plays one trajectory. Called concurrently for all trajectories of a step."""

    async def run(self, row: Row, model: RolloutModel) -> Outcome:
        """Play one row.

        Args:
            row: row of the dataset, with the prompt column as it was written, if the row has a prompt.
            model: samples from the policy for this trajectory.

        Raises:
            TrajectoryEnded: from `model`, if the program does not handle it. An exception raised from it counts as it.
            Exception: anything else is a failure of the environment.
        """
        ...

    def release(self, trajectory: Trajectory) -> None:
        """Reuse or close the trajectory's environment. Called when it has been scored, or was dropped."""
        ...

    def close(self) -> None:
        """Close all environments. Called at the end of the run."""
        ...


@dataclass(slots=True, eq=False)
class TrajectoryRunner:
    """Runs a program for one trajectory of a group: the rollout function for several turns."""

    program: Program  # plays the trajectories
    _: KW_ONLY
    template: ChatTemplate | None  # renders messages; None if the tokenizer has no chat template
    parser: ResponseParser  # parses replies
    limits: TurnLimits  # of every trajectory
    prompt_column: str  # name of the prompt column in rows
    retries: int  # times that a trajectory is repeated after its environment failed
    keep_thoughts: bool = False  # go on from sampled tokens where the chat template rewrites the history
    step_rewards_per_token: bool = False  # credit step rewards to their turns, not only to the trajectory
    max_concurrent: int | None = None  # trajectories at the same time; None: no limit
    _places: AbstractAsyncContextManager[Any] = field(init=False)

    def __post_init__(self) -> None:
        """Start with all places free."""
        self._places = nullcontext() if self.max_concurrent is None else asyncio.Semaphore(self.max_concurrent)

    async def __call__(
        self, generate: Generate, tokenizer: Any, prompt: Prompt, sampling: SamplingParams, key: CallKey
    ) -> Trajectory:
        """Roll out one trajectory once a place is free. Raises only errors of the rollout engine."""
        async with self._places:
            return await self._roll_out(generate, tokenizer, prompt, sampling, key)

    async def _roll_out(
        self, generate: Generate, tokenizer: Any, prompt: Prompt, sampling: SamplingParams, key: CallKey
    ) -> Trajectory:
        start = asyncio.get_running_loop().time()
        attempts = 0
        while True:
            attempts += 1
            model = RolloutModel(
                generate,
                template=self.template,
                parser=self.parser,
                tokenizer=tokenizer,
                prompt=prompt,
                sampling=sampling,
                key=key,
                limits=self.limits,
                keep_thoughts=self.keep_thoughts,
            )
            try:
                outcome, error = await self._attempt(model)
            finally:
                model.close()
            if outcome.end != "environment_error" or attempts > self.retries:
                break
        seconds = asyncio.get_running_loop().time() - start
        trajectory = _trajectory(model, outcome, error, tokenizer, attempts=attempts, seconds=seconds)
        return trajectory if self.step_rewards_per_token else replace(trajectory, step_rewards=())

    def release(self, trajectory: Trajectory) -> None:
        """Reuse or close the trajectory's environment."""
        self.program.release(trajectory)

    def close(self) -> None:
        """Close all environments."""
        self.program.close()

    async def _attempt(self, model: RolloutModel) -> tuple[Outcome, str | None]:
        """Run the program once and return its outcome, with the error of a broken trajectory."""
        content = model.prompt.content
        row = {**model.prompt.columns, **({self.prompt_column: content} if content else {})}
        row = copy.deepcopy(row)  # trajectories of a group must not see each other's changes
        deadline = asyncio.timeout(self.limits.timeout_s)
        try:
            async with deadline:
                outcome = await self.program.run(row, model)
            _check(outcome, model)
        except Exception as error:
            if model.engine_error is not None:
                raise model.engine_error from None
            end = limit_behind(error)
            if end is None and deadline.expired():
                seconds = f"rollout.trajectory_timeout_s: {self.limits.timeout_s:g}"
                return Outcome(end="timeout"), f"the trajectory did not end within {seconds} seconds"
            if end is None or isinstance(error, EnvironmentFailure):
                return Outcome(end="environment_error"), _describe(error)
            outcome = Outcome(end=end)
        if model.engine_error is not None:  # the program caught it
            raise model.engine_error
        if not any(call.trained for call in model.calls):
            error_text = "the environment ended without a model call to train on"
            if model.ended is not None:
                error_text = f"a limit ({model.ended}) was reached before a model call to train on had finished"
            return Outcome(end="environment_error", environment=outcome.environment), error_text
        return outcome, None


def read_outcome(returned: Any, *, name: str) -> Outcome:
    """Read what `run(row, model)` or `solve(row, base_url, api_key)` returned.

    Args:
        returned: reward, or mapping with the reward under "reward" and metrics under other names, or None.
        name: name of the reward.

    Raises:
        EnvironmentFailure: it is something else.
    """
    if isinstance(returned, Outcome):
        return returned
    values = returned if isinstance(returned, Mapping) else {"reward": returned}
    numbers: dict[str, float] = {}
    for key, value in values.items():
        if value is None and key == "reward":
            continue
        if not isinstance(key, str) or not isinstance(value, bool | int | float) or not math.isfinite(value):
            raise EnvironmentFailure(
                f"{name} returned {value!r:.200} ({type(value).__name__}) as {key!r}; return a finite number, a "
                f"mapping of names to finite numbers, or None"
            )
        numbers[key] = float(value)
    return Outcome(name=name, reward=numbers.pop("reward", None), metrics=numbers)


def _check(outcome: Outcome, model: RolloutModel) -> None:
    num_trained = sum(call.trained for call in model.calls)
    if model.step_rewards and len(model.step_rewards) != num_trained:
        raise EnvironmentFailure(f"{len(model.step_rewards)} step rewards for {num_trained} trained model calls")


def _trajectory(
    model: RolloutModel, outcome: Outcome, error: str | None, tokenizer: Any, *, attempts: int, seconds: float
) -> Trajectory:
    trained = [call for call in model.calls if call.trained]
    cut = bool(trained) and trained[-1].finish_reason == "length"
    texts = [text_of(call, tokenizer) for call in trained]
    messages = model.transcript or [{"role": "assistant", "content": text} for text in texts]  # without a chat
    scores = [score for score in (outcome.reward, *model.step_rewards) if score is not None]
    return Trajectory(
        calls=model.calls,
        messages=tuple(messages),
        text="\n".join(texts),
        end=outcome.end or model.ended or ("length" if cut else "answer"),
        observation=outcome.observation,
        rewards={outcome.name: sum(scores)} if scores else {},
        step_rewards=tuple(model.step_rewards),
        metrics=outcome.metrics,
        stats=replace(
            outcome.stats,
            attempts=attempts,
            rewritten=model.num_rewritten,
            masked_tokens=num_masked_tokens(model.calls),
            model_s=model.model_s,
            environment_s=max(0.0, seconds - model.model_loop_s),
        ),
        error=error,
        environment=outcome.environment,
    )


def num_masked_tokens(calls: Sequence[ModelCall]) -> int:
    """Count tokens of a trajectory's sequences that are neither trained nor part of its prompt, the first context."""
    return sum(
        int(np.count_nonzero(~sequence.loss_mask))
        - common_length(sequence.token_ids, next(call.context_ids for call in calls if call.trained))
        for sequence in join_calls(calls)
    )


def _describe(error: BaseException) -> str:
    """Return what failed, and where in the user's code, in a line; below it the traceback."""
    what = str(error) if isinstance(error, EnvironmentFailure) else describe_error(error)
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    own = [frame for frame in traceback.extract_tb(root.__traceback__) if is_user_code(frame.filename)]
    place = f" (at {own[-1].filename}:{own[-1].lineno})" if own else ""
    return f"{what.partition(chr(10))[0]}{place}\n\n{''.join(traceback.format_exception(error)).rstrip()}"
