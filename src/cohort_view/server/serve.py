"""Run the server: its routes, and how it listens on 127.0.0.1 and stops."""

import importlib
import os
import signal
import socket
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from cohort.errors import UserError, describe_error
from cohort_view import config_info, now, series
from cohort_view.run import KINDS, ViewedRun, completions_name, steps_around, steps_on_disk
from cohort_view.server.answers import BadQueryError, QueryParameters, StaticFiles, json_answer, json_error
from cohort_view.server.events import Watcher, search_events
from cohort_view.server.runs import Runs
from cohort_view.server.security import Guard

MAX_POINTS = 20_000


class _Later:
    """A module that is imported on first use, since pyarrow takes seconds to load from a slow disk."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


groups, questions, search, tokens, tools = (
    _Later(f"cohort_view.{name}") for name in ("groups", "questions", "search.search", "tokens", "tools")
)


class NotFoundError(LookupError):
    """What the address names does not exist."""


class Asked:
    """What a request asks for: runs and numbers of its path, and its query."""

    def __init__(self, watcher: Watcher, path: Mapping[str, str], query: QueryParameters):
        """Keep the parameters of the request's path and its query."""
        self._watcher = watcher
        self._path = path
        self.query = query

    @classmethod
    def by(cls, request: Request, watcher: Watcher) -> "Asked":
        """Return what a request asks for."""
        return cls(watcher, request.path_params, QueryParameters(request.query_params))

    def run(self) -> ViewedRun:
        """Return the run of the path, up to date."""
        return self._find(self._path["id"])

    def runs(self) -> list[ViewedRun]:
        """Return the runs of the query, up to date; all if it names none."""
        ids = self.query.names("runs")
        if not ids:
            return self.all_runs()
        return [self._find(run_id) for run_id in ids]

    def all_runs(self) -> list[ViewedRun]:
        """Return all runs, up to date."""
        runs = self._watcher.runs.all()
        for run in runs:
            self._watcher.refresh(run)
        return runs

    def root(self) -> Path | None:
        """Return the folder whose runs are listed, if there is one."""
        return self._watcher.runs.root

    def number(self, name: str) -> int:
        """Return a number of the path, such as a step."""
        text = self._path[name]
        if not (text.isascii() and text.isdecimal() and len(text) <= 12):
            raise NotFoundError(f"{name} {text[:40]!r} is not a number.")
        return int(text)

    def kind(self) -> str:
        """Return which completions of a step are meant."""
        return self.query.choice("kind", "step", KINDS)

    def step(self) -> tuple[ViewedRun, int, str]:
        """Return the run, a step of which it has completions or metrics, and the kind of completions."""
        run, step, kind = self.run(), self.number("step"), self.kind()
        if os.path.exists(run.path / completions_name(kind, step)) or (kind == "step" and step in run.metrics.steps):
            return run, step, kind
        found = [number for number, kinds in steps_on_disk(run.path).items() if kind in kinds]
        there = f"It has {len(found):,} from {found[0]} to {found[-1]}." if found else "It has none."
        raise NotFoundError(f"{run.id} has no completions of kind {kind!r} of step {step}. {there}")

    def _find(self, run_id: str) -> ViewedRun:
        run = self._watcher.runs.find(run_id)
        if run is None:
            known = ", ".join(run.id for run in self._watcher.runs.all()[:10])
            raise NotFoundError(f"There is no run {run_id[:80]!r} on this page. Its runs: {known or 'none'}.")
        self._watcher.refresh(run)
        return run


def build_app(watcher: Watcher, *, static: StaticFiles | None = None) -> ASGIApp:
    """Build the app, without access checks."""
    files = static or StaticFiles()

    def page(request: Request) -> Response:
        return files.answer(request, request.path_params.get("name", "index.html"))

    def answer(handle: Callable[[Asked], Any]) -> Callable[[Request], Any]:
        async def handler(request: Request) -> Response:
            def work() -> Response:
                return json_answer(request, handle(Asked.by(request, watcher)))

            return await run_in_threadpool(work)

        return handler

    async def events(request: Request) -> Response:
        ids = QueryParameters(request.query_params).names("runs")
        return _stream(request, watcher.listen(ids))

    async def search_stream(request: Request) -> Response:
        asked = Asked.by(request, watcher)
        run = await run_in_threadpool(asked.run)
        query = asked.query
        step = query.integer("step", -1, low=0, high=10**12)
        wanted = {
            "text": query.text("text"),
            "where": query.text("where"),
            "step": None if step < 0 else step,
            "kind": query.choice("kind", "", ("", *KINDS)) or None,
            "limit": query.integer("limit", 200, low=1, high=5000),
        }
        return _stream(request, search_events(run, wanted, stopped=watcher.is_stopped))

    def curves_csv(request: Request) -> Response:
        asked = Asked.by(request, watcher)
        runs, names = asked.runs(), asked.query.names("names")
        headers = {"content-disposition": 'attachment; filename="curves.csv"'}
        lines = series.curves_csv(runs, names)
        return StreamingResponse(lines, media_type="text/csv; charset=utf-8", headers=headers)

    routes = [
        Route("/", page),
        Route("/static/{name:path}", page),
        Route("/events", events),
        Route("/api/curves.csv", curves_csv),
        Route("/api/runs/{id}/search", search_stream),
        *(Route(path, answer(handle)) for path, handle in ANSWERS.items()),
    ]
    handlers: dict[Any, Any] = {
        BadQueryError: lambda request, error: json_error(400, str(error)),
        NotFoundError: lambda request, error: json_error(404, str(error)),
        HTTPException: lambda request, error: json_error(error.status_code, error.detail),
        Exception: lambda request, error: json_error(500, describe_error(error)),
    }
    return Starlette(routes=routes, exception_handlers=handlers)


class EventStream(StreamingResponse):
    """Server-sent events, which are closed as soon as the tab is.

    Starlette only cancels what sends them. A generator that was not running at that moment would go on until it is
    collected as garbage, and with it what it watches or searches.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]):
        super().__init__(events, media_type="text/event-stream", headers={"x-accel-buffering": "no"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the tab is closed, and close them."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()


def _stream(request: Request, events: AsyncGenerator[bytes, None]) -> Response:
    return Response(media_type="text/event-stream") if request.method == "HEAD" else EventStream(events)


def _curves(asked: Asked) -> Any:
    query = asked.query
    x: Literal["step", "time"] = "time" if query.choice("x", "step", ("step", "time")) == "time" else "step"
    points = query.integer("points", 800, low=4, high=MAX_POINTS)
    start, stop = query.optional_number("from"), query.optional_number("to")
    return series.curves(asked.runs(), query.names("names"), x, start, stop, points)


def _steps(asked: Asked) -> Any:
    around = asked.query.integer("around", -1, low=0, high=10**12)
    return steps_around(asked.run().path, None if around < 0 else around)


def _step(asked: Asked) -> Any:
    query = asked.query
    run, step, kind = asked.step()
    return groups.step(
        run,
        step,
        kind,
        query.choice("sort", "spread", groups.SORTS),
        query.choice("descending", "1", ("0", "1")) == "1",
        query.integer("offset", 0, low=0, high=10**9),
        query.integer("limit", 50, low=1, high=groups.MAX_GROUPS),
    )


def _completion(asked: Asked) -> Any:
    offset = asked.query.integer("offset", 0, low=0, high=10**12)
    limit = asked.query.integer("limit", tokens.TOKENS_SHOWN, low=1, high=tokens.MAX_TOKENS)
    return tokens.completion(*asked.step(), asked.number("row"), offset, limit)


def _kind_of_questions(asked: Asked) -> str:
    return asked.query.choice("kind", "step", ("step", "eval"))


def _questions(asked: Asked) -> Any:
    query = asked.query
    return questions.questions(
        asked.run(),
        _kind_of_questions(asked),
        query.choice("show", "", ("", *questions.STATES)),
        query.choice("sort", "order", questions.SORTS),
        query.integer("offset", 0, low=0, high=10**9),
        query.integer("limit", 100, low=1, high=1000),
    )


# What JSON each path answers with.
ANSWERS: Mapping[str, Callable[[Asked], Any]] = {
    "/api/runs": lambda asked: now.runs(asked.all_runs(), asked.root()),
    "/api/curves": _curves,
    "/api/differences": lambda asked: config_info.differences(asked.runs()),
    "/api/runs/{id}/now": lambda asked: now.now(asked.run()),
    "/api/runs/{id}/metrics": lambda asked: series.metrics_list(asked.run()),
    "/api/runs/{id}/config": lambda asked: config_info.config_info(asked.run()),
    "/api/runs/{id}/log": lambda asked: now.log(asked.run(), asked.query.text("name")),
    "/api/runs/{id}/steps": _steps,
    "/api/runs/{id}/steps/{step}": _step,
    "/api/runs/{id}/steps/{step}/groups/{index}": lambda asked: groups.group(*asked.step(), asked.number("index")),
    "/api/runs/{id}/steps/{step}/completions/{row}": _completion,
    "/api/runs/{id}/search/columns": lambda asked: {"columns": search.columns(asked.run())},
    "/api/runs/{id}/questions": _questions,
    "/api/runs/{id}/questions/{prompt_id}": lambda asked: questions.question(
        asked.run(), _kind_of_questions(asked), asked.number("prompt_id")
    ),
    "/api/runs/{id}/tools": lambda asked: tools.tools(asked.run()),
}


FIRST_PORT = 7600
_PORTS_TRIED = 50
_NICE = 10
_THREADS = 4  # requests answered at a time: the page must not slow the run down


class ViewServer(uvicorn.Server):
    """The web server of the page; `run` starts it."""

    def __init__(self, folders: Sequence[Path], *, root: Path | None = None, port: int | None = None):
        """Listen for `folders`, and all runs below `root`. Raises as `listen` does."""
        self.listener = listen(port)
        self.port: int = self.listener.getsockname()[1]
        self.runs = Runs(folders, root=root)
        self.watcher = Watcher(self.runs)
        self._guard = Guard(build_app(self.watcher))
        super().__init__(
            uvicorn.Config(
                self._guard,
                loop="asyncio",
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=1,
            )
        )

    @property
    def address(self) -> str:
        """Address to open, with the token."""
        return f"http://127.0.0.1:{self.port}/?token={self._guard.token}"

    def stop_on_signals(self) -> None:
        """Have Ctrl-C and SIGTERM stop the server from now on, also before it serves. Only in the main thread."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: setattr(self, "should_exit", True))

    def serve_until_stopped(self) -> None:
        """Serve in this thread until `should_exit` is set."""
        self.run(sockets=[self.listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept requests."""
        import anyio.to_thread

        anyio.to_thread.current_default_thread_limiter().total_tokens = _THREADS
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop. Open tabs are not waited for."""
        self.watcher.stop()
        self.force_exit = True
        await super().shutdown(sockets)


def listen(port: int | None) -> socket.socket:
    """Listen on 127.0.0.1.

    Args:
        port: port; 0: any free one; None: the first free one from 7600.

    Raises:
        UserError: the port is taken, or none is free.
    """
    ports = range(FIRST_PORT, FIRST_PORT + _PORTS_TRIED) if port is None else [port]
    for candidate in ports:
        # With the protocol given, asyncio turns Nagle's algorithm off; otherwise every answer takes 40 ms longer.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", candidate))
            listener.listen(128)
        except OSError as error:
            listener.close()
            if port is not None:
                raise UserError(
                    f"--port: {port} cannot be used: {error.strerror}; leave it out for the next free port"
                ) from error
            continue
        return listener
    raise UserError(f"--port: the ports {ports[0]} to {ports[-1]} are all in use; choose another one")


def lower_priority() -> None:
    """Let the run go first: this process gets the processor time that it leaves."""
    with suppress(OSError):
        os.nice(_NICE)
