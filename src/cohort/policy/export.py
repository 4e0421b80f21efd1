"""A policy's weights as its saved folder would have them, one after another, for whoever else computes with them.

E experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cohort.policy.policy import Policy
from cohort.policy.skeleton import saved_tensors


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that is announced."""

    name: str  # as in a saved model folder
    shape: tuple[int, ...]
    dtype: torch.dtype


def weight_specs(policy: Policy, dtype: torch.dtype) -> list[TensorSpec]:
    """What `stream_weights` yields, in its order, without gathering anything."""
    specs = []
    for group in _groups(policy):
        shapes = {name: torch.empty(tensor.shape, dtype=_cast(tensor, dtype), device="meta") for name, tensor in group}
        specs += [TensorSpec(n, tuple(t.shape), t.dtype) for n, t in _as_saved(policy, shapes).items()]
    return specs


def stream_weights(policy: Policy, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every weight by its name in a saved model folder, whole; a tied one once. Every rank takes part, to the end.

    Of sharded weights one tensor is gathered at a time, or one layer's where saved tensors are made from several.

    Args:
        policy: whose weights.
        dtype: that floating-point weights are cast to, before they are gathered.
    """
    with torch.no_grad():
        for group in _groups(policy):
            yield from _as_saved(policy, {name: _whole(tensor, dtype) for name, tensor in group}).items()


def _groups(policy: Policy) -> Iterator[list[tuple[str, Tensor]]]:
    """The model's tensors in the portions in which their names and shapes can be turned into those of a folder.

    Where the library fuses tensors when it loads, as the E experts of a layer, that is a layer.
    """
    tensors = saved_tensors(policy.model)
    if not _is_converted(policy):
        yield from ([item] for item in tensors)
        return
    names = policy.model._no_split_modules or ()
    layers = [f"{name}." for name, module in policy.model.named_modules() if type(module).__name__ in names]

    def layer_of(item: tuple[str, Tensor]) -> int:
        return next((n for n, layer in enumerate(layers) if item[0].startswith(layer)), -1)

    for _, group in groupby(sorted(tensors, key=layer_of), key=layer_of):
        yield list(group)


def _is_converted(policy: Policy) -> bool:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    return any(isinstance(c, WeightConverter) for c in get_model_conversion_mapping(policy.model, add_legacy=False))


def _as_saved(policy: Policy, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As `save_pretrained` would name and cut them."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(policy.model, tensors)


def _whole(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    cast = tensor.detach().to(_cast(tensor, dtype))
    return cast.full_tensor() if isinstance(cast, DTensor) else cast


def _cast(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if tensor.is_floating_point() else tensor.dtype
