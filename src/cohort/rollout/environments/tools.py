"""Tools: functions, the methods of an environment, and the tool `python`; execute the tool calls of a reply.

Whatever goes wrong with a call becomes an error message to the model, except that an environment whose method hangs has
failed.
"""

import asyncio
import copy
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from cohort.chat import ToolCall, tool_schema
from cohort.config.rollout import ToolSpec
from cohort.config.user_code import load_function
from cohort.errors import UserError, describe_error, suggest
from cohort.records import Message
from cohort.rollout.environments.child_process import ChildPool, UserCode
from cohort.rollout.environments.handle import DeadlineMissed, EnvironmentHandle, ToolHandle
from cohort.rollout.environments.model import EnvironmentFailure
from cohort.sandbox import Job, Sandbox, SharedSandbox
from cohort.sandbox.session import PythonSession, SessionEnded

Schema = Mapping[str, Any]  # JSON schema of a tool

PYTHON = "python"  # the tool that runs code in the sandbox
_CHARACTERS_PER_TOKEN = 32  # more than tokens have; longer results are cut before they are tokenized
_MEDIA = ("image", "image_url", "audio", "input_audio", "video")  # types of content parts that are not text
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


class PythonStopped(Exception):  # noqa: N818
    """The code was stopped, or did not start."""


class PythonTool(EnvironmentHandle):
    """Runs every call in a fresh process."""

    def __init__(self, sandbox: Sandbox, *, pool: ThreadPoolExecutor | None = None):
        """Create a handle; `pool` bounds how many calls run at once."""
        self._sandbox = sandbox
        self._pool = pool or ThreadPoolExecutor(sandbox.max_concurrent, thread_name_prefix="tool python")

    async def call(self, name: str, arguments: Mapping[str, Any], *, timeout_s: float, seed: int | None = None) -> str:
        """Run code and return its output.

        Raises:
            PythonStopped: it exceeded a limit, ended its process, or the sandbox does not start.
        """
        loop = asyncio.get_running_loop()
        wall_s = min(timeout_s, self._sandbox.limits.wall_s)
        return await loop.run_in_executor(self._pool, self._run, str(arguments["code"]), wall_s)

    def close(self) -> None:
        """Start no further calls."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, code: str, wall_s: float) -> str:
        request = {"kind": "python", "code": code, "max_output": self._sandbox.limits.max_output_bytes}
        limits = replace(self._sandbox.limits, wall_s=wall_s)
        outcome = self._sandbox.run(Job(request=request, limits=limits))
        if not outcome.started:
            raise PythonStopped(f"the sandbox did not start: {outcome.errors[:200]}")
        if not outcome.records:
            raise PythonStopped(_stopped({"exited": "the process ended"}.get(outcome.ending, outcome.ending), wall_s))
        return _text(outcome.records[0])


class StatefulPythonTool(PythonTool):
    """Runs the calls of a trajectory in one process, which keeps their variables."""

    def __init__(self, sandbox: Sandbox, *, pool: ThreadPoolExecutor | None = None):
        """See `PythonTool`."""
        super().__init__(sandbox, pool=pool)
        self._session = PythonSession(sandbox)
        self._lock = asyncio.Lock()
        self._is_over = False  # no process may start after the trajectory

    async def call(self, name: str, arguments: Mapping[str, Any], *, timeout_s: float, seed: int | None = None) -> str:
        """See `PythonTool.call`. Calls of one reply run in their order."""
        async with self._lock:
            return await super().call(name, arguments, timeout_s=timeout_s)

    def for_trajectory(self) -> "StatefulPythonTool":
        """Return a handle with a process of its own."""
        return StatefulPythonTool(self._sandbox, pool=self._pool)

    def end_trajectory(self) -> None:
        """End the process; return at once."""
        self._is_over = True
        self._session.close()

    def _run(self, code: str, wall_s: float) -> str:
        try:
            return _text(self._session.call(code, wall_s=wall_s))
        except SessionEnded as error:
            self._session.close()
            if not self._is_over:
                self._session = PythonSession(self._sandbox)
            raise PythonStopped(f"{_stopped(str(error), wall_s)}; all variables are lost") from error


def load_python_tool(spec: ToolSpec, sandbox: SharedSandbox, *, field: str) -> tuple[dict[str, Any], PythonTool]:
    """Open the sandbox, and return the tool's schema and handle.

    Raises:
        UserError: no sandbox works here, or it holds no state.
    """
    state = bool(spec.args.get("state", False))
    opened = sandbox.open()
    if state and not opened.backend.holds_sessions:
        raise UserError(
            f"{field}: {{use: python, args: {{state: true}}}} needs a process per trajectory, which sandbox.backend: "
            f"{opened.backend.name} does not have; remove state, or use sandlock, bubblewrap or container"
        )
    return tool_schema(_with_state if state else python), (StatefulPythonTool if state else PythonTool)(opened)


def python(code: str) -> str:  # type: ignore[empty-body]  # its signature is what the model sees
    """Run Python code in a fresh process and return what it prints, and the value of its last expression.

    Args:
        code: Python code
    """


def _with_state(code: str) -> str:  # type: ignore[empty-body]
    """Run Python code and return what it prints, and the value of its last expression. Variables are kept.

    Args:
        code: Python code
    """


_with_state.__name__ = python.__name__


def _text(record: Mapping[str, Any]) -> str:
    output, missing = str(record.get("output", "")), record.get("missing")
    if isinstance(missing, int) and missing > 0:
        output += f"\n[... {missing:,} more bytes were cut]"
    return output


def _stopped(why: str, wall_s: float) -> str:
    if why in ("wall time", "timed out"):
        return f"the code did not finish within {wall_s:g} s"
    return f"the code was stopped: {why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool that the model may call."""

    schema: Schema
    handle: EnvironmentHandle
    of_environment: bool = False  # a method of an environment, which has failed if the method hangs

    @property
    def name(self) -> str:
        """Name of the function."""
        return str(self.schema["function"]["name"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The message that answers a tool call."""

    message: Message
    is_error: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolExecutor:
    """Executes tool calls within limits."""

    tokenizer: Any
    max_tokens: int  # of a result
    timeout_s: float

    async def execute(self, calls: Sequence[ToolCall], tools: Mapping[str, Tool]) -> list[ToolResult]:
        """Execute the calls of one reply concurrently, and return their results in order.

        Raises:
            EnvironmentFailure: a method of an environment hangs, or a result is not text; other calls are cancelled.
        """
        tasks = [asyncio.ensure_future(self._execute(call, tools)) for call in calls]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _execute(self, call: ToolCall, tools: Mapping[str, Tool]) -> ToolResult:
        tool = tools.get(call.name)
        if tool is None:
            known = suggest(call.name, sorted(tools), "Tools")
            return self._result(call, f"Error: there is no tool {call.name!r}{known}", is_error=True)
        if (problem := argument_problem(call.arguments, tool.schema)) is not None:
            return self._result(call, f"Error: {problem}", is_error=True)
        try:
            arguments = copy.deepcopy(call.arguments)  # the tool may change its own
            value = await tool.handle.call(call.name, arguments, timeout_s=self.timeout_s)
        except (DeadlineMissed, EnvironmentFailure) as error:
            if tool.of_environment:
                raise EnvironmentFailure(f"method {call.name!r}: {error} (rollout.tool_timeout_s)") from error
            return self._result(call, f"Error: tool {call.name!r}: {error}", is_error=True)
        except Exception as error:
            return self._result(call, f"Error: {describe_error(error)}", is_error=True)
        where = f"tool {call.name!r}"
        try:
            return self._result(call, result_text(value, where=where), is_error=False)
        except EnvironmentFailure:
            raise
        except Exception as error:  # nested too deeply, or its own `__str__`
            what = f"returned a {type(value).__name__} that has no text: {describe_error(error)}"
            return self._result(call, f"Error: {where} {what}", is_error=True)

    def _result(self, call: ToolCall, text: str, *, is_error: bool) -> ToolResult:
        content = self.cut(text)
        return ToolResult(
            message={"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}, is_error=is_error
        )

    def cut(self, text: str) -> str:
        """Cut a text to `max_tokens`, followed by a marker that says how much is missing.

        Lone surrogates are replaced: file names and scraped pages have them, and tokenizers reject them.
        """
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        start = text[: _CHARACTERS_PER_TOKEN * self.max_tokens]
        token_ids = self.tokenizer(start, add_special_tokens=False)["input_ids"]
        if len(token_ids) > self.max_tokens:
            # the end of the last token may be half a character
            start = str(self.tokenizer.decode(token_ids[: self.max_tokens])).rstrip("\N{REPLACEMENT CHARACTER}")
        missing = len(text) - len(start)
        return text if missing <= 0 else f"{start}\n[... {missing:,} more characters were cut]"


def load_tools(
    specs: Sequence[ToolSpec | str],
    *,
    isolate: bool = False,
    sandbox: SharedSandbox | None = None,
    field: str = "rollout.tools",
) -> tuple[Tool, ...]:
    """Load plain functions as tools, which run in this process or, with `isolate`, in others; and the tool `python`.

    Raises:
        UserError: one cannot be loaded, has no type hints or docstring, or two have the same name.
    """
    functions: dict[str, Callable[..., Any]] = {}
    uses, schemas, own = [], [], []
    for i, spec in enumerate(specs):
        use = spec if isinstance(spec, str) else spec.use
        if use == PYTHON:
            python = ToolSpec(use=use) if isinstance(spec, str) else spec
            schema, tool = load_python_tool(python, sandbox or SharedSandbox(), field=f"{field}[{i}]")
            own.append(Tool(schema=schema, handle=tool))
            continue
        function = load_function(use, field=f"{field}[{i}]")
        try:
            schema = tool_schema(function)
        except UserError as error:
            raise UserError(f"{field}[{i}]: {use!r}: {error}") from error
        name = schema["function"]["name"]
        if name in functions:
            raise UserError(f"{field}[{i}]: {use!r}: another tool is also named {name!r}; rename one of the two")
        functions[name] = function
        uses.append(use)
        schemas.append(schema)
    handle: EnvironmentHandle = ToolHandle(functions)
    if isolate:
        handle = ChildPool(UserCode(name="tools", key=field, functions=dict(zip(functions, uses, strict=True))))
    names = [*functions, *(tool.name for tool in own)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{field}: two tools are named {twice!r}; rename one of the two")
    return (*(Tool(schema=schema, handle=handle) for schema in schemas), *own)


def argument_problem(arguments: Mapping[str, Any], schema: Schema) -> str | None:
    """Compare the arguments of a call with the tool's schema. Return what is wrong, or None."""
    function = schema["function"]
    parameters = function.get("parameters", {})
    properties = parameters.get("properties", {})
    name = function["name"]
    for argument, value in arguments.items():
        if argument not in properties:
            takes = ", ".join(properties) or "no arguments"
            return f"tool {name!r} has no parameter {argument!r}; it takes {takes}"
        if not _has_type(value, properties[argument]):
            expected = properties[argument]["type"]
            return f"tool {name!r}: {argument} must be of type {expected}, not {type(value).__name__} {value!r:.80}"
    missing = [parameter for parameter in parameters.get("required", ()) if parameter not in arguments]
    return f"tool {name!r} needs {', '.join(missing)}" if missing else None


def _has_type(value: Any, schema: Schema) -> bool:
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or (value is None and schema.get("nullable")):
        return True
    allowed = [kind for name in kinds for kind in _TYPES.get(name, (object,))]
    if isinstance(value, bool):
        return bool in allowed or object in allowed
    return isinstance(value, tuple(allowed)) or (value is None and "null" in kinds)


def result_text(value: Any, *, where: str) -> str:
    """Return the text of a result: text as it is, else as JSON, else as `str()` has it.

    Raises:
        EnvironmentFailure: it is or has an image or other content that is not text.
        Exception: its `str()` raises.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, bytes | bytearray):
        raise EnvironmentFailure(f"{where} returned {type(value).__name__}; only text is supported, so decode it")
    if type(value).__module__.startswith("PIL."):
        raise EnvironmentFailure(f"{where} returned an image ({type(value).__name__}); only text is supported")
    if isinstance(value, list | tuple) and value and all(map(_is_content_part, value)):
        other = next((part["type"] for part in value if part["type"] != "text"), None)
        if other is not None:
            raise EnvironmentFailure(f"{where} returned content of type {other!r}; only text is supported")
        return "".join(part["text"] for part in value)
    try:
        return json.dumps(value, ensure_ascii=False)
    except Exception:  # not JSON: keys, values, depth, or the object's own methods
        return str(value)


def _is_content_part(value: Any) -> bool:
    """Whether a value is a part of a message's content, rather than data that has a "type" too."""
    if not isinstance(value, Mapping):
        return False
    kind = value.get("type")
    if not isinstance(kind, str):
        return False
    return kind in _MEDIA or (kind == "text" and isinstance(value.get("text"), str))
