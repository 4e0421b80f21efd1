"""Set up the `object` rollout engine: the user's object behind the engine protocol, with its answers checked.

K context tokens and C sampled tokens of one model call.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cohort.config.user_code import error_location
from cohort.errors import TrainingError, UserError, describe_error
from cohort.models import Policy
from cohort.records import IntArray, ModelCall
from cohort.rollout.engines.base import CallKey, SamplingParams
from cohort.rollout.engines.setup import EngineInputs, StartedEngine, TrainingProcesses

_LOGPROB_TOLERANCE = 1e-4  # rounding may push a probability slightly above 1


def check_engine(engine: Any) -> None:
    """Check that an object has the method that every engine needs.

    Raises:
        UserError: it has not.
    """
    if isinstance(engine, type):
        raise UserError(f"engine: {engine.__name__} is a class; give an instance, such as {engine.__name__}()")
    if not inspect.iscoroutinefunction(getattr(engine, "generate", None)):
        built_in = f"; for a built-in engine use rollout={{'engine': {engine!r}}}" if isinstance(engine, str) else ""
        raise UserError(
            f"engine: {type(engine).__name__} needs a method `async def generate(self, token_ids, sampling, key)`, "
            f"which returns a cohort.ModelCall{built_in}"
        )


class ObjectSetup:
    """Set up sampling by the user's object."""

    shares_gpus = keeps_base = False

    def __init__(self, inputs: EngineInputs):
        """Take the object.

        Raises:
            UserError: there is none, as in a run from a file.
        """
        if inputs.engine is None:
            raise UserError(
                "rollout.engine: object stands for an object that a script gives as cohort.Trainer(engine=...); run "
                "that script, or use rollout.engine: auto"
            )
        self._engine = inputs.engine

    def start(self, processes: TrainingProcesses, *, folder: Path, notify: Callable[[str], None]) -> StartedEngine:
        """Give the object the weights."""
        engine = ObjectEngine(self._engine, processes.policy)
        engine.update_weights(policy_version=processes.num_updates)
        return StartedEngine(engine=engine)


class ObjectEngine:
    """Answers model calls with an object of the user's, whose `generate` is all that it needs."""

    def __init__(self, engine: Any, policy: Policy):
        """Wrap an engine that has passed `check_engine`."""
        self._engine = engine
        self._policy = policy
        self._name = type(engine).__name__
        self._policy_version = 0

    async def generate(self, token_ids: IntArray, sampling: SamplingParams, key: CallKey) -> ModelCall:
        """Have the object sample a continuation of `token_ids` [K].

        Raises:
            UserError: its answer breaks a rule.
            TrainingError: it raised.
        """
        try:
            call = await self._engine.generate(token_ids, sampling, key)
        except (UserError, TrainingError):
            raise
        except Exception as error:
            raise self._failure("generate", error) from error
        if not isinstance(call, ModelCall):
            raise self._wrong(f"a {type(call).__name__}", "must be a cohort.ModelCall")
        tokens, logprobs = np.asarray(call.token_ids), np.asarray(call.sampling_logprobs, dtype=np.float64)
        limit, size = sampling.max_completion_tokens, self._policy.model.config.get_text_config().vocab_size
        if not np.array_equal(call.context_ids, token_ids):
            raise self._wrong("another context", "context_ids must be the token_ids that it was given")
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not 0 < len(tokens) <= limit:
            raise self._wrong(f"token_ids {call.token_ids!r:.80}", f"must be 1 to {limit} token ids")
        if tokens.min() < 0 or tokens.max() >= size:
            raise self._wrong(f"token ids from {tokens.min()} to {tokens.max()}", f"must be below {size}")
        if logprobs.shape != tokens.shape or not (np.isfinite(logprobs) & (logprobs <= _LOGPROB_TOLERANCE)).all():
            raise self._wrong(
                f"sampling_logprobs {call.sampling_logprobs!r:.80}", "must be one finite number of at most 0 per token"
            )
        if call.finish_reason not in ("stop", "length"):
            raise self._wrong(f"finish_reason {call.finish_reason!r}", "must be 'stop' or 'length'")
        if not 0 <= call.policy_version <= self._policy_version:
            raise self._wrong(
                f"policy_version {call.policy_version!r}",
                f"must be that of weights it was given, the last of which had {self._policy_version}",
            )
        tokens = tokens.astype(np.int64)
        return replace(call, context_ids=token_ids, token_ids=tokens, sampling_logprobs=logprobs, text=None)

    def advance(self) -> bool:
        """Let the object work on waiting calls, if it collects them."""
        return bool(self._call("advance"))

    def release_gpus(self) -> None:
        """Tell the object that a wait has ended."""
        self._call("release_gpus")

    def update_weights(self, *, policy_version: int) -> None:
        """Give the object the model, whose weights are now those of `policy_version`."""
        self._policy_version = policy_version
        self._call("update_weights", self._policy.model, policy_version=policy_version)

    def close(self) -> None:
        """Close the object."""
        self._call("close")

    def _call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method that the object may lack.

        Raises:
            TrainingError: it raised.
        """
        try:
            return getattr(self._engine, method, _nothing)(*args, **options)
        except (UserError, TrainingError):
            raise
        except Exception as error:
            raise self._failure(method, error) from error

    def _failure(self, method: str, error: Exception) -> TrainingError:
        return TrainingError(
            f"engine: {self._name}.{method} raised {describe_error(error)} (at {error_location(error)})"
        )

    def _wrong(self, returned: str, rule: str) -> UserError:
        return UserError(f"engine: {self._name}.generate returned {returned}; {rule}")


def _nothing(*args: Any, **options: Any) -> None:
    """Stand in for a method that the object lacks."""
