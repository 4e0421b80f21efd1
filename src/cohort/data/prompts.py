"""Render rows as prompts: chat template, tokenizer, length limit.

P = tokens of one prompt, N = prompts of a set.
"""

import json
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from cohort.chat import ChatTemplate, prompt_messages
from cohort.data.cache import content_key
from cohort.data.content import Content, read_content
from cohort.data.lengths import Lengths, check_overlong, check_shares, find_lengths
from cohort.data.rows import (
    OnProgress,
    RowColumns,
    StoredRows,
    columns_of,
    describe_row,
    no_progress,
    values_of,
)
from cohort.errors import UserError, suggest
from cohort.records import IntArray, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_NUM_TRIED = 20  # prompts that are encoded and decoded again
_MAX_CHARACTERS = 2000  # of each


_RENDERED_ROWS = 10_000  # of data in memory, that are rendered before the run: more are rendered when they are sampled
_BATCH = 1000  # texts that are tokenized at a time
_SLACK = 16  # tokens by which the length of a text in the template may differ from that of its parts
_PLAIN_ROLES = frozenset({"system", "user", "assistant"})  # around whose contents templates write a few tokens
_MOST_EXPANSION = 11  # bytes that Unicode normalization makes of one


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """Prompts of a dataset, in file order."""

    prompts: Sequence[Prompt]  # at least one, all with epoch 0; dropped rows leave gaps in the ids
    num_dropped_overlong: int  # rows dropped because their prompt exceeds the limit
    sources: Sequence[tuple[str, int]] = ()  # of a mixture: name of each source, and how many prompts end with it

    @property
    def ids(self) -> IntArray:
        """[N] id of each prompt, its row number."""
        prompts = self.prompts
        return prompts.ids if isinstance(prompts, SampledPrompts) else np.array([prompt.id for prompt in prompts])


class SampledPrompts(Sequence[Prompt]):
    """Prompts of large data, each rendered when it is asked for."""

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        renderer: "PromptRenderer",
        lengths: Lengths,
        *,
        max_prompt_tokens: int,
        where: str,
        optional: bool,
    ):
        """Use the rows `lengths.kept`. The other arguments are those of `build_prompts`."""
        self._rows, self._renderer, self._where, self._optional = rows, renderer, where, optional
        self.ids = lengths.kept  # [N]
        self._max_prompt_tokens = max_prompt_tokens
        self._names = {name: None for name in columns_of(rows) if name != renderer.prompt_column}
        self.longest_tokens = lengths.longest  # at least the tokens of the longest prompt

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self._render(int(row)) for row in self.ids[index]]
        return self._render(int(self.ids[index]))

    def by_id(self, row: int) -> Prompt:
        """Return the prompt of a row."""
        return self._render(row)

    @property
    def digest(self) -> str | None:
        """Identifies the rows and which of them are kept; None if nothing but reading all of them does."""
        digest = self._rows.digest if isinstance(self._rows, StoredRows) else None
        return digest and content_key(digest, self._renderer.prompt_column, self.ids.tobytes())

    def rows(self, columns: Iterable[str] | None = None) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield the number of each row, and these columns of it but for the prompt. None: all columns."""
        wanted = set(self._names if columns is None else columns)
        names = [name for name in self._names if name in wanted]
        for row, values in self._only_kept(zip(*(values_of(self._rows, name) for name in names), strict=True)):
            yield row, dict(zip(names, values, strict=True))
        if not names:
            yield from ((row, {}) for row in self.ids.tolist())

    def contents(self) -> Iterator[Content]:
        """Yield what `Prompt.content` will be, without tokens."""
        for row, value in self._only_kept(values_of(self._rows, self._renderer.prompt_column)):
            is_missing = value is None and self._optional
            yield "" if is_missing else read_content(value, self._at(row))

    def _at(self, row: int) -> str:
        return f"{self._where}: {describe_row(self._rows, row)}"

    def _only_kept(self, values: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        kept = iter(self.ids.tolist())
        wanted = next(kept, None)
        for row, value in enumerate(values):
            if row == wanted:
                yield row, value
                wanted = next(kept, None)

    def _render(self, row: int) -> Prompt:
        rows, column, where = self._rows, self._renderer.prompt_column, self._at(row)
        renderer = self._renderer
        if isinstance(rows, StoredRows) and rows.sources:
            renderer = renderer.for_source(rows.source_of(row))
        value = rows.read(column, row, row + 1)[0] if isinstance(rows, StoredRows) else rows[row].get(column)
        content: Content = ""
        if value is None and self._optional:
            token_ids = renderer.placeholder
        else:
            content, token_ids = renderer.render(value, where=where)
        if len(token_ids) > self._max_prompt_tokens:
            raise UserError(
                f"{where}: the chat template makes {len(token_ids)} tokens of this prompt, more than of other texts of "
                f"its length, and more than rollout.max_prompt_tokens={self._max_prompt_tokens}; use at least "
                f"{len(token_ids)}"
            )
        return Prompt(id=row, epoch=0, content=content, token_ids=token_ids, columns=RowColumns(rows, row, self._names))


def longest_tokens(prompts: Sequence[Prompt], *, exact: bool = False) -> int:
    """Return the tokens of the longest prompt, or a number that is not less, if finding it means rendering all."""
    if isinstance(prompts, SampledPrompts) and not exact:
        return prompts.longest_tokens
    return max(len(prompt.token_ids) for prompt in prompts)


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
        system_prompts: Mapping[str, str] | None = None,
    ) -> None:
        """Arguments are the keys of the `data` section, which messages name, JSON schemas of tools, and system prompts
        of sources that have their own.

        `system_prompt`, `chat_template_kwargs` and `tools` need the chat template. An empty system prompt is rendered
        as an empty system message, which keeps templates from adding their own.

        Raises:
            UserError: the chat template is needed but missing, or never reads one of `chat_template_kwargs`.
        """
        assert apply_chat_template or not (system_prompt or chat_template_kwargs or tools), "the configuration refuses"
        self.prompt_column = prompt_column
        self._options: dict[str, Any] = {
            "prompt_column": prompt_column,
            "apply_chat_template": apply_chat_template,
            "chat_template_kwargs": chat_template_kwargs,
            "tools": tools,
        }
        self._system_prompts = system_prompts or {}
        self._of_source: dict[str, PromptRenderer] = {}
        self._tokenizer = tokenizer
        self._system_prompt = system_prompt
        self._tools = tools
        self._template_kwargs = dict(chat_template_kwargs or {})
        self._template = ChatTemplate(tokenizer, kwargs=chat_template_kwargs) if apply_chat_template else None

    def for_source(self, name: str | None) -> "PromptRenderer":
        """Return the renderer of a source's prompts: another one if the source has its own system prompt."""
        if name is None or name not in self._system_prompts:
            return self
        if name not in self._of_source:
            own = self._system_prompts[name]
            self._of_source[name] = PromptRenderer(self._tokenizer, system_prompt=own, **self._options)
        return self._of_source[name]

    def render(self, value: Any, *, where: object) -> tuple[Content, IntArray]:
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

    def find_lengths(
        self,
        contents: Iterable[tuple[int, Any]],
        *,
        max_prompt_tokens: int,
        where: Callable[[int], object],
        optional: bool,
    ) -> Iterator[tuple[int, int]]:
        """Yield row number and tokens. Numbers within the limit may be a bound.

        `contents` are the numbers of rows with their prompts, and `where` says how messages name a row.

        Bytes bound tokens, so most texts need no look. The others are tokenized in batches, and rendered if that does
        not show that they fit. Everything that `render` would refuse is refused.
        """
        waiting: list[tuple[int, Any, list[str]]] = []
        for row, value in contents:
            if value is None and optional:
                yield row, len(self.placeholder)
                continue
            at = where(row)
            content = read_content(value, at)
            texts = self._plain_texts(content)
            if texts is None:
                yield row, len(self.render(value, where=at)[1])
            elif (bound := self._bound(sum(map(self._most_tokens, texts)), len(texts))) <= max_prompt_tokens:
                yield row, bound
            else:
                waiting.append((row, value, texts))
                if len(waiting) == _BATCH:
                    yield from self._tokenize(waiting, max_prompt_tokens, where)
                    waiting = []
        yield from self._tokenize(waiting, max_prompt_tokens, where)

    def _tokenize(
        self, waiting: "list[tuple[int, Any, list[str]]]", max_prompt_tokens: int, where: Callable[[int], object]
    ) -> Iterator[tuple[int, int]]:
        texts = [text for _, _, of_row in waiting for text in of_row]
        backend = self._tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        lengths = map(len, backend.encode_batch_fast(texts, add_special_tokens=False))
        for row, value, of_row in waiting:
            bound = self._bound(sum(next(lengths) for _ in of_row), len(of_row))
            yield row, bound if bound <= max_prompt_tokens else len(self.render(value, where=where(row))[1])

    def _plain_texts(self, content: Content) -> list[str] | None:
        """Return the texts of a prompt whose length can be bounded by theirs; None if it must be rendered.

        Those are texts and messages of roles and keys that have been rendered before, without special tokens.
        """
        if self._tokenizer_is_unknown:
            return None
        if isinstance(content, str):
            shape: Any = None
            texts = [content]
        elif any(m.keys() != {"role", "content"} or m["role"] not in _PLAIN_ROLES for m in content):
            return None
        else:
            shape = tuple(message["role"] for message in content)
            texts = [message["content"] for message in content]
        if shape not in self._rendered_shapes:
            self._rendered_shapes.add(shape)
            return None
        if any(text.lstrip().startswith(self._special) for text in texts):
            return None
        return texts

    def _most_tokens(self, text: str) -> int:
        size = len(text.encode())
        return size if text.isascii() or not self._normalizes else size * _MOST_EXPANSION

    def _bound(self, tokens: int, num_messages: int) -> int:
        return tokens + self._overhead * num_messages + _SLACK

    @cached_property
    def _overhead(self) -> int:
        """Tokens of a prompt of one letter: at least those that the template adds to each message."""
        return len(self.render("a", where="data.prompt")[1])

    @cached_property
    def _rendered_shapes(self) -> set[Any]:
        return set()

    @cached_property
    def _special(self) -> tuple[str, ...]:
        return tuple(token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special)

    @cached_property
    def _tokenizer_is_unknown(self) -> bool:
        """Whether it may make more than one token of a byte: it is not of the `tokenizers` package."""
        return getattr(self._tokenizer, "backend_tokenizer", None) is None

    @cached_property
    def _normalizes(self) -> bool:
        return self._tokenizer.backend_tokenizer.normalizer is not None

    @cached_property
    def digest(self) -> str | None:
        """Identifies all that lengths depend on, but for the data; None if the tokenizer is unknown."""
        if self._tokenizer_is_unknown:
            return None
        settings: list[Any] = [self.prompt_column, self._system_prompt, self._tools, self._template_kwargs]
        settings += [dict(self._system_prompts)] if self._system_prompts else []
        template = None if self._template is None else self._tokenizer.get_chat_template(tools=self._tools)
        specials = sorted(self._tokenizer.added_tokens_decoder), str(self._tokenizer.special_tokens_map)
        return content_key(
            self._tokenizer.backend_tokenizer.to_str(), json.dumps([*settings, template, specials], default=str)
        )

    @cached_property
    def placeholder(self) -> IntArray:
        """Token ids for rows without a prompt, which an environment writes: those of an empty user message."""
        assert self._template is not None, "environments need the chat template"
        return self._render("", f"{self.prompt_column!r}: a row without a prompt", self._template)

    def _render(self, content: Content, where: object, template: ChatTemplate) -> IntArray:
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

    def _encode(self, content: Content, where: object) -> IntArray:
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
    weighted: bool = False,
    on_progress: OnProgress = no_progress,
) -> PromptSet:
    """Check every row, and render them if they are few. A prompt's id is its row number, counted from 0 (error
    messages count from 1).

    A prompt carries the row's other columns: the union of all rows' columns, None for missing ones. Prompts with more
    than `max_prompt_tokens` tokens are dropped and counted, or an error, depending on `overlong`; never truncated.
    `field` is the data's configuration key, "data.path" or "eval.path". With `optional`, rows may lack a prompt, whose
    content is then "". With `weighted`, each source of the mixture needs a prompt. `on_progress` is called while the
    prompts of large data are checked.

    Raises:
        UserError: no rows, no prompt column, a prompt that cannot be rendered, or no prompt left.
    """
    if not rows:
        raise UserError(f"{field}: the data has no rows; at least one prompt is needed")
    where = f"{field.rpartition('.')[0]}.prompt={renderer.prompt_column!r}"
    columns = columns_of(rows)
    if renderer.prompt_column not in columns and not optional:
        raise UserError(f"{where}: the data has no such column{suggest(renderer.prompt_column, columns, 'Columns')}")
    if isinstance(rows, StoredRows) or len(rows) > _RENDERED_ROWS:
        options: dict[str, Any] = {"max_prompt_tokens": max_prompt_tokens, "where": where, "optional": optional}
        lengths = find_lengths(rows, renderer, on_progress, **options)
        check_overlong(lengths.overlong, rows, max_prompt_tokens, overlong, field)
        sources = rows.sources if isinstance(rows, StoredRows) else ()
        if weighted:
            check_shares(sources, lengths, max_prompt_tokens)
        sampled = SampledPrompts(rows, renderer, lengths, **options)
        ends = np.searchsorted(lengths.kept, [end for _, end in sources]).tolist()
        return PromptSet(
            prompts=sampled,
            num_dropped_overlong=len(lengths.overlong),
            sources=tuple((name, end) for (name, _), end in zip(sources, ends, strict=True)),
        )
    prompts = [_prompt(index, row, renderer, columns, where, optional) for index, row in enumerate(rows)]
    kept = tuple(prompt for prompt in prompts if len(prompt.token_ids) <= max_prompt_tokens)
    too_long = {prompt.id: n for prompt in prompts if (n := len(prompt.token_ids)) > max_prompt_tokens}
    check_overlong(too_long, rows, max_prompt_tokens, overlong, field)
    return PromptSet(prompts=kept, num_dropped_overlong=len(too_long))


def _prompt(
    index: int, row: Mapping[str, Any], renderer: PromptRenderer, columns: Sequence[str], where: str, optional: bool
) -> Prompt:
    value = row.get(renderer.prompt_column)
    content: Content = ""
    if value is None and optional:
        token_ids = renderer.placeholder
    else:
        content, token_ids = renderer.render(value, where=f"{where}: row {index + 1}")
    others = {column: row.get(column) for column in columns if column != renderer.prompt_column}
    return Prompt(id=index, epoch=0, content=content, token_ids=token_ids, columns=others)


def build_prompt(
    index: int,
    row: Mapping[str, Any],
    renderer: PromptRenderer,
    *,
    columns: Sequence[str],
    max_prompt_tokens: int,
    overlong: Literal["drop", "error"],
    field: str,
    optional: bool,
) -> Prompt | None:
    """Render a row of a stream as `build_prompts` renders those that are known; None if it is dropped."""
    where = f"{field.rpartition('.')[0]}.prompt={renderer.prompt_column!r}"
    prompt = _prompt(index, row, renderer, list(dict.fromkeys([*columns, *row])), where, optional)
    if (length := len(prompt.token_ids)) <= max_prompt_tokens:
        return prompt
    if overlong == "error":
        raise UserError(
            f"rollout.max_prompt_tokens={max_prompt_tokens}: the prompt in row {index + 1} of {field} has {length} "
            f"tokens; use at least {length}, or data.overlong_prompts: drop"
        )
    return None


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
