"""Parse sampled tokens into an assistant message with reasoning and tool calls.

https://huggingface.co/docs/transformers/chat_response_parsing describes response templates. Patterns take linear
time: names exclude the marks around them or are bounded, and quantifiers side by side are possessive.

K = tokens of a context, C = sampled tokens of a turn.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import regex  # of transformers, whose patterns are written for it

from cohort.chat.messages import EXAMPLE, EXAMPLE_TOOL, REASONING_KEYS, any_of, plain_messages
from cohort.errors import UserError
from cohort.records import IntArray, ModelCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# How the generation prompts of these formats begin the assistant's turn.
_TURN_STARTS = [
    "<|im_start|>assistant\n",
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "<|assistant|>",
    "<|Assistant|>",
    "<｜Assistant｜>",
    "<|start_of_role|>assistant<|end_of_role|>",
    "<start_of_turn>model\n",
]
_FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_THINK = {"open": "<think>", "close": "</think>"}
_ARGUMENT = {"name": "text", "args": {"strip": False}}


def _format(tool_calls: Mapping[str, Any] | None, *, reasoning: Mapping[str, Any] | None = _THINK) -> dict[str, Any]:
    fields: dict[str, Any] = {"content": {}}
    if reasoning is not None:
        fields["reasoning_content"] = dict(reasoning)
    if tool_calls is not None:
        fields["tool_calls"] = {"repeats": True, **tool_calls}
    return {"start_anchor": _TURN_STARTS, "fields": fields}


# <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>
_JSON_CALLS = {
    "open": "<tool_call>",
    "close": "</tool_call>",
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}

# <tool_call><function=f><parameter=a>1</parameter></function></tool_call>
_XML_CALLS = {
    "open_pattern": r"<tool_call>\s*<function=(?P<name>[^<>\n]+)>",
    "close_pattern": r"</function>\s*</tool_call>",
    "content": "xml-inline",
    "content_args": {
        "tag_pattern": r"<parameter=(?P<key>[^<>\n]+)>\n?(?P<value>.*?)\n?</parameter>",
        "value_parser": _ARGUMENT,
    },
    "transform": _FUNCTION,
}

# <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
_GLM_CALLS = {
    "open_pattern": r"<tool_call>\s*(?P<name>[^\s<]+)",
    "close": "</tool_call>",
    "content": "xml-inline",
    "content_args": {
        "tag_pattern": (
            r"<arg_key>\s*+(?P<key>[^<\s]*+(?:\s++[^<\s]++)*+)\s*+</arg_key>"
            r"\s*+<arg_value>(?P<value>(?:(?!<arg_key>).)*?)</arg_value>"
        ),
        "value_parser": _ARGUMENT,
    },
    "transform": _FUNCTION,
}

# {"name": "f", "parameters": {"a": 1}}, at most one call per turn
_LLAMA_CALLS = {
    "open_pattern": (
        r'(?:<\|python_tag\|>)?\{\s*(?:"type":\s*"function",\s*)?"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*'
    ),
    "close_pattern": r"\}\s*(?:<\|eot_id\|>|<\|eom_id\|>|\Z)",
    "content": "json",
    "transform": _FUNCTION,
}

# to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>, or the channel before the recipient
_GPT_OSS = {
    "start_anchor": "<|start|>assistant",
    "fields": {
        "reasoning_content": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
        "content": {"open": "<|channel|>final<|message|>", "close": ["<|return|>", "<|end|>"]},
        "tool_calls": {
            # Partial matching of the regex module takes quadratic time for a pattern with a text that any match must
            # have: `(?!)-`, which matches nothing, leaves none.
            "open_pattern": (
                r"(?:<\|channel\|>commentary\s++)?(?:to=functions\.|(?!)-)(?P<name>[^\s<]{1,200}+)\s*+"
                r"(?:<\|channel\|>commentary\s*+)?(?:<\|constrain\|>)?\s*+(?:json)?\s*+(?:<\|message\|>|(?!)-)"
            ),
            "close": "<|call|>",
            "repeats": True,
            "content": "json",
            "transform": _FUNCTION,
        },
    },
}

# The format belongs to chat templates that contain all markers; the first match counts.
_FORMATS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("<|channel|>", "functions."), _GPT_OSS),
    (("<tool_call>", "<arg_key>"), _format(_GLM_CALLS)),
    (("<tool_call>", "<function="), _format(_XML_CALLS)),
    (("<tool_call>", "<think>"), _format(_JSON_CALLS)),
    (("<tool_call>",), _format(_JSON_CALLS, reasoning=None)),
    (("<|start_header_id|>", '"parameters": '), _format(_LLAMA_CALLS, reasoning=None)),
    (("</think>",), _format(None)),
)


def find_format(chat_template: str) -> dict[str, Any] | None:
    """Return the response template whose markers the chat template contains, or None."""
    return next((spec for markers, spec in _FORMATS if all(marker in chat_template for marker in markers)), None)


_MAX_SHOWN = 200  # characters of a malformed call in its error message
_MAX_REGIONS = 200  # reasoning blocks and tool calls of a turn: transformers takes time quadratic in their number
_TOO_MANY = f"A turn has at most {_MAX_REGIONS} tool calls and reasoning blocks: those after them were not read."


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the model asks for."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A parsed assistant turn."""

    content: str  # includes the text of tool calls that cannot be parsed
    reasoning: str | None  # None: the turn has no reasoning block; "": an empty one
    tool_calls: tuple[ToolCall, ...]
    errors: tuple[str, ...]  # why tool calls cannot be parsed, as messages for the model
    call: ModelCall | None = None  # with the exact tokens, if a `RolloutModel` sampled the turn

    @property
    def message(self) -> dict[str, Any]:
        """The chat message to append to the history."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
                for call in self.tool_calls
            ]
        return message


class ResponseParser:
    """Parses sampled turns by the tokenizer's response template, or a built-in one for its chat template.

    The fields of a response template are captured as text, and each tool call is then parsed on its own, so a malformed
    call spoils neither the others nor the content.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Choose the format of replies.

        Raises:
            UserError: the tokenizer's response template is invalid.
        """
        self._tokenizer = tokenizer
        own = getattr(tokenizer, "response_template", None)
        self._is_own = bool(own)
        added = tokenizer.added_tokens_decoder.values()
        self._special_tokens = any_of(token.content for token in added if token.special)
        templates = tokenizer.chat_template or ""
        self._format = own or find_format(templates if isinstance(templates, str) else "\n".join(templates.values()))
        if self._format is None:
            return
        try:
            self._tokenizer.parse_response("", self._format, prefix="")
            self._captures = {name: _capture(field) for name, field in self._format["fields"].items()}
            self._regions = {**self._format, "defaults": {}, "fields": self._captures}
            self._tokenizer.parse_response("", self._regions, prefix="")
            self._turn_start = re.compile(_pattern(self._format, "start_anchor") or "")
            openings = filter(None, (_pattern(field, "open") for field in self._format["fields"].values()))
            self._opening = regex.compile("|".join(f"(?:{pattern})" for pattern in openings), regex.DOTALL)
        except (ValueError, KeyError, TypeError, AttributeError, re.error, regex.error) as error:
            raise UserError(f"the tokenizer's response_template is invalid: {error}") from error

    def check_tools(self) -> None:
        """Check that the format of tool calls is known.

        Raises:
            UserError: it is not.
        """
        advice = (
            "Set response_template in the model's tokenizer_config.json; see "
            "https://huggingface.co/docs/transformers/chat_response_parsing"
        )
        if self._format is None or "tool_calls" not in self._format["fields"]:
            raise UserError(
                "tools need a known format of tool calls, but the tokenizer's response_template has none, and its chat "
                "template has no built-in one (Qwen and Hermes, Qwen3-Coder, Llama 3.1, GLM-4.5, gpt-oss). " + advice
            )
        try:
            text = self._tokenizer.apply_chat_template(plain_messages(EXAMPLE[:2]), [EXAMPLE_TOOL], tokenize=False)
        except Exception:  # `ChatTemplate.check_tools` says that the template rejects tool calls
            return
        rendered = np.asarray(self._tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)
        calls = self.parse(rendered, context_ids=rendered[:0]).tool_calls
        if not any(call.name == "call_me" and call.arguments == {"key": "SentinelCall"} for call in calls):
            source = "the tokenizer's response_template" if self._is_own else "the built-in format of its markers"
            raise UserError(f"tools: {source} does not parse the tool calls that the chat template renders. {advice}")

    def parse(
        self, token_ids: IntArray, *, context_ids: IntArray, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Reply:
        """Parse the tokens of a sampled turn. Never raises, whatever the model wrote.

        Args:
            token_ids: sampled tokens, [C].
            context_ids: tokens before them, in which the chat template may have begun the turn, [K].
            tools: JSON schemas of the tools, by which arguments are cast.
        """
        if self._format is None:
            text = self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)
            return Reply(content=str(text), reasoning=None, tool_calls=(), errors=())
        text, rest = self._parsed_part(self._decode(token_ids))
        regions = self._tokenizer.parse_response(text, self._regions, prefix=self._turn_so_far(context_ids))
        contents = [*(region["text"] for region in regions.get("content", [])), rest]
        reasoning = [region["text"] for key in REASONING_KEYS for region in regions.get(key, [])]
        end = self._end_of_turn(token_ids)
        sources = [_source(region, end) for region in regions.get("tool_calls", [])]
        ids = np.concatenate([context_ids, token_ids]).astype(np.int64)
        turn = hashlib.sha1(ids.tobytes(), usedforsecurity=False)
        calls: list[ToolCall] = []
        malformed, errors = [], [_TOO_MANY] if rest else []
        for source in sources:
            try:
                parsed = [_read_call(call) for call in self._parse_calls(source, tools)]
            except Exception as error:  # the model may have written anything
                reason: object = error.__cause__ or error  # the JSON decoder's, which is shorter
                if isinstance(reason, RecursionError):
                    reason = "it is nested too deeply"
                errors.append(f"The tool call cannot be parsed: {reason}. It was: {source:.{_MAX_SHOWN}}")
                malformed.append(source)
                continue
            for call_id, name, arguments in parsed:
                call_id = call_id or _new_call_id(turn, len(calls))
                calls.append(ToolCall(id=call_id, name=name, arguments=arguments))
        reply = Reply(
            content=self._join([*contents, *malformed]),
            reasoning=self._join(reasoning) if reasoning else None,
            tool_calls=tuple(calls),
            errors=tuple(errors),
        )
        rejection = self._rejection(reply)
        if rejection is None:
            return reply
        errors.append(f"The tool calls cannot be made: {rejection}")
        return replace(reply, content=self._join([*contents, *sources]), tool_calls=(), errors=tuple(errors))

    def _parsed_part(self, text: str) -> tuple[str, str]:
        """Split a turn where it has too many reasoning blocks and tool calls; the second part becomes content."""
        openings = self._opening.finditer(text) if self._opening.pattern else iter(())
        end = next((match.start() for match in islice(openings, _MAX_REGIONS, None)), len(text))
        return text[:end], text[end:]

    def _turn_so_far(self, context_ids: IntArray) -> str:
        """What the chat template has written of the turn, with the marker of its start; "" if there is no marker."""
        text = self._decode(context_ids)
        starts = [match.start() for match in self._turn_start.finditer(text)]
        return text[starts[-1] :] if starts else ""

    def _rejection(self, reply: Reply) -> str | None:
        """Why the chat template rejects the tool calls: Llama's, for example, takes one per turn. None: it does not."""
        if not reply.tool_calls:
            return None
        messages = plain_messages([EXAMPLE[0], reply.message])
        try:
            self._tokenizer.apply_chat_template(messages, [EXAMPLE_TOOL], tokenize=False)
        except Exception as error:  # templates are code and may raise anything
            return str(error)
        return None

    def _parse_calls(self, source: str, tools: Sequence[Mapping[str, Any]] | None) -> list[Any]:
        """Parse the text of a region of tool calls by its response template. Raises if it is malformed."""
        assert self._format is not None
        field = self._format["fields"]["tool_calls"]
        keys = ("open", "open_pattern", "content", "content_args", "transform", "transform_each")
        schema = {"start_anchor": "-", "fields": {"calls": {key: field[key] for key in keys if key in field}}}
        calls = self._tokenizer.parse_response(source, schema, prefix="", tools=tools)["calls"]
        return calls if isinstance(calls, list) else [calls]

    def _join(self, texts: Iterable[str]) -> str:
        """Join texts without special tokens, which templates could take for their own."""
        return "\n".join(filter(None, (self._special_tokens.sub("", text).strip() for text in texts)))

    def _end_of_turn(self, token_ids: IntArray) -> str:
        """Text of the last token if it is a special one, else ""."""
        last = self._tokenizer.added_tokens_decoder.get(int(token_ids[-1])) if len(token_ids) else None
        return last.content if last is not None and last.special else ""

    def _decode(self, token_ids: IntArray) -> str:
        return str(self._tokenizer.decode(token_ids.tolist(), clean_up_tokenization_spaces=False))


def _capture(field: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field of a response template that captures its regions as text, all of them."""
    captured = {key: field[key] for key in ("close", "close_pattern") if key in field}
    captured |= {"repeats": True, "content": "text", "content_args": {"strip": False}}
    pattern = _pattern(field, "open")
    if pattern is None:  # what is outside of all other regions
        return captured | {"transform": {"text": "{content}"}}
    return captured | {
        "open_pattern": f"(?P<opening>{pattern})",
        "transform": {"opening": "{opening}", "text": "{content}"},
    }


def _pattern(field: Mapping[str, Any], key: str) -> str | None:
    """Return the regular expression of a response template's `key`, which may also be a text or several."""
    if key not in field:
        return field.get(f"{key}_pattern")
    return any_of([field[key]] if isinstance(field[key], str) else field[key]).pattern


def _source(region: Mapping[str, str], end: str) -> str:
    """Text of a region of tool calls without the end of the turn."""
    return region["opening"] + region["text"].rstrip().removesuffix(end)


def _read_call(call: Any) -> tuple[str | None, str, dict[str, Any]]:
    """Validate a tool call: return its id if it has one, its name and its arguments. Raises ValueError."""
    function = call.get("function", call) if isinstance(call, Mapping) else call
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError('a tool call is an object with a "name" and "arguments"')
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, Mapping):
        raise ValueError(f"the arguments are an object with one value per parameter, not {type(arguments).__name__}")
    json.dumps([function["name"], arguments], ensure_ascii=False).encode()  # JSON can escape invalid Unicode
    call_id = call.get("id")
    return call_id if isinstance(call_id, str) else None, function["name"], dict(arguments)


def _new_call_id(turn: Any, index: int) -> str:
    """Return an id that is the same in every run. Mistral's chat templates demand nine letters or digits.

    Args:
        turn: hash of the context and the sampled tokens.
        index: of the call in the turn.
    """
    digest = turn.copy()
    digest.update(np.int64(index).tobytes())
    return str(digest.hexdigest()[:9])
