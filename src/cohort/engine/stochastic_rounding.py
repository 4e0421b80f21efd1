"""Stochastic rounding to bfloat16: up or down with a probability by distance, so that the expected value is exact.

Rounding to nearest loses every update that is smaller than half the distance between adjacent bfloat16 numbers, which
is 0.2 to 0.4 % of a weight. The random bits are a hash of (seed, update, weight, element), so they do not depend on
the device, the number of ranks or where a run was resumed.
"""

import zlib

import numpy as np
import torch
from torch import Tensor

_BLOCK = 1 << 24  # elements at a time; each takes 8 bytes of temporary memory
_MASK = 0xFFFFFFFF


def rounding_key(seed: int, update: int, name: str) -> int:
    """Derive the key of the random bits of one weight in one update."""
    return int(np.random.SeedSequence((seed, update, zlib.crc32(name.encode()))).generate_state(1)[0])


def round_stochastically(wide: Tensor, into: Tensor, *, key: int, first: int = 0) -> None:
    """Round `wide` (float32) into `into` (bfloat16), each number to one of its two neighbors.

    Args:
        wide: values of any shape.
        into: destination of the same shape.
        key: key of the random bits.
        first: index of the first element in the full weight, of which this may be a shard.
    """
    flat, out = wide.contiguous().view(-1), into.view(-1)
    for start in range(0, flat.numel(), _BLOCK):
        bits = flat[start : start + _BLOCK].view(torch.int32)
        noise = _hash(torch.arange(first + start, first + start + len(bits), device=wide.device), key) & 0xFFFF
        # bfloat16 drops the low 16 bits: random bits added to them carry with a probability proportional to their value
        rounded = (bits + noise.to(torch.int32)) & ~0xFFFF
        out[start : start + _BLOCK] = rounded.view(torch.float32).to(torch.bfloat16)


def _hash(numbers: Tensor, key: int) -> Tensor:
    """Hash each int64 to 32 bits by rounds of xor-shift and multiply (lowbias32, C. Wellons, "hash-prospector")."""
    x = (numbers * 0x9E3779B9 + key) & _MASK  # spreads adjacent numbers; products may overflow, low bits are exact
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return x ^ (x >> 16)
