"""Weights that the files hold in another form than the model: which stored tensors each is made of, read row by row.

The library knows what each architecture needs (`transformers.conversion_mapping`), and converts with its own
operations here too. The files of a mixture of experts, say, have a tensor for each expert, and the model one of all:
row n is made of what the files have for expert n, so that no rank reads an expert that it does not keep.
"""

from collections import defaultdict
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cohort.errors import UserError
from cohort.policy.weights import StoredTensor, read_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """A tensor of the model that is made of stored ones."""

    name: str  # of the tensor in the model
    sources: Mapping[str, tuple[StoredTensor, ...]]  # by the library's pattern for their names
    is_stacked: bool  # row n is made of the n-th tensor of every pattern, and of nothing else
    first_name: str  # by which the library calls the conversion, where it makes several tensors
    converter: Any  # a `WeightConverter` that holds nothing
    config: Any  # of the model

    def read_rows(self, into: Tensor, first_row: int) -> None:
        """As `weights.read_rows`; of one row at a time where rows are made by themselves, or of all.

        Raises:
            UserError: a file ends too early or cannot be read, or what comes of it does not fit into the model.
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
        """What the library makes of some of the tensors of each pattern."""
        converter = deepcopy(self.converter)
        for pattern, sources in self.sources.items():
            for source in sources[which]:
                tensor = torch.empty(source.shape, dtype=dtype)
                read_rows(source, tensor, 0)
                converter.collected_tensors[pattern].append(tensor)
        with torch.no_grad():
            made = converter.convert(self.first_name, config=self.config)[self.name]
        whole: Tensor = made[0] if isinstance(made, list) else made
        return whole


def conversions_of(model: Any) -> list[Any]:
    """The library's renamings and conversions of a model's tensors, as it is loaded."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return list(get_model_conversion_mapping(model, add_legacy=False))


def by_name_in_model(model: Any, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor | Converted] | None:
    """What a model's tensors are read from, as far as the files have it.

    Args:
        model: from `empty_model`.
        stored: the tensors of the files.

    Returns:
        None where only the library itself can make the model's tensors.
    """
    names = set(model.state_dict())
    mapping = conversions_of(model)
    if not mapping:
        prefix = f"{model.base_model_prefix}."
        return {name if name in names else f"{prefix}{name}": place for name, place in stored.items()}
    return _converted(model, names, mapping, stored)


def _converted(
    model: Any, names: set[str], mapping: list[Any], stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor | Converted] | None:
    """In the order, and under the names, in which the library collects what it converts."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    there = dict.fromkeys(names)
    found: dict[str, StoredTensor | Converted] = {}
    collected: dict[str, dict[str, list[StoredTensor]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(stored, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, there)
        if renamed not in names and name in names:
            renamed, pattern = rename_source_key(name, [], [], model.base_model_prefix, there)
        if pattern is None:
            found[renamed] = stored[name]
        else:
            collected[renamed][pattern].append(stored[name])
    for first_name, sources in collected.items():
        converter = of_pattern[next(iter(sources))]
        if not _is_known(converter, sources):
            return None
        first, *others = converter.target_patterns
        for target in (first, *others):
            name = first_name.replace(first, target)
            found[name] = Converted(
                name=name,
                sources={pattern: tuple(places) for pattern, places in sources.items()},
                is_stacked=_is_stacked(converter),
                first_name=first_name,
                converter=deepcopy(converter),
                config=model.config,
            )
    return found


def _is_known(converter: Any, sources: Mapping[str, list[StoredTensor]]) -> bool:
    """Whether all that is needed to convert is here, and the operations look at nothing else."""
    from transformers import core_model_loading as library

    plain = (library.MergeModulelist, library.Concatenate, library.Chunk)
    every = {len(places) for places in sources.values()}
    return (
        set(sources) == set(converter.source_patterns)
        and len(every) == 1
        and all(type(operation) in plain for operation in converter.operations)
        and all(place.dtype is not None and place.dtype.is_floating_point for ps in sources.values() for place in ps)
    )


def _is_stacked(converter: Any) -> bool:
    from transformers.core_model_loading import Concatenate, MergeModulelist

    first, *others = converter.operations
    return (
        isinstance(first, MergeModulelist)
        and first.dim == 0
        and all(isinstance(operation, Concatenate) and operation.dim > 0 for operation in others)
    )


def _put(into: Tensor, made: Tensor, first_row: int, of: Converted) -> None:
    if made.shape[1:] != into.shape[1:] or len(made) < first_row + len(into):
        file = next(iter(of.sources.values()))[0].file
        raise UserError(
            f"model.path: {file}: what is stored for {of.name} has rows of {list(made.shape[1:])}, and by config.json "
            f"they are {list(into.shape[1:])}; weights and config.json are of different models"
        )
    into.copy_(made[first_row : first_row + len(into)])
