"""Try out JIT-compiled kernels before anything relies on them.

An unsupported GPU or driver, or a missing C compiler, then costs speed and not the run.
"""

import warnings
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

_TOLERANCE = 3e-2  # relative to the largest value: above rounding, far below real errors


def kernels_agree(kernels: str, instead: str, compare: Callable[[], Iterable[tuple[Tensor, Tensor]]]) -> bool:
    """Return whether kernels run and give correct results; otherwise warn.

    Args:
        kernels: name for the warning, e.g. "Triton kernels for ...".
        instead: name of the fallback.
        compare: yields pairs of actual and expected results.

    Raises:
        RuntimeError: out of memory, which says nothing about the kernels.
    """
    try:
        for actual, expected in compare():
            error = ((actual - expected).abs().max() / expected.abs().max()).item()  # waits for the device
            if not error <= _TOLERANCE:  # also true for NaN
                raise ArithmeticError(f"results differ by {error:.1g} of the largest value")
    except Exception as error:
        if "out of memory" in str(error):
            raise
        warn_fallback(kernels, instead, error)
        return False
    return True


def warn_fallback(kernels: str, instead: str, error: Exception) -> None:
    """Warn that kernels are not used, and why."""
    reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
    warnings.warn(
        f"{kernels} do not work here ({reason}). Falling back to {instead}, which is slower",
        RuntimeWarning,
        stacklevel=2,
    )


def probe_values(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return deterministic values in [-1, 1], without using the random generators."""
    count = torch.Size(shape).numel()
    return torch.arange(count, device=device, dtype=torch.float32).mul_(0.7).sin_().view(shape).to(dtype)
