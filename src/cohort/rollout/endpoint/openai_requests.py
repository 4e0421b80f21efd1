"""Read requests of OpenAI's API and of vLLM's token API: validate them, and find fields without effect.

K context tokens.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cohort.records import IntArray, Message

# Sampling is the run's, because the loss assumes it.
SAMPLING_FIELDS = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "ignore_eos"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "length_penalty"),
    }
)
# Fields that change neither what is sampled nor what is returned.
_HARMLESS = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "request_id", "priority"),
        *("prompt_cache_key", "prompt_cache_retention", "cache_salt", "detokenize", "output_kind"),
        *("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "include_reasoning"),
    }
)
# Fields that are refused, except for these values, which are their defaults.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "audio": (),
    "features": (),
    "content_parts": ([],),
    "echo": (False,),
    "suffix": ("",),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "truncate_prompt_tokens": (),
}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class RequestError(Exception):
    """A request that is answered with an error of OpenAI's form."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None):
        """Create an error.

        Args:
            message: explanation for the agent's author.
            status: HTTP status. SDKs repeat requests after 408, 409, 429 and 5xx only.
            param: field of the request that is wrong.
            code: identifier for programs.
        """
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """What every kind of request may ask for."""

    model: str  # name that the client uses; every name is the policy
    max_tokens: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    train: bool  # our own field: False for a simulated user or an opponent
    stream: bool
    include_usage: bool  # in a stream
    logprobs: bool
    return_token_ids: bool
    ignored: tuple[str, ...]  # fields without effect


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request to /v1/chat/completions."""

    options: CallOptions
    messages: Sequence[Message]  # canonical: text contents, arguments as objects
    tools: Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """A request to /v1/completions."""

    options: CallOptions
    prompt: str | IntArray  # text, or token ids [K]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRequest:
    """A request to /inference/v1/generate, as vLLM has it."""

    options: CallOptions
    token_ids: IntArray  # [K]


AnyRequest = ChatRequest | TextRequest | TokenRequest


def read_chat_request(body: Any) -> ChatRequest:
    """Read the body of a chat request. Raises RequestError."""
    fields = _Fields(body)
    tools = _tools(fields.take("tools"))
    if fields.peek("tool_choice") == "none":
        tools = None
    messages = _messages(fields.take("messages"))
    logprobs = fields.flag("logprobs")
    return ChatRequest(messages=messages, tools=tools, options=_options(fields, fields, logprobs=logprobs))


def read_text_request(body: Any) -> TextRequest:
    """Read the body of a request for a text completion. Raises RequestError."""
    fields = _Fields(body)
    prompt = fields.take("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        (prompt,) = prompt
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        raise RequestError("several prompts in one request are not supported; send one request each", param="prompt")
    read = _text(prompt, "prompt") if isinstance(prompt, str) else _token_ids(prompt, "prompt")
    return TextRequest(prompt=read, options=_options(fields, fields, logprobs=fields.logprobs()))


def read_token_request(body: Any) -> TokenRequest:
    """Read the body of a request to vLLM's token API. Raises RequestError."""
    fields = _Fields(body)
    token_ids = _token_ids(fields.take("token_ids"), "token_ids")
    sampling = _Fields(fields.take("sampling_params") or {}, "sampling_params.")
    options = _options(fields, sampling, logprobs=sampling.logprobs())
    if options.stream:
        raise RequestError("streams are not supported here", param="stream")
    return TokenRequest(token_ids=token_ids, options=options)


class _Fields:
    """The fields of an object, of which those that are read are removed."""

    def __init__(self, body: Any, prefix: str = ""):
        if not isinstance(body, dict):
            raise RequestError(f"{prefix.rstrip('.') or 'the body'} must be a JSON object", param=prefix or None)
        self._left = {name: value for name, value in body.items() if value is not None}
        self._prefix = prefix

    def peek(self, name: str) -> Any:
        return self._left.get(name)

    def take(self, name: str) -> Any:
        return self._left.pop(name, None)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._left.pop(name, default)
        if not isinstance(value, bool):
            raise self._error(name, "true or false", value)
        return value

    def count(self, name: str) -> int | None:
        value = self._left.pop(name, None)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise self._error(name, "a positive integer", value)
        return value

    def logprobs(self) -> bool:
        """Read the number of top logprobs; the sampled token's is returned anyway."""
        value = self._left.pop("logprobs", None)
        if value is not None and (isinstance(value, bool) or value not in (0, 1)):
            raise self._error("logprobs", "0 or 1: only the sampled token's logprob is known", value)
        return value is not None

    def refuse(self) -> None:
        """Refuse fields with a value that is not supported."""
        for name, allowed in _REFUSED.items():
            value = self.take(name)
            if value is not None and value not in allowed:
                supported = " or ".join(json.dumps(one) for one in allowed) or "leave it out"
                raise RequestError(
                    f"{self._prefix}{name}: {json.dumps(value):.100} is not supported here; supported: {supported}",
                    param=f"{self._prefix}{name}",
                    code="unsupported_value",
                )

    def ignored(self) -> tuple[str, ...]:
        """Return names of fields that were not read and may have been meant to have an effect."""
        return tuple(name for name in self._left if name not in _HARMLESS)

    def _error(self, name: str, rule: str, value: Any) -> RequestError:
        return RequestError(f"{self._prefix}{name} must be {rule}, not {value!r:.100}", param=f"{self._prefix}{name}")


def _options(fields: _Fields, sampling: _Fields, *, logprobs: bool) -> CallOptions:
    """Read what all requests have. `sampling` has the parameters of sampling; they may be `fields` too."""
    max_tokens = sampling.count("max_tokens")
    limits = [limit for limit in (max_tokens, sampling.count("max_completion_tokens")) if limit is not None]
    stream_options = _Fields(fields.take("stream_options") or {}, "stream_options.")
    model = fields.take("model")
    options = CallOptions(
        model=_text(model, "model") if isinstance(model, str) else "policy",
        max_tokens=min(limits, default=None),
        stop=_stop(sampling.take("stop")),
        stop_token_ids=tuple(_token_ids(sampling.take("stop_token_ids") or [], "stop_token_ids", minimum=0).tolist()),
        train=fields.flag("train", True),
        stream=fields.flag("stream"),
        include_usage=stream_options.flag("include_usage"),
        logprobs=logprobs,
        return_token_ids=fields.flag("return_token_ids"),
        ignored=(),
    )
    for one in (fields, sampling):
        one.refuse()
    ignored = dict.fromkeys([*fields.ignored(), *sampling.ignored()])
    return replace(options, ignored=tuple(ignored))


def _stop(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise RequestError("stop must be a text or a list of texts that are not empty", param="stop")
    return tuple(texts)


def _token_ids(value: Any, where: str, *, minimum: int = 1) -> IntArray:
    is_right = isinstance(value, list) and all(
        isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**31 for token in value
    )
    if not is_right or len(value) < minimum:
        raise RequestError(f"{where} must be a list of token ids" + (", or a text" * (where == "prompt")), param=where)
    return np.asarray(value, dtype=np.int64)


def _tools(value: Any) -> Sequence[Mapping[str, Any]] | None:
    tools = value or []
    if not isinstance(tools, list):
        raise RequestError("tools must be a list", param="tools")
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(
                f'tools[{number}] must be {{"type": "function", "function": {{"name": ..., ...}}}}', param="tools"
            )
    return tools or None


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise RequestError("messages must be a list of at least one message", param="messages")
    return [_message(message, f"messages[{number}]") for number, message in enumerate(value)]


def _message(value: Any, where: str) -> Message:
    """Return a message in the form in which replies are kept, so that both can be compared."""
    if not isinstance(value, dict):
        raise RequestError(f"{where} must be an object", param=where)
    given = {key: one for key, one in value.items() if one is not None}
    role = given.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(f"{where}.role must be one of {', '.join(_ROLES)}, not {role!r:.100}", param=where)
    for key in ("audio", "function_call"):
        if key in given:
            raise RequestError(f"{where}.{key} is not supported", param=where, code="unsupported_value")
    if "content" not in given and role != "assistant":
        raise RequestError(f"{where}.content is missing", param=where)
    message: dict[str, Any] = {"role": _ROLES[role], "content": _content(given.get("content", ""), f"{where}.content")}
    for key in ("name", "tool_call_id"):
        if key in given:
            message[key] = _text(given[key], f"{where}.{key}")
    if role == "assistant":
        reasoning = next((given[key] for key in ("reasoning_content", "reasoning") if key in given), None)
        if reasoning is not None:
            message["reasoning_content"] = _text(reasoning, f"{where}.reasoning_content")
        calls = given.get("tool_calls") or []
        if not isinstance(calls, list):
            raise RequestError(f"{where}.tool_calls must be a list", param=where)
        if calls:
            message["tool_calls"] = [
                _tool_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(calls)
            ]
    return message


def _content(value: Any, where: str) -> str:
    if not isinstance(value, list):
        return _text(value, where)
    texts = []
    for number, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text":
            raise RequestError(
                f"{where}[{number}] has type {kind!r:.100}; only text is supported",
                param=where,
                code="unsupported_value",
            )
        texts.append(_text(part.get("text"), f"{where}[{number}].text"))
    return "\n".join(texts)


def _tool_call(value: Any, where: str) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f'{where} must have a "function" with a "name" and "arguments"', param=where)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where}.function.arguments is not JSON: {error}", param=where) from error
    if not isinstance(arguments, dict):
        raise RequestError(f"{where}.function.arguments must be an object", param=where)
    call = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": _text(value["id"], f"{where}.id"), **call} if value.get("id") is not None else call


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{where} must be text, not {type(value).__name__}", param=where)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{where} is not valid Unicode: {error.reason}", param=where) from error
    return value
