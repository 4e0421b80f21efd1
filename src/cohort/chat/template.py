"""Render chat messages as token ids, and extend a sampled turn without tokenizing it again.

K = tokens of a context, C = sampled tokens of a turn, S = tokens of a suffix.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from cohort.chat.formats import find_thoughts
from cohort.chat.messages import (
    EXAMPLE,
    EXAMPLE_TOOL,
    REASONING_KEYS,
    Masked,
    any_of,
    are_equal,
    arguments_as_text,
    mask,
    plain_messages,
    takes_text_arguments,
)
from cohort.errors import UserError, describe_error, did_you_mean
from cohort.records import FinishReason, IntArray, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[Mapping[str, Any]] | None  # JSON schemas, as `tool_schema` makes them

# Arguments of `apply_chat_template` set by Cohort; all others are variables of the template.
_RESERVED_KWARGS = frozenset(
    {
        *("conversation", "messages", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"),
        *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        *("sanitize_control_tokens", "tokenizer_kwargs"),
    }
)


@dataclass(slots=True)
class Rendering:
    """The latest rendering of a growing conversation, with masked assistant messages.

    The next one starts with the same text unless the template rewrites the history.
    """

    messages: Sequence[Message] = ()
    tools: Tools = None
    text: str = ""


class ChatTemplate:
    """The chat template of a tokenizer. It writes special tokens itself, so the tokenizer adds none."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", *, kwargs: Mapping[str, Any] | None = None) -> None:
        """Create the template of a tokenizer.

        Args:
            tokenizer: tokenizer with a chat template.
            kwargs: `data.chat_template_kwargs`, variables of the template.

        Raises:
            UserError: there is no chat template, or it never reads one of `kwargs`.
        """
        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs or {})
        self._check_kwargs()
        name = getattr(tokenizer, "name_or_path", "")
        self._name = f"the chat template of {name}" if name else "the chat template"
        added = [token.content for token in tokenizer.added_tokens_decoder.values()]
        self._added_tokens = any_of(text for text in added if text.strip())  # Gemma's has line breaks
        template = tokenizer.get_chat_template(tools=self._kwargs.get("tools"))
        self._tool_variables = ("tools", "xml_tools") if "xml_tools" in template else ("tools",)  # SmolLM3's
        self._takes_text = takes_text_arguments(tokenizer)
        self._special = tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)

    def render(self, messages: Sequence[Message], tools: Tools = None) -> IntArray:
        """Render messages and the generation prompt as token ids, [K].

        Raises:
            UserError: the template rejects the messages, or their content is not text.
        """
        return self._encode(self._text(plain_messages(messages), tools))

    def written_twice(self, messages: Sequence[Message]) -> str | None:
        """Return a special token that a message begins with and the template writes too; None if there is none.

        Such a message is the output of a template already.
        """
        contents = [content for message in messages if isinstance(content := message.get("content"), str)]
        for content in contents:
            token = next((t for t in self._special if content.lstrip().startswith(t)), None)
            if token is not None:
                text = self._text(plain_messages(messages), None)
                return token if text.count(token) > sum(c.count(token) for c in contents) else None
        return None

    def suffix(
        self,
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Tools = None,
        *,
        sampled_ids: IntArray,
        finish_reason: FinishReason,
        keep_history: bool = False,
        rendering: Rendering | None = None,
    ) -> IntArray | None:
        """Return the ids that follow a sampled turn: its end, the messages `new` and the generation prompt, [S].

        Contents of assistant messages are rendered as sentinels, so what was sampled need not be what the template
        would write: other spaces in JSON, or another tokenization of the same text.

        Args:
            history: all messages so far, ending with the sampled assistant message.
            new: messages to append.
            tools: tools that the history was rendered with.
            sampled_ids: tokens of the sampled turn, including the end-of-turn token if sampled, [C].
            finish_reason: "stop": the suffix does not repeat the end-of-turn token, if one was sampled; "length": the
                suffix supplies it.
            keep_history: go on from the sampled tokens even where the template rewrites what was before.
            rendering: the conversation's previous rendering, which need not be repeated; this call replaces it.

        Returns:
            The ids, or None if the template does not continue what was sampled: given `new`, it drops or changes what
            it rendered before (such as reasoning), or ends the turn with another control token. A new sequence must
            then start from `render`.

        Raises:
            UserError: the template rejects the messages, or their content is not text.
        """
        messages, following = plain_messages(history), plain_messages(new)
        masked = mask(messages, following)
        try:
            turn = self._turn(masked.messages, following, tools, rendering)
        except UserError:
            self._text([*messages, *following], tools)  # raises unless only the sentinels were rejected
            return None
        if turn is None or not all(sentinel in turn for sentinel in masked.last):
            return self._kept_suffix(masked, following, tools, sampled_ids, finish_reason) if keep_history else None
        if messages[-1].get("reasoning_content") == "":
            marker = self._marker(masked, tools)  # of the empty thought that the model wrote, unless the prompt did
            if marker in self._decode(sampled_ids) and not turn.lstrip().startswith(marker):
                return self._kept_suffix(masked, following, tools, sampled_ids, finish_reason) if keep_history else None
        end = max((turn.index(sentinel) + len(sentinel) for sentinel in masked.last), default=0)
        ends_inside_call = masked.last_is_call or not masked.last
        return self._continue(turn[end:], sampled_ids, finish_reason, ends_inside_call)

    def _kept_suffix(
        self, masked: Masked, new: Sequence[Message], tools: Tools, sampled_ids: IntArray, finish_reason: FinishReason
    ) -> IntArray | None:
        """Return what the template writes after the last assistant message, whatever it makes of those before."""
        last = {key: value for key, value in masked.messages[-1].items() if key not in REASONING_KEYS}
        if not last.get("content") and not masked.last_is_call:
            last["content"] = masked.unused
        text = self._text([*masked.messages[:-1], last, *new], tools)
        if not any(sentinel in text for sentinel in (*masked.last, masked.unused)):  # a call without arguments
            last["content"] = masked.unused
            text = self._text([*masked.messages[:-1], last, *new], tools)
        end = max(text.rfind(sentinel) + len(sentinel) for sentinel in (*masked.last, masked.unused))
        if not any(sentinel in text for sentinel in (*masked.last, masked.unused)):
            return None
        return self._continue(text[end:], sampled_ids, finish_reason, masked.last_is_call)

    def rewrites(self, tools: Tools = None) -> str | None:
        """Say what of its history the template changes, by a conversation with it; None if it keeps everything.

        Sampled tokens then are not what the template renders, so a new token sequence starts.
        """
        template = self._tokenizer.get_chat_template(tools=self._kwargs.get("tools"))
        user, call, result = EXAMPLE
        answer: Message = {"role": "assistant", "content": "Done."}
        more: Message = {"role": "user", "content": "More."}
        schemas = tools or None
        tokens = [token.content for token in self._tokenizer.added_tokens_decoder.values()]
        conversations = [(answer, more, "drops thoughts before a new user message")]
        if tools:
            conversations.insert(0, (call, result, "drops thoughts once another message follows"))
        for reasoning in self._possible_reasoning(find_thoughts(template, tokens), template, schemas):
            for turn, new, dropped in conversations:
                if not self._keeps([user, {**turn, **reasoning}], [new], schemas):
                    if reasoning.get("reasoning_content"):
                        return dropped
                    return (
                        "changes a turn once another follows"
                        if turn is call
                        else ("changes earlier turns before a new user message")
                    )
        return None

    def _possible_reasoning(
        self, thoughts: tuple[str, str] | None, template: str, tools: Tools
    ) -> Sequence[Mapping[str, str]]:
        """Return the reasoning that turns may have: none, an empty one that the prompt writes, or some."""
        some = {"reasoning_content": "Why."}
        if thoughts is None:
            return [{}, some] if "analysis" in template and "<|channel|>" in template else [{}]
        prompt = self._text(plain_messages(EXAMPLE[:1]), tools).rstrip()
        if prompt.endswith(thoughts[1]):
            return [{"reasoning_content": ""}]
        return [some] if prompt.endswith(thoughts[0]) else [{}, some]

    def _keeps(self, history: Sequence[Message], new: Sequence[Message], tools: Tools) -> bool:
        masked = mask(plain_messages(history), plain_messages(new))
        try:
            turn = self._turn(masked.messages, plain_messages(new), tools)
        except UserError:
            return True  # a conversation that cannot be
        return turn is not None and all(sentinel in turn for sentinel in masked.last)

    @cached_property
    def takes_errors_as_results(self) -> bool:
        """Whether a tool message may follow an assistant message without calls, as after a malformed one."""
        sentinel = "SentinelResult"
        answer: Message = {"role": "assistant", "content": "Call."}
        error: Message = {"role": "tool", "content": sentinel}  # it answers no call, so it has neither name nor id
        try:
            return sentinel in self._text(plain_messages([EXAMPLE[0], answer, error]), [EXAMPLE_TOOL])
        except UserError:
            return False

    def check_tools(self, tools: Tools) -> None:
        """Check that the template renders tool schemas, assistant tool calls and tool messages.

        Raises:
            UserError: it drops or rejects one of them.
        """
        if not tools:
            return
        advice = "Use a model whose chat template has tools, or put such a chat_template.jinja into the model's folder"
        try:
            text = self._text(plain_messages(EXAMPLE), [*tools, EXAMPLE_TOOL])
        except UserError as error:
            raise UserError(f"tools need a chat template that renders them, but {error}. {advice}") from error
        sentinels = {
            "SentinelSchema": "tool schemas",
            "SentinelCall": "tool calls of assistant messages",
            "SentinelResult": "tool messages",
        }
        dropped = [part for sentinel, part in sentinels.items() if sentinel not in text]
        if dropped:
            parts = " and ".join(dropped)
            raise UserError(f"tools need a chat template that renders them, but {self._name} drops {parts}. {advice}")

    def _turn(
        self, history: Sequence[Message], new: Sequence[Message], tools: Tools, rendering: Rendering | None = None
    ) -> str | None:
        """Return the text after the context of the last assistant message, or None if the context changes."""
        messages = [*history, *new]
        text = self._text(messages, tools)
        context = None
        if rendering is not None:
            is_context = are_equal(rendering.messages, history[:-1]) and rendering.tools == tools
            # the prefix may still differ: some templates write the date
            context = rendering.text if is_context and text.startswith(rendering.text) else None
            rendering.messages, rendering.tools, rendering.text = messages, tools, text
        if context is None:
            context = self._text(history[:-1], tools)
        return text[len(context) :] if text.startswith(context) else None

    def _marker(self, masked: Masked, tools: Tools) -> str:
        """Return what the template writes before the reasoning of the last message, such as `<think>`."""
        last = {**masked.messages[-1], "reasoning_content": masked.unused, "thinking": masked.unused}
        before, found, _ = (self._turn([*masked.messages[:-1], last], [], tools) or "").partition(masked.unused)
        return before.strip() if found else masked.unused

    def _continue(
        self, tail: str, sampled_ids: IntArray, finish_reason: FinishReason, ends_inside_call: bool
    ) -> IntArray | None:
        """Tokenize what follows the sampled turn.

        Args:
            tail: text after the last sentinel of the turn. It may begin with text that the model writes itself, such
                as the end of a tool call.
            sampled_ids: [C]
            finish_reason: how the turn ended.
            ends_inside_call: whether the model wrote more after the last sentinel.
        """
        sampled = self._decode(sampled_ids)
        last = self._tokenizer.added_tokens_decoder.get(int(sampled_ids[-1])) if len(sampled_ids) else None
        stopped_by = last.content if last is not None and finish_reason == "stop" else None
        written = len(tail)  # end of the text that the model may have written itself
        for match in self._added_tokens.finditer(tail):
            if match.group() == stopped_by:
                ids = self._encode(tail[match.start() :])
                return ids[1:] if ids[0] == sampled_ids[-1] else None
            if match.group() not in sampled:
                written = match.start()
                break
        if last is not None and last.special and stopped_by is not None:  # others may have completed a stop string
            return None
        if ends_inside_call:
            # what was sampled after the call, or instead of its end, would not be in the history
            end_of_call = "".join(tail[:written].split()).lstrip("\"'")  # the sentinel is a quoted text
            is_whole = "".join(sampled.split()).endswith(end_of_call)
            return self._encode(tail[written:]) if is_whole and written < len(tail) else None
        closing = tail[:written].strip()  # such as </think>
        return self._encode(tail[written:] if closing and sampled.rstrip().endswith(closing) else tail)

    def _text(self, messages: Sequence[Message], tools: Tools) -> str:
        """Render messages with the generation prompt as text."""
        schemas = [dict(tool) for tool in tools or ()]
        kwargs = self._kwargs | (dict.fromkeys(self._tool_variables, schemas) if schemas else {})
        messages = arguments_as_text(messages) if self._takes_text else messages
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=False, **kwargs
            )
            text.encode()  # tokenizers reject invalid Unicode
            return str(text)
        except Exception as error:  # templates are code and may raise anything
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise UserError(f"{self._name} rejected the messages (roles: {roles}): {describe_error(error)}") from error

    def _encode(self, text: str) -> IntArray:
        return np.asarray(self._tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)

    def _decode(self, token_ids: IntArray) -> str:
        return str(self._tokenizer.decode(token_ids.tolist(), clean_up_tokenization_spaces=False))

    def _check_kwargs(self) -> None:
        if not self._tokenizer.chat_template:
            raise UserError(
                "data.apply_chat_template=true: the tokenizer has no chat template; put a chat_template.jinja into the "
                "model's folder, or use data.apply_chat_template=false, which takes the text as it is"
            )
        reserved = sorted(_RESERVED_KWARGS & self._kwargs.keys())
        if reserved:
            raise UserError(
                f"data.chat_template_kwargs: {reserved[0]!r} is set by Cohort; use only variables that the chat "
                "template reads, such as enable_thinking"
            )
        template = self._tokenizer.get_chat_template(tools=self._kwargs.get("tools"))
        identifiers = set(re.findall(r"[A-Za-z_]\w*", template))
        for key in self._kwargs:
            if key not in identifiers:
                raise UserError(
                    f"data.chat_template_kwargs: the model's chat template never reads {key!r}, so it has no "
                    f"effect{did_you_mean(key, identifiers)}"
                )
