"""Products with few rows on CPUs, by copies of the weights in oneDNN's packed layout.

Decoding multiplies each weight by few rows. BLAS libraries then read the weight at a fraction of the memory's speed,
since they copy it into a layout of their own in each call. Here that is done once for many calls.
"""

import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from cohort.plan import defaults
from cohort.processes.this_process import available_memory_bytes

_LEAST_NUMEL = 2**16  # smaller weights, such as those of adapters, are left alone
_ROWS = 8  # for which the layout is chosen, and the measurement made
_MEASURED_BYTES = 2**29
_MARGIN = 1.1  # the layout must be slower by this factor, so that noise does not change the choice between runs


class PackedWeight:
    """A packed copy of a weight [outputs, inputs], to multiply rows by."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype):
        self._dtype = dtype
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(dtype), _ROWS)
        self._bias = None if bias is None else bias.detach().to(dtype)

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply rows [..., inputs]; return [..., outputs]."""
        rows = rows.to(self._dtype)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return out


class PackedLayers:
    """Linear layers that multiply by packed copies of their weights between `install` and `remove`."""

    def __init__(self, layers: Sequence[nn.Linear], dtype: torch.dtype):
        """Pack the weights of layers.

        Args:
            layers: the result of `packable_layers`.
            dtype: dtype of the products, float32 or bfloat16.
        """
        self._layers = layers
        self._dtype = dtype
        self._packed = [PackedWeight(layer.weight, layer.bias, dtype) for layer in layers]

    def install(self) -> None:
        """Let the layers multiply by the copies."""
        for layer, packed in zip(self._layers, self._packed, strict=True):
            vars(layer)["forward"] = packed

    def remove(self) -> None:
        """Let the layers multiply by their own weights again."""
        for layer in self._layers:
            vars(layer).pop("forward", None)

    def are_faster(self) -> bool:
        """Measure whether products with few rows are about as fast as with the layers' own weights, or faster."""
        sizes = accumulate(layer.weight.numel() * self._dtype.itemsize for layer in self._layers)
        count = sum(size <= _MEASURED_BYTES for size in sizes) or 1
        own = [layer.weight.detach().to(self._dtype) for layer in self._layers[:count]]
        rows = [torch.ones(_ROWS, weight.shape[1], dtype=self._dtype) for weight in own]
        times: dict[Callable[..., Any], list[float]] = {_own_products: [], _packed_products: []}
        for _ in range(4):  # in turn, since other processes come and go
            for products, seconds in times.items():
                start = time.perf_counter()
                products(rows, own if products is _own_products else self._packed[:count])
                seconds.append(time.perf_counter() - start)
        return min(times[_packed_products]) < _MARGIN * min(times[_own_products])


def _own_products(rows: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    with torch.autocast("cpu", enabled=False):
        for x, weight in zip(rows, weights, strict=True):
            nn.functional.linear(x, weight)


def _packed_products(rows: Sequence[Tensor], weights: Sequence[PackedWeight]) -> None:
    for x, weight in zip(rows, weights, strict=True):
        weight(x)


def packable_layers(model: nn.Module, dtype: torch.dtype) -> list[nn.Linear]:
    """Return the linear layers of a model whose weights can be packed; none if that would not pay or not fit.

    Args:
        model: the model, with its weights gathered.
        dtype: dtype of the products.
    """
    if not has_packed_products(dtype):
        return []
    layers = [module for module in model.modules() if type(module) is nn.Linear and _is_packable(module)]
    num_bytes = sum(layer.weight.numel() for layer in layers) * dtype.itemsize
    # smaller models stay in the processor's caches
    if num_bytes < defaults.PACKED_WEIGHTS_BYTES or 2 * num_bytes > available_memory_bytes():
        return []
    return layers


def has_packed_products(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies in this dtype here: in float32, and in bfloat16 on CPUs with AVX-512."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _is_packable(layer: nn.Linear) -> bool:
    weight = layer.weight
    is_plain = type(weight) is nn.Parameter and weight.device.type == "cpu" and "forward" not in vars(layer)
    return is_plain and weight.is_contiguous() and weight.numel() >= _LEAST_NUMEL
