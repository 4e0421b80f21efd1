"""Read and write safetensors files, row by row, also where they store weights in another form than the model.

A file is the length of its header in 8 bytes, the header in JSON, and the tensors' data
(https://huggingface.co/docs/safetensors). Files are validated by header and size. Tensors are read at their offsets and
not through a memory map, so reading takes no page-cache memory of the process, and a file that shrinks meanwhile is an
error, not a crash.

Conversions are those of transformers (`transformers.conversion_mapping`). For example, checkpoints of
mixture-of-experts models have one tensor per expert, and the model has one for all: row n is made from the tensors of
expert n, so no rank reads experts that it does not keep.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cohort.errors import UserError
from cohort.models.loading.multimodal import multimodal_of, outer_name, saved_model

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = "model-{:05}-of-{:05}.safetensors"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPES |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8}
_DTYPES |= {"U8": torch.uint8, "BOOL": torch.bool}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LFS = b"version https://git-lfs"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Location of a tensor in a safetensors file."""

    file: Path
    start: int  # offset in the file, in bytes
    num_bytes: int
    shape: tuple[int, ...]
    stored_dtype: str  # name in the format, e.g. BF16

    @property
    def dtype(self) -> torch.dtype | None:
        """torch dtype; None if unsupported, e.g. 8-bit floats with separate scales."""
        return _DTYPES.get(self.stored_dtype)

    @property
    def stored_tensors(self) -> "tuple[StoredTensor, ...]":
        """The tensors that this one is read from, in order."""
        return (self,)

    def read_rows(self, into: Tensor, first_row: int) -> None:
        """Read rows of a tensor with a supported dtype, converted to the dtype and device of `into`.

        Needs a buffer of the same size, unless `into` is on the CPU in the dtype of the file.

        Args:
            into: [rows, ...].
            first_row: index of the first row.

        Raises:
            UserError: the file is truncated or cannot be read.
        """
        assert self.dtype is not None and into.shape[1:] == self.shape[1:]
        if not into.numel():  # some ranks have no rows of a small tensor
            return
        into = into.detach()
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        direct = into.dtype == self.dtype and into.device.type == "cpu" and into.is_contiguous()
        rows = into if direct else torch.empty(into.shape, dtype=self.dtype)
        self._read(first_row * row_bytes, rows.reshape(-1).view(torch.uint8))
        if not direct:
            into.copy_(rows)

    def read_bytes(self, start: int = 0, num_bytes: int | None = None) -> Tensor:
        """Read the raw bytes, by default all of them.

        Raises:
            UserError: the file is truncated or cannot be read.
        """
        part = torch.empty(self.num_bytes if num_bytes is None else num_bytes, dtype=torch.uint8)
        self._read(start, part)
        return part

    def _read(self, start: int, into: Tensor) -> None:
        """Fill a byte tensor with the bytes from `start` on."""
        view, done = into.numpy().data, 0
        try:
            with self.file.open("rb", buffering=0) as file:
                file.seek(self.start + start)
                while done < len(view):  # a single read returns at most 2 GiB
                    count = file.readinto(view[done:])
                    if not count:
                        raise OSError(
                            f"{len(view) - done} bytes are missing; the file has changed since it was checked"
                        )
                    done += count
        except OSError as error:
            raise UserError(f"model.path: {self.file}: cannot read it: {error}") from error


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Header entry of a tensor to write."""

    name: str
    stored_dtype: str  # name in the format
    shape: tuple[int, ...]
    num_bytes: int

    @staticmethod
    def of(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> "TensorInfo":
        """Describe a tensor of this shape and dtype."""
        return TensorInfo(name, _NAMES[dtype], shape, math.prod(shape) * dtype.itemsize)


def stored_weights(path: Path, *, field: str = "model.path") -> dict[str, StoredTensor]:
    """List the tensors of a safetensors file, or of all those of a model folder, by name; empty without any.

    Raises:
        UserError: a file is missing, truncated or of another format; the message names it and starts with `field`.
    """
    try:
        if path.is_file():
            return _read_header(path)
        if (path / SINGLE).is_file():
            return _read_header(path / SINGLE)
        if (path / INDEX).is_file():
            return _read_shards(path / INDEX)
        return {}
    except (ValueError, OSError) as error:
        raise UserError(f"{field}: {error}") from error


def write_tensors(path: Path, described: Sequence[TensorInfo], tensors: Iterable[Tensor]) -> None:
    """Write a safetensors file, one tensor at a time.

    Args:
        path: the file to write.
        described: header entries of the tensors.
        tensors: the tensors in the same order, on any device; raw bytes are allowed.
    """
    with path.open("wb") as file:
        write_header(file, described)
        for whole in tensors:
            write_tensor(file, whole)
            del whole  # free it before the next one is made


def write_header(file: BinaryIO, described: Sequence[TensorInfo]) -> None:
    """Write the header of a safetensors file, which the tensors follow."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in described:
        place = [end, end + tensor.num_bytes]
        header[tensor.name] = {"dtype": tensor.stored_dtype, "shape": list(tensor.shape), "data_offsets": place}
        end += tensor.num_bytes
    text = json.dumps(header).encode()
    text = text.ljust(len(text) + -len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)


def write_tensor(file: BinaryIO, tensor: Tensor) -> None:
    """Write the next tensor of a safetensors file, from any device."""
    file.write(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def write_index(folder: Path, files: Mapping[str, Sequence[TensorInfo]]) -> None:
    """Write the index file of sharded weights."""
    size = sum(tensor.num_bytes for tensors in files.values() for tensor in tensors)
    names = {tensor.name: file for file, tensors in files.items() for tensor in tensors}
    index = {"metadata": {"total_size": size}, "weight_map": names}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _read_shards(index: Path) -> dict[str, StoredTensor]:
    """List the tensors of the files that an index names.

    Raises:
        ValueError: the index or one of its files is damaged.
    """
    text = index.read_bytes()
    if text.startswith(_LFS):
        raise ValueError(_lfs_message(index))
    try:
        shards = sorted(set(json.loads(text)["weight_map"].values()))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{index} is not a weights index ({error!r}); copy it again") from None
    missing = [shard for shard in shards if not (index.parent / shard).is_file()]
    if missing:
        raise ValueError(
            f"{index} names {len(shards)} files, but {len(missing)} of them are missing: {few(missing)}; copy "
            f"them into the folder"
        )
    return {name: tensor for shard in shards for name, tensor in _read_header(index.parent / shard).items()}


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """List the tensors of one file, once safetensors has validated its header and size.

    Raises:
        ValueError: the file is damaged.
    """
    with path.open("rb") as file:
        start = file.read(64)
        if start.startswith(_LFS):
            raise ValueError(_lfs_message(path))
        try:
            with safe_open(path, "numpy"):
                pass
        except SafetensorError as error:
            raise ValueError(
                f"{path} ({path.stat().st_size} bytes) is truncated, or not a safetensors file ({error}); copy or "
                f"download it again"
            ) from None
        length = int.from_bytes(start[:8], "little")
        file.seek(8)
        entries: dict[str, Any] = json.loads(file.read(length))
    entries.pop("__metadata__", None)
    tensors = {}
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        tensors[name] = StoredTensor(
            file=path,
            start=8 + length + begin,
            num_bytes=end - begin,
            shape=tuple(entry["shape"]),
            stored_dtype=entry["dtype"],
        )
    return tensors


def _lfs_message(path: Path) -> str:
    return f"{path} is a git-lfs pointer, not the file itself; run `git lfs pull` in its folder"


def few(names: Iterable[str]) -> str:
    """Join up to three names for a message, in order."""
    names = sorted(names)
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedTensor:
    """A tensor of the model that is converted from stored tensors."""

    name: str  # in the model
    sources: Mapping[str, tuple[StoredTensor, ...]]  # by the name pattern of transformers
    is_stacked: bool  # row n is made of the n-th tensor of each pattern only
    first_name: str  # name that transformers gives a conversion to several tensors
    converter: Any  # an empty `WeightConverter`
    config: Any  # of the model

    @property
    def stored_tensors(self) -> tuple[StoredTensor, ...]:
        """The tensors that this one is made of, in order."""
        return tuple(tensor for tensors in self.sources.values() for tensor in tensors)

    def read_rows(self, into: Tensor, first_row: int) -> None:
        """Convert and read rows, see `StoredTensor.read_rows`. Stacked tensors are converted one row at a time.

        Raises:
            UserError: a file is truncated or cannot be read, or the result does not fit the model.
        """
        if not into.numel():
            return
        into = into.detach()
        if not self.is_stacked:
            _put(into, self._convert(into.dtype, slice(None)), first_row, self)
            return
        for n in range(len(into)):
            _put(into[n : n + 1], self._convert(into.dtype, slice(first_row + n, first_row + n + 1)), 0, self)

    def _convert(self, dtype: torch.dtype, which: slice) -> Tensor:
        """Convert the selected tensors of each pattern."""
        converter = deepcopy(self.converter)
        for pattern, sources in self.sources.items():
            for source in sources[which]:
                tensor = torch.empty(source.shape, dtype=dtype)
                source.read_rows(tensor, 0)
                converter.collected_tensors[pattern].append(tensor)
        with torch.no_grad():
            made = converter.convert(self.first_name, config=self.config)[self.name]
        converted: Tensor = made[0] if isinstance(made, list) else made
        return converted


def weight_conversions(model: Any) -> list[Any]:
    """Return the renamings and conversions that transformers applies when loading a model."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return list(get_model_conversion_mapping(model, add_legacy=False))


def map_to_model(model: Any, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor | ConvertedTensor] | None:
    """Map stored tensors to the names of the model's tensors, converted where necessary.

    Args:
        model: result of `meta_model`.
        stored: tensors by name in the files.

    Returns:
        sources by name in the model; None if only transformers itself can convert them.
    """
    return _read_names(model, stored)[0]


def weights_beside(model: Any, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the stored tensors of a multimodal model that are not of its language model `model`, by stored name."""
    return {name: stored[name] for name in _read_names(model, stored)[1]}


def _read_names(
    model: Any, stored: Mapping[str, StoredTensor]
) -> tuple[dict[str, StoredTensor | ConvertedTensor] | None, list[str]]:
    """Return the result of `map_to_model`, and the names of the stored tensors that are not of a language model.

    Tensors are collected in the same order as by transformers.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    multimodal = multimodal_of(model)
    outer = saved_model(model, multimodal)
    own = {outer_name(model, name): name for name in model.state_dict()}
    mapping = weight_conversions(outer)
    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    names = dict.fromkeys((*own, *outer.state_dict()), True)
    found: dict[str, StoredTensor | ConvertedTensor] = {}
    collected: dict[str, dict[str, list[StoredTensor]]] = defaultdict(lambda: defaultdict(list))
    beside: list[str] = []
    for name in sorted(stored, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, outer.base_model_prefix, names)
        if renamed not in names and name in names:
            renamed, pattern = rename_source_key(name, [], [], outer.base_model_prefix, names)
        if multimodal is not None and renamed not in own:
            beside.append(name)
        elif pattern is None:
            found[own.get(renamed, renamed)] = stored[name]
        else:
            collected[renamed][pattern].append(stored[name])
    for first_name, sources in collected.items():
        converter = of_pattern[next(iter(sources))]
        if not _is_supported(converter, sources):
            return None, beside
        first, *others = converter.target_patterns
        for target in (first, *others):
            name = first_name.replace(first, target)
            found[own.get(name, name)] = ConvertedTensor(
                name=name,
                sources={pattern: tuple(places) for pattern, places in sources.items()},
                is_stacked=_is_stacked(converter),
                first_name=first_name,
                converter=deepcopy(converter),
                config=outer.config,
            )
    return found, beside


def _is_supported(converter: Any, sources: Mapping[str, list[StoredTensor]]) -> bool:
    """Whether all tensors of a conversion are present, and its operations are supported."""
    from transformers import core_model_loading as library

    plain = (library.MergeModulelist, library.Concatenate, library.Chunk)
    counts = {len(tensors) for tensors in sources.values()}
    return (
        set(sources) == set(converter.source_patterns)
        and len(counts) == 1
        and all(type(operation) in plain for operation in converter.operations)
        and all(t.dtype is not None and t.dtype.is_floating_point for tensors in sources.values() for t in tensors)
    )


def _is_stacked(converter: Any) -> bool:
    from transformers.core_model_loading import Concatenate, MergeModulelist

    first, *others = converter.operations
    return (
        isinstance(first, MergeModulelist)
        and first.dim == 0
        and all(isinstance(operation, Concatenate) and operation.dim > 0 for operation in others)
    )


def _put(into: Tensor, made: Tensor, first_row: int, of: ConvertedTensor) -> None:
    if made.shape[1:] != into.shape[1:] or len(made) < first_row + len(into):
        file = of.stored_tensors[0].file
        raise UserError(
            f"model.path: {file}: {of.name} has rows of shape {list(made.shape[1:])}, but config.json says "
            f"{list(into.shape[1:])}; weights and config.json do not belong together"
        )
    into.copy_(made[first_row : first_row + len(into)])
