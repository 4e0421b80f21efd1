"""Frozen linear layers in 4 or 8 bits, by bitsandbytes (nf4 with double quantization) and torchao (int8, fp8).

transformers quantizes tensor by tensor while loading. Its layers are then replaced by ours, which hold the same
tensors: torchao layers save a dequantized weight for backward, and bitsandbytes layers modify themselves (a bias is
cast to the input dtype, codes are repacked for some CPUs).
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
    """Check that a quantization is available, before loading weights.

    Args:
        kind: quantization of the weights.
        field: configuration key that the message starts with.

    Raises:
        UserError: a package is missing, or has no kernels for this machine.
    """
    available = [other for other, package in _PACKAGES.items() if find_spec(package) is not None]
    if kind not in available:
        also = f", or use {' or '.join(available)}" if available else ""
        raise UserError(
            f"{field}: {kind} needs the package {_PACKAGES[kind]}, which is not installed; install "
            f"cohort-rl[quantization]{also}"
        )
    if kind == "nf4":
        from transformers.integrations import validate_bnb_backend_availability

        try:
            validate_bnb_backend_availability(raise_exception=True)
        except RuntimeError as error:
            raise UserError(f"{field}: nf4: bitsandbytes does not work on this machine ({error}); use int8") from error


def loading_options(kind: Quantization, device: torch.device, compute_dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for a quantization."""
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


def replace_quantized_layers(model: Any, compute_dtype: torch.dtype) -> None:
    """Replace quantized layers of transformers by `QuantizedLinear`, see the module docstring.

    Args:
        model: loaded with `loading_options`.
        compute_dtype: dtype of the products.
    """
    for parameter in model.parameters():
        if not is_quantized(parameter):  # on CPU it may be a view of the memory-mapped file
            parameter.data = parameter.data.clone()
    for name, module in [*model.named_modules()]:
        if isinstance(module, nn.Linear) and is_quantized(module.weight):
            model.set_submodule(name, QuantizedLinear(module, compute_dtype))


def is_quantized(weight: Any) -> bool:
    """Whether a weight is quantized."""
    return hasattr(weight, "quant_state") or hasattr(weight, "qdata")


def storage_tensors(weight: Any) -> list[Tensor]:
    """Return the tensors that store a weight: itself, or codes, scales and tables if quantized."""
    if hasattr(weight, "qdata"):
        return [weight.qdata, weight.scale]
    state = getattr(weight, "quant_state", None)
    if state is None:
        return [weight]
    return [weight.data, state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]


def quantization_notes(model: Any) -> list[str]:
    """Messages for the user about the quantized layers of a model; empty without any."""
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    if not layers:
        return []
    own = [p for name, p in model.named_parameters() if not is_quantized(p) and "lora_" not in name]
    number = sum(layer.in_features * layer.out_features for layer in layers)
    num_bytes = sum({p.data_ptr(): p.nbytes for layer in layers for p in storage_tensors(layer.weight)}.values())
    return [
        f"{number / 1e6:.4g} million weights of {len(layers)} linear layers are quantized ("
        f"{num_bytes / 1e6:.4g} MB); {sum(p.numel() for p in own) / 1e6:.4g} million others are not"
    ]


class QuantizedLinear(nn.Linear):
    """A frozen linear layer with a quantized weight."""

    def __init__(self, layer: nn.Linear, compute_dtype: torch.dtype):
        """Take over the parameters of a layer.

        Args:
            layer: layer of transformers with a quantized weight.
            compute_dtype: dtype of the products.
        """
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        weight: Any = layer.weight
        if hasattr(weight, "quant_state"):
            weight.module = None  # drop the reference to the replaced layer
            weight.quant_state.dtype = compute_dtype  # dequantize directly to it

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., in] to [..., out], in the dtype of the input or of autocast."""
        device = input.device.type
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        out: Tensor = _Product.apply(input, self.weight)
        return out if self.bias is None else out + self.bias.to(out.dtype)


class _Product(torch.autograd.Function):
    """Product with a frozen quantized weight. Saves only the quantized weight for backward."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Any) -> Tensor:
        ctx.weight = weight
        if hasattr(weight, "qdata") or not input.is_cuda:
            return nn.functional.linear(input, dequantize(weight, input.dtype))
        from bitsandbytes import matmul_4bit  # a fused kernel on GPUs only

        out: Tensor = matmul_4bit(input, weight, weight.quant_state)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return gradient @ dequantize(ctx.weight, gradient.dtype), None


def dequantize(weight: Any, dtype: torch.dtype) -> Tensor:
    """Dequantize a weight to [out, in]."""
    if hasattr(weight, "qdata"):
        numbers: Tensor = weight.dequantize(dtype)
        return numbers
    from bitsandbytes.functional import dequantize_4bit

    # As one row: on CPUs with AVX-512, bitsandbytes 0.50 reads wrong scales if rows are not a multiple of its
    # block size of 64 (an in_features of 96, 144 or 208).
    state = copy(weight.quant_state)
    state.shape = torch.Size((1, state.shape.numel()))
    numbers = dequantize_4bit(weight.data, state)
    return numbers.view(weight.quant_state.shape).to(dtype)
