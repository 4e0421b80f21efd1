"""Environments behind an OpenEnv server, one WebSocket session per trajectory (https://github.com/meta-pytorch/OpenEnv).

A server with tools (MCP) gets tool calls. Another gets the reply as its action if actions have one required text field,
else a call of the tool `step`, whose parameters are the action's fields.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx2 as httpx

from cohort.chat import ToolCall
from cohort.errors import UserError, describe_error, suggest
from cohort.rollout.environments.libraries.common import import_library, opened, seed_rows, with_system
from cohort.rollout.environments.model import RolloutModel, TrajectoryEnded
from cohort.rollout.environments.sources import EnvironmentSource
from cohort.rollout.environments.tools import Schema, argument_problem, result_text

_NAME = "openenv"
_MCP_ACTIONS = ("Action", "CallToolAction", "ListToolsAction")  # titles of their schemas
_STEP = "step"  # tool of a server without tools
_CONNECT_TIMEOUT_S = 30.0
_OPTIONS = ("observation", "max_sessions", "system_prompt")


def load(url: str, args: Mapping[str, Any], *, field: str) -> EnvironmentSource:
    """Return the environment of a server, and check that it answers. See `OpenEnv` for `args`.

    Raises:
        UserError: the library is not installed, the server does not answer, or `args` are wrong.
    """
    unknown = sorted({*args} - {*_OPTIONS})
    if unknown:
        raise UserError(f"{field}.args: {unknown[0]!r} is none of {', '.join(_OPTIONS)}")
    client = import_library("openenv.core", extra="openenv", field=field).GenericEnvClient
    connect = partial(_connect, client, url.rstrip("/"))
    try:
        action, tools = _describe(connect, url)
    except Exception as error:  # of the connection, or of the environment's reset
        raise UserError(f"{field}: the OpenEnv server {url} cannot be used: {describe_error(error)}") from error
    text_field = None if tools else _text_field(action)
    if not tools and text_field is None:
        tools = [_step_tool(action)]
    create = partial(OpenEnv, connect=connect, text_field=text_field, tools=tools, **args)
    return EnvironmentSource(kind=OpenEnv, name=_NAME, create=create, rows=seed_rows, schemas=tuple(tools))


@dataclass(eq=False, kw_only=True)
class OpenEnv:
    """Plays rows with sessions of a server. The columns of a row are the arguments of its `reset`."""

    connect: Callable[[], Any]  # opens a session
    text_field: str | None  # of actions, that is the text of a reply; None to play with tools
    tools: Sequence[Schema]  # the server's, or `step`
    observation: str | None = None  # field of observations that the model sees; None: all of them, as JSON
    max_sessions: int | None = None  # at a time; servers have a limit of their own, often 1
    system_prompt: str | None = None

    def __post_init__(self) -> None:
        self._tools = {schema["function"]["name"]: schema for schema in self.tools}
        self._sessions = nullcontext() if self.max_sessions is None else asyncio.Semaphore(self.max_sessions)

    async def run(self, row: Mapping[str, Any], model: RolloutModel) -> float:
        """Play one row. The reward is the sum of those of all steps."""
        arguments = {key: value for key, value in row.items() if key != "prompt" and value is not None}
        async with self._sessions, opened(self.connect, name=_NAME) as call:
            result = await call("reset", **arguments)
            first = "\n".join(filter(None, (row.get("prompt"), self._text(result.observation))))
            messages = with_system(self.system_prompt, first)
            total = float(result.reward or 0.0)

            async def step(action: Mapping[str, Any]) -> str:
                nonlocal result, total
                result = await call("step", action=action)
                total += float(result.reward or 0.0)
                return self._text(result.observation)

            try:
                while not result.done:
                    reply = await model.chat(messages, tools=self.tools or None)
                    messages = [*messages, reply.message]
                    if self.text_field is not None:
                        messages.append({"role": "user", "content": await step({self.text_field: reply.content})})
                        continue
                    if not reply.tool_calls:
                        break
                    for tool_call in reply.tool_calls:
                        text = self._problem(tool_call) or ("" if result.done else await step(self._action(tool_call)))
                        messages.append(
                            {"role": "tool", "tool_call_id": tool_call.id, "name": tool_call.name, "content": text}
                        )
            except TrajectoryEnded:
                pass
        return total

    def _action(self, call: ToolCall) -> dict[str, Any]:
        if call.name == _STEP:
            return dict(call.arguments)
        return {"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)}

    def _problem(self, call: ToolCall) -> str | None:
        """Return what is wrong with a call, as a message to the model."""
        schema = self._tools.get(call.name)
        if schema is None:
            return f"Error: there is no tool {call.name!r}{suggest(call.name, sorted(self._tools), 'Tools')}"
        problem = argument_problem(call.arguments, schema)
        return None if problem is None else f"Error: {problem}"

    def _text(self, observation: Mapping[str, Any]) -> str:
        if self.observation is not None:
            return result_text(observation.get(self.observation, ""), where=_NAME)
        if "tool_name" in observation and "result" in observation:  # of a tool of the server
            result = observation["error"] or observation["result"]
            content = result.get("content") if isinstance(result, Mapping) else None
            return result_text(content or result, where=_NAME)
        fields = {key: value for key, value in observation.items() if key != "metadata" and value not in (None, "")}
        return result_text(fields, where=_NAME) if fields else ""


def _connect(client: Any, url: str) -> Any:
    return client(base_url=url).sync().connect()


def _describe(connect: Any, url: str) -> tuple[Mapping[str, Any], list[Schema]]:
    """Return the JSON schema of the server's actions, and its tools if it has some."""
    answer = httpx.get(f"{url.rstrip('/')}/schema", timeout=_CONNECT_TIMEOUT_S)
    answer.raise_for_status()
    action = answer.json()["action"]
    if action.get("title") not in _MCP_ACTIONS:
        return action, []
    session = connect()
    try:
        session.reset()
        tools = session.step({"type": "list_tools"}).observation["tools"]
    finally:
        session.close()
    return action, [
        _tool(tool["name"], tool["description"], tool.get("input_schema") or tool.get("inputSchema")) for tool in tools
    ]


def _text_field(action: Mapping[str, Any]) -> str | None:
    required = action.get("required", [])
    is_text = len(required) == 1 and action["properties"][required[0]].get("type") == "string"
    return required[0] if is_text else None


def _step_tool(action: Mapping[str, Any]) -> Schema:
    properties = {name: schema for name, schema in action.get("properties", {}).items() if name != "metadata"}
    parameters = {"type": "object", "properties": properties, "required": action.get("required", [])}
    return _tool(_STEP, action.get("description", "Act in the environment."), parameters)


def _tool(name: str, description: str, parameters: Any) -> Schema:
    function = {"name": name, "description": description, "parameters": parameters or {"type": "object"}}
    return {"type": "function", "function": function}
