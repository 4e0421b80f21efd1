"""Parse sampled tokens into an assistant message with reasoning and tool calls.

K = tokens of a context, C = sampled tokens of a turn.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cohort.chat.calls import RawCall, cast_arguments
from cohort.chat.formats import FORMATS, find_format, find_thoughts
from cohort.chat.messages import EXAMPLE, EXAMPLE_TOOL, any_of, arguments_as_text, plain_messages, takes_text_arguments
from cohort.chat.replies import MAX_REGIONS, Piece, Thoughts, read_reply
from cohort.chat.response_template import ResponseTemplate
from cohort.errors import UserError
from cohort.records import FinishReason, IntArray, Message, ModelCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_SHOWN = 200  # characters of a malformed call in its error message
_TOO_MANY = f"A turn has at most {MAX_REGIONS} tool calls and reasoning blocks: those after them were not read."
_ADVICE = (
    "Set response_template in the model's tokenizer_config.json; see "
    "https://huggingface.co/docs/transformers/chat_response_parsing"
)


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
    is_cut: bool = False  # a limit cut the turn inside a tool call: no call is made
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
    """Parses sampled turns by the tokenizer's response template, or the format of its chat template's family."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Choose the format of replies.

        Raises:
            UserError: the tokenizer's response template is invalid.
        """
        self._tokenizer = tokenizer
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._special_tokens = any_of(special)
        self._takes_text = bool(tokenizer.chat_template) and takes_text_arguments(tokenizer)
        templates = tokenizer.chat_template or ""
        text = templates if isinstance(templates, str) else "\n".join(templates.values())
        own = getattr(tokenizer, "response_template", None)
        self._own = ResponseTemplate(tokenizer, own) if own else None
        self._format = find_format(text)
        pair = find_thoughts(text, (token.content for token in tokenizer.added_tokens_decoder.values()))
        self._thoughts = Thoughts(open=pair[0], close=pair[1]) if pair else Thoughts(are_separate=False)
        marks = self._format.own_texts if self._format else frozenset()
        # they may end a reply without ending the turn
        self._ends_of_parts = {*marks, self._thoughts.open, self._thoughts.close}
        if self._format and self._format.syntax == "harmony":
            self._ends_of_parts |= {"<|call|>", "<|end|>"}

    @property
    def family(self) -> str | None:
        """The family of models that writes tool calls like this one; None if it is unknown."""
        return self._format.family if self._format else None

    @property
    def thought_markers(self) -> tuple[str, str] | None:
        """What opens and closes thoughts; None if the chat template and the tokenizer know none."""
        if self._format is not None and self._format.syntax == "harmony":
            return "<|channel|>analysis<|message|>", "<|end|>"
        return (self._thoughts.open, self._thoughts.close) if self._thoughts.are_separate else None

    def check_tools(self) -> None:
        """Check that the format of tool calls is known.

        Raises:
            UserError: it is not.
        """
        if not (self._own.has_tools if self._own else self._format):
            known = "; ".join(dict.fromkeys(form.family for form in FORMATS))
            raise UserError(
                "tools need a known format of tool calls, but the tokenizer's response_template has none, and its chat "
                f"template has no built-in one ({known}). {_ADVICE}"
            )
        rendered = self._rendered_call()
        if rendered is None:  # `ChatTemplate.check_tools` says that the template rejects tool calls
            return
        ids = np.asarray(self._tokenizer(rendered.rstrip(), add_special_tokens=False)["input_ids"], dtype=np.int64)
        calls = self.parse(ids, context_ids=ids[:0]).tool_calls
        if not any(call.name == "call_me" and call.arguments == {"key": "SentinelCall"} for call in calls):
            source = "the tokenizer's response_template" if self._own else f"the format of {self.family}"
            raise UserError(f"tools: {source} does not parse the tool calls that the chat template renders. {_ADVICE}")

    def _rendered_call(self) -> str | None:
        """Render the turn of an example's tool call; None if the chat template rejects it."""
        user, call = EXAMPLE[:2]
        if self._format is not None and self._format.syntax == "kimi":  # the id has the function's name
            call = {**call, "tool_calls": [{**call["tool_calls"][0], "id": "functions.call_me:0"}]}
        texts = []
        for messages, has_prompt in (([user, call], False), ([user], True), ([user], False)):
            try:
                text = self._render(messages, has_prompt)
            except Exception:  # templates are code and may raise anything
                return None
            texts.append(text)
        if self._own:  # it finds the turn itself
            return texts[0]
        return next((texts[0].removeprefix(start) for start in texts[1:] if texts[0].startswith(start)), texts[0])

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        plain: Sequence[Message] = plain_messages(messages)
        plain = arguments_as_text(plain) if self._takes_text else plain
        text = self._tokenizer.apply_chat_template(
            list(plain), [EXAMPLE_TOOL], tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return str(text)

    def parse(
        self,
        token_ids: IntArray,
        *,
        context_ids: IntArray,
        tools: Sequence[Mapping[str, Any]] | None = None,
        finish_reason: FinishReason = "stop",
    ) -> Reply:
        """Parse the tokens of a sampled turn. Never raises, whatever the model wrote.

        Args:
            token_ids: sampled tokens, [C].
            context_ids: tokens before them, in which the chat template may have begun the turn, [K].
            tools: JSON schemas of the tools, by which arguments are cast.
            finish_reason: "length": a call that the turn ends inside of was cut off. Then none of the turn's calls is
                made, and `Reply.is_cut` is set. "stop": such a call is malformed, unless only its end marker misses.
        """
        is_cut = finish_reason == "length"
        ids = np.concatenate([context_ids, token_ids]).astype(np.int64)
        turn = hashlib.sha1(ids.tobytes(), usedforsecurity=False)
        calls: list[ToolCall] = []
        contents: list[str] = []  # without the sources of calls
        sources: list[str] = []  # with them
        reasoning = self._prewritten_reasoning(context_ids)
        errors: list[str] = []
        was_cut, previous = False, ""
        for piece in self._pieces(token_ids, context_ids, tools, is_cut=is_cut):
            if piece.kind == "thought":
                reasoning.append(piece.text)
                previous = piece.kind
                continue
            made = []
            if piece.kind == "call":
                try:
                    made = [_tool_call(call, tools, turn, len(calls) + i) for i, call in enumerate(piece.calls)]
                except (ValueError, RecursionError) as error:
                    reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
                    piece = replace(piece, kind="malformed", reason=reason)
            if piece.kind == "malformed":
                errors.append(f"The tool call cannot be parsed: {piece.reason}. It was: {piece.text:.{_MAX_SHOWN}}")
            elif piece.kind == "beyond":
                errors.append(_TOO_MANY)
            was_cut = was_cut or piece.kind == "cut"
            calls += made
            joined = piece.kind == "text" == previous
            previous = piece.kind
            if piece.kind != "call":
                _append(contents, piece.text, joined=joined)
            _append(sources, piece.text, joined=joined)
        reply = Reply(
            content=self._join(sources if was_cut else contents),
            reasoning=self._join(reasoning) if reasoning else None,
            tool_calls=() if was_cut else tuple(calls),
            errors=tuple(errors),
            is_cut=was_cut,
        )
        rejection = self._rejection(reply)
        if rejection is None:
            return reply
        errors.append(f"The tool calls cannot be made: {rejection}")
        return replace(reply, content=self._join(sources), tool_calls=(), errors=tuple(errors))

    def _pieces(
        self,
        token_ids: IntArray,
        context_ids: IntArray,
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        is_cut: bool,
    ) -> Iterator[Piece]:
        text, end = self._decode(token_ids), self._end_of_turn(token_ids)
        if self._own is not None:
            return self._own.read(text, self._decode(context_ids), tools, end=end, is_cut=is_cut)
        text = text if end in self._ends_of_parts else text.removesuffix(end)
        opens = self._prompt_ends_with(context_ids, self._thoughts.open)
        return read_reply(text, self._format, self._thoughts, inside=opens, is_cut=is_cut)

    def _prewritten_reasoning(self, context_ids: IntArray) -> list[str]:
        """Return an empty thought if the prompt has closed one."""
        if self._own is None and self._prompt_ends_with(context_ids, self._thoughts.close):
            return [""]
        return []

    def _prompt_ends_with(self, context_ids: IntArray, marker: str) -> bool:
        if not self._thoughts.are_separate:
            return False
        tail = self._decode(context_ids[-4 * len(marker) - 16 :])  # a token has at least a byte
        return tail.rstrip().endswith(marker)

    def _rejection(self, reply: Reply) -> str | None:
        """Why the chat template rejects the tool calls: Llama's, for example, takes one per turn. None: it does not."""
        if not reply.tool_calls:
            return None
        try:
            self._render([EXAMPLE[0], reply.message])
        except Exception as error:  # templates are code and may raise anything
            return str(error)
        return None

    def _join(self, texts: Iterable[str]) -> str:
        """Join texts without special tokens, which templates could take for their own."""
        return "\n".join(filter(None, (self._special_tokens.sub("", text).strip() for text in texts)))

    def _end_of_turn(self, token_ids: IntArray) -> str:
        """Text of the last token if it is a special one, else ""."""
        last = self._tokenizer.added_tokens_decoder.get(int(token_ids[-1])) if len(token_ids) else None
        return last.content if last is not None and last.special else ""

    def _decode(self, token_ids: IntArray) -> str:
        return str(self._tokenizer.decode(token_ids.tolist(), clean_up_tokenization_spaces=False))


def _append(texts: list[str], text: str, *, joined: bool) -> None:
    """Append a text, or join it to the last one."""
    if joined:
        texts[-1] += text
    else:
        texts.append(text)


def _tool_call(call: RawCall, tools: Sequence[Mapping[str, Any]] | None, turn: Any, index: int) -> ToolCall:
    """Cast the arguments of a call. Raises ValueError for texts that are no Unicode, which JSON can escape."""
    arguments = cast_arguments(call, tools)
    json.dumps([call.name, arguments, call.id], ensure_ascii=False).encode()
    return ToolCall(id=call.id or _new_call_id(turn, index), name=call.name, arguments=arguments)


def _new_call_id(turn: Any, index: int) -> str:
    """Return an id that is the same in every run. Mistral's chat templates demand nine letters or digits.

    Args:
        turn: hash of the context and the sampled tokens.
        index: of the call in the turn.
    """
    digest = turn.copy()
    digest.update(np.int64(index).tobytes())
    return str(digest.hexdigest()[:9])
