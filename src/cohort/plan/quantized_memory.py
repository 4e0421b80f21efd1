"""Memory of quantized frozen weights in closed form, as stored by bitsandbytes and torchao.

nf4: 4 bits per weight, one byte per 64 for their scale, a float32 per 256 such bytes, a float32 mean and tables of 16
and 256: 4.127 bits per weight of a large matrix. int8 and fp8: 8 bits per weight, a float32 per row.
"""

import math

from cohort.config import Quantization
from cohort.plan.shape import ModelShape, WeightShape

_BLOCK, _BLOCKS = 64, 256
_TABLE_BYTES = 4 * (1 + 16 + 256)


def matrix_bytes(kind: Quantization, weight: WeightShape) -> int:
    """Bytes of one quantized weight [out, in]."""
    number = math.prod(weight)
    if kind != "nf4":
        return number + 4 * weight[0]
    blocks = -(-number // _BLOCK)
    return -(-number // 2) + blocks + 4 * -(-blocks // _BLOCKS) + _TABLE_BYTES


def model_bytes(shape: ModelShape, kind: Quantization, bytes_each: int) -> int:
    """Bytes of a model with quantized linear layers; other weights take `bytes_each`."""
    saved_per_layer = sum(bytes_each * math.prod(w) - matrix_bytes(kind, w) for w in _matrices(shape))
    return bytes_each * shape.num_parameters - shape.layers * saved_per_layer


def dequantized_bytes(shape: ModelShape, kind: Quantization, compute_bytes: int) -> int:
    """Bytes of the largest weight, dequantized for its matmul; torchao applies scales in float32."""
    each = {"nf4": compute_bytes, "int8": compute_bytes + 4, "fp8": max(8, compute_bytes + 4)}[kind]
    return each * max(map(math.prod, _matrices(shape)))


def _matrices(shape: ModelShape) -> list[WeightShape]:
    return [(fan_out, fan_in) for fan_in, fan_out in shape.linear_layers.values()]
