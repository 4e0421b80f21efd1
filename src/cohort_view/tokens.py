"""One completion, token by token, with the texts of tokens from the run's tokenizer.json.

Decoding with the library joins tokens and drops special ones. Here each token has a text of its own, also one that is
only some bytes of a character. Reading only the vocabulary takes a fraction of the time and memory of a tokenizer.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from cohort.errors import describe_error
from cohort_view.completions import (
    FileCache,
    ParquetRows,
    completions_name,
    numbers,
    optional_text,
    parse_prompt,
    step_index,
)
from cohort_view.groups import RunFiles, group_completion, row_values
from cohort_view.records import BoolArray, Completion, FloatArray, IntArray, ShownTokens, TokenColumns
from cohort_view.values import get, inside, text

TOKENIZER = "tokenizer.json"
_MAX_BYTES = 200 << 20
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_BOUNDARY = "▁"  # SentencePiece's space


class Vocabulary:
    """Texts of tokens by id."""

    def __init__(self, tokenizer: Mapping[str, Any]):
        """Read the content of a tokenizer.json."""
        model = tokenizer["model"]
        entries = model["vocab"]
        if isinstance(entries, Mapping):
            self._tokens = {int(i): str(token) for token, i in entries.items()}
        else:  # Unigram: tokens with their scores
            self._tokens = {i: str(entry[0]) for i, entry in enumerate(entries)}
        added = tokenizer.get("added_tokens") or ()
        self._added = {int(token["id"]): str(token["content"]) for token in added}
        self._special = {int(token["id"]) for token in added if token.get("special")}
        self._kinds = _kinds_in(tokenizer.get("decoder"))
        self._prefix = model.get("continuing_subword_prefix") or "##"
        self._suffix = model.get("end_of_word_suffix") or ""
        self._known: dict[int, tuple[str | None, bool]] = {}

    def columns(self, ids: Sequence[int]) -> TokenColumns:
        """Return the tokens' texts, None where an id is not in the vocabulary."""
        found = [self._text(i) for i in ids]
        return TokenColumns(
            ids=ids,
            texts=[text for text, _ in found],
            special=[i in self._special for i in ids],
            bytes=[partial for _, partial in found],
        )

    def token_bytes(self, i: int) -> bytes | None:
        """Return the UTF-8 bytes that a token stands for."""
        if i in self._added:
            return self._added[i].encode("utf-8", errors="replace")
        token = self._tokens.get(i)
        if token is None:
            return None
        if "ByteLevel" in self._kinds:
            table = _byte_level_table()
            if all(character in table for character in token):
                return bytes(table[character] for character in token)
            return token.encode("utf-8", errors="replace")
        if "ByteFallback" in self._kinds and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        if "WordPiece" in self._kinds:
            continues = token.startswith(self._prefix)
            token = token.removeprefix(self._prefix) if continues else f" {token}"
        elif "BPEDecoder" in self._kinds and self._suffix and token.endswith(self._suffix):
            token = token.removesuffix(self._suffix) + " "
        elif self._kinds & {"Metaspace", "Replace"}:
            token = token.replace(_WORD_BOUNDARY, " ")
        return token.encode("utf-8", errors="replace")

    def _text(self, i: int) -> tuple[str | None, bool]:
        """Return a token's text, and whether it shows bytes that are no whole character."""
        if i not in self._known:
            raw = self.token_bytes(i)
            self._known[i] = (None, False) if raw is None else visible_text(raw)
        return self._known[i]


def visible_text(raw: bytes) -> tuple[str, bool]:
    r"""Decode UTF-8, with bytes that are no whole character as "\xf0"; return whether there are any."""
    try:
        return raw.decode("utf-8"), False
    except UnicodeDecodeError:
        return raw.decode("utf-8", errors="backslashreplace"), True


def _kinds_in(decoder: Any) -> frozenset[str]:
    """Return the types of a tokenizer's decoders."""
    if not isinstance(decoder, Mapping):
        return frozenset()
    inner = [kind for part in decoder.get("decoders") or () for kind in _kinds_in(part)]
    return frozenset([str(decoder.get("type")), *inner])


@cache
def _byte_level_table() -> Mapping[str, int]:
    """Return the bytes that the characters of byte-level BPE stand for (GPT-2's bytes_to_unicode, inverted)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_VOCABULARIES: FileCache[Vocabulary | None] = FileCache(2)


def find_vocabulary(
    run_path: Path, config: Mapping[str, Any] | None
) -> tuple[Vocabulary | None, Path | None, list[str]]:
    """Return a run's vocabulary, the file that it is from, and why others could not be read.

    Searches final/, the checkpoints, newest first, and `model.path` if it is a folder.
    """
    problems = []
    for folder, name in _places(run_path, config):
        path = folder / name
        try:
            if not inside(folder, name).is_file():
                continue
            vocabulary = _VOCABULARIES.get(path, lambda path=path: _read(path))  # type: ignore[misc]
        except Exception as error:  # a damaged file can raise anything
            problems.append(f"{path} cannot be read: {describe_error(error, 200)}.")
            continue
        return vocabulary, path, problems
    problems.append("Tokens are shown as ids: no tokenizer.json in final/, checkpoints/ or the folder of model.path.")
    return None, None, problems


def _places(run_path: Path, config: Mapping[str, Any] | None) -> list[tuple[Path, str]]:
    """Return where to look for a tokenizer: folders that may be read, and paths in them."""
    try:
        found = [name for name in os.listdir(inside(run_path, "checkpoints")) if name.startswith("step-")]
    except OSError:
        found = []
    newest_first = sorted(found, key=_number, reverse=True)
    in_run = [(run_path, f"{folder}/{TOKENIZER}") for folder in ("final", *(f"checkpoints/{n}" for n in newest_first))]
    model = text(config, "model", "path")
    return in_run + ([(Path(model), TOKENIZER)] if model is not None and Path(model).is_absolute() else [])


def _number(name: str) -> int:
    digits = name.rpartition("-")[2]
    return int(digits) if digits.isdecimal() and len(digits) < 16 else -1


def _read(path: Path) -> Vocabulary:
    if path.stat().st_size > _MAX_BYTES:
        raise ValueError(f"it has more than {_MAX_BYTES >> 20} MB")
    return Vocabulary(json.loads(path.read_bytes()))


TOKENS_SHOWN = 20_000
MAX_TOKENS = 100_000  # in one answer
PROMPT_TOKENS_SHOWN = 2_000  # of each sequence, the last
RECORDED = ("logprobs", "entropies", "reference_logprobs", "advantages", "loss_weights")
_LISTS = ("prompt_token_ids", "completion_token_ids", "sampling_logprobs", "sequence_token_ids", "loss_mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sequence:
    """A sequence of the row: T tokens after the prompt."""

    prompt_ids: IntArray
    ids: IntArray  # [T]
    loss_mask: BoolArray  # [T]
    sampling_logprobs: FloatArray | None  # [T] NaN for tokens that were not sampled
    recorded: Mapping[str, FloatArray]  # [T] each, NaN where not computed


def completion(run: RunFiles, step: int, kind: str, row: int, offset: int = 0, limit: int = TOKENS_SHOWN) -> Completion:
    """Return one row of a completions file with everything known per token.

    Args:
        run: run folder.
        step: number of completed steps, as in the file's name.
        kind: `step`, `replaced`, `dropped` or `eval`.
        row: number of the row in its file.
        offset: tokens to leave out, counted over the sequences after their prompts.
        limit: most tokens to return.
    """
    name = completions_name(kind, step)
    index = step_index(run.path, kind, step, run.config)
    file = ParquetRows(run.path, name)
    offset, limit = max(0, offset), max(0, min(limit, MAX_TOKENS))
    if not 0 <= row < min(file.num_rows, index.num_rows):
        problems = index.problems or (f"{name} has no row {row}: it has {file.num_rows}.",)
        return Completion(step=step, kind=kind, row=row, offset=offset, limit=limit, problems=problems)
    values = dict(row_values(file, range(row, row + 1), without=_LISTS))[row]
    lists = file.read(_LISTS, range(row, row + 1))
    group = index.group_of(row)
    shown = group_completion(row, values, index)
    tokens = ParquetRows(run.path, tokens_name(step)) if kind == "step" else None
    recorded = tokens is not None and bool(tokens.names)
    of_tokens = _recorded(tokens, row, file.num_rows) if tokens is not None and recorded else {}
    problems = [*index.problems, *file.problems, *_tokens_problems(run, step, tokens)]
    sequences = _sequences(lists, of_tokens, problems, name)
    vocabulary, tokenizer, of_vocabulary = find_vocabulary(run.path, run.config)
    return Completion(
        **{field.name: getattr(shown, field.name) for field in fields(shown)},
        step=step,
        kind=kind,
        group=group,
        prompt=parse_prompt(optional_text(values.get("prompt"), cut=False), index.are_chats[group]),
        sequences=_shown(sequences, vocabulary, offset, limit),
        num_tokens=sum(len(sequence.ids) for sequence in sequences),
        offset=offset,
        limit=limit,
        tokenizer=None if tokenizer is None else str(tokenizer),
        recorded=recorded,
        trained=_is_trained(of_tokens),
        problems=tuple(dict.fromkeys([*problems, *of_vocabulary])),
    )


def _tokens_problems(run: RunFiles, step: int, tokens: ParquetRows | None) -> Sequence[str]:
    """Return what is wrong with the step's file in `tokens/`; `tokens` is None for completions that have none."""
    if tokens is None:
        return ()
    if tokens.names or (run.path / tokens_name(step)).exists():
        return tokens.problems
    wanted = get(run.config, "run", "record_tokens")
    if wanted is True:
        return (f"{tokens_name(step)} was not kept: run.record_tokens_max_size bounds the folder.",)
    if wanted == "auto":
        return (f"{tokens_name(step)} was not kept: run.record_tokens: auto keeps the last steps; true keeps more.",)
    return ()


def tokens_name(step: int) -> str:
    """Return the name of a file of recorded tokens within the run folder."""
    return f"tokens/step-{step:06d}.parquet"


def _recorded(tokens: ParquetRows, row: int, num_rows: int) -> dict[str, FloatArray]:
    """Read what the trainer recorded per token of a row."""
    if tokens.num_rows != num_rows:
        tokens.problems.append(f"{tokens.name} has {tokens.num_rows} rows, the completions file has {num_rows}.")
        return {}
    found = tokens.read(RECORDED, range(row, row + 1))
    lists = {name: _list(column) for name, column in found.items()}
    return {name: values for name, values in lists.items() if values is not None}


def _is_trained(recorded: Mapping[str, FloatArray]) -> bool | None:
    """Whether the trainer computed the row's tokens: it leaves out those without a gradient."""
    return bool(np.isfinite(recorded["logprobs"]).any()) if "logprobs" in recorded else None


def _sequences(
    lists: Mapping[str, pa.ChunkedArray], recorded: Mapping[str, FloatArray], problems: list[str], name: str
) -> list[_Sequence]:
    """Divide a row's tokens into its sequences."""
    prompt_ids, sampled_ids = (_ids(lists.get(key)) for key in ("prompt_token_ids", "completion_token_ids"))
    logprobs = _list(lists.get("sampling_logprobs"))
    of_sequences = _lists(lists.get("sequence_token_ids"))
    masks = _lists(lists.get("loss_mask"))
    if of_sequences is None:  # a single turn
        context, all_ids, mask = [prompt_ids], [sampled_ids], np.ones(len(sampled_ids), bool)
        starts = [0]
    else:
        all_ids = [np.nan_to_num(ids).astype(np.int64) for ids in of_sequences]
        total = sum(map(len, all_ids))
        mask = np.concatenate([np.zeros(0, bool), *(np.nan_to_num(m).astype(bool) for m in masks or ())])
        if len(mask) != total:
            problems.append(f"{name}: the loss mask of the row has {len(mask)} values for {total} tokens.")
            mask = np.zeros(total, bool)
        bounds = np.cumsum([0, *map(len, all_ids)])
        starts = [_first(mask[a:b]) for a, b in pairwise(bounds.tolist())]
        context = [ids[:start] for ids, start in zip(all_ids, starts, strict=True)]
    aligned = _aligned(recorded, len(mask), problems)
    sampling = _scatter(logprobs, mask, problems, name)
    sequences, at = [], 0
    for ids, before, start in zip(all_ids, context, starts, strict=True):
        part = slice(at + start, at + len(ids))
        of_part = {key: values[part] for key, values in aligned.items()}
        sampling_part = None if sampling is None else sampling[part]
        sequences.append(
            _Sequence(
                prompt_ids=before,
                ids=ids[start:],
                loss_mask=mask[part],
                sampling_logprobs=sampling_part,
                recorded=of_part,
            )
        )
        at += len(ids)
    return sequences


def _first(mask: BoolArray) -> int:
    """Return the place of the first sampled token."""
    return int(mask.argmax()) if mask.any() else 0


def _aligned(recorded: Mapping[str, FloatArray], length: int, problems: list[str]) -> dict[str, FloatArray]:
    """Keep recorded columns that have one value per token."""
    for key, values in recorded.items():
        if len(values) != length:
            problems.append(f"Recorded {key} have {len(values)} values for {length} tokens.")
    return {key: values for key, values in recorded.items() if len(values) == length}


def _scatter(logprobs: FloatArray | None, mask: BoolArray, problems: list[str], name: str) -> FloatArray | None:
    """Put the logprobs of the sampled tokens into their places among all tokens."""
    if logprobs is None:
        return None
    if len(logprobs) != mask.sum():
        problems.append(f"{name}: the row has {len(logprobs)} sampling logprobs for {mask.sum()} sampled tokens.")
        return None
    placed = np.full(len(mask), np.nan)
    placed[mask] = logprobs
    return placed


def _shown(sequences: Sequence[_Sequence], vocabulary: Vocabulary | None, offset: int, limit: int) -> list[ShownTokens]:
    """Return the sequences with `limit` tokens after the first `offset`."""
    shown, before = [], 0
    for sequence in sequences:
        start = min(max(0, offset - before), len(sequence.ids))
        stop = min(max(0, offset + limit - before), len(sequence.ids))
        part = slice(start, max(start, stop))
        recorded = {key: values[part] for key, values in sequence.recorded.items()}
        sampling = None if sequence.sampling_logprobs is None else sequence.sampling_logprobs[part]
        shown.append(
            ShownTokens(
                prompt_tokens=len(sequence.prompt_ids),
                prompt=_columns(sequence.prompt_ids[-PROMPT_TOKENS_SHOWN:], vocabulary),
                num_tokens=len(sequence.ids),
                offset=start,
                tokens=_columns(sequence.ids[part], vocabulary),
                loss_mask=sequence.loss_mask[part].tolist(),
                sampling_logprobs=_values(sampling),
                ratios=_values(_ratios(recorded.get("logprobs"), sampling)),
                **{key: _values(recorded.get(key)) for key in RECORDED},
            )
        )
        before += len(sequence.ids)
    return shown


def _ratios(logprobs: FloatArray | None, sampling_logprobs: FloatArray | None) -> FloatArray | None:
    """Return the trainer's probabilities divided by the sampler's, NaN for tokens that are not trained."""
    if logprobs is None or sampling_logprobs is None:
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        return np.exp(logprobs - sampling_logprobs)


def _columns(ids: IntArray, vocabulary: Vocabulary | None) -> TokenColumns:
    as_list = ids.tolist()
    if vocabulary is None:
        return TokenColumns(ids=as_list, texts=None, special=None, bytes=None)
    return vocabulary.columns(as_list)


def _values(values: FloatArray | None) -> list[float | None] | None:
    """Return numbers with 6 significant digits, which float32 has, and None where there is none."""
    if values is None:
        return None
    return [
        float(f"{value:.6g}") if finite else None
        for value, finite in zip(values.tolist(), np.isfinite(values), strict=True)
    ]


def _list(column: pa.ChunkedArray | None) -> FloatArray | None:
    """Return the list of a column's only row, NaN for nulls; None if it is null or missing."""
    if column is None or len(column) != 1:
        return None
    value = column[0]
    inner = getattr(value, "values", None)
    if not value.is_valid or inner is None:
        return None
    return numbers(pa.chunked_array([inner]), len(inner))


def _lists(column: pa.ChunkedArray | None) -> list[FloatArray] | None:
    """Return the lists in the list of a column's only row; None if it is null or missing."""
    if column is None or len(column) != 1:
        return None
    inner = getattr(column[0], "values", None)
    if not column[0].is_valid or inner is None or not hasattr(inner, "offsets"):
        return None
    return [numbers(pa.chunked_array([s.values]), len(s.values)) if s.is_valid else np.zeros(0) for s in inner]


def _ids(column: pa.ChunkedArray | None) -> IntArray:
    values = _list(column)
    return np.zeros(0, np.int64) if values is None else np.nan_to_num(values).astype(np.int64)
