"""Requests of OpenAI's API and of vLLM's token API: what they may hold, and which fields have no effect."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PositiveInt,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from cohort.records import Message

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
# Fields that are refused but for these values, which are their defaults.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
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
_UNSUPPORTED = "unsupported_value"


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


class _Object(BaseModel):
    """An object of a request. A field that is null counts as left out."""

    model_config = ConfigDict(strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, value: Any) -> Any:
        return {key: one for key, one in value.items() if one is not None} if isinstance(value, dict) else value


def _check_unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"not valid Unicode: {error.reason}") from error
    return text


def _refuse(value: Any) -> None:
    raise PydanticCustomError(_UNSUPPORTED, "not supported")


Text = Annotated[str, AfterValidator(_check_unicode)]
TokenIds = list[Annotated[int, Field(ge=0, lt=2**31)]]
_Prompt = Annotated[TokenIds, Field(min_length=1)]
_Refused = Annotated[None, BeforeValidator(_refuse)]


def _join_parts(content: Any) -> Any:
    """Return the text of a content that is a list of parts."""
    if not isinstance(content, list):
        return content
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text":
            raise PydanticCustomError(
                _UNSUPPORTED, "a part has type {kind}; only text is supported", {"kind": f"{kind!r:.100}"}
            )
        if not isinstance(part.get("text"), str):
            raise ValueError("a part has no text")
    return "\n".join(part["text"] for part in content)


def _parse_arguments(arguments: Any) -> Any:
    try:
        return json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error


class _CalledFunction(_Object):
    name: Text
    arguments: Annotated[dict[str, Any], BeforeValidator(_parse_arguments)] = {}


class _ToolCall(_Object):
    id: Text | None = None
    type: Literal["function"] = "function"
    function: _CalledFunction


class _Message(_Object):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Text, BeforeValidator(_join_parts)]
    name: Text | None = None
    tool_call_id: Text | None = None
    reasoning_content: Text | None = Field(None, validation_alias=AliasChoices("reasoning_content", "reasoning"))
    tool_calls: list[_ToolCall] = []
    audio: _Refused = None
    function_call: _Refused = None

    @model_validator(mode="before")
    @classmethod
    def _allow_a_reply_without_content(cls, value: Any) -> Any:
        is_reply = isinstance(value, dict) and value.get("role") == "assistant"
        return {**value, "content": ""} if is_reply and value.get("content") is None else value

    def canonical(self) -> Message:
        """Return the message in the form in which replies are kept, so that both can be compared."""
        is_reply = self.role == "assistant"
        message = self.model_dump(exclude_none=True, exclude=None if is_reply else {"reasoning_content", "tool_calls"})
        if not self.tool_calls:
            message.pop("tool_calls", None)
        return {**message, "role": "system" if self.role == "developer" else self.role}


def _check_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError('a tool must be {"type": "function", "function": {"name": ..., ...}}')
    return tool


def _list_stop(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


def _has_logprobs(number: Any) -> bool:
    """Read the number of top logprobs; the sampled token's is returned anyway."""
    if isinstance(number, bool) or number not in (0, 1):
        raise ValueError("should be 0 or 1: only the sampled token's logprob is known")
    return True


def _take_only_prompt(prompt: Any) -> Any:
    """Return the prompt of a list with one."""
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int):
        return prompt
    if len(prompt) > 1:
        raise PydanticCustomError(_UNSUPPORTED, "several prompts in one request; send one request each")
    return prompt[0]


class _StreamOptions(_Object):
    include_usage: bool = False


class Request(_Object):
    """What every kind of request may ask for."""

    model_config = ConfigDict(extra="allow")

    model: Text = "policy"  # name that the client uses; every name is the policy
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    stop: Annotated[list[Annotated[Text, Field(min_length=1)]], BeforeValidator(_list_stop)] = []
    stop_token_ids: TokenIds = []
    train: bool = True  # our own field: False for a simulated user or an opponent
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    logprobs: bool = False
    return_token_ids: bool = False

    @property
    def limit(self) -> int | None:
        """Maximum number of tokens to sample."""
        return min(filter(None, (self.max_tokens, self.max_completion_tokens)), default=None)

    @property
    def unread(self) -> Mapping[str, Any]:
        """Fields other than those of this class."""
        return self.model_extra or {}

    @property
    def ignored(self) -> list[str]:
        """Names of fields without effect that may have been meant to have one."""
        return [name for name in self.unread if name not in _HARMLESS and name not in _SUPPORTED]


class ChatRequest(Request):
    """A request to /v1/chat/completions."""

    messages: Annotated[list[_Message], Field(min_length=1)]
    tools: list[Annotated[dict[str, Any], AfterValidator(_check_tool)]] = []

    @property
    def usable_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the model may call."""
        return None if self.unread.get("tool_choice") == "none" else self.tools or None


class TextRequest(Request):
    """A request to /v1/completions."""

    prompt: Annotated[
        Annotated[Text, Tag("text")] | Annotated[_Prompt, Tag("token_ids")],
        Discriminator(lambda prompt: "text" if isinstance(prompt, str) else "token_ids"),
        BeforeValidator(_take_only_prompt),
    ]
    logprobs: Annotated[bool, BeforeValidator(_has_logprobs)] = False


class TokenRequest(Request):
    """A request to /inference/v1/generate, as vLLM has it."""

    token_ids: _Prompt
    sampling_params: dict[str, Any] = {}
    stream: Literal[False] = False
    logprobs: Annotated[bool, BeforeValidator(_has_logprobs)] = False

    @model_validator(mode="before")
    @classmethod
    def _take_sampling_params(cls, value: Any) -> Any:
        parameters = value.get("sampling_params") if isinstance(value, dict) else None
        return {**value, **parameters} if isinstance(parameters, dict) else value


AnyRequest = ChatRequest | TextRequest | TokenRequest


def read_request(kind: type[AnyRequest], body: Any) -> AnyRequest:
    """Read the body of a request. Raises RequestError."""
    try:
        request = kind.model_validate(body)
    except ValidationError as error:
        raise _explain(error.errors(include_url=False)[0]) from error
    for name, supported in _SUPPORTED.items():
        value = request.unread.get(name)
        if value is not None and value not in supported:
            instead = " or ".join(map(json.dumps, supported)) or "leave it out"
            message = f"{name}: {json.dumps(value):.100} is not supported here; supported: {instead}"
            raise RequestError(message, param=name, code=_UNSUPPORTED)
    return request


def _explain(error: ErrorDetails) -> RequestError:
    """Say which field is wrong, its value and the rule."""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"])[1:]
    if error["type"] == "missing":
        return RequestError(f"{path} is missing", param=path)
    rule = "should be an object" if error["type"] == "model_type" else error["msg"]
    rule = rule.removeprefix("Value error, ").removeprefix("Input ")
    code = _UNSUPPORTED if error["type"] == _UNSUPPORTED else None
    return RequestError(f"{path or 'the body'}: {error['input']!r:.100}: {rule}", param=path or None, code=code)
