"""Server-sent events: live updates of every open tab, and the results of a search."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from cohort.errors import describe_error
from cohort_view.run import ViewedRun
from cohort_view.server.runs import Runs
from cohort_view.values import to_json

POLL_S = 0.5
HEARTBEAT_S = 15.0
_JUST_NOW_S = 10.0
_PARTS = ("completions", "config", "events", "metrics", "plan", "status", "summary")
_MAX_WAITING = 1000  # events that a tab has not read; older ones tell it nothing new


class Listener:
    """One open tab. Its queue belongs to the server's event loop."""

    def __init__(self, run_ids: Iterable[str]):
        self.run_ids = frozenset(run_ids)
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue(_MAX_WAITING)

    def wants(self, run_id: str) -> bool:
        """Whether the tab shows this run."""
        return not self.run_ids or run_id in self.run_ids

    def put(self, event: bytes | None) -> None:
        """Send an event, or None: the last one. From any thread."""
        try:
            self._loop.call_soon_threadsafe(self._put, event)
        except RuntimeError:  # the loop is closed
            return

    def _put(self, event: bytes | None) -> None:
        if self._queue.full():
            self._queue.get_nowait()
        self._queue.put_nowait(event)

    async def events(self, heartbeat_s: float = HEARTBEAT_S) -> AsyncGenerator[bytes, None]:
        """Yield events, and a comment when there were none for a while, which shows that the connection lives."""
        while True:
            try:
                event = await asyncio.wait_for(self._queue.get(), heartbeat_s)
            except TimeoutError:
                yield b": alive\n\n"
                continue
            if event is None:
                return
            yield event


class Watcher:
    """Polls the runs that somebody listens to. Without listeners it only waits."""

    def __init__(self, runs: Runs, *, poll_s: float = POLL_S):
        self.runs = runs
        self._poll_s = poll_s
        self._refreshed: dict[str, float] = {}
        self._at_start = {run.id for run in runs.all()}  # a run that is found later is a change by itself
        self._last_changes: dict[str, tuple[float, bytes]] = {}  # by run: when it was noticed, and the event
        self._listeners: set[Listener] = set()
        self._changed = threading.Condition()
        self._stopped = False
        self.last_listened = time.monotonic()  # when a tab was last known to be open
        self._thread = threading.Thread(target=self._watch, name="watch runs", daemon=True)
        self._thread.start()

    def is_stopped(self) -> bool:
        """Whether the server stops."""
        return self._stopped

    @property
    def num_listeners(self) -> int:
        """Number of open tabs."""
        return len(self._listeners)

    async def listen(self, run_ids: Iterable[str]) -> AsyncGenerator[bytes, None]:
        """Yield the events of runs until the server stops."""
        listener = Listener(run_ids)
        with self._changed:
            self._listeners = {*self._listeners, listener}
            self._changed.notify()
        # The tab asked for its data before it listened: what changed in between was noticed by another request.
        for run_id, (noticed, event) in list(self._last_changes.items()):
            if listener.wants(run_id) and time.monotonic() - noticed < _JUST_NOW_S:
                listener.put(event)
        try:
            yield b"retry: 2000\n\n"
            if self._stopped:
                return
            async for event in listener.events():
                yield event
        finally:
            with self._changed:
                self._listeners = self._listeners - {listener}
                self.last_listened = time.monotonic()

    def refresh(self, run: ViewedRun) -> None:
        """Read what is new in a run folder, unless that was done a moment ago, and tell the tabs."""
        now = time.monotonic()
        if now - self._refreshed.get(run.id, -self._poll_s) < self._poll_s / 2:
            return
        is_first = run.id not in self._refreshed
        parts = run.refresh()  # a request that comes meanwhile waits in here
        self._refreshed[run.id] = time.monotonic()
        if not parts or (is_first and run.id in self._at_start):
            return
        event = as_event("changed", to_json(_change(run, parts)))
        self._last_changes[run.id] = (now, as_event("changed", to_json(_change(run, _PARTS))))
        for listener in self._listeners:
            if listener.wants(run.id):
                listener.put(event)

    def stop(self) -> None:
        """End all streams and the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        for listener in self._listeners:
            listener.put(None)

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._listeners)
                if self._stopped:
                    return
            started = time.monotonic()
            for run in self.runs.all():
                if any(listener.wants(run.id) for listener in self._listeners):
                    self.refresh(run)
            # Folders that take long to read, as on a network, are read less often.
            pause = max(self._poll_s, 2 * (time.monotonic() - started))
            with self._changed:
                self._changed.wait_for(lambda: self._stopped, pause)


def _change(run: ViewedRun, parts: Collection[str]) -> dict[str, object]:
    steps = run.last_metrics.steps  # does not read a long run that nobody opened
    step = int(steps[-1]) if len(steps) else 0
    return {"run": run.id, "step": step, "state": run.state, "gone": run.gone, "parts": sorted(parts)}


def as_event(name: str, data: str) -> bytes:
    """Format a server-sent event. `data` is JSON, which has no line breaks."""
    return f"event: {name}\ndata: {data}\n\n".encode()


async def search_events(
    run: ViewedRun, wanted: Mapping[str, Any], *, stopped: Callable[[], bool]
) -> AsyncGenerator[bytes, None]:
    """Yield a search's matches, progress and end.

    Args:
        run: run to search.
        wanted: arguments of `cohort_view.search.search.Search`.
        stopped: whether the server stops.
    """
    left = threading.Event()
    loop = asyncio.get_running_loop()
    found: asyncio.Queue[bytes | None] = asyncio.Queue()

    def put(event: bytes | None) -> None:
        try:
            loop.call_soon_threadsafe(found.put_nowait, event)
        except RuntimeError:  # the loop is closed: the server has stopped
            left.set()

    def work() -> None:
        try:
            for event in _search(run, wanted, lambda: left.is_set() or stopped()):
                put(event)
                if left.is_set():
                    return
        finally:
            put(None)

    # A thread of its own: those of the pool cannot be left while they work.
    threading.Thread(target=work, name="search", daemon=True).start()
    try:
        while (event := await found.get()) is not None:
            yield event
    finally:
        left.set()


def _search(run: ViewedRun, wanted: Mapping[str, Any], cancelled: Callable[[], bool]) -> Iterator[bytes]:
    from cohort.config.condition import ConditionError  # pyarrow takes time to import
    from cohort_view.search.search import Search, search

    try:
        for found in search(run, Search(**wanted), cancelled):
            yield as_event(type(found).__name__.lower(), to_json(found))
    except ConditionError as error:
        yield as_event("error", to_json({"error": str(error), "position": error.position}))
    except Exception as error:
        yield as_event("error", to_json({"error": describe_error(error), "position": None}))
