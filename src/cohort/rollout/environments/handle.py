"""Call user code on the collector's event loop, with deadlines.

Asynchronous functions run on the event loop. Synchronous ones run in daemon threads: a thread that hangs cannot be
ended, and must not keep the process alive.
"""

import asyncio
import inspect
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Generic, TypeVar

from cohort.errors import describe_error
from cohort.processes.child import CLOSE_TIMEOUT_S


class DeadlineMissed(Exception):  # noqa: N818
    """A function of user code did not return in time. It may still be running."""


class EnvironmentHandle:
    """User code whose functions can be called: an environment instance, or the tools of a run."""

    instance: Any = None  # the environment instance for reward functions

    @property
    def is_alive(self) -> bool:
        """Whether it can still be called."""
        return True

    async def call(self, name: str, arguments: Mapping[str, Any], *, timeout_s: float, seed: int | None = None) -> Any:
        """Call a function or method and return its result.

        Args:
            name: name of the function or method.
            arguments: keyword arguments.
            timeout_s: deadline.
            seed: seed of the global random generators, if the code has a process of its own.

        Raises:
            DeadlineMissed: it did not return within `timeout_s`.
            EnvironmentFailure: the process in which it runs has ended.
            Exception: the function raised it.
        """
        raise NotImplementedError

    def for_trajectory(self) -> "EnvironmentHandle":
        """Return the handle for one trajectory: one of its own if the functions have state."""
        return self

    def end_trajectory(self) -> None:
        """End what `for_trajectory` has started."""

    async def refresh(self, *, timeout_s: float) -> None:
        """Bring `instance` up to date for reward functions. Raises as `call` does."""

    def close(self) -> None:
        """Call the instance's `close()`, if it has one. Does not wait for it."""

    def join(self, timeout_s: float) -> None:
        """Wait until `close` is done, but not longer than `timeout_s`."""


class ToolHandle(EnvironmentHandle):
    """Plain functions, which run concurrently: each synchronous call in a thread of its own."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]]):
        """Create a handle of functions by name."""
        self._functions = functions

    async def call(self, name: str, arguments: Mapping[str, Any], *, timeout_s: float, seed: int | None = None) -> Any:
        """Call a function. See `EnvironmentHandle`."""
        thread = UserThread(f"tool {name}")
        try:
            return await call_function(self._functions[name], arguments, thread=thread, timeout_s=timeout_s)
        finally:
            thread.close()


class InstanceHandle(EnvironmentHandle):
    """An instance in this process. Its synchronous methods, and its constructor, run in a thread of its own.

    Its methods run one after another, also if the model calls several at a time.
    """

    def __init__(self, instance: Any, thread: "UserThread"):
        """Create a handle of an instance. `create` also constructs it."""
        self.instance = instance
        self._thread = thread
        self._lock = asyncio.Lock()

    @classmethod
    async def create(cls, constructor: Callable[[], Any], *, name: str, timeout_s: float | None) -> "InstanceHandle":
        """Construct an instance. Raises as `EnvironmentHandle.call` does."""
        thread = UserThread(f"environment {name}")
        try:
            return cls(await call_function(constructor, {}, thread=thread, timeout_s=timeout_s), thread)
        except BaseException:
            thread.close()
            raise

    async def call(
        self, name: str, arguments: Mapping[str, Any], *, timeout_s: float | None, seed: int | None = None
    ) -> Any:
        """Call a method. See `EnvironmentHandle`."""
        async with self._lock:
            return await call_function(
                getattr(self.instance, name), arguments, thread=self._thread, timeout_s=timeout_s
            )

    def close(self) -> None:
        """Call the instance's `close()`, if it has one, in its thread."""
        close = getattr(self.instance, "close", None)
        if callable(close):
            self._thread.start(lambda: _close(close), {}, lambda result, error: None)
        self._thread.close()

    def join(self, timeout_s: float) -> None:
        """Wait until `close` is done, but not longer than `timeout_s`."""
        self._thread.join(timeout_s)


H = TypeVar("H", bound=EnvironmentHandle)


class HandlePool(Generic[H]):
    """Handles of one environment, or of the same functions, for one trajectory or call at a time each."""

    def __init__(self, create: Callable[[], Awaitable[H]]):
        """Create an empty pool.

        Args:
            create: creates a handle, with an instance of its own.
        """
        self._create = create
        self._idle: list[H] = []
        self._in_use: dict[int, H] = {}  # by id of the instance

    async def acquire(self) -> H:
        """Return a handle that nobody else uses."""
        self._idle = [handle for handle in self._idle if handle.is_alive]
        handle = self._idle.pop() if self._idle else await self._create()
        self._in_use[id(handle.instance)] = handle
        return handle

    def release(self, instance: Any) -> None:
        """Reuse the handle of an instance. Does nothing for one of another pool."""
        handle = self._in_use.pop(id(instance), None)
        if handle is not None:
            self._idle.append(handle)

    def discard(self, handle: H) -> None:
        """Close a handle, which is never reused."""
        self._in_use.pop(id(handle.instance), None)
        handle.close()

    def close(self) -> None:
        """Close all handles. Does not wait for it."""
        for handle in (*self._idle, *self._in_use.values()):
            handle.close()

    def join(self, timeout_s: float) -> None:
        """Wait until all are closed, but not longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        for handle in (*self._idle, *self._in_use.values()):
            handle.join(max(0.0, deadline - time.monotonic()))


def close_instance(instance: Any, name: str) -> None:
    """Call an instance's `close()`, if it has one, in a thread, and wait for it a few seconds."""
    handle = InstanceHandle(instance, UserThread(f"close {name}"))
    handle.close()
    handle.join(CLOSE_TIMEOUT_S)


class UserThread:
    """A daemon thread that runs functions one after another."""

    def __init__(self, name: str):
        """Create the thread; the first call of `start` starts it. Not thread-safe."""
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._queue,), name=name, daemon=True)

    def start(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        on_done: Callable[[Any, BaseException | None], None],
    ) -> None:
        """Run a function when earlier ones have returned; `on_done` gets its result and error in the thread."""
        if self._thread.ident is None:
            self._thread.start()
        self._queue.put((function, arguments, on_done))

    async def call(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Run a function and wait for its result."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

        def answer(result: Any, error: BaseException | None) -> None:
            if not done.done():  # nobody waits after the deadline
                done.set_result((result, error))

        def answer_from_thread(result: Any, error: BaseException | None) -> None:
            with suppress(RuntimeError):  # the run has ended, and closed the loop
                loop.call_soon_threadsafe(answer, result, error)

        self.start(function, arguments, answer_from_thread)
        result, error = await done
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """End the thread when all functions have returned."""
        self._queue.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread, but not longer than `timeout_s`."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)


async def in_thread(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Run a function in a daemon thread of its own and wait for its result."""
    thread = UserThread("call")
    try:
        return await thread.call(function, arguments)
    finally:
        thread.close()


async def call_function(
    function: Callable[..., Any], arguments: Mapping[str, Any], *, thread: UserThread, timeout_s: float | None
) -> Any:
    """Call a function that is synchronous or asynchronous. Raises as `EnvironmentHandle.call` does."""

    async def call() -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(**arguments)
        result = await thread.call(function, arguments)
        return await result if inspect.isawaitable(result) else result

    return await with_deadline(call(), timeout_s)


async def with_deadline(awaitable: Awaitable[Any], timeout_s: float | None) -> Any:
    """Await user code. Whatever it raises that is no `Exception`, such as `SystemExit`, is raised as `RuntimeError`.

    Raises:
        DeadlineMissed: it did not finish within `timeout_s`; it is cancelled.
    """

    async def guarded() -> Any:
        try:
            return await awaitable
        except (SystemExit, KeyboardInterrupt) as error:  # they would end the event loop
            raise RuntimeError(describe_error(error)) from error

    task = asyncio.ensure_future(guarded())
    try:
        # not asyncio.wait_for: its TimeoutError looks like one of user code, and it waits for what ignores cancellation
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        if not done:
            raise DeadlineMissed(f"did not return within {timeout_s:g} s")
        if task.cancelled():
            raise RuntimeError("CancelledError")
        error = task.exception()
        if error is not None and not isinstance(error, Exception):
            raise RuntimeError(describe_error(error)) from error
        return task.result()
    finally:
        task.cancel()


def _work(tasks: "queue.SimpleQueue[Any]") -> None:
    while (task := tasks.get()) is not None:
        function, arguments, on_done = task
        result, error = None, None
        try:
            result = function(**arguments)
        except BaseException as raised:  # SystemExit too: the thread would swallow it
            error = raised
        on_done(result, error)
        del task, function, arguments, on_done, result, error  # keep nothing alive while waiting


def _close(close: Callable[[], Any]) -> None:
    result = close()
    if inspect.isawaitable(result):

        async def wait() -> None:
            await result

        asyncio.run(wait())
