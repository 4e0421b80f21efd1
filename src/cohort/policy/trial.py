"""Kernels that are compiled where they run, tried out before anything relies on them.

A GPU or a driver that the compiler does not know, or no C compiler on the machine, costs time then and not the run.
"""

import warnings
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

_TOLERANCE = 3e-2  # of the largest number: what is wrong is off by far more, and what is rounded by less


def works(kernels: str, instead: str, compare: Callable[[], Iterable[tuple[Tensor, Tensor]]]) -> bool:
    """Whether kernels run and compute what they should; otherwise a warning says why not.

    Args:
        kernels: for the warning: "Triton's kernels for ...".
        instead: what takes their place.
        compare: computes with the kernels, and the same without them.

    Raises:
        RuntimeError: memory ran out, which says nothing of the kernels.
    """
    try:
        for actual, expected in compare():
            error = ((actual - expected).abs().max() / expected.abs().max()).item()  # waits for the device
            if not error <= _TOLERANCE:  # so for NaN
                raise ArithmeticError(f"results differ by {error:.1g} of the largest value")
    except Exception as error:
        if "out of memory" in str(error):
            raise
        warn_of(kernels, instead, error)
        return False
    return True


def warn_of(kernels: str, instead: str, error: Exception) -> None:
    """Say that kernels are not used any more, and why."""
    reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
    warnings.warn(
        f"{kernels} cannot be used here ({reason}); {instead} instead, which is slower", RuntimeWarning, stacklevel=2
    )


def numbers(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Numbers between -1 and 1, always the same, that leave the random generators alone."""
    count = torch.Size(shape).numel()
    return torch.arange(count, device=device, dtype=torch.float32).mul_(0.7).sin_().view(shape).to(dtype)
