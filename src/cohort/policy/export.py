"""A policy's weights as its saved folder has them, one after another, for it and for whoever samples."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cohort.policy.conversion import conversions_of
from cohort.policy.policy import Policy
from cohort.policy.skeleton import saved_tensors


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that is announced."""

    name: str  # as in a saved model folder
    shape: tuple[int, ...]
    dtype: torch.dtype


def weight_specs(policy: Policy, dtype: torch.dtype | None = None) -> list[TensorSpec]:
    """What `stream_weights` yields, in its order, without gathering anything."""
    specs = []
    for group in _groups(policy, dtype):
        shapes = {name: torch.empty(tensor.shape, dtype=_cast(tensor, dtype), device="meta") for name, tensor in group}
        specs += [TensorSpec(n, tuple(t.shape), t.dtype) for n, t in _as_saved(policy, shapes).items()]
    return specs


def stream_weights(policy: Policy, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every weight by its name in a saved model folder, whole; a tied one once. Every rank takes part, to the end.

    Of sharded weights one tensor is gathered at a time, or those that saved tensors are made of together.

    Args:
        policy: whose weights.
        dtype: that floating-point weights are cast to, before they are gathered; None for their own, and where the
            model has copies of masters, the masters'.
    """
    with torch.no_grad():
        for group in _groups(policy, dtype):
            made = _as_saved(policy, {name: _whole(tensor, dtype) for name, tensor in group})
            while made:  # none is held for longer than whoever takes it needs it
                name = next(iter(made))
                yield name, made.pop(name)


def saved_bytes(policy: Policy) -> int:
    """Of the weights in the policy's saved folder: its own, in their masters' dtype, or its adapter's."""
    if policy.adapter is not None:
        return sum(p.numel() * p.element_size() for p in policy.model.parameters() if p.requires_grad)
    return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in weight_specs(policy))


def _groups(policy: Policy, dtype: torch.dtype | None) -> Iterator[list[tuple[str, Tensor]]]:
    """The policy's tensors in the portions in which their names and shapes can be turned into those of a folder.

    That is each by itself, but where the library made several of one when it loaded them.
    """
    from transformers.core_model_loading import WeightConverter, apply_converters

    found = reversed(conversions_of(policy.model))
    converters = [c.reverse_transform() for c in found if isinstance(c, WeightConverter)]
    masters = policy.masters if dtype is None else None
    together: dict[str, list[tuple[str, Tensor]]] = {}
    for name, held in saved_tensors(policy.model):
        master = None if masters is None else masters.of(name)
        tensor = held if master is None else master
        stored_name, pattern = apply_converters(name, converters)
        together.setdefault(name if pattern is None else stored_name, []).append((name, tensor))
    yield from together.values()


def _as_saved(policy: Policy, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As `save_pretrained` would name and cut them."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(policy.model, tensors)


def _whole(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    cast = tensor.detach().to(_cast(tensor, dtype))
    return cast.full_tensor() if isinstance(cast, DTensor) else cast


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
