"""Trained weights in host memory, of which the device has a copy in the dtype that is computed in.

The copy is what forward and backward see, the sampler and the servers too; updates are made of the masters, and the
masters are what is saved. So nothing is rounded twice, and an update that is small beside a weight is not lost.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn


class Masters:
    """The weights of a model, frozen ones too, on the host, sharded as the model is.

    Attributes:
        tree: modules without a forward that hold the masters under the names that they have in the model.
        dtype: of the first, which is what a model's dtype is called. A few may be wider, where the model asks for it.
    """

    def __init__(self, model: Any, compute_dtype: torch.dtype):
        """Copy the weights of `model` to the host, and leave it with a rounded copy.

        Args:
            model: its weights are there, and nothing was computed with it yet. If it is sharded, FSDP2 has not looked
                at its dtypes yet.
            compute_dtype: of the copy.
        """
        self.tree = nn.Module()
        for name, parameter in model.named_parameters():
            master = nn.Parameter(parameter.detach().to("cpu", copy=True), requires_grad=parameter.requires_grad)
            _put(self.tree, name, master)
        self.dtype = next(self.tree.parameters()).dtype
        self._by_name = dict(self.tree.named_parameters())
        self._model = model
        round_weights(model, compute_dtype)
        for _, parameter, master in self.pairs():
            parameter.grad_dtype = master.dtype  # micro-batches are added up as wide as without masters

    def pairs(self) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        """Each weight that is trained: its name, its copy on the device, its master."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                yield name, parameter, self._by_name[name]

    def of(self, name: str) -> Tensor | None:
        """The master of a saved tensor, if it has one: buffers have not."""
        return self._by_name.get(name)


def round_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Have a model compute in `dtype`. Its buffers stay as they are."""

    def cast_weight(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if isinstance(tensor, nn.Parameter) and tensor.is_floating_point() else tensor

    model._apply(cast_weight)


def _put(tree: nn.Module, name: str, parameter: nn.Parameter) -> None:
    *path, last = name.split(".")
    for part in path:
        if part not in dict(tree.named_children()):
            tree.add_module(part, nn.Module())
        tree = cast(nn.Module, getattr(tree, part))
    tree.register_parameter(last, parameter)
