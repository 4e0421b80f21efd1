"""Token logprobs from hidden states without materializing [T, V] logits.

Logits are computed tile by tile, reduced to online softmax statistics, and recomputed in backward. So the head takes
8TVH FLOPs instead of 6TVH, and no memory of T x V. `linear_loss` gets the loss in forward and computes each tile once.
Both ignore the caller's autocast: the dtype of the hidden states decides.

T loss tokens, H hidden size, V vocabulary, R LoRA rank; t tokens of a tile.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cohort.models.lm_head.tiled_matmul import (
    GradientSums,
    Operands,
    chunk_slices,
    gradient_rows,
    tile_shape,
    weight_rows,
)
from cohort.models.lm_head.tiled_softmax import (
    LogitTransform,
    OnlineSoftmax,
    RowGradients,
    logits_to_grad_,
    update_softmax,
)
from cohort.plan.tiles import CPU_TILE_ELEMENTS, TILE_ELEMENTS, loss_tile_elements, loss_tile_tokens

# Backward skips rows without a gradient if at most this fraction of rows has one.
LIVE_ROWS = 0.75

TokenLoss = Callable[[Tensor, Tensor | None, slice], Tensor]


class LinearLoss(NamedTuple):
    """A loss, and the logprobs and entropy that it was computed from."""

    loss: Tensor  # sum over tokens, with gradient
    logprobs: Tensor  # [T], detached
    entropy: Tensor | None  # [T] in nats, detached; None if not requested


def linear_logprobs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    adapter: tuple[Tensor, Tensor] | None = None,
    entropy: bool = False,
    tile_elements: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute logprobs of targets under softmax(head(hidden) / temperature), and the entropy of that distribution.

    Both are differentiable once. Matrix products take factors in the dtype of `hidden_TH`; other weights are cast tile
    by tile. Products, logits, statistics and gradient sums are float32 (float64 with float64 hidden states), because
    bfloat16 logits have errors of 1e-2 in logprobs. A gradient is rounded once, to the dtype of its operand.

    Args:
        hidden_TH: [T, H] final hidden states at the positions that predict the targets.
        weight_VH: [V, H] weight of the language-model head, gathered (not a DTensor).
        targets_T: [T] int64 token ids. Ids outside the vocabulary have logprob NaN.
        bias: [V] of the head.
        temperature: divides the logits, after scale and softcap.
        scale: multiplies the logits (Cohere, Granite).
        softcap: logits become softcap * tanh(logits / softcap) (Gemma 2).
        adapter: features [T, R] and weight [V, R] of a low-rank addition to the head: their product is added to
            hidden @ weight^T.
        entropy: also compute the entropy.
        tile_elements: maximum number of logits in memory; the default depends on the device. If the logits of all T
            tokens fit, they are saved for backward.

    Returns:
        logprobs [T], and entropy [T] in nats or None.
    """
    transform = LogitTransform(temperature=temperature, scale=scale, softcap=softcap)
    operands = _operands(hidden_TH, weight_VH, bias, adapter)
    if tile_elements is None:
        tile_elements = CPU_TILE_ELEMENTS if hidden_TH.device.type == "cpu" else TILE_ELEMENTS
    return _LinearLogprobs.apply(targets_T, transform, entropy, tile_elements, *operands)


def linear_loss(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    token_loss: TokenLoss,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    adapter: tuple[Tensor, Tensor] | None = None,
    entropy: bool = False,
    tile_elements: int | None = None,
) -> LinearLoss:
    """Compute the sum of a token-level loss, with the head's gradients computed in forward (6TVH FLOPs).

    Equals `token_loss` of `linear_logprobs` if the loss of a token does not depend on other tokens' logprobs. Gradients
    are kept in float32 until backward scales them: [V, H] of it if the weight is trained.

    Takes the arguments of `linear_logprobs`, and:

    Args:
        token_loss: takes logprobs [t], entropy [t] (None unless requested) and the slice of tokens, and returns their
            weighted losses [t]. Called once per tile of at least one token, in order; other tensors that it uses get
            no gradient.
    """
    transform = LogitTransform(temperature=temperature, scale=scale, softcap=softcap)
    operands = _operands(hidden_TH, weight_VH, bias, adapter)
    if tile_elements is None:
        tile_elements = loss_tile_elements(len(operands.weight), on_gpu=hidden_TH.device.type != "cpu")
    options = (transform, entropy, tile_elements, torch.is_grad_enabled())
    return LinearLoss(*_LinearLoss.apply(targets_T, token_loss, *options, *operands))


@torch.no_grad()
def head_logits(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    adapter: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Compute full logits [T, V] without gradient, with the numerics of `linear_logprobs`."""
    operands = _operands(hidden_TH, weight_VH, bias, adapter)
    logits = hidden_TH.new_empty(len(hidden_TH), len(operands.weight), dtype=operands.dtype)
    with _no_autocast(operands):
        _fill(logits, operands, slice(None), TILE_ELEMENTS)
        bias_V = operands.tile(slice(None), slice(None)).bias
        return LogitTransform(scale=scale, softcap=softcap).apply(logits, bias_V, out=logits)


def token_logprobs(
    logits_TV: Tensor, targets_T: Tensor, temperature: float, *, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Logprobs [T] of targets under softmax(logits / temperature), and the entropy [T] in nats or None."""
    log_p = torch.log_softmax(logits_TV if temperature == 1.0 else logits_TV / temperature, dim=-1)
    logprobs = log_p.gather(-1, targets_T.unsqueeze(-1)).squeeze(-1)
    return logprobs, -(log_p.exp() * log_p).sum(dim=-1) if entropy else None


class _LinearLogprobs(torch.autograd.Function):
    """Loops over vocabulary slices, and over tokens within each."""

    @staticmethod
    def forward(
        ctx: Any, targets: Tensor, transform: LogitTransform, entropy: bool, tile_elements: int, *tensors: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        operands = Operands(*tensors)
        running = OnlineSoftmax.start(targets, dtype=operands.dtype, entropy=entropy)
        t, v = tile_shape(operands, tile_elements)
        buffer = operands.hidden.new_empty(t * v, dtype=operands.dtype)
        with _no_autocast(operands):
            for ids in chunk_slices(len(operands.weight), v):
                vocab_slice = operands.vocab_slice(ids)
                for tokens in chunk_slices(len(targets), t):
                    part = vocab_slice.tile(tokens, slice(None))
                    tile = part.products(_tile_of(buffer, tokens, ids))
                    update_softmax(tile, running.rows(tokens), targets[tokens] - ids.start, part.bias, transform)
        logprobs, entropies, logsumexp = running.result()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(targets, logsumexp, entropies, *tensors)
        ctx.transform, ctx.tile_elements = transform, tile_elements
        # If one tile has everything, the first backward overwrites it; a second one recomputes it.
        is_one = (t, v) == (len(targets), len(operands.weight))
        ctx.kept = buffer.view(t, v) if is_one and any(ctx.needs_input_grad) else None
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, logprob_grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        targets, logsumexp, entropies, *tensors = ctx.saved_tensors
        kept, ctx.kept = ctx.kept, None
        operands = Operands(*tensors)
        if logprob_grad is None:
            logprob_grad = torch.zeros_like(logsumexp)
        rows = RowGradients(logsumexp, logprob_grad, entropies, entropy_grad)
        args = ctx.needs_input_grad[4:], ctx.transform, ctx.tile_elements
        live = _live_rows(rows)
        if live is None:
            sums = _backward(operands, rows, targets, kept, *args)
        else:
            kept = None if kept is None else kept[live]
            sums = _backward(operands.rows(live), rows.rows(live), targets[live], kept, *args)
            sums = sums.scatter(live, len(targets))
        return None, None, None, None, *sums.rounded(operands)


def _backward(
    operands: Operands,
    rows: RowGradients,
    targets: Tensor,
    kept: Tensor | None,
    wanted: tuple[bool, ...],
    transform: LogitTransform,
    tile_elements: int,
) -> GradientSums:
    """Sum each vocabulary slice over all tokens before the next, so its gradient is written once."""
    sums = GradientSums.zeros(operands, wanted, by_vocabulary=True)
    if kept is not None:
        t, v = kept.shape
        buffer = kept.view(-1)
    else:
        t, v = tile_shape(operands, tile_elements)
        buffer = operands.hidden.new_empty(t * v, dtype=operands.dtype)
    with _no_autocast(operands):
        for ids in chunk_slices(len(operands.weight), v):
            vocab_slice, sums_of_ids = operands.vocab_slice(ids), sums.vocab_slice(ids, operands.dtype)
            for tokens in chunk_slices(len(targets), t):
                part, tile = vocab_slice.tile(tokens, slice(None)), _tile_of(buffer, tokens, ids)
                if kept is None:
                    part.products(tile)
                logits_to_grad_(tile, rows.rows(tokens), targets[tokens] - ids.start, part.bias, transform)
                part.add_gradients(sums_of_ids.tile(tokens, slice(None)), tile)
            sums.store(ids, sums_of_ids)
    return sums


class _LinearLoss(torch.autograd.Function):
    """Loops over tokens, each with the whole vocabulary, which the loss needs."""

    @staticmethod
    def forward(
        ctx: Any,
        targets: Tensor,
        token_loss: TokenLoss,
        transform: LogitTransform,
        entropy: bool,
        tile_elements: int,
        differentiate: bool,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        operands = Operands(*tensors)
        wanted = ctx.needs_input_grad[6:] if differentiate else (False,) * len(tensors)
        sums = GradientSums.zeros(operands, wanted, by_vocabulary=False)
        bias = operands.tile(slice(None), slice(None)).bias
        num_ids = len(operands.weight)
        size, copied = loss_tile_tokens(len(targets), num_ids, tile_elements), min(tile_elements, TILE_ELEMENTS)
        buffer = operands.hidden.new_empty(size * num_ids, dtype=operands.dtype)
        everything = OnlineSoftmax.start(targets, dtype=operands.dtype, entropy=entropy)
        loss = buffer.new_zeros(())
        with _no_autocast(operands):
            for tokens in chunk_slices(len(targets), size):
                tile = _tile_of(buffer, tokens, slice(0, num_ids))
                _fill(tile, operands, tokens, copied)
                running = everything.rows(tokens)
                update_softmax(tile, running, targets[tokens], bias, transform)
                part_of_loss, rows = _loss_and_grads(token_loss, running, tokens)
                loss += part_of_loss
                if any(wanted):
                    logits_to_grad_(tile, rows, targets[tokens], bias, transform)
                    for ids in chunk_slices(num_ids, gradient_rows(operands, copied)):
                        operands.tile(tokens, ids).add_gradients(sums.tile(tokens, ids), tile[:, ids])
        logprobs, entropies, _ = everything.result()
        ctx.mark_non_differentiable(*(x for x in (logprobs, entropies) if x is not None))
        ctx.set_materialize_grads(False)
        ctx.sums = sums  # not with save_for_backward: backward scales them in place
        ctx.dtypes = [None if x is None else x.dtype for x in tensors]
        return loss, logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        sums, ctx.sums = ctx.sums, None
        if sums is None:
            raise RuntimeError("gradients computed in forward allow one backward pass only")
        grads = (None if x is None else x.mul_(loss_grad).to(dtype) for x, dtype in zip(sums, ctx.dtypes, strict=True))
        return None, None, None, None, None, None, *grads


def _loss_and_grads(token_loss: TokenLoss, running: OnlineSoftmax, tokens: slice) -> tuple[Tensor, RowGradients]:
    """Compute the loss of a tile's tokens, and its gradients with respect to logprobs and entropies."""
    logprobs, entropy, logsumexp = running.result()
    leaves = [x.requires_grad_() for x in (logprobs, entropy) if x is not None]
    with torch.enable_grad():
        loss = token_loss(logprobs, entropy, tokens).sum()
    grads: list[Tensor | None] = [None, None]
    if loss.requires_grad:
        grads[: len(leaves)] = torch.autograd.grad(loss, leaves, allow_unused=True)
    logprob_grad = torch.zeros_like(logsumexp) if grads[0] is None else grads[0]
    return loss.detach(), RowGradients(logsumexp, logprob_grad, None if entropy is None else entropy.detach(), grads[1])


def _operands(hidden: Tensor, weight: Tensor, bias: Tensor | None, adapter: tuple[Tensor, Tensor] | None) -> Operands:
    features, adapter_weight = adapter or (None, None)
    return Operands(hidden, weight, bias, features, adapter_weight)


def _no_autocast(operands: Operands) -> torch.autocast:
    """Disable autocast, which would affect some products but not those with `out=`."""
    return torch.autocast(operands.hidden.device.type, enabled=False)


def _tile_of(buffer: Tensor, tokens: slice, ids: slice) -> Tensor:
    """View the start of a buffer as a tile [t, v]."""
    t, v = tokens.stop - tokens.start, ids.stop - ids.start
    return buffer[: t * v].view(t, v)


def _fill(tile_tV: Tensor, operands: Operands, tokens: slice, tile_elements: int) -> None:
    """Compute raw logits of some tokens for the whole vocabulary, casting a limited number of weights at a time."""
    for ids in chunk_slices(len(operands.weight), weight_rows(operands, tile_elements)):
        operands.tile(tokens, ids).products(tile_tV[:, ids])


def _live_rows(rows: RowGradients) -> Tensor | None:
    """Return indices of rows with a gradient, or None if skipping the others does not pay."""
    live = rows.logprob_grad != 0
    if rows.entropy_grad is not None:
        live |= rows.entropy_grad != 0
    index = live.nonzero().squeeze(1)
    return index if len(index) <= LIVE_ROWS * len(live) else None
