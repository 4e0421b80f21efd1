"""Formats of tool calls and reasoning, as response templates of transformers, for tokenizers that have none.

https://huggingface.co/docs/transformers/chat_response_parsing describes response templates. Patterns take linear
time: names exclude the marks around them or are bounded, and quantifiers side by side are possessive.
"""

from collections.abc import Mapping
from typing import Any

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
