"""Normalize chat messages, and replace what assistants wrote by sentinels."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from cohort.errors import UserError
from cohort.records import Message

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")

# A conversation with a tool call, to see what a tokenizer makes of it.
EXAMPLE: tuple[Message, ...] = (
    {"role": "user", "content": "Call it."},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call00000",
                "type": "function",
                "function": {"name": "call_me", "arguments": {"key": "SentinelCall"}},
            }
        ],
    },
    {"role": "tool", "name": "call_me", "tool_call_id": "call00000", "content": "SentinelResult"},
)
EXAMPLE_TOOL = {
    "type": "function",
    "function": {
        "name": "call_me",
        "description": "SentinelSchema",
        "parameters": {"type": "object", "properties": {"key": {"type": "string", "description": "An argument."}}},
    },
}

# Markers such as <think> or <|channel|>, which templates look for in the content of messages.
_MARKER = re.compile(r"(<[^<>\s]{1,40}>)")


def prompt_messages(content: str | Sequence[Message], system_prompt: str | None = None) -> list[Message]:
    """Return the messages of a prompt: text is one user message. The system prompt comes first unless there is one."""
    messages: list[Message] = [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
    if system_prompt is not None and all(message["role"] != "system" for message in messages):
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def append_observation(content: str | Sequence[Message], observation: str) -> str | list[Message]:
    """Append what an environment's `reset` returned to a prompt: to its last user message, or as one if it has none."""
    if isinstance(content, str):
        return content + observation
    messages = list(content)
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        return [*messages, {"role": "user", "content": observation}]
    if observation:
        last = messages[users[-1]]
        said = last["content"]
        part = {"type": "text", "text": observation}
        text = [*said, part] if isinstance(said, list) else (said or "") + observation
        messages[users[-1]] = {**last, "content": text}
    return messages


def are_equal(one: Any, other: Any) -> bool:
    """Whether messages are equal. False if they cannot be compared, as with arrays or tensors in them."""
    try:
        return bool(one == other)
    except Exception:  # whatever the library of the array raises
        return False


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages with text contents and the keys that chat templates read.

    Text parts are joined with line breaks, keys without a value are left out, arguments of tool calls that are JSON
    text become objects, and reasoning is passed under both keys that templates read: `reasoning_content` and
    `thinking`.

    Raises:
        UserError: a message is malformed, or its content has a part that is not text.
    """
    return [_plain(message, f"message {number}") for number, message in enumerate(messages, start=1)]


def _plain(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UserError(f'{where}: a message is {{"role": ..., "content": ...}}, not {message!r:.60}')
    where = f"{where} (role {message['role']!r})"
    plain = {key: value for key, value in message.items() if value is not None}
    if "content" in plain:
        plain["content"] = _text(plain["content"], where)
    reasoning = next((plain[key] for key in REASONING_KEYS if key in plain), None)
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise UserError(f"{where}: its reasoning must be text, not {type(reasoning).__name__}")
        plain |= {"reasoning_content": reasoning, "thinking": reasoning}
    calls = plain.pop("tool_calls", None)
    if calls:  # some templates only ask whether the key is there
        if not isinstance(calls, list | tuple) or not all(map(_is_call, calls)):
            raise UserError(f"{where}: its tool_calls must be a list of function calls, not {calls!r:.60}")
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    return plain


def _is_call(call: Any) -> bool:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise UserError(f"{where}: its content must be text, not {type(content).__name__}")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise UserError(f"{where}: its content has a part of type {kind!r}; only text is supported")
        texts.append(part["text"])
    return "\n".join(texts)


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return dict(call)
    if not isinstance(arguments, Mapping):
        return dict(call)
    function = {**function, "arguments": dict(arguments)}
    return {**call, "function": function} if "function" in call else function


def takes_text_arguments(tokenizer: Any) -> bool:
    """Whether the chat template wants the arguments of tool calls as JSON text (DeepSeek's do), not as objects."""
    try:
        text = tokenizer.apply_chat_template(plain_messages(EXAMPLE[:2]), [EXAMPLE_TOOL], tokenize=False)
        is_printed = "{'key': 'SentinelCall'}" in text  # as Python prints an object
    except Exception:  # templates are code and may raise anything
        is_printed = True
    if not is_printed:
        return False
    try:
        tokenizer.apply_chat_template(arguments_as_text(plain_messages(EXAMPLE[:2])), [EXAMPLE_TOOL], tokenize=False)
    except Exception:  # then it rejects calls
        return False
    return True


def arguments_as_text(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages with the arguments of tool calls as JSON text."""
    return [
        {**message, "tool_calls": [_call_with_text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else dict(message)
        for message in messages
    ]


def _call_with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments")
    if not isinstance(arguments, Mapping):
        return dict(call)
    function = {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {**call, "function": function} if "function" in call else function


@dataclass(frozen=True, slots=True, kw_only=True)
class Masked:
    """Messages whose assistant contents, reasoning and arguments are sentinels."""

    messages: list[dict[str, Any]]
    last: tuple[str, ...]  # sentinels of the last message
    last_is_call: bool  # the last message ends with a tool call
    unused: str  # one more sentinel


def mask(messages: Sequence[Message], following: Sequence[Message]) -> Masked:
    """Replace what assistants wrote in `messages` by sentinels that are not in `following` either.

    Keys, empty values and markers such as `<think>` stay, because templates branch on them. Both are `plain_messages`;
    `messages` are not empty.
    """
    sentinels = _sentinels([*messages, *following])
    masked: list[dict[str, Any]] = []
    used: list[str] = []
    for message in messages:
        used = []
        masked.append(_mask_message(message, sentinels, used) if message["role"] == "assistant" else dict(message))
    return Masked(
        messages=masked,
        last=tuple(used),
        last_is_call=bool(messages[-1].get("tool_calls")),
        unused=next(sentinels),
    )


def _mask_message(message: Message, sentinels: Iterator[str], used: list[str]) -> dict[str, Any]:
    masked = dict(message)
    if message.get("reasoning_content"):
        reasoning = _mask_text(message["reasoning_content"], sentinels, used)
        masked |= {"reasoning_content": reasoning, "thinking": reasoning}
    if message.get("content"):
        masked["content"] = _mask_text(message["content"], sentinels, used)
    if message.get("tool_calls"):
        masked["tool_calls"] = [_mask_call(call, sentinels, used) for call in message["tool_calls"]]
    return masked


def _mask_call(call: Mapping[str, Any], sentinels: Iterator[str], used: list[str]) -> dict[str, Any]:
    function = call.get("function", call)
    if not function.get("arguments"):
        return dict(call)
    name, value = next(sentinels), next(sentinels)
    used += [name, value]
    function = {**function, "arguments": {name: value}}
    return {**call, "function": function} if "function" in call else function


def _mask_text(text: str, sentinels: Iterator[str], used: list[str]) -> str:
    pieces = _MARKER.split(text)
    for index in range(0, len(pieces), 2):  # the others are markers
        if pieces[index].strip():
            pieces[index] = next(sentinels)
            used.append(pieces[index])
    return "".join(pieces)


def _sentinels(messages: Sequence[Message]) -> Iterator[str]:
    """Return words that the messages do not contain, none of them part of another."""
    text = repr(messages)
    stem = next(word for word in (f"Sentinel{number}x" for number in count()) if word not in text)
    return (f"{stem}{number:06d}" for number in count())


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Match any of the texts, the longest where several match."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
