"""Online softmax over tiles of logits, and the gradient of a tile in place.

A tile holds raw logits (hidden states times weights) of t tokens and v consecutive token ids. `update_softmax` reads it
and `logits_to_grad_` overwrites it. Both have an eager implementation, below, and a fused one for GPUs
(`triton_kernels.py`).

T tokens, V vocabulary; t and v of one tile.
"""

from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from cohort.models.attention.interface import kernels_agree, probe_values, warn_fallback
from cohort.models.lm_head.softmax import LogitTransform, OnlineSoftmax, RowGradients

# The eager implementation processes a tile in blocks of rows, so temporaries stay small and, on a CPU, in cache.
BLOCK_ELEMENTS = {"cpu": 1 << 18}
OTHER_BLOCK_ELEMENTS = 1 << 22  # on GPUs, blocks must be worth the kernel launches

use_triton = True  # use Triton, if it works, for float32 tiles on CUDA
_TRITON, _PLAIN = "Triton kernels for the language-model head", "eager PyTorch"


def update_softmax(
    tile_tv: Tensor, running: OnlineSoftmax, columns_t: Tensor, bias_v: Tensor | None, transform: LogitTransform
) -> None:
    """Update the softmax statistics of the rows of a tile.

    Args:
        tile_tv: [t, v] raw logits; unchanged.
        running: statistics of these t rows.
        columns_t: [t] int64, column of each target in the tile; outside [0, v) if it is in another tile.
        bias_v: [v] of the head for these columns.
        transform: maps raw logits to those of the softmax.
    """
    args = (tile_tv, running, columns_t, bias_v, transform)
    if not _run_fused("update_softmax", running.sum_exp_z is not None, *args):
        _update_softmax(*args)


def logits_to_grad_(
    tile_tv: Tensor, rows: RowGradients, columns_t: Tensor, bias_v: Tensor | None, transform: LogitTransform
) -> None:
    """Overwrite raw logits with their gradient. The other arguments are those of `update_softmax`.

    With softmax p, its entropy H, and gradients g and e of logprob and entropy, the gradient of a logit is
    g (1[target] - p) - e p (log p + H).
    """
    args = (tile_tv, rows, columns_t, bias_v, transform)
    if not _run_fused("logits_to_grad_", rows.entropy is not None and rows.entropy_grad is not None, *args):
        _logits_to_grad_(*args)


def check_triton(device: torch.device, *, bias: bool, softcap: bool) -> None:
    """Check before a run whether the Triton kernels work on a GPU; otherwise warn and do not use them.

    Args:
        device: device of the tiles.
        bias: whether the head has a bias.
        softcap: whether the head has a softcap.
    """
    for entropy in (True, False):
        _usable_kernels(device, bias, softcap, entropy)


def _run_fused(name: str, entropy: bool, *args: Any) -> bool:
    """Run the function of that name in `triton_kernels`, if it is usable. Return whether it ran."""
    tile, bias, transform = args[0], args[3], args[4]
    if not _suits_triton(tile):
        return False
    kernels = _usable_kernels(tile.device, bias is not None, transform.softcap is not None, entropy)
    if kernels is None:
        return False
    try:
        getattr(kernels, name)(*args)
    except kernels.TritonError as error:  # raised before launch, mostly for lack of shared memory
        _give_up()
        warn_fallback(_TRITON, _PLAIN, error)
        return False
    return True


def _suits_triton(tile: Tensor) -> bool:
    return tile.is_cuda and tile.dtype == torch.float32


def _usable_kernels(device: torch.device, bias: bool, softcap: bool, entropy: bool) -> ModuleType | None:
    """Return the fused kernels, unless they failed. Each variant is first tried on a small tile."""
    if not use_triton or (kernels := _triton()) is None:
        return None
    if not _works(device, bias, softcap, entropy):
        _give_up()
        return None
    return kernels


def _give_up() -> None:
    global use_triton
    use_triton = False


@cache
def _triton() -> ModuleType | None:
    try:
        from cohort.models.lm_head import triton_kernels
    except ImportError:
        return None
    return triton_kernels


@cache
def _works(device: torch.device, bias: bool, softcap: bool, entropy: bool) -> bool:
    def compare() -> Iterator[tuple[Tensor, Tensor]]:
        tile, bias_v = probe_values(2, 5008, device=device, dtype=torch.float32), None  # two blocks of columns
        if bias:
            bias_v = probe_values(5008, device=device, dtype=torch.float32)
        transform = LogitTransform(temperature=0.7, softcap=2.0 if softcap else None)
        columns = torch.tensor([3, 5000], device=device)
        kernels = _triton()
        assert kernels is not None
        results = []
        for update, to_grad in (
            (kernels.update_softmax, kernels.logits_to_grad_),
            (_update_softmax, _logits_to_grad_),
        ):
            running = OnlineSoftmax.start(columns, dtype=torch.float32, entropy=entropy)
            update(tile, running, columns, bias_v, transform)
            logprobs, entropies, logsumexp = running.result()
            grads = probe_values(2, device=device, dtype=torch.float32) + 1.0
            rows = RowGradients(logsumexp, grads, entropies, grads if entropy else None)
            gradient = tile.clone()
            to_grad(gradient, rows, columns, bias_v, transform)
            results.append((logprobs, logsumexp, gradient, *([] if entropies is None else [entropies])))
        yield from zip(*results, strict=True)

    return kernels_agree(_TRITON, _PLAIN, compare)


def _update_softmax(
    tile: Tensor, running: OnlineSoftmax, columns: Tensor, bias: Tensor | None, transform: LogitTransform
) -> None:
    inside, column = _inside(columns, tile.shape[1])
    for tokens, first, second in _blocks(tile):
        logits = transform.apply(tile[tokens], bias, out=first)
        maximum, sum_exp, sum_exp_z, target = running.rows(tokens)
        target.copy_(torch.where(inside[tokens], logits.gather(1, column[tokens]).squeeze(1), target))
        new_maximum = torch.maximum(maximum, logits.amax(dim=1))
        change = maximum - new_maximum
        kept = change.exp()
        centered = torch.sub(logits, new_maximum.unsqueeze(1), out=first)
        exp = torch.exp(centered, out=first if sum_exp_z is None else second)
        exp_sum = exp.sum(dim=1)
        if sum_exp_z is not None:
            sum_exp_z.addcmul_(sum_exp, change).mul_(kept).add_(exp.mul_(centered).sum(dim=1))
        sum_exp.mul_(kept).add_(exp_sum)
        maximum.copy_(new_maximum)


def _logits_to_grad_(
    tile: Tensor, rows: RowGradients, columns: Tensor, bias: Tensor | None, transform: LogitTransform
) -> None:
    inside, column = _inside(columns, tile.shape[1])
    logprob_grad = rows.logprob_grad * transform.slope
    at_target = torch.where(inside, logprob_grad, 0.0).unsqueeze(1)
    for tokens, first, second in _blocks(tile):
        grad = logits = transform.apply(tile[tokens], bias, out=tile[tokens])
        if transform.softcap is not None:
            tanh = torch.mul(logits, 1 / transform.outer, out=second)
            slope = torch.addcmul(tanh.new_ones(()), tanh, tanh, value=-1, out=second)
        log_p = grad.sub_(rows.logsumexp[tokens].unsqueeze(1))
        g = logprob_grad[tokens]
        if rows.entropy is None or rows.entropy_grad is None:
            grad = log_p.exp_().mul_(-g.unsqueeze(1))
        else:
            e = rows.entropy_grad[tokens] * transform.slope
            p = torch.exp(log_p, out=first)
            grad = log_p.mul_(-e.unsqueeze(1)).sub_((e * rows.entropy[tokens] + g).unsqueeze(1)).mul_(p)
        grad.scatter_add_(1, column[tokens], at_target[tokens])
        if transform.softcap is not None:
            grad.mul_(slope)


def _inside(columns: Tensor, num_ids: int) -> tuple[Tensor, Tensor]:
    """Return whether each target is in the tile [t], and its column clamped to the tile [t, 1]."""
    return (columns >= 0) & (columns < num_ids), columns.clamp(0, num_ids - 1).unsqueeze(1)


def _blocks(tile: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield blocks of rows, each with two scratch buffers of its size."""
    num_tokens, num_ids = tile.shape
    size = max(1, BLOCK_ELEMENTS.get(tile.device.type, OTHER_BLOCK_ELEMENTS) // num_ids)
    first, second = (tile.new_empty(min(size, num_tokens), num_ids) for _ in range(2))
    for start in range(0, num_tokens, size):
        count = min(size, num_tokens - start)
        yield slice(start, start + count), first[:count], second[:count]
