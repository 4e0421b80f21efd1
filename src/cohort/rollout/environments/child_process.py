"""Run user code in child processes, which can be killed and may crash without ending the run."""

import asyncio
import os
import pickle
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from cohort.errors import describe_error
from cohort.processes.child import CLOSE_TIMEOUT_S, Child, ChildFailed, child_command
from cohort.rollout.engines.servers.secret import SECRET_VARIABLE
from cohort.rollout.environments.handle import (
    DeadlineMissed,
    EnvironmentHandle,
    HandlePool,
    UserThread,
    in_thread,
)
from cohort.rollout.environments.model import EnvironmentFailure, RolloutModel, TrajectoryEnded

_COMMAND = child_command("cohort.rollout.environments.child_main")
START_TIMEOUT_S = 120.0  # for imports and the constructor


@dataclass(frozen=True, kw_only=True)
class UserCode:
    """What a child process loads: functions, or else an instance of an environment."""

    name: str  # in messages
    key: str  # of the configuration
    functions: Mapping[str, str] = field(default_factory=dict)  # paths such as file.py:function, by name
    use: str = ""  # environment as in the configuration
    args: Mapping[str, Any] = field(default_factory=dict)  # of its constructor
    of_library: bool = False  # `use` begins with the name of a library
    copies_attributes: bool = True  # `refresh` copies the instance's attributes, since a reward function may read them


class ChildError(Exception):
    """User code raised an exception. Its subclasses have the names of these exceptions."""


class ChildProcess(EnvironmentHandle):
    """One child process, which hosts one instance or functions. Runs one call at a time.

    The child is killed with all its descendants if a call misses its deadline or is cancelled, if its answer is
    invalid, and when this process ends.
    """

    def __init__(self, code: UserCode):
        """Start the process; `start` also loads the code."""
        self.instance = Attributes(code.name)
        self.kind: Sequence[str] = ()  # module, qualified name and file of the instance's class
        self._code = code
        self._lock = asyncio.Lock()
        self._is_closing = False
        env = {name: value for name, value in os.environ.items() if name != SECRET_VARIABLE}
        self._child = Child(_COMMAND, env=env)
        self.process = self._child.process

    @classmethod
    async def start(cls, code: UserCode, *, timeout_s: float = START_TIMEOUT_S) -> Self:
        """Start a process and load the code. Raises as `call` does."""
        child = cls(code)
        try:
            child.kind = await child._request("load", vars(code), timeout_s=timeout_s)
        except DeadlineMissed:
            raise EnvironmentFailure(f"the process of {code.name} was not ready within {timeout_s:g} s") from None
        except BaseException:
            child.kill()
            raise
        return child

    async def call(
        self,
        name: str,
        arguments: Mapping[str, Any],
        *,
        timeout_s: float | None,
        seed: int | None = None,
        positional: Sequence[Any] = (),
        model: RolloutModel | None = None,
    ) -> Any:
        """Call a method or function and return its result.

        Args:
            name: name of the method or function.
            arguments: keyword arguments.
            timeout_s: deadline; None for none.
            seed: seed of the global random generators of Python and NumPy.
            positional: arguments before these. All must be picklable.
            model: the last of the positional arguments: the child can call its `chat` and `generate`.

        Returns:
            The result if it is JSON; otherwise an object of a type of the same name and with the same text.

        Raises:
            DeadlineMissed: it did not return within `timeout_s`.
            EnvironmentFailure: the child ended, or its arguments or result cannot be passed on.
            ChildError: the code raised an exception.
        """
        content = {
            "name": name,
            "seed": seed,
            "positional": tuple(positional),
            "arguments": dict(arguments),
            "turns_left": None if model is None else model.turns_left,
        }
        return await self._request("call", content, timeout_s=timeout_s, model=model)

    async def refresh(self, *, timeout_s: float) -> None:
        """Copy the instance's public attributes to `instance`, if rewards read them. Raises as `call` does."""
        if not self._code.copies_attributes:
            return
        attributes = await self._request("attributes", {}, timeout_s=timeout_s)
        vars(self.instance).clear()
        vars(self.instance).update(attributes, _name=self._code.name)

    @property
    def is_alive(self) -> bool:
        """Whether the process is running and not closing."""
        return self._child.is_alive and not self._is_closing

    def close(self) -> None:
        """Call the instance's `close()`, if it has one, and end the process. Does not wait for it."""
        if not self._is_closing:
            self._is_closing = True
            self._child.hang_up()  # the child closes the instance, and ends
            threading.Thread(target=self.join, name="close a child process", daemon=True).start()

    def join(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Wait until the process has ended, but not longer than `timeout_s`; then kill it."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        """Kill the process and its descendants."""
        self._child.kill()

    def describe_output(self) -> str:
        """Return the last lines of output, with an introduction; an empty text if there was none."""
        return self._child.describe_output()

    async def _request(
        self, kind: str, content: Mapping[str, Any], *, timeout_s: float | None, model: RolloutModel | None = None
    ) -> Any:
        """Send a request and return the result. Any error but an exception of user code kills the child."""
        try:
            pickled = pickle.dumps(content)
        except Exception as error:
            why = describe_error(error)
            raise EnvironmentFailure(f"{self._code.name}: an argument cannot be passed to a process: {why}") from error
        deadline = asyncio.timeout(timeout_s)
        async with self._lock:
            try:
                async with deadline:
                    result = await self._exchange(kind, pickled, model)
            except BaseException as error:
                self.kill()
                if deadline.expired():
                    raise DeadlineMissed(f"did not return within {timeout_s:g} s") from None
                if isinstance(error, ChildFailed):
                    raise EnvironmentFailure(f"the process of {self._code.name} {error}") from None
                raise
        if isinstance(result, ChildError):
            raise result
        return result

    async def _exchange(self, kind: str, content: bytes, model: RolloutModel | None) -> Any:
        """Send a request, answer the child's requests to the model, and return the result or the user code's error."""
        answers: dict[int, asyncio.Task[None]] = {}
        thread = UserThread(f"process of {self._code.name}")
        try:
            await thread.call(self._child.send, {"message": (kind, 0, content)})
            while True:
                message = await thread.call(self._child.receive, {})
                if "request" in message and model is not None:
                    number = message["request"]
                    answers[number] = asyncio.create_task(self._answer(model, message))
                elif "cancel" in message:
                    answers[message["cancel"]].cancel()
                else:
                    return _read_result(message)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise EnvironmentFailure(
                f"{self._code.name}: its process sent an invalid message: {error!r:.200}"
            ) from error
        finally:
            thread.close()
            for task in answers.values():
                task.cancel()

    async def _answer(self, model: RolloutModel, message: Mapping[str, Any]) -> None:
        """Call the model for the child."""
        answer: tuple[type[Exception] | None, Any]  # what to raise, and with which argument; or None, and the result
        try:
            method = model.chat if message["method"] == "chat" else model.generate
            answer = None, (await method(**message["arguments"]), model.turns_left)
        except TrajectoryEnded as ended:
            answer = TrajectoryEnded, ended.end
        except EnvironmentFailure as failure:
            answer = EnvironmentFailure, str(failure)
        except Exception as error:
            answer = RuntimeError, describe_error(error)
        with suppress(ChildFailed):  # which `_exchange` learns by itself
            await in_thread(self._child.send, {"message": ("answer", message["request"], pickle.dumps(answer))})


class ChildPool(EnvironmentHandle):
    """Child processes with the same functions or class: the handle of functions, each call in a process of its own."""

    def __init__(self, code: UserCode):
        """Create a pool without processes; calls start them."""
        self._pool = HandlePool(partial(ChildProcess.start, code))

    async def call(self, name: str, arguments: Mapping[str, Any], **options: Any) -> Any:
        """Call a function in an idle process, or a new one. The options are those of `ChildProcess.call`."""
        child = await self._pool.acquire()
        try:
            return await child.call(name, arguments, **options)
        finally:
            self._pool.release(child.instance)

    def close(self) -> None:
        """Close all processes. Does not wait for it."""
        self._pool.close()

    def join(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Wait until all processes have ended, but not longer than `timeout_s`; then kill them."""
        self._pool.join(timeout_s)


class Attributes:
    """The public attributes of an environment in a child process, as they were at the end of its trajectory."""

    def __init__(self, name: str):
        """Create it without attributes."""
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"{name!r}: with rollout.isolate, rewards only see the public attributes of {self._name} that are JSON"
        )


class _Shown:
    """An object of the child that is not JSON: only its text, and its number if it is one."""

    def __init__(self, text: str, number: float | None):
        self._text = text
        self._number = number

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__

    def item(self) -> float | None:
        """Return the number, as scalars of NumPy and PyTorch do."""
        return self._number


def _read_result(message: Mapping[str, Any]) -> Any:
    """Return the result in a message, or the `ChildError` in it."""
    if "result" in message:
        return message["result"]
    if "error" in message:
        error: ChildError = type(message["name"], (ChildError,), {})(message["error"])
        error.add_note(f"In the child process:\n{message['traceback']}")
        error.__cause__ = TrajectoryEnded(message["limit"]) if message.get("limit") else None
        return error
    if message["type"] in ("bytes", "bytearray"):  # others recognize it by its type
        return message["text"].encode()
    return type(message["type"], (_Shown,), {"__module__": message["module"]})(message["text"], message["number"])
