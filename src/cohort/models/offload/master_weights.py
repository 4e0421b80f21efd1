"""Master weights in host memory, with a copy in the compute dtype on the device.

Forward, backward and samplers use the copy. The optimizer updates the master weights, and these are saved. So nothing
is rounded twice, and small updates are not lost.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn


class MasterWeights:
    """Master weights of a model on the host, including frozen ones, sharded like the model.

    Attributes:
        tree: empty modules that hold the master weights under their names in the model.
        dtype: dtype of the first weight. Models may keep a few weights in a wider dtype.
    """

    def __init__(self, model: Any, compute_dtype: torch.dtype):
        """Copy the weights of `model` to the host, and round those of the model.

        Args:
            model: a loaded model, not used yet. If sharded, FSDP2 must not have inspected its dtypes.
            compute_dtype: dtype of the weights left in the model.
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
            parameter.grad_dtype = master.dtype  # accumulate gradients in the dtype of the master weights

    def pairs(self) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        """Yield name, device copy and master weight of each trained weight."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                yield name, parameter, self._by_name[name]

    def of(self, name: str) -> Tensor | None:
        """Return the master weight of a saved tensor; None for buffers."""
        return self._by_name.get(name)


def round_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters of a model to `dtype`, but not its buffers."""

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
