"""A search as server-sent events. It ends when the client goes away."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator

from cohort.view.records import to_json
from cohort.view.run import ViewedRun
from cohort.view.search.grammar import QuerySyntaxError
from cohort.view.search.search import search
from cohort.view.server.events import as_event


async def search_events(
    run: ViewedRun, query: str, limit: int, *, stopped: Callable[[], bool]
) -> AsyncGenerator[bytes, None]:
    """Yield a search's matches, progress and end.

    Args:
        run: run to search.
        query: text of the search.
        limit: most matches.
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
            for event in _search(run, query, limit, lambda: left.is_set() or stopped()):
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


def _search(run: ViewedRun, query: str, limit: int, cancelled: Callable[[], bool]) -> Iterator[bytes]:
    try:
        for found in search(run, query, limit, cancelled):
            yield as_event(type(found).__name__.lower(), to_json(found))
    except QuerySyntaxError as error:
        yield as_event("error", to_json({"error": str(error), "position": error.position}))
    except Exception as error:
        yield as_event("error", to_json({"error": f"{type(error).__name__}: {error}", "position": None}))
