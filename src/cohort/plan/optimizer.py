"""What optimizers keep of a weight from step to step, in bytes: one place for plans and for training."""

import math
from collections.abc import Sequence

from cohort.config import AdafactorConfig, Adamw8bitConfig, MuonConfig, OptimConfig, SgdConfig
from cohort.config.optim import RoundedConfig
from cohort.errors import UserError

_LARGE, _BLOCK = 4096, 256  # torchao keeps moments of so many elements in 8 bits, with a float32 for each block
_CODES = 256  # and a table of float32, one for each value of a byte


def check_spread(config: OptimConfig, processes: int) -> None:
    """Compare the optimizer with the processes that weights are spread over.

    Raises:
        UserError: it cannot move them.
    """
    if config.name == "adafactor" and processes > 1:
        raise UserError(
            f"optim.name: adafactor cannot move weights that are spread over processes, as PyTorch has it, and there "
            f"are {processes}; use adamw_8bit, muon or sgd, which keep less than adamw too, or hardware.processes: 1"
        )


def state_bytes(config: OptimConfig, shape: Sequence[int], bytes_each: int, *, by_muon: bool) -> int:
    """Of one weight, or of the part of it that a process has.

    Args:
        config: the `optim` section.
        shape: of the weight, or of the part.
        bytes_each: of one of its numbers.
        by_muon: whether Muon's own rule moves it, where `config` is Muon's: a matrix inside of a layer.
    """
    size = math.prod(shape)
    if isinstance(config, RoundedConfig) and config.stochastic_rounding:
        bytes_each = max(4, bytes_each)  # the weights alone are narrower
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
