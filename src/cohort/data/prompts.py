"""Render rows as prompts: chat template, tokenizer, length limit.

P = tokens of one prompt.
"""

import ast
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cohort.chat import ChatTemplate, prompt_messages
from cohort.errors import UserError, excerpt, suggest
from cohort.records import IntArray, Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Content = str | Sequence[Message]

_NUM_TRIED = 20  # prompts that are encoded and decoded again
_MAX_CHARACTERS = 2000  # of each
_MESSAGES_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*['"](role|content)['"]\s*:""")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """Prompts of a dataset, rendered once, in file order."""

    prompts: tuple[Prompt, ...]  # at least one, all with epoch 0; dropped rows leave gaps in the ids
    num_dropped_overlong: int  # rows dropped because their prompt exceeds the limit


class PromptRenderer:
    """Renders the prompt column of a row as token ids. Nothing is tokenized twice.

    With the chat template, text becomes one user message and chat messages are rendered as they are; the system prompt
    is added unless the messages have one. The template writes special tokens, so the tokenizer adds none. Without the
    template, text is tokenized verbatim, with the tokenizer's default special tokens.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        prompt_column: str = "prompt",
        system_prompt: str | None = None,
        apply_chat_template: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Arguments are the keys of the `data` section, which messages name, and JSON schemas of tools.

        `system_prompt`, `chat_template_kwargs` and `tools` need the chat template. An empty system prompt is rendered
        as an empty system message, which keeps templates from adding their own.

        Raises:
            UserError: the chat template is needed but missing, or never reads one of `chat_template_kwargs`.
        """
        assert apply_chat_template or not (system_prompt or chat_template_kwargs or tools), "the configuration refuses"
        self.prompt_column = prompt_column
        self._tokenizer = tokenizer
        self._system_prompt = system_prompt
        self._tools = tools
        self._template = ChatTemplate(tokenizer, kwargs=chat_template_kwargs) if apply_chat_template else None

    def render(self, value: Any, *, where: str) -> tuple[Content, IntArray]:
        """Render one prompt: return its content as written, and its token ids [P].

        `value` is the prompt column of one row; errors start with `where`, such as "data.prompt='question': row 3".
        Keys of messages whose value is None are left out: Arrow adds them where messages have different keys.
        Raises `UserError` if the value is neither text nor messages, is empty or malformed, or does not render.
        """
        content = read_content(value, where)
        token_ids = (
            self._encode(content, where) if self._template is None else self._render(content, where, self._template)
        )
        assert token_ids.ndim == 1, token_ids.shape
        if len(token_ids) == 0:
            raise UserError(f"{where}: the prompt has no tokens in this tokenizer's vocabulary")
        return content, token_ids

    @cached_property
    def placeholder(self) -> IntArray:
        """Token ids for rows without a prompt, which an environment writes: those of an empty user message."""
        assert self._template is not None, "environments need the chat template"
        return self._render("", f"{self.prompt_column!r}: a row without a prompt", self._template)

    def _render(self, content: Content, where: str, template: ChatTemplate) -> IntArray:
        messages = prompt_messages(content, self._system_prompt)
        try:
            token_ids, token = template.render(messages, self._tools), template.written_twice(messages)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        if token is not None:
            raise UserError(
                f"{where}: the text begins with {token!r}, which the chat template writes as well, so it would be "
                f"applied twice; use data.apply_chat_template: false, or a column with the plain text"
            )
        return token_ids

    def _encode(self, content: Content, where: str) -> IntArray:
        if not isinstance(content, str):
            raise UserError(
                f"{where}: chat messages need the chat template; use data.apply_chat_template=true, or text"
            )
        token_ids = self._tokenizer(content)["input_ids"]
        bos = self._tokenizer.bos_token_id
        # Text rendered by a template beforehand may already begin with BOS: do not add a second one.
        if bos is not None and list(token_ids[:2]) == [bos, bos]:
            token_ids = token_ids[1:]
        return np.asarray(token_ids, dtype=np.int64)


def build_prompts(
    rows: Sequence[Mapping[str, Any]],
    renderer: PromptRenderer,
    *,
    max_prompt_tokens: int,
    overlong: Literal["drop", "error"],
    field: str = "data.path",
    optional: bool = False,
) -> PromptSet:
    """Render every row. A prompt's id is its row number, counted from 0 (error messages count from 1).

    A prompt carries the row's other columns: the union of all rows' columns, None for missing ones. Prompts with more
    than `max_prompt_tokens` tokens are dropped and counted, or an error, depending on `overlong`; never truncated.
    `field` is the data's configuration key, "data.path" or "eval.path". With `optional`, rows may lack a prompt, whose
    content is then "".

    Raises:
        UserError: no rows, no prompt column, a prompt that cannot be rendered, or no prompt left.
    """
    if not rows:
        raise UserError(f"{field}: the data has no rows; at least one prompt is needed")
    where = f"{field.rpartition('.')[0]}.prompt={renderer.prompt_column!r}"
    columns = list(dict.fromkeys(column for row in rows for column in row))
    if renderer.prompt_column not in columns and not optional:
        raise UserError(f"{where}: the data has no such column{suggest(renderer.prompt_column, columns, 'Columns')}")
    prompts = []
    for index, row in enumerate(rows):
        value = row.get(renderer.prompt_column)
        content: Content = ""
        if value is None and optional:
            token_ids = renderer.placeholder
        else:
            content, token_ids = renderer.render(value, where=f"{where}: row {index + 1}")
        others = {column: row.get(column) for column in columns if column != renderer.prompt_column}
        prompts.append(Prompt(id=index, epoch=0, content=content, token_ids=token_ids, columns=others))
    kept = tuple(prompt for prompt in prompts if len(prompt.token_ids) <= max_prompt_tokens)
    num_overlong = len(prompts) - len(kept)
    if num_overlong and (overlong == "error" or not kept):
        raise _overlong_error(prompts, max_prompt_tokens, field)
    return PromptSet(prompts=kept, num_dropped_overlong=num_overlong)


def describe_lost_text(tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[Prompt]) -> str | None:
    """Return a warning if encoding and decoding some prompts loses text; None if it does not.

    Other spaces between words, capitals and Unicode normalization are a tokenizer's right.
    """
    texts = [text for prompt in prompts[:: -(-len(prompts) // _NUM_TRIED)] for text in _texts(prompt.content)]
    lost = []
    for text in texts:
        token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        back = str(tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))
        if not _has_all_of(text, back):
            lost.append((text, back))
    if not lost:
        return None
    text, back = lost[0]
    start = max(next((n for n, pair in enumerate(zip(text, back, strict=False)) if len(set(pair)) > 1), 0) - 10, 0)
    return (
        f"warning: the tokenizer loses text in {len(lost)} of {len(texts)} prompts that were tried: "
        f"{text[start : start + 40]!r} comes back as {back[start : start + 40]!r}. If you made the tokenizer yourself, "
        f"transformers may read it with another pre-tokenizer: compare with AutoTokenizer.from_pretrained, and see "
        f"tokenizer_class in its tokenizer_config.json"
    )


def _texts(content: Content) -> list[str]:
    """Return what people wrote, cut to a length that is quick to encode."""
    texts = [content] if isinstance(content, str) else [str(message.get("content") or "") for message in content]
    return [text[:_MAX_CHARACTERS] for text in texts if text.strip()]


def _has_all_of(text: str, back: str) -> bool:
    """Whether `back` has the characters of `text`, and a space wherever `text` has one."""
    (letters, ends), (letters_back, ends_back) = _words(text), _words(back)
    return letters == letters_back and ends <= ends_back


def _words(text: str) -> tuple[str, set[int]]:
    """Return a normalized text without spaces, and the positions in it where words end."""
    plain = unicodedata.normalize("NFKD", text.casefold())
    words = "".join(c for c in plain if not unicodedata.combining(c)).split()
    return "".join(words), set(accumulate(map(len, words)))


def _overlong_error(prompts: Sequence[Prompt], max_prompt_tokens: int, field: str) -> UserError:
    limit = f"rollout.max_prompt_tokens={max_prompt_tokens}"
    lengths = [len(prompt.token_ids) for prompt in prompts]
    num_overlong = sum(length > max_prompt_tokens for length in lengths)
    if num_overlong == len(prompts):
        return UserError(
            f"{limit}: no prompt of {field} is that short; the shortest of {len(prompts)} has {min(lengths)} tokens, "
            f"the longest {max(lengths)}; use at least {min(lengths)} ({max(lengths)} keeps every prompt)"
        )
    first = next(prompt for prompt, length in zip(prompts, lengths, strict=True) if length > max_prompt_tokens)
    return UserError(
        f"{limit}: the prompt in row {first.id + 1} of {field} has {len(first.token_ids)} tokens, and {num_overlong} "
        f"of {len(prompts)} prompts are too long; use at least {max(lengths)}, or data.overlong_prompts: drop"
    )


def read_content(value: Any, where: str) -> Content:
    """Validate a prompt: text or a list of messages."""
    if isinstance(value, str):
        _check_text(value, where)
        if _is_messages_as_text(value):
            raise UserError(
                f"{where}: holds chat messages as text; store them as a list of messages, in JSON lines or "
                "Parquet (CSV holds text prompts only)"
            )
        return value
    if isinstance(value, list | tuple):
        return _read_messages(value, where)
    raise UserError(
        f"{where}: a prompt is text or a list of chat messages, not {'missing' if value is None else excerpt(value)}"
    )


def _read_messages(values: Sequence[Any], where: str) -> list[Message]:
    if not values:
        raise UserError(f"{where}: the list of chat messages is empty")
    messages: list[Message] = []
    for number, value in enumerate(values, start=1):
        at = f"{where}, message {number}"
        if not isinstance(value, Mapping):
            raise UserError(f'{at}: a message is {{"role": ..., "content": ...}}, not {excerpt(value)}')
        message = {key: entry for key, entry in value.items() if entry is not None}
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise UserError(f'{at}: has no "role" such as "user". Its keys: {", ".join(map(str, message)) or "none"}')
        content = message.get("content")
        if isinstance(content, str):
            _check_text(content, at, may_be_empty=message["role"] != "user")
        elif content is not None or "tool_calls" not in message:
            raise UserError(f'{at}: its "content" must be text, not {excerpt(content)}')
        messages.append(message)
    if messages[-1]["role"] == "assistant":
        raise UserError(
            f"{where}: the last message is the assistant's, so the prompt already holds an answer; end it with the "
            "message to answer, and move the answer to a column of its own"
        )
    return messages


def _check_text(text: str, where: str, *, may_be_empty: bool = False) -> None:
    if not text.strip() and not may_be_empty:
        raise UserError(f"{where}: the text is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can escape half of a surrogate pair, which tokenizers reject
        raise UserError(f"{where}: character {error.start + 1} of the text is not valid Unicode") from error


def _is_messages_as_text(text: str) -> bool:
    """Whether the text is a list of messages printed as JSON or Python, as in CSV files."""
    if not _MESSAGES_AS_TEXT.match(text):
        return False
    for parse in (json.loads, ast.literal_eval):
        try:
            values = parse(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        return all(isinstance(value, dict) and {"role", "content"} <= value.keys() for value in values)
    return False
