"""Read weights that are stored in a different form from the model's, row by row.

The mappings and operations are those of transformers (`transformers.conversion_mapping`). For example, checkpoints of
mixture-of-experts models have one tensor per expert, and the model has one for all: row n is made from the tensors of
expert n, so no rank reads experts that it does not keep.
"""

from collections import defaultdict
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cohort.errors import UserError
from cohort.models.loading.safetensors_files import StoredTensor, read_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedTensor:
    """A tensor of the model that is converted from stored tensors."""

    name: str  # in the model
    sources: Mapping[str, tuple[StoredTensor, ...]]  # by the name pattern of transformers
    is_stacked: bool  # row n is made of the n-th tensor of each pattern only
    first_name: str  # name that transformers gives a conversion to several tensors
    converter: Any  # an empty `WeightConverter`
    config: Any  # of the model

    def read_rows(self, into: Tensor, first_row: int) -> None:
        """Convert and read rows, see `safetensors_files.read_rows`. Stacked tensors are converted one row at a time.

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
                read_rows(source, tensor, 0)
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
    names = set(model.state_dict())
    mapping = weight_conversions(model)
    if not mapping:
        prefix = f"{model.base_model_prefix}."
        return {name if name in names else f"{prefix}{name}": place for name, place in stored.items()}
    return _converted(model, names, mapping, stored)


def _converted(
    model: Any, names: set[str], mapping: list[Any], stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor | ConvertedTensor] | None:
    """`map_to_model` of a model with conversions; collects tensors in the same order as transformers."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    model_names = dict.fromkeys(names)
    found: dict[str, StoredTensor | ConvertedTensor] = {}
    collected: dict[str, dict[str, list[StoredTensor]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(stored, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, model_names)
        if renamed not in names and name in names:
            renamed, pattern = rename_source_key(name, [], [], model.base_model_prefix, model_names)
        if pattern is None:
            found[renamed] = stored[name]
        else:
            collected[renamed][pattern].append(stored[name])
    for first_name, sources in collected.items():
        converter = of_pattern[next(iter(sources))]
        if not _is_supported(converter, sources):
            return None
        first, *others = converter.target_patterns
        for target in (first, *others):
            name = first_name.replace(first, target)
            found[name] = ConvertedTensor(
                name=name,
                sources={pattern: tuple(places) for pattern, places in sources.items()},
                is_stacked=_is_stacked(converter),
                first_name=first_name,
                converter=deepcopy(converter),
                config=model.config,
            )
    return found


def _is_supported(converter: Any, sources: Mapping[str, list[StoredTensor]]) -> bool:
    """Whether all tensors of a conversion are present, and its operations are supported."""
    from transformers import core_model_loading as library

    plain = (library.MergeModulelist, library.Concatenate, library.Chunk)
    counts = {len(tensors) for tensors in sources.values()}
    return (
        set(sources) == set(converter.source_patterns)
        and len(counts) == 1
        and all(type(operation) in plain for operation in converter.operations)
        and all(
            place.dtype is not None and place.dtype.is_floating_point
            for tensors in sources.values()
            for place in tensors
        )
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
        file = next(iter(of.sources.values()))[0].file
        raise UserError(
            f"model.path: {file}: {of.name} has rows of shape {list(made.shape[1:])}, but config.json says "
            f"{list(into.shape[1:])}; weights and config.json do not belong together"
        )
    into.copy_(made[first_row : first_row + len(into)])
