"""Rounding to bfloat16 at random: up or down, in proportion to how near each is, so that the mean is right.

Rounding to nearest loses every update of less than half a step between two bfloat16 numbers, 0.2 to 0.4 % of a weight.
The random bits are a hash of (seed, update, weight, number of the element), so that neither the device nor the number
of ranks nor where a run was resumed changes them.
"""

import zlib

import numpy as np
import torch
from torch import Tensor

_BLOCK = 1 << 24  # elements at a time, which take 8 bytes each meanwhile
_MASK = 0xFFFFFFFF


def noise_key(seed: int, update: int, name: str) -> int:
    """Of the random bits of one weight in one update."""
    return int(np.random.SeedSequence((seed, update, zlib.crc32(name.encode()))).generate_state(1)[0])


def round_at_random(wide: Tensor, into: Tensor, *, key: int, first: int = 0) -> None:
    """Write `wide` (float32) into `into` (bfloat16), each number as one of the two next to it.

    Args:
        wide: of any shape.
        into: of the same shape.
        key: of the random bits.
        first: number of the first element in the whole weight, of which this may be a part.
    """
    flat, out = wide.contiguous().view(-1), into.view(-1)
    for start in range(0, flat.numel(), _BLOCK):
        bits = flat[start : start + _BLOCK].view(torch.int32)
        noise = _hash(torch.arange(first + start, first + start + len(bits), device=wide.device), key) & 0xFFFF
        # a number's magnitude in 16 more bits than are kept: what is added carries as often as those are large
        rounded = (bits + noise.to(torch.int32)) & ~0xFFFF
        out[start : start + _BLOCK] = rounded.view(torch.float32).to(torch.bfloat16)


def _hash(numbers: Tensor, key: int) -> Tensor:
    """32 bits for each int64: rounds of xor-shift and multiplication (lowbias32, C. Wellons, "hash-prospector")."""
    x = (numbers * 0x9E3779B9 + key) & _MASK  # neighbours far apart; products may overflow, low bits are right
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return x ^ (x >> 16)
