"""Memory of what stays for the whole run: quantized weights, optimizer state and reward models.

nf4: 4 bits per weight, one byte per 64 for their scale, a float32 per 256 such bytes, a float32 mean and tables of 16
and 256: 4.127 bits per weight of a large matrix. int8 and fp8: 8 bits per weight, a float32 per row.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cohort.config import AdafactorConfig, Adamw8bitConfig, Config, MuonConfig, OptimConfig, Quantization, SgdConfig
from cohort.config.optim import StochasticRoundingConfig
from cohort.errors import UserError
from cohort.plan.defaults import BYTES
from cohort.plan.layer_parts import WeightShape
from cohort.plan.shape import ModelShape, try_read_shape

_NF4_BLOCK, _NF4_BLOCKS = 64, 256
_TABLE_BYTES = 4 * (1 + 16 + 256)


def matrix_bytes(kind: Quantization, weight: WeightShape) -> int:
    """Bytes of one quantized weight [out, in]."""
    number = math.prod(weight)
    if kind != "nf4":
        return number + 4 * weight[0]
    blocks = -(-number // _NF4_BLOCK)
    return -(-number // 2) + blocks + 4 * -(-blocks // _NF4_BLOCKS) + _TABLE_BYTES


def model_bytes(shape: ModelShape, kind: Quantization, bytes_each: int) -> int:
    """Bytes of a model with quantized linear layers; other weights take `bytes_each`."""
    saved = sum(layers * (bytes_each * math.prod(w) - matrix_bytes(kind, w)) for w, layers in shape.linear_weights)
    return bytes_each * shape.num_parameters - saved


def dequantized_bytes(shape: ModelShape, kind: Quantization, compute_bytes: int) -> int:
    """Bytes of the largest weight, dequantized for its matmul; torchao applies scales in float32."""
    each = {"nf4": compute_bytes, "int8": compute_bytes + 4, "fp8": max(8, compute_bytes + 4)}[kind]
    return each * max(math.prod(weight) for weight, _ in shape.linear_weights)


_LARGE, _BLOCK = 4096, 256  # torchao: smallest tensor with 8-bit moments; elements per float32 scale
_CODES = 256  # float32 entries of the dequantization table


def check_optimizer_sharding(config: OptimConfig, processes: int) -> None:
    """Check that the optimizer supports sharded weights.

    Raises:
        UserError: it does not, and there are several processes.
    """
    if config.name == "adafactor" and processes > 1:
        raise UserError(
            f"optim.name: adafactor does not support weights sharded over {processes} processes (PyTorch's does not); "
            f"use adamw_8bit, muon or sgd, which also keep less state than adamw, or hardware.processes: 1"
        )


def state_bytes(config: OptimConfig, shape: Sequence[int], bytes_each: int, *, by_muon: bool) -> int:
    """Optimizer state of one weight or shard, in bytes.

    Args:
        config: the `optim` section.
        shape: shape of the weight or shard.
        bytes_each: bytes per element.
        by_muon: with Muon, whether Muon's own rule updates it: a matrix inside a layer.
    """
    size = math.prod(shape)
    if isinstance(config, StochasticRoundingConfig) and config.stochastic_rounding:
        bytes_each = max(4, bytes_each)  # only the weights are narrow
    match config:
        case Adamw8bitConfig() if size >= _LARGE and size % _BLOCK == 0:
            return 2 * (size + 4 * size // _BLOCK + 4 * _CODES)
        case AdafactorConfig() if len(shape) >= 2:
            *matrices, rows, columns = shape
            return bytes_each * math.prod(matrices) * (rows + columns)
        case AdafactorConfig():
            return bytes_each * size
        case SgdConfig():
            return bytes_each * size if config.momentum else 0
        case MuonConfig() if by_muon:
            return bytes_each * size
        case _:
            return 2 * bytes_each * size


_BYTES = {**BYTES, "float16": 2}


def reward_model_bytes(config: Config, *, on_gpu: bool) -> int:
    """Weights of the rewards `model` on the policy's device; 0 for a model of unknown size.

    They are on rank 0 only, whose memory decides whether a run fits.
    """
    return sum(
        _model_bytes(reward.args, on_gpu=on_gpu)
        for reward in config.rewards
        if reward.use == "model" and "path" in reward.args and _is_on_policy_device(reward.args, on_gpu=on_gpu)
    )


def _is_on_policy_device(args: dict[str, Any], *, on_gpu: bool) -> bool:
    """Whether a model is on the device of rank 0."""
    device = args.get("device")
    return device in (None, "train") or (on_gpu and device in ("cuda", "cuda:0"))


def _model_bytes(args: dict[str, Any], *, on_gpu: bool) -> int:
    """Bytes of one model: of its files, if it is here, converted to its dtype."""
    path, dtype = Path(str(args["path"])), str(args.get("dtype", "auto"))
    files = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    stored = _stored_dtype(path) if files else "bfloat16"
    if dtype == "auto":
        dtype = stored if on_gpu else "float32"
    each = _BYTES.get(dtype, _BYTES["float32"])
    if files:
        return files * each // _BYTES.get(stored, each)
    shape = try_read_shape(str(args["path"]))
    return 0 if shape is None else each * shape.as_critic().num_parameters


def _stored_dtype(path: Path) -> str:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "float32"
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")
