"""Optimizer state in bytes, for plan and training."""

import math
from collections.abc import Sequence

from cohort.config import AdafactorConfig, Adamw8bitConfig, MuonConfig, OptimConfig, SgdConfig
from cohort.config.optim import StochasticRoundingConfig
from cohort.errors import UserError

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
