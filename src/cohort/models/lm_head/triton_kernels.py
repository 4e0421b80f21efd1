"""Triton kernels of `tiled_softmax` for float32 tiles: one read in forward, one read and write in backward.

Set TRITON_INTERPRET=1 before importing this to run the kernels on a CPU. T tokens, V vocabulary; t and v of one tile.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels have Triton annotations)

import triton
import triton.language as tl
from torch import Tensor
from triton import TritonError

from cohort.models.lm_head.softmax import LogitTransform, OnlineSoftmax, RowGradients

__all__ = ["TritonError", "logits_to_grad_", "update_softmax"]
BLOCK = 4096  # columns per program and iteration: 16 KiB


def update_softmax(
    tile_tv: Tensor, running: OnlineSoftmax, columns_t: Tensor, bias_v: Tensor | None, transform: LogitTransform
) -> None:
    """See `tiled_softmax.update_softmax`. One program per row."""
    if not tile_tv.numel():
        return
    _softmax_kernel[(len(tile_tv),)](
        tile_tv,
        tile_tv.stride(0),
        tile_tv.shape[1],
        bias_v,
        columns_t,
        running.maximum,
        running.sum_exp,
        running.sum_exp_z,
        running.target,
        transform.inner,
        transform.outer,
        HAS_BIAS=bias_v is not None,
        HAS_SOFTCAP=transform.softcap is not None,
        HAS_ENTROPY=running.sum_exp_z is not None,
        BLOCK=BLOCK,
        num_warps=8,
    )


def logits_to_grad_(
    tile_tv: Tensor, rows: RowGradients, columns_t: Tensor, bias_v: Tensor | None, transform: LogitTransform
) -> None:
    """See `tiled_softmax.logits_to_grad_`. One program per row and block of columns."""
    if not tile_tv.numel():
        return
    has_entropy = rows.entropy is not None and rows.entropy_grad is not None
    _gradient_kernel[(len(tile_tv), triton.cdiv(tile_tv.shape[1], BLOCK))](
        tile_tv,
        tile_tv.stride(0),
        tile_tv.shape[1],
        bias_v,
        columns_t,
        rows.logsumexp,
        rows.logprob_grad.contiguous(),
        rows.entropy if has_entropy else None,
        rows.entropy_grad.contiguous() if rows.entropy_grad is not None and has_entropy else None,
        transform.inner,
        transform.outer,
        transform.slope,
        HAS_BIAS=bias_v is not None,
        HAS_SOFTCAP=transform.softcap is not None,
        HAS_ENTROPY=has_entropy,
        BLOCK=BLOCK,
        num_warps=8,
    )


@triton.jit
def _softmax_kernel(
    tile,
    row_stride,
    num_columns,
    bias,
    columns,
    maximums,
    sums_exp,
    sums_exp_z,
    targets,
    inner,
    outer,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    start_of_row = tile + row.to(tl.int64) * row_stride
    column = tl.load(columns + row)
    maximum = tl.load(maximums + row)
    sum_exp = tl.load(sums_exp + row)
    sum_exp_z = tl.load(sums_exp_z + row) if HAS_ENTROPY else 0.0
    target = tl.load(targets + row)
    for start in range(0, num_columns, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        inside = ids < num_columns
        z = tl.load(start_of_row + ids, mask=inside, other=0.0)
        z = _logits(z, bias, ids, inside, inner, outer, HAS_BIAS, HAS_SOFTCAP)
        if (column >= start) & (column < tl.minimum(start + BLOCK, num_columns)):
            target = tl.sum(tl.where(ids == column, z, 0.0))
        new_maximum = tl.maximum(maximum, tl.max(tl.where(inside, z, float("-inf"))))
        change = maximum - new_maximum
        kept = tl.exp(change)
        centered = z - new_maximum
        exp = tl.where(inside, tl.exp(centered), 0.0)
        if HAS_ENTROPY:
            sum_exp_z = (sum_exp_z + sum_exp * change) * kept + tl.sum(exp * centered)
        sum_exp = sum_exp * kept + tl.sum(exp)
        maximum = new_maximum
    tl.store(maximums + row, maximum)
    tl.store(sums_exp + row, sum_exp)
    if HAS_ENTROPY:
        tl.store(sums_exp_z + row, sum_exp_z)
    tl.store(targets + row, target)


@triton.jit
def _gradient_kernel(
    tile,
    row_stride,
    num_columns,
    bias,
    columns,
    logsumexps,
    logprob_grads,
    entropies,
    entropy_grads,
    inner,
    outer,
    slope,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < num_columns
    places = tile + row.to(tl.int64) * row_stride + ids
    z = tl.load(places, mask=inside, other=0.0)
    z = _logits(z, bias, ids, inside, inner, outer, HAS_BIAS, HAS_SOFTCAP)
    g = tl.load(logprob_grads + row)
    log_p = z - tl.load(logsumexps + row)
    factor = -g
    if HAS_ENTROPY:
        factor -= tl.load(entropy_grads + row) * (log_p + tl.load(entropies + row))
    grad = tl.exp(log_p) * factor
    grad = tl.where(ids == tl.load(columns + row), grad + g, grad) * slope
    if HAS_SOFTCAP:
        tanh = z / outer
        grad *= 1.0 - tanh * tanh
    tl.store(places, grad, mask=inside)


@triton.jit
def _logits(z, bias, ids, inside, inner, outer, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    if HAS_BIAS:
        z += tl.load(bias + ids, mask=inside, other=0.0)
    z *= inner
    if HAS_SOFTCAP:
        exp = tl.exp(-2.0 * tl.abs(z))  # Triton's tanh does not work with TRITON_INTERPRET
        tanh = (1.0 - exp) / (1.0 + exp)
        z = tl.where(z < 0, -tanh, tanh) * outer
    return z
