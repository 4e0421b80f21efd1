"""Collect groups: run one coroutine per trajectory on an event loop in a thread of its own.

The event loop only runs while the training loop waits for groups; an engine's own threads and processes run all the
time. When no coroutine can run, the engine works on all waiting calls, in the training thread.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeVar

from cohort.processes.this_process import gc_paused
from cohort.records import Prompt, RolloutGroup, ScoredGroup, Trajectory
from cohort.rollout.engines.base import CallKey, Generate, RolloutEngine, SamplingParams, StepKey
from cohort.rollout.environments.handle import UserThread
from cohort.rollout.environments.programs import answer_prompt, completion

T = TypeVar("T")

_TICK_S = 0.5  # maximum wait between checks whether the run should stop
_CLOSE_TIMEOUT_S = 10.0  # for cancelled coroutines to clean up


# Coroutine function that produces one trajectory of a group, from `generate`, the tokenizer, the prompt, the
# sampling parameters, and the key of its first call. Later calls use `replace(key, turn=...)`.
RolloutFunction = Callable[[Generate, Any, Prompt, SamplingParams, CallKey], Coroutine[Any, Any, Trajectory]]
# Coroutine function that samples the whole group of a prompt in another process.
SampleGroup = Callable[[Prompt, SamplingParams, StepKey], Coroutine[Any, Any, RolloutGroup]]


class RolloutCollector:
    """Collects groups of trajectories from an engine."""

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: Any,
        *,
        rollout_function: RolloutFunction = answer_prompt,
        sample_group: SampleGroup | None = None,
        release: Callable[[Trajectory], None] = lambda trajectory: None,
        close_environments: Callable[[], None] = lambda: None,
        counts: Callable[[], Mapping[str, int]] = dict,
        while_waiting: Callable[[], None] = lambda: None,
    ):
        """Create a collector without starting anything.

        Args:
            engine: answers model calls; closed with the collector.
            tokenizer: passed to the rollout function.
            rollout_function: produces one trajectory of a group.
            sample_group: samples the groups that are submitted, if other processes do it; the engine works for them.
            release: frees the environment of a trajectory that has been scored, or was dropped.
            close_environments: called when the collector is closed.
            counts: returns events since its last call, by name, for the metrics.
            while_waiting: called about twice a second during waits, which end if it raises.
        """
        self.counts = counts
        self._while_waiting = while_waiting
        self._engine = engine
        self._tokenizer = tokenizer
        self._rollout_function = rollout_function
        self._sample_group = sample_group
        self._release = release
        self._close_environments = close_environments
        self._selector = _Selector()
        self._loop = _Loop(self._selector)
        # the caller's thread may have a running loop, as in a notebook
        self._thread = UserThread("rollouts")
        self._loop.set_exception_handler(self._callback_failed)
        self._failures: list[BaseException] = []  # exceptions of callbacks
        self._selector.on_idle = self._loop.stop
        self._tasks: set[asyncio.Task[Any]] = set()

    def submit(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, key: StepKey
    ) -> list[asyncio.Task[RolloutGroup]]:
        """Start sampling one group per prompt and return their tasks, in order. `wait` lets them run."""
        if self._sample_group is not None:
            return [self.start(self._sample_group(prompt, sampling, key)) for prompt in prompts]
        return [self.start(self.own_group(prompt, sampling, key)) for prompt in prompts]

    def start(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a coroutine. `wait` lets it run; it is cancelled when the collector is closed."""
        task = self._loop.create_task(coroutine)
        self._track(task)
        return task

    def _track(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def wait(self, tasks: Sequence[asyncio.Task[Any]], *, count: int) -> None:
        """Run coroutines until `count` of these tasks are done.

        Re-raises exceptions of coroutines and callbacks.

        Raises:
            UserError: a prompt cannot be sampled.
            TrainingError: the engine failed.
            StopRequested: the run was asked to stop.
        """
        max_wait_s = 0.0
        while True:
            self._run(max_wait_s)
            advanced = self._engine.advance()
            self._run()
            if _num_done(tasks) >= count:
                break
            self._while_waiting()
            max_wait_s = 0.0 if advanced else _TICK_S
        self._engine.release_gpus()

    def collect(self, prompts: Sequence[Prompt], sampling: SamplingParams, key: StepKey) -> list[RolloutGroup]:
        """Sample one group per prompt, in order. Raises as `wait` does."""
        tasks = self.submit(prompts, sampling, key)
        self.wait(tasks, count=len(tasks))
        return [task.result() for task in tasks]

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        """Call a function in the event loop as soon as it runs. May be called from any thread."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback, *args)

    async def own_group(self, prompt: Prompt, sampling: SamplingParams, key: StepKey) -> RolloutGroup:
        """Roll out all trajectories of one prompt's group in this process."""
        return await self.group(self._engine.generate, prompt, sampling, key, self._rollout_function)

    async def group(
        self,
        generate: Generate,
        prompt: Prompt,
        sampling: SamplingParams,
        key: StepKey,
        rollout_function: RolloutFunction = answer_prompt,
    ) -> RolloutGroup:
        """Roll out all trajectories of one prompt's group concurrently. Default: with a single model call each."""
        keys = (key.call(prompt, index) for index in range(sampling.num_generations))
        if rollout_function is answer_prompt:  # a third of the time that a coroutine for each takes
            calls = [asyncio.ensure_future(generate(prompt.token_ids, sampling, call_key)) for call_key in keys]
            tasks = [call for call in calls if isinstance(call, asyncio.Task)]
            for task in tasks:
                self._track(task)
            await asyncio.gather(*tasks)  # one may fail long before the others end
            completions = [completion(await call, self._tokenizer, sampling) for call in calls]
            return RolloutGroup(prompt=prompt, trajectories=tuple(completions))
        coroutines = (rollout_function(generate, self._tokenizer, prompt, sampling, call_key) for call_key in keys)
        trajectories = await asyncio.gather(*(self.start(coroutine) for coroutine in coroutines))
        return RolloutGroup(prompt=prompt, trajectories=tuple(trajectories))

    def release(self, groups: Iterable[RolloutGroup | ScoredGroup]) -> None:
        """Free the environments of groups that have been scored, or were dropped."""
        for group in groups:
            for trajectory in group.trajectories:
                self._release(trajectory)

    def update_weights(self, *, policy_version: int) -> None:
        """From now on, sample with the trainer's current weights and label tokens `policy_version`."""
        self._engine.update_weights(policy_version=policy_version)

    def close(self) -> None:
        """Cancel all coroutines and close the engine. A second call does nothing."""
        if self._loop.is_closed():
            return
        try:
            deadline = self._loop.time() + _CLOSE_TIMEOUT_S
            for task in self._tasks:
                task.cancel()
            self._run()
            while self._tasks and self._loop.time() < deadline:
                self._run(_TICK_S)
        finally:
            with ExitStack() as at_the_end:
                at_the_end.callback(self._thread.close)
                at_the_end.callback(self._loop.close)
                at_the_end.callback(self._engine.close)
                at_the_end.callback(self._close_environments)

    def _run(self, max_wait_s: float = 0.0) -> None:
        """Run coroutines until none can run, for at most one tick.

        If none can run at once, wait up to `max_wait_s` for I/O and timers. Re-raises exceptions of callbacks.
        """
        self._selector.max_wait_s = max_wait_s
        paused: Future[None] = Future()
        self._thread.start(self._run_until_paused, {}, lambda _, error: _finish(paused, error))
        try:
            paused.result()
        finally:
            if not paused.done():  # Ctrl-C: when this raises, no coroutine may run
                self._loop.call_soon_threadsafe(self._loop.stop)
                wait_for([paused])
        if self._failures:
            raise self._failures.pop(0)

    def _run_until_paused(self) -> None:
        tick = self._loop.call_later(_TICK_S, self._loop.stop)
        with self._loop.clock_running(), gc_paused():  # for one tick at most
            self._loop.run_forever()
        tick.cancel()

    def _callback_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Keep the exception of a callback, which nobody awaits; log other reports of the event loop."""
        if "handle" not in context:
            loop.default_exception_handler(context)
            return
        self._failures.append(context["exception"])
        loop.stop()

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieve it, or asyncio logs a warning if nobody awaits the task


class _Loop(asyncio.SelectorEventLoop):
    """An event loop whose clock only runs while coroutines can: no timer expires during a training step.

    Nor while a local engine samples, which blocks the loop: a tool would miss its deadline without a chance to answer.
    """

    _stopped_s = 0.0  # total time in which the clock stood still
    _stopped_at: float | None = None  # None while the clock runs

    def time(self) -> float:
        """Return the loop's time in seconds."""
        now = super().time() if self._stopped_at is None else self._stopped_at
        return now - self._stopped_s

    @contextmanager
    def clock_running(self) -> Iterator[None]:
        """Let the clock run. Not reentrant."""
        was_stopped_at, self._stopped_at = self._stopped_at, None
        if was_stopped_at is not None:
            self._stopped_s += super().time() - was_stopped_at
        try:
            yield
        finally:
            self._stopped_at = super().time()


class _Selector(selectors.DefaultSelector):
    """Calls `on_idle` when the event loop would block, that is, when no coroutine can run."""

    on_idle: Callable[[], None]
    max_wait_s = 0.0  # how long the next call blocks before `on_idle`

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for I/O as the event loop asks, but only once and for at most `max_wait_s`."""
        if timeout is not None and timeout <= 0:  # callbacks are ready, or a timer has expired
            return super().select(timeout)
        max_wait_s, self.max_wait_s = self.max_wait_s, 0.0
        events = super().select(max_wait_s if timeout is None else min(timeout, max_wait_s))
        if not events:
            self.on_idle()
        return events


def _finish(future: Future[None], error: BaseException | None) -> None:
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _num_done(tasks: Sequence[asyncio.Task[Any]]) -> int:
    """Count finished tasks. Raises the exception of the first failed one."""
    done = [task for task in tasks if task.done()]
    for task in done:
        task.result()
    return len(done)
