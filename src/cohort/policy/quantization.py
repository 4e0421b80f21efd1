"""Frozen linear layers in 4 or 8 bits, by bitsandbytes (nf4 with double quantization) and torchao (int8, fp8).

The Hugging Face library quantizes while it loads, one tensor after another. Its layers are replaced by ours then, which
hold the same tensors: torchao's layers keep a whole weight each for backward, and bitsandbytes' change their own bits
(a bias gets the input's dtype, codes are packed anew for some CPUs).
"""

from copy import copy
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from cohort.config import Quantization
from cohort.errors import UserError

_PACKAGES: dict[Quantization, str] = {"nf4": "bitsandbytes", "int8": "torchao", "fp8": "torchao"}


def check_quantization(kind: Quantization, *, field: str = "model.quantization") -> None:
    """To be asked before any weights are loaded.

    Args:
        kind: of the weights.
        field: that asks for it.

    Raises:
        UserError: a package is missing, or has no kernels for this machine.
    """
    there = [other for other, package in _PACKAGES.items() if find_spec(package) is not None]
    if kind not in there:
        also = f", or use {' or '.join(there)}" if there else ""
        raise UserError(
            f"{field}: {kind} needs the package {_PACKAGES[kind]}, which is not installed; install "
            f"cohort-rl[quantization]{also}"
        )
    if kind == "nf4":
        from transformers.integrations import validate_bnb_backend_availability

        try:
            validate_bnb_backend_availability(raise_exception=True)
        except RuntimeError as error:
            raise UserError(f"{field}: nf4: bitsandbytes cannot be used on this machine ({error}); use int8") from error


def loading_options(kind: Quantization, device: torch.device, compute_dtype: torch.dtype) -> dict[str, Any]:
    """What the library's `from_pretrained` is to be given besides."""
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if kind == "nf4":
        how: Any = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=compute_dtype,
        )
    else:
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

        how = TorchAoConfig(Int8WeightOnlyConfig() if kind == "int8" else Float8WeightOnlyConfig())
    return {"quantization_config": how, "device_map": {"": device}}


def adopt(model: Any, compute_dtype: torch.dtype) -> None:
    """Give quantized layers of the library's the place of which this module's docstring tells.

    Args:
        model: loaded with `loading_options`.
        compute_dtype: of the products.
    """
    for parameter in model.parameters():
        if not is_quantized(parameter):  # on CPUs it may lie in the file, all of which would stay mapped
            parameter.data = parameter.data.clone()
    for name, module in [*model.named_modules()]:
        if isinstance(module, nn.Linear) and is_quantized(module.weight):
            model.set_submodule(name, QuantizedLinear(module, compute_dtype))


def is_quantized(weight: Any) -> bool:
    """Whether it is held in fewer bits than it is computed in."""
    return hasattr(weight, "quant_state") or hasattr(weight, "qdata")


def stored_parts(weight: Any) -> list[Tensor]:
    """What a weight takes memory for: the tensor itself, or codes, scales and tables of a quantized one."""
    if hasattr(weight, "qdata"):
        return [weight.qdata, weight.scale]
    state = getattr(weight, "quant_state", None)
    if state is None:
        return [weight]
    return [weight.data, state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]


def told(model: Any) -> list[str]:
    """What a person should know of a model's quantized layers; nothing where there are none."""
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    if not layers:
        return []
    own = [p for name, p in model.named_parameters() if not is_quantized(p) and "lora_" not in name]
    number = sum(layer.in_features * layer.out_features for layer in layers)
    num_bytes = sum({p.data_ptr(): p.nbytes for layer in layers for p in stored_parts(layer.weight)}.values())
    return [
        f"{number / 1e6:.4g} million weights of {len(layers)} linear layers are quantized and take "
        f"{num_bytes / 1e6:.4g} MB; {sum(p.numel() for p in own) / 1e6:.4g} million others are as they were"
    ]


class QuantizedLinear(nn.Linear):
    """A frozen linear layer that computes with its weight as it is stored."""

    def __init__(self, layer: nn.Linear, compute_dtype: torch.dtype):
        """Take over the parameters.

        Args:
            layer: of the library, with a quantized weight.
            compute_dtype: of the products.
        """
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        weight: Any = layer.weight
        if hasattr(weight, "quant_state"):
            weight.module = None  # the layer that this one replaces
            weight.quant_state.dtype = compute_dtype  # that codes are turned into, at once and not by way of another

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] to [..., out], in the dtype that other products have here: the input's, or autocast's."""
        device = input.device.type
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        out: Tensor = _Product.apply(input, self.weight)
        return out if self.bias is None else out + self.bias.to(out.dtype)


class _Product(torch.autograd.Function):
    """A product with a frozen weight, of which nothing is kept for backward but the weight as it is stored."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Any) -> Tensor:
        ctx.weight = weight
        if hasattr(weight, "qdata") or not input.is_cuda:
            return nn.functional.linear(input, whole(weight, input.dtype))
        from bitsandbytes import matmul_4bit  # a fused kernel on GPUs only

        out: Tensor = matmul_4bit(input, weight, weight.quant_state)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return gradient @ whole(ctx.weight, gradient.dtype), None


def whole(weight: Any, dtype: torch.dtype) -> Tensor:
    """The numbers [out, in] that a quantized weight stands for."""
    if hasattr(weight, "qdata"):
        numbers: Tensor = weight.dequantize(dtype)
        return numbers
    from bitsandbytes.functional import dequantize_4bit

    # As one row: on CPUs with AVX-512 bitsandbytes 0.50 reads the wrong scales where a row is no multiple of its blocks
    # of 64 (an in_features of 96, 144 or 208).
    state = copy(weight.quant_state)
    state.shape = torch.Size((1, state.shape.numel()))
    numbers = dequantize_4bit(weight.data, state)
    return numbers.view(weight.quant_state.shape).to(dtype)
