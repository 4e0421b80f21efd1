"""Stream a policy's full weights under their saved names, for saving and for weight updates of samplers."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cohort.models.loading.meta_device import named_saved_tensors
from cohort.models.loading.weight_conversion import weight_conversions
from cohort.models.policy import Policy

if TYPE_CHECKING:
    from transformers.core_model_loading import WeightConverter


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, shape and dtype of a tensor that will be streamed."""

    name: str  # in a saved model folder
    shape: tuple[int, ...]
    dtype: torch.dtype


def weight_specs(policy: Policy, dtype: torch.dtype | None = None) -> list[TensorSpec]:
    """Return the specs of what `stream_weights` yields, in order, without gathering weights."""
    specs = []
    for group in _groups(policy, dtype):
        shapes = {name: torch.empty(tensor.shape, dtype=_cast(tensor, dtype), device="meta") for name, tensor in group}
        specs += [TensorSpec(n, tuple(t.shape), t.dtype) for n, t in _as_saved(policy, shapes).items()]
    return specs


@torch.no_grad()  # not a `with` block: a consumer that fails leaves the generator suspended, and gradients off
def stream_weights(policy: Policy, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield every full weight by its name in a saved model folder, tied ones once. Exhaust it on every rank.

    Sharded weights are gathered one at a time, or together if a saved tensor is made of several.

    Args:
        policy: source of the weights.
        dtype: cast floating-point weights to it before gathering; None keeps the dtype of the (master) weights.
    """
    for group in _groups(policy, dtype):
        made = _as_saved(policy, {name: _full_tensor(tensor, dtype) for name, tensor in group})
        while made:  # drop each one as soon as it has been consumed
            name = next(iter(made))
            yield name, made.pop(name)


def saved_bytes(policy: Policy) -> int:
    """Return the size of the saved weights: of the adapter if there is one, otherwise of the (master) weights."""
    if policy.adapter is not None:
        return sum(p.numel() * p.element_size() for p in policy.model.parameters() if p.requires_grad)
    return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in weight_specs(policy))


def _groups(policy: Policy, dtype: torch.dtype | None) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield groups of tensors that are converted to saved tensors together.

    A group is a single tensor, unless transformers split or merged tensors when loading them.
    """
    from transformers.core_model_loading import WeightConverter

    found = reversed(weight_conversions(policy.model))
    converters = [c.reverse_transform() for c in found if isinstance(c, WeightConverter)]
    master_weights = policy.master_weights if dtype is None else None
    together: dict[str, list[tuple[str, Tensor]]] = {}
    for name, held in named_saved_tensors(policy.model):
        master = None if master_weights is None else master_weights.of(name)
        tensor = held if master is None else master
        together.setdefault(_stored_name(name, converters), []).append((name, tensor))
    yield from together.values()


def _stored_name(name: str, converters: list["WeightConverter"]) -> str:
    """Return the name that the first matching converter gives a weight; without a match the weight keeps its own."""
    for converter in converters:
        renamed, pattern = converter.rename_source_key(name)
        if pattern is not None:
            return str(renamed)
    return name


def _as_saved(policy: Policy, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert names and shapes to those of `save_pretrained`."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(policy.model, tensors)


def _full_tensor(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    cast = tensor.detach().to(_cast(tensor, dtype))
    return cast.full_tensor() if isinstance(cast, DTensor) else cast


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
