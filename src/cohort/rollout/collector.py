"""Run rollouts as coroutines on one event loop, in the thread of the training loop.

The event loop only runs while the training loop waits for rollouts; an engine's own threads and processes run all the
time. When no coroutine can run, the engine works on all waiting calls.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from cohort import stopping
from cohort.records import Prompt, RolloutGroup, Trajectory
from cohort.rollout.engines.base import CallKey, Generate, RolloutEngine, SamplingParams, StreamKey
from cohort.rollout.environments.single_turn import answer_prompt

T = TypeVar("T")

_TICK_S = 0.5  # maximum wait between checks whether the run should stop
_CLOSE_TIMEOUT_S = 10.0  # for cancelled coroutines to clean up


# Coroutine of one group member. Takes the key of its first call; later calls use `replace(key, turn=...)`.
Rollout = Callable[[Generate, Any, Prompt, SamplingParams, CallKey], Coroutine[Any, Any, Trajectory]]


class RolloutCollector:
    """Collects groups of completions from an engine."""

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: Any,
        *,
        rollout: Rollout = answer_prompt,
        while_waiting: Callable[[], None] = lambda: None,
    ):
        """Create a collector without starting anything.

        Args:
            engine: answers model calls; closed with the collector.
            tokenizer: passed to rollouts.
            rollout: the coroutine function of one member of a group.
            while_waiting: called about twice a second during waits.
        """
        self._while_waiting = while_waiting
        self._engine = engine
        self._tokenizer = tokenizer
        self._rollout = rollout
        self._selector = _Selector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._loop.set_exception_handler(self._callback_failed)
        self._failures: list[BaseException] = []  # of callbacks
        self._selector.on_idle = self._loop.stop
        self._rollouts: set[asyncio.Task[Any]] = set()

    def submit(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, key: StreamKey
    ) -> list[asyncio.Task[RolloutGroup]]:
        """Start sampling one group per prompt and return their tasks, in order. `wait` lets them run."""
        return [self.start(self.group(self._engine.generate, prompt, sampling, key)) for prompt in prompts]

    def start(self, rollout: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a coroutine. `wait` lets it run; it is cancelled when the collector is closed."""
        task = self._loop.create_task(rollout)
        self._rollouts.add(task)
        task.add_done_callback(self._task_done)
        return task

    def wait(self, tasks: Sequence[asyncio.Task[Any]], *, count: int) -> None:
        """Run coroutines until `count` of these tasks are done.

        Re-raises exceptions of coroutines and callbacks.

        Raises:
            UserError: a prompt cannot be sampled.
            TrainingError: the engine failed.
            StopRequested: the run was asked to stop.
        """
        patience_s = 0.0
        while True:
            self._run(patience_s)
            advanced = self._engine.advance()
            self._run()
            if _num_done(tasks) >= count:
                break
            stopping.check()
            self._while_waiting()
            patience_s = 0.0 if advanced else _TICK_S
        self._engine.release_gpus()

    def collect(self, prompts: Sequence[Prompt], sampling: SamplingParams, key: StreamKey) -> list[RolloutGroup]:
        """Sample one group per prompt, in order. Raises as `wait` does."""
        tasks = self.submit(prompts, sampling, key)
        self.wait(tasks, count=len(tasks))
        return [task.result() for task in tasks]

    async def group(self, generate: Generate, prompt: Prompt, sampling: SamplingParams, key: StreamKey) -> RolloutGroup:
        """Roll out all members of one prompt's group concurrently."""
        keys = (key.call(prompt, index) for index in range(sampling.num_generations))
        rollouts = (self._rollout(generate, self._tokenizer, prompt, sampling, call_key) for call_key in keys)
        members = await asyncio.gather(*(self.start(rollout) for rollout in rollouts))
        return RolloutGroup(prompt=prompt, trajectories=tuple(members))

    def load_weights(self, *, policy_version: int) -> None:
        """Sample from the trainer's current weights, labeled `policy_version`, from now on."""
        self._engine.load_weights(policy_version=policy_version)

    def close(self) -> None:
        """Cancel all rollouts and close the engine. A second call does nothing."""
        if self._loop.is_closed():
            return
        deadline = self._loop.time() + _CLOSE_TIMEOUT_S
        try:
            for task in self._rollouts:
                task.cancel()
            self._run()
            while self._rollouts and self._loop.time() < deadline:
                self._run(_TICK_S)
        finally:
            try:
                self._engine.close()
            finally:
                self._loop.close()

    def _run(self, patience_s: float = 0.0) -> None:
        """Run coroutines until none can run, for at most one tick.

        If none can run at once, wait up to `patience_s` for I/O and timers. Re-raises exceptions of callbacks.
        """
        self._selector.patience_s = patience_s
        tick = self._loop.call_later(_TICK_S, self._loop.stop)
        with _no_running_loop():
            self._loop.run_forever()
        tick.cancel()
        if self._failures:
            raise self._failures.pop(0)

    def _callback_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Keep the exception of a callback, which nobody awaits; log other reports of the event loop."""
        if "handle" not in context:
            loop.default_exception_handler(context)
            return
        self._failures.append(context["exception"])
        loop.stop()

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._rollouts.discard(task)
        if not task.cancelled():
            task.exception()  # retrieve it, or asyncio logs a warning if nobody awaits the task


class _Selector(selectors.DefaultSelector):
    """Calls `on_idle` when the event loop would block, that is, when no coroutine can run."""

    on_idle: Callable[[], None]
    patience_s = 0.0  # how long the next call blocks before `on_idle`

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for I/O as the event loop asks, but only once and for at most `patience_s`."""
        if timeout is not None and timeout <= 0:  # callbacks are ready, or a timer has expired
            return super().select(timeout)
        patience_s, self.patience_s = self.patience_s, 0.0
        events = super().select(patience_s if timeout is None else min(timeout, patience_s))
        if not events:
            self.on_idle()
        return events


@contextmanager
def _no_running_loop() -> Iterator[None]:
    """Allow an event loop to run inside another one, as in a notebook, which it blocks."""
    outer = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(outer)


def _num_done(tasks: Sequence[asyncio.Task[Any]]) -> int:
    """Count finished tasks. Raises the exception of the first failed one."""
    done = [task for task in tasks if task.done()]
    for task in done:
        task.result()
    return len(done)
