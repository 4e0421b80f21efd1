"""Texts of single tokens, from a run's tokenizer.json.

Decoding with the library joins tokens and drops special ones. Here each token has a text of its own, also one that is
only some bytes of a character. Reading only the vocabulary takes a fraction of the time and memory of a tokenizer.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from cohort.view.completions import FileCache
from cohort.view.files import text
from cohort.view.paths import inside
from cohort.view.records import TokenColumns

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
            problems.append(f"{path} cannot be read: {str(error)[:200] or type(error).__name__}.")
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
