"""The child process of isolated user code: hosts one environment instance, or functions.

`cohort.processes.child_start` starts it. See `cohort.processes.child` for how it talks to its parent.
"""

import asyncio
import faulthandler
import inspect
import json
import os
import pickle
import random
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from cohort.config.user_code import load_callable, load_function
from cohort.errors import describe_error
from cohort.processes.child import CLOSE_TIMEOUT_S, MAX_ANSWER_BYTES, connect

if TYPE_CHECKING:
    from cohort.chat import Reply
    from cohort.records import ModelCall

_MAX_ATTRIBUTE_BYTES = 1 << 20
_MAX_ATTRIBUTES_BYTES = 16 << 20  # of all of them
_MAX_ERROR_CHARACTERS = 20_000


def main() -> None:
    """Answer calls until the parent hangs up."""
    if sys.version_info >= (3, 14):
        faulthandler.enable(c_stack=False)  # dozens of lines that would hide the last output
    Host(connect()).run()


class Host:
    """Runs user code, one call at a time, in the main thread: some libraries need it, others one thread for all.

    Functions are called between runs of the event loop, so that a synchronous one may use `asyncio.run`. The loop runs
    while asynchronous ones do, and while the parent asks for nothing.
    """

    def __init__(self, connection: Connection):
        """Create a host; `run` starts it."""
        self._connection = connection
        self._loop = asyncio.new_event_loop()
        self._target: Any = None
        self._close: Callable[[], Any] = lambda: None
        self._num_requests = 0
        self._requests: dict[int, asyncio.Future[Any]] = {}  # to the model, unanswered
        self._calls: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()  # kind and content

    def run(self) -> None:
        """Answer calls forever."""
        asyncio.set_event_loop(self._loop)
        threading.Thread(target=self._read, name="connection", daemon=True).start()
        while True:
            self._call(*self._loop.run_until_complete(self._calls.get()))

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message to the parent.

        Raises:
            ValueError: it has more than `MAX_ANSWER_BYTES`.
            TypeError: it is not JSON.
        """
        content = json.dumps(message).encode()
        if len(content) > MAX_ANSWER_BYTES:
            raise ValueError(f"{len(content)} bytes are too many for one message; at most {MAX_ANSWER_BYTES}")
        self._connection.send_bytes(content)

    def load(
        self, key: str, functions: Mapping[str, str], use: str, args: Mapping[str, Any], of_library: bool, **_: Any
    ) -> list[str]:
        """Load the functions of a `UserCode`; without any, create the environment of `use`.

        Returns:
            the module, the qualified name and the file ("" if none) of the environment's class.
        """
        if functions:
            loaded = {name: load_function(path, field=key) for name, path in functions.items()}
            self._target = SimpleNamespace(**loaded)
            return []
        if of_library:
            from cohort.config.rollout import EnvironmentSpec
            from cohort.rollout.environments.sources import find_source

            self._target = find_source(EnvironmentSpec(use=use, args=dict(args)), field=key).create()
        else:
            self._target = load_callable(use, field=key)(**args)
        self._close = getattr(self._target, "close", self._close)
        kind = type(self._target)
        return [kind.__module__, kind.__qualname__, getattr(sys.modules.get(kind.__module__), "__file__", "") or ""]

    def call(
        self,
        name: str,
        seed: int | None,
        positional: Sequence[Any],
        arguments: Mapping[str, Any],
        turns_left: int | None,
    ) -> Any:
        """Call a method or function; `turns_left` is that of the model, if it takes one."""
        if seed is not None:
            random.seed(seed)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(seed)
        model = () if turns_left is None else (Model(self, turns_left=turns_left),)
        return getattr(self._target, name)(*positional, *model, **arguments)

    def attributes(self) -> dict[str, Any]:
        """Return the instance's public attributes that are JSON."""
        return _attributes(self._target)

    def close(self) -> Any:
        """Close the instance. The process ends afterwards."""
        return self._close()

    async def request(self, method: str, arguments: Mapping[str, Any]) -> Any:
        """Call a method of the trajectory's model and return its result."""
        self._num_requests += 1
        number = self._num_requests
        answer = self._requests[number] = self._loop.create_future()
        try:
            plain = json.loads(json.dumps(arguments, default=_plain))
            self.send({"request": number, "method": method, "arguments": plain})
            return await answer
        except asyncio.CancelledError:
            self.send({"cancel": number})
            raise
        finally:
            del self._requests[number]

    def _read(self) -> None:
        with suppress(OSError, EOFError):
            while True:
                self._loop.call_soon_threadsafe(self._on_message, *self._connection.recv())
        self._loop.call_soon_threadsafe(self._on_message, "close", 0, pickle.dumps({}))
        time.sleep(CLOSE_TIMEOUT_S)
        os._exit(0)  # and the guard kills what is left of the group

    def _on_message(self, kind: str, number: int, content: bytes) -> None:
        if kind == "answer":
            answer = self._requests.get(number)
            if answer is not None and not answer.done():
                exception, value = pickle.loads(content)
                answer.set_result(value) if exception is None else answer.set_exception(exception(value))
            return
        self._calls.put_nowait((kind, content))

    def _call(self, kind: str, content: bytes) -> None:
        try:
            result = getattr(self, kind)(**pickle.loads(content))
            if inspect.isawaitable(result):
                result = self._loop.run_until_complete(_wait_for(result))
            self._answer(result)
        except BaseException as error:  # SystemExit too: it would end the process as if its code were to blame
            name = type(error).__name__
            text = describe_error(error).removeprefix(f"{name}: ")[:_MAX_ERROR_CHARACTERS]
            frames = "".join(traceback.format_exception(error))[-_MAX_ERROR_CHARACTERS:]
            self.send({"error": text, "name": name, "traceback": frames, "limit": _limit_behind(error)})
        finally:
            if kind == "close":
                os._exit(0)

    def _answer(self, result: Any) -> None:
        try:
            self.send({"result": result})
        except (TypeError, RecursionError):  # not JSON
            kind, number = type(result), None
            with suppress(Exception):
                number = float(result.item())  # of NumPy or PyTorch
            self.send({"text": str(result), "type": kind.__name__, "module": kind.__module__, "number": number})


class Model:
    """The model of a trajectory, which the parent keeps. See `cohort.rollout.environments.model.RolloutModel`."""

    def __init__(self, host: Host, *, turns_left: int):
        """Create the model of one call of `run`."""
        self.turns_left = turns_left  # number of further calls that may be trained on
        self._host = host

    async def chat(self, messages: Any, tools: Any = None, train: bool = True, **options: Any) -> "Reply":
        """Sample the next assistant message of a conversation."""
        arguments = {"messages": messages, "tools": tools, "train": train, **options}
        reply: Reply = await self._request("chat", arguments)
        return reply

    async def generate(self, token_ids: Sequence[int], train: bool = True, **options: Any) -> "ModelCall":
        """Sample a continuation of `token_ids` [K]."""
        call: ModelCall = await self._request("generate", {"token_ids": token_ids, "train": train, **options})
        return call

    async def _request(self, method: str, arguments: Mapping[str, Any]) -> Any:
        result, self.turns_left = await self._host.request(method, arguments)
        return result


async def _wait_for(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _limit_behind(error: BaseException) -> str | None:
    """Return the trajectory's limit that an exception reports, if this process has heard of one."""
    model = sys.modules.get("cohort.rollout.environments.model")
    return None if model is None else model.limit_behind(error)


def _attributes(instance: Any) -> dict[str, Any]:
    """Return the public attributes that are JSON, for reward functions. Leaves out what exceeds the limits."""
    attributes: dict[str, Any] = {}
    left = _MAX_ATTRIBUTES_BYTES
    for name in dir(instance):
        with suppress(Exception):  # a property that raises, a value that is not JSON
            if not name.startswith("_") and not callable(value := getattr(instance, name)):
                text = json.dumps(value, default=_plain)
                if len(text) <= min(left, _MAX_ATTRIBUTE_BYTES):
                    attributes[name] = json.loads(text)
                    left -= len(text)
    return attributes


def _plain(value: Any) -> Any:
    """Convert for `json.dumps`: mappings to dicts, and arrays of NumPy or PyTorch to lists."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")
