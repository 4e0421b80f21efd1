"""One completion, token by token, with the texts of tokens from the run's tokenizer.json."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from cohort.errors import describe_error
from cohort.records import BoolArray, FloatArray, IntArray
from cohort_view.completions import FileCache, ParquetRows, is_broken, numbers, step_index
from cohort_view.run import ViewedRun, completions_name
from cohort_view.values import get, inside, text

TOKENIZER = "tokenizer.json"
_MAX_BYTES = 200 << 20
_MAX_ID = 1 << 32
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"  # in a text, for bytes that are no whole character
_ANCHOR = "a"  # decoders treat the first and the last token of a text differently: each token is decoded between two


class TokenTexts:
    """Texts of tokens by id: what each adds to a text that has others before and after it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Decode nothing yet."""
        decoder = tokenizer.decoder
        self._id_to_token: Callable[[int], str | None] = tokenizer.id_to_token
        self._decode: Callable[[list[str]], str] = " ".join if decoder is None else decoder.decode
        self._special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._before = self._decode([_ANCHOR])
        self._after = self._decode([_ANCHOR, _ANCHOR])[len(self._before) :]
        self._known: dict[int, tuple[str | None, bool]] = {}

    def columns(self, ids: Sequence[int]) -> dict[str, Any]:
        """Return the tokens' texts, None where an id is not in the vocabulary."""
        found = [self._text(i) for i in ids]
        return {
            "ids": ids,
            "texts": [text for text, _ in found],
            "special": [i in self._special for i in ids],
            "bytes": [partial for _, partial in found],
        }

    def _text(self, i: int) -> tuple[str | None, bool]:
        """Return a token's text, and whether it shows bytes that are no whole character, such as "\\xf0\\x9f"."""
        if i not in self._known:
            token = self._id_to_token(i) if 0 <= i < _MAX_ID else None
            self._known[i] = (None, False) if token is None else self._text_of(token)
        return self._known[i]

    def _text_of(self, token: str) -> tuple[str, bool]:
        between = self._decode([_ANCHOR, token, _ANCHOR])
        text = between[len(self._before) : len(between) - len(self._after)]
        if _REPLACEMENT not in text or _REPLACEMENT in token:
            return text, False
        raw = _bytes_of(token)
        try:
            return raw.decode(), False
        except UnicodeDecodeError:
            return raw.decode(errors="backslashreplace"), True


def _bytes_of(token: str) -> bytes:
    """Return the bytes of a token that is no text by itself: `<0xF0>`, or characters that stand for a byte each."""
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    table = _byte_level_table()
    return b"".join(table.get(character) or character.encode() for character in token)


@cache
def _byte_level_table() -> Mapping[str, bytes]:
    """Return the bytes of the characters of byte-level BPE: printable bytes are themselves, the others follow."""
    alphabet = sorted(ByteLevel.alphabet())
    printable = [character for character in alphabet if ord(character) < 256]
    others = [byte for byte in range(256) if chr(byte) not in printable]
    of_bytes = [*map(ord, printable), *others]
    return {character: bytes([byte]) for character, byte in zip(alphabet, of_bytes, strict=True)}


_TOKENIZERS: FileCache[TokenTexts] = FileCache(2)


def find_tokenizer(run_path: Path, config: Mapping[str, Any] | None) -> tuple[TokenTexts | None, list[str]]:
    """Return the texts of a run's tokens, and which files could not be read.

    Searches final/, the checkpoints, newest first, and `model.path` if it is a folder.
    """
    problems = []
    for folder, name in _places(run_path, config):
        path = folder / name
        try:
            if folder == run_path:
                inside(folder, name)  # while a model's own folder may hold links, as the cache of Hugging Face does
            if not path.is_file():
                continue
            texts = _TOKENIZERS.get(path, lambda path=path: _read(path))  # type: ignore[misc]
        except Exception as error:  # a damaged file can raise anything
            problems.append(f"{path} cannot be read: {describe_error(error, 200)}.")
            continue
        return texts, problems
    problems.append("Tokens are shown as ids: no tokenizer.json in final/, checkpoints/ or the folder of model.path.")
    return None, problems


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


def _read(path: Path) -> TokenTexts:
    if path.stat().st_size > _MAX_BYTES:
        raise ValueError(f"it has more than {_MAX_BYTES >> 20} MB")
    try:
        return TokenTexts(Tokenizer.from_file(str(path)))
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # how the library fails on some damaged files: no Exception
            raise
        raise ValueError(str(error)) from error


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


def completion(
    run: ViewedRun, step: int, kind: str, row: int, offset: int = 0, limit: int = TOKENS_SHOWN
) -> dict[str, Any]:
    """Return the tokens of one row of a completions file with everything known per token.

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
    asked = {"step": step, "kind": kind, "row": row, "offset": offset, "limit": limit}
    if not 0 <= row < min(file.num_rows, index.num_rows):
        problems = index.problems or (f"{name} has no row {row}: it has {file.num_rows}.",)
        return {**asked, "sequences": [], "num_tokens": 0, "recorded": False, "problems": problems}
    lists = file.read(_LISTS, range(row, row + 1))
    tokens = ParquetRows(run.path, tokens_name(step)) if kind == "step" else None
    recorded = tokens is not None and bool(tokens.names)
    of_tokens = _recorded(tokens, row, file.num_rows) if tokens is not None and recorded else {}
    sequences: list[_Sequence] = []
    with file.noting_problems():
        sequences = _sequences(lists, of_tokens)
    left_out = recorded and not of_tokens and not is_broken(index.ends[row])
    problems = [*index.problems, *file.problems, *_tokens_problems(run, step, tokens, left_out=left_out)]
    texts, of_tokenizer = find_tokenizer(run.path, run.config)
    return {
        **asked,
        "sequences": _shown(sequences, texts, offset, limit),
        "num_tokens": sum(len(sequence.ids) for sequence in sequences),  # after the prompts, sent or not
        "recorded": recorded,  # whether there is a file of `run.record_tokens` for the step
        "trained": _is_trained(of_tokens),  # whether the recorded tokens have a gradient; None if it is not known
        "problems": list(dict.fromkeys([*problems, *of_tokenizer])),
    }


def _tokens_problems(run: ViewedRun, step: int, tokens: ParquetRows | None, *, left_out: bool) -> Sequence[str]:
    """Return the problems of the step's file in `tokens/`, which may leave out the row; none if `tokens` is None."""
    if tokens is None:
        return ()
    wanted = get(run.config, "run", "record_tokens")
    if not tokens.is_missing:
        if left_out and not tokens.problems and wanted == "auto":
            return ("Not recorded: run.record_tokens: auto records the first groups of large steps; true records all.",)
        return tokens.problems
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


def _sequences(lists: Mapping[str, pa.ChunkedArray], recorded: Mapping[str, FloatArray]) -> list[_Sequence]:
    """Divide a row's tokens into its sequences.

    Raises:
        ValueError: columns have different numbers of values.
    """
    prompt_ids, sampled_ids = (_ids(lists.get(key)) for key in ("prompt_token_ids", "completion_token_ids"))
    logprobs = _list(lists.get("sampling_logprobs"))
    of_sequences = _lists(lists.get("sequence_token_ids"))
    masks = _lists(lists.get("loss_mask"))
    if of_sequences is None:  # a single turn
        context, all_ids, mask = [prompt_ids], [sampled_ids], np.ones(len(sampled_ids), bool)
        starts = [0]
    else:
        all_ids = [np.nan_to_num(ids).astype(np.int64) for ids in of_sequences]
        mask = np.concatenate([np.zeros(0, bool), *(np.nan_to_num(m).astype(bool) for m in masks or ())])
        bounds = np.cumsum([0, *map(len, all_ids)])
        starts = [_first(mask[a:b]) for a, b in pairwise(bounds.tolist())]
        context = [ids[:start] for ids, start in zip(all_ids, starts, strict=True)]
    if any(len(v) != len(mask) for v in (np.concatenate(all_ids or [mask]), *recorded.values())):
        raise ValueError("the row's columns, or those in tokens/, have different numbers of tokens")
    sampling = None
    if logprobs is not None:
        sampling = np.full(len(mask), np.nan)
        sampling[np.flatnonzero(mask)[: len(logprobs)]] = logprobs
    sequences, at = [], 0
    for ids, before, start in zip(all_ids, context, starts, strict=True):
        part = slice(at + start, at + len(ids))
        of_part = {key: values[part] for key, values in recorded.items()}
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


def _shown(sequences: Sequence[_Sequence], texts: TokenTexts | None, offset: int, limit: int) -> list[dict[str, Any]]:
    """Return the sequences with `limit` tokens after the first `offset`."""
    shown, before = [], 0
    for sequence in sequences:
        start = min(max(0, offset - before), len(sequence.ids))
        stop = min(max(0, offset + limit - before), len(sequence.ids))
        part = slice(start, max(start, stop))
        recorded = {key: values[part] for key, values in sequence.recorded.items()}
        sampling = None if sequence.sampling_logprobs is None else sequence.sampling_logprobs[part]
        shown.append(
            {
                "prompt_tokens": len(sequence.prompt_ids),
                "prompt": _columns(sequence.prompt_ids[-PROMPT_TOKENS_SHOWN:], texts),
                "num_tokens": len(sequence.ids),
                "offset": start,
                "tokens": _columns(sequence.ids[part], texts),
                "loss_mask": sequence.loss_mask[part].tolist(),
                "sampling_logprobs": _values(sampling),
                "ratios": _values(_ratios(recorded.get("logprobs"), sampling)),
                **{key: _values(recorded.get(key)) for key in RECORDED},
            }
        )
        before += len(sequence.ids)
    return shown


def _ratios(logprobs: FloatArray | None, sampling_logprobs: FloatArray | None) -> FloatArray | None:
    """Return the trainer's probabilities divided by the sampler's, NaN for tokens that are not trained."""
    if logprobs is None or sampling_logprobs is None:
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        return np.exp(logprobs - sampling_logprobs)


def _columns(ids: IntArray, texts: TokenTexts | None) -> dict[str, Any]:
    as_list = ids.tolist()
    if texts is None:
        return {"ids": as_list, "texts": None, "special": None, "bytes": None}
    return texts.columns(as_list)


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
