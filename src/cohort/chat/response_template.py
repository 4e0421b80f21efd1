"""Read replies by a tokenizer's own response template.

https://huggingface.co/docs/transformers/chat_response_parsing describes response templates.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import regex  # of transformers, whose patterns are written for it

from cohort.chat.calls import Malformed, RawCall, arguments_of
from cohort.chat.messages import REASONING_KEYS, any_of
from cohort.chat.replies import MAX_REGIONS, Piece
from cohort.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ResponseTemplate:
    """A response template. Its fields are captured as text, and each region of tool calls is then parsed on its own."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", template: Mapping[str, Any]) -> None:
        """Check the template.

        Raises:
            UserError: it is invalid.
        """
        self._tokenizer = tokenizer
        self._template = template
        try:
            tokenizer.parse_response("", template, prefix="")
            captures = {name: _capture(field) for name, field in template["fields"].items()}
            self._regions = {**template, "defaults": {}, "fields": captures}
            tokenizer.parse_response("", self._regions, prefix="")
            self._turn_start = re.compile(_pattern(template, "start_anchor") or "")
            openings = filter(None, (_pattern(field, "open") for field in template["fields"].values()))
            self._opening = regex.compile("|".join(f"(?:{pattern})" for pattern in openings), regex.DOTALL)
        except (ValueError, KeyError, TypeError, AttributeError, re.error, regex.error) as error:
            raise UserError(f"the tokenizer's response_template is invalid: {error}") from error

    @property
    def has_tools(self) -> bool:
        """Whether it describes tool calls."""
        return "tool_calls" in self._template["fields"]

    def read(
        self, text: str, context: str, tools: Sequence[Mapping[str, Any]] | None, *, end: str, is_cut: bool
    ) -> Iterator[Piece]:
        """Yield the parts of a reply: answers, thoughts, then tool calls.

        Args:
            text: the reply.
            context: what is before it, in which the chat template may have begun the turn.
            tools: JSON schemas of the tools, by which arguments are cast.
            end: the end-of-turn token, "" if the reply has none.
            is_cut: whether a limit ended the reply.
        """
        text, rest = self._parsed_part(text)
        regions = self._tokenizer.parse_response(text, self._regions, prefix=self._turn_so_far(context))
        yield from (Piece("text", region["text"]) for region in regions.get("content", []))
        for key in REASONING_KEYS:
            yield from (Piece("thought", region["text"]) for region in regions.get(key, []))
        for region in regions.get("tool_calls", []):
            source = region["opening"] + region["text"].rstrip().removesuffix(end)
            try:
                calls = [_call(call) for call in self._parse_calls(source, tools)]
            except Exception as error:  # the model may have written anything
                reason: object = error.__cause__ or error  # the JSON decoder's, which is shorter
                if isinstance(reason, RecursionError):
                    reason = "it is nested too deeply"
                is_last = is_cut and text.rstrip().endswith(source.rstrip())
                yield Piece("cut" if is_last else "malformed", source, reason=str(reason))
            else:
                yield Piece("call", source, calls=calls)
        if rest:
            yield Piece("beyond", rest)

    def _parsed_part(self, text: str) -> tuple[str, str]:
        """Split a turn where it has too many regions, in whose number transformers takes quadratic time."""
        openings = self._opening.finditer(text) if self._opening.pattern else iter(())
        end = next((match.start() for match in islice(openings, MAX_REGIONS, None)), len(text))
        return text[:end], text[end:]

    def _turn_so_far(self, context: str) -> str:
        """What the chat template has written of the turn, with the marker of its start; "" if there is no marker."""
        starts = [match.start() for match in self._turn_start.finditer(context)]
        return context[starts[-1] :] if starts else ""

    def _parse_calls(self, source: str, tools: Sequence[Mapping[str, Any]] | None) -> list[Any]:
        """Parse the text of a region of tool calls. Raises if it is malformed."""
        field = self._template["fields"]["tool_calls"]
        keys = ("open", "open_pattern", "content", "content_args", "transform", "transform_each")
        schema = {"start_anchor": "-", "fields": {"calls": {key: field[key] for key in keys if key in field}}}
        calls = self._tokenizer.parse_response(source, schema, prefix="", tools=tools)["calls"]
        return calls if isinstance(calls, list) else [calls]


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


def _call(call: Any) -> RawCall:
    """Validate a tool call."""
    function = call.get("function", call) if isinstance(call, Mapping) else call
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise Malformed('a tool call is an object with a "name" and "arguments"')
    call_id = call.get("id")
    arguments = arguments_of(function.get("arguments"))
    return RawCall(function["name"], arguments, call_id if isinstance(call_id, str) else None)
