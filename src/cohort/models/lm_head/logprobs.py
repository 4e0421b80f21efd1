"""Token logprobs from hidden states without materializing [T, V] logits.

Logits are computed tile by tile, reduced to online softmax statistics, and recomputed in backward. So the head takes
8TVH FLOPs instead of 6TVH, and no memory of T x V. `linear_loss` gets the loss in forward and computes each tile once.
Both ignore the caller's autocast: the dtype of the hidden states decides.

T loss tokens, H hidden size, V vocabulary; t tokens of a tile. `tokens` and `ids` are slices of T and V.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cohort.models.lm_head.softmax import IDENTITY, LogitTransform, OnlineSoftmax, RowGradients
from cohort.models.lm_head.tiled_matmul import (
    GradientSums,
    Operands,
    chunk_slices,
    gradient_rows,
    tile_shape,
    weight_rows,
)
from cohort.models.lm_head.tiled_softmax import logits_to_grad_, update_softmax
from cohort.plan.defaults import CPU_TILE_ELEMENTS, TILE_ELEMENTS, loss_tile_elements, loss_tile_tokens

# On CPUs backward skips rows without a gradient if at most this fraction of rows has one.
MAX_LIVE_FRACTION = 0.75

TokenLoss = Callable[[Tensor, Tensor, slice], Tensor]  # logprobs [t], entropies [t] and their tokens -> losses [t]


def linear_logprobs(
    operands: Operands,
    targets_T: Tensor,
    transform: LogitTransform = IDENTITY,
    *,
    entropy: bool = False,
    tile_elements: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute logprobs of targets under softmax(logits), and the entropy of that distribution.

    Both are differentiable once. Matrix products take factors in the dtype of the hidden states; other weights are cast
    tile by tile. Products, logits, statistics and gradient sums are float32 (float64 with float64 hidden states),
    because bfloat16 logits have errors of 1e-2 in logprobs. A gradient is rounded once, to the dtype of its operand.

    Args:
        operands: hidden states at the positions that predict the targets, and the weights of the head.
        targets_T: [T] int64 token ids. Ids outside the vocabulary have logprob NaN.
        transform: bias to softmax: scale, softcap and temperature of the logits.
        entropy: also compute the entropy.
        tile_elements: maximum number of logits in memory; the default depends on the device. If the logits of all T
            tokens fit, they are saved for backward.

    Returns:
        logprobs [T], and entropy [T] in nats or None.
    """
    if tile_elements is None:
        tile_elements = CPU_TILE_ELEMENTS if operands.hidden.device.type == "cpu" else TILE_ELEMENTS
    return _LinearLogprobs.apply(targets_T, transform, entropy, tile_elements, *operands)


def linear_loss(
    operands: Operands,
    targets_T: Tensor,
    token_loss: TokenLoss,
    transform: LogitTransform = IDENTITY,
    *,
    tile_elements: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the sum of a token-level loss, with the head's gradients computed in forward (6TVH FLOPs).

    Equals `token_loss` of `linear_logprobs` if the loss of a token does not depend on other tokens' logprobs. Gradients
    are kept in float32 until backward scales them: [V, H] of it if the weight is trained.

    Takes the arguments of `linear_logprobs`, and:

    Args:
        token_loss: takes logprobs [t], entropy [t] and the slice of tokens, and returns their weighted losses [t].
            Called once per tile of at least one token, in order; other tensors that it uses get no gradient.

    Returns:
        the loss [] with gradient, and the detached logprobs [T].
    """
    if tile_elements is None:
        tile_elements = loss_tile_elements(len(operands.weight), on_gpu=operands.hidden.device.type != "cpu")
    return _LinearLoss.apply(targets_T, token_loss, transform, tile_elements, torch.is_grad_enabled(), *operands)


@torch.no_grad()
def head_logits(
    operands: Operands, transform: LogitTransform = IDENTITY, *, product: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Compute full logits [T, V] without gradient, with the numerics of `linear_logprobs`.

    Args:
        operands: hidden states [T, H], and the weights of the head.
        transform: bias to softmax.
        product: multiplies hidden states by the weight; None takes that of the operands.
    """
    hidden = operands.hidden
    with _no_autocast(operands):
        if product is None:
            logits = hidden.new_empty(len(hidden), len(operands.weight), dtype=operands.dtype)
            _fill(logits, operands, slice(None), TILE_ELEMENTS)
        else:
            logits = operands.add_lora(product(hidden))
        return transform.apply(logits, operands.tile(slice(None), slice(None)).bias, out=logits)


def token_logprobs(
    logits_TV: Tensor, targets_T: Tensor, temperature: float, *, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Logprobs [T] of targets under softmax(logits / temperature), and the entropy [T] in nats or None."""
    log_p = torch.log_softmax(logits_TV if temperature == 1.0 else logits_TV / temperature, dim=-1)
    logprobs = log_p.gather(-1, targets_T.unsqueeze(-1)).squeeze(-1)
    return logprobs, -(log_p.exp() * log_p).sum(dim=-1) if entropy else None


class _LinearLogprobs(torch.autograd.Function):
    """Loop over vocabulary slices, and over tokens within each."""

    @staticmethod
    def forward(
        ctx: Any, targets: Tensor, transform: LogitTransform, entropy: bool, tile_elements: int, *tensors: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        operands = Operands(*tensors)
        softmax = OnlineSoftmax.start(targets, dtype=operands.dtype, entropy=entropy)
        num_tokens, num_ids = tile_shape(operands, tile_elements)
        buffer = operands.hidden.new_empty(num_tokens * num_ids, dtype=operands.dtype)
        with _no_autocast(operands):
            for ids in chunk_slices(len(operands.weight), num_ids):
                vocab_slice = operands.vocab_slice(ids)
                for tokens in chunk_slices(len(targets), num_tokens):
                    tile = vocab_slice.tile(tokens, slice(None))
                    logits = tile.products(_tile_of(buffer, tokens, ids))
                    update_softmax(logits, softmax.rows(tokens), targets[tokens] - ids.start, tile.bias, transform)
        logprobs, entropies, logsumexp = softmax.result()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(targets, logsumexp, entropies, *tensors)
        ctx.transform, ctx.tile_elements = transform, tile_elements
        # If one tile has all logits, the first backward overwrites it; a second one recomputes it.
        is_whole = (num_tokens, num_ids) == (len(targets), len(operands.weight))
        ctx.logits = buffer.view(num_tokens, num_ids) if is_whole and any(ctx.needs_input_grad) else None
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, logprob_grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        targets, logsumexp, entropies, *tensors = ctx.saved_tensors
        logits, ctx.logits = ctx.logits, None
        operands = Operands(*tensors)
        if logprob_grad is None:
            logprob_grad = torch.zeros_like(logsumexp)
        rows = RowGradients(logsumexp, logprob_grad, entropies, entropy_grad)
        args = ctx.needs_input_grad[4:], ctx.transform, ctx.tile_elements
        live = _live_rows(rows)
        if live is None:
            sums = _backward(operands, rows, targets, logits, *args)
        else:
            logits = None if logits is None else logits[live]
            sums = _backward(operands.rows(live), rows.rows(live), targets[live], logits, *args)
            sums = sums.scatter(live, len(targets))
        return None, None, None, None, *sums.rounded(operands)


def _backward(
    operands: Operands,
    rows: RowGradients,
    targets: Tensor,
    saved_logits: Tensor | None,
    wanted: tuple[bool, ...],
    transform: LogitTransform,
    tile_elements: int,
) -> GradientSums:
    """Sum each vocabulary slice over all tokens before the next, so its gradient is written once."""
    sums = GradientSums.zeros(operands, wanted, by_vocabulary=True)
    num_tokens, num_ids = tile_shape(operands, tile_elements) if saved_logits is None else saved_logits.shape
    if saved_logits is None:
        buffer = operands.hidden.new_empty(num_tokens * num_ids, dtype=operands.dtype)
    else:
        buffer = saved_logits.view(-1)
    with _no_autocast(operands):
        for ids in chunk_slices(len(operands.weight), num_ids):
            vocab_slice, sums_of_ids = operands.vocab_slice(ids), sums.vocab_slice(ids, operands.dtype)
            for tokens in chunk_slices(len(targets), num_tokens):
                tile, logits = vocab_slice.tile(tokens, slice(None)), _tile_of(buffer, tokens, ids)
                if saved_logits is None:
                    tile.products(logits)
                logits_to_grad_(logits, rows.rows(tokens), targets[tokens] - ids.start, tile.bias, transform)
                tile.add_gradients(sums_of_ids.tile(tokens, slice(None)), logits)
            sums.store(ids, sums_of_ids)
    return sums


class _LinearLoss(torch.autograd.Function):
    """Loop over tiles of tokens with the whole vocabulary, which the loss needs."""

    @staticmethod
    def forward(
        ctx: Any,
        targets: Tensor,
        token_loss: TokenLoss,
        transform: LogitTransform,
        tile_elements: int,
        differentiate: bool,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        operands = Operands(*tensors)
        wanted = ctx.needs_input_grad[5:] if differentiate else (False,) * len(tensors)
        sums = GradientSums.zeros(operands, wanted, by_vocabulary=False)
        bias = operands.tile(slice(None), slice(None)).bias
        num_ids = len(operands.weight)
        num_tokens = loss_tile_tokens(len(targets), num_ids, tile_elements)
        cast_elements = min(tile_elements, TILE_ELEMENTS)
        buffer = operands.hidden.new_empty(num_tokens * num_ids, dtype=operands.dtype)
        softmax = OnlineSoftmax.start(targets, dtype=operands.dtype, entropy=True)
        loss = buffer.new_zeros(())
        with _no_autocast(operands):
            for tokens in chunk_slices(len(targets), num_tokens):
                logits = _tile_of(buffer, tokens, slice(0, num_ids))
                _fill(logits, operands, tokens, cast_elements)
                softmax_of_tile = softmax.rows(tokens)
                update_softmax(logits, softmax_of_tile, targets[tokens], bias, transform)
                loss_of_tile, rows = _loss_and_grads(token_loss, softmax_of_tile, tokens)
                loss += loss_of_tile
                if any(wanted):
                    logits_to_grad_(logits, rows, targets[tokens], bias, transform)
                    for ids in chunk_slices(num_ids, gradient_rows(operands, cast_elements)):
                        operands.tile(tokens, ids).add_gradients(sums.tile(tokens, ids), logits[:, ids])
        logprobs, _, _ = softmax.result()
        ctx.mark_non_differentiable(logprobs)
        ctx.set_materialize_grads(False)
        ctx.sums = sums  # not with save_for_backward: backward scales them in place
        ctx.dtypes = [None if x is None else x.dtype for x in tensors]
        return loss, logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
        sums, ctx.sums = ctx.sums, None
        if sums is None:
            raise RuntimeError("gradients computed in forward allow one backward pass only")
        grads = (None if x is None else x.mul_(loss_grad).to(dtype) for x, dtype in zip(sums, ctx.dtypes, strict=True))
        return None, None, None, None, None, *grads


def _loss_and_grads(token_loss: TokenLoss, softmax: OnlineSoftmax, tokens: slice) -> tuple[Tensor, RowGradients]:
    """Compute the loss of a tile's tokens, and its gradients with respect to logprobs and entropies."""
    logprobs, entropies, logsumexp = softmax.result()
    assert entropies is not None
    leaves = (logprobs.requires_grad_(), entropies.requires_grad_())
    with torch.enable_grad():
        loss = token_loss(logprobs, entropies, tokens).sum()
    logprob_grad, entropy_grad = None, None
    if loss.requires_grad:
        logprob_grad, entropy_grad = torch.autograd.grad(loss, leaves, allow_unused=True)
    if logprob_grad is None:
        logprob_grad = torch.zeros_like(logsumexp)
    return loss.detach(), RowGradients(logsumexp, logprob_grad, entropies.detach(), entropy_grad)


def _no_autocast(operands: Operands) -> torch.autocast:
    """Disable autocast, which would affect some products but not those with `out=`."""
    return torch.autocast(operands.hidden.device.type, enabled=False)


def _tile_of(buffer: Tensor, tokens: slice, ids: slice) -> Tensor:
    """View the start of a buffer as the logits of a tile."""
    num_tokens, num_ids = tokens.stop - tokens.start, ids.stop - ids.start
    return buffer[: num_tokens * num_ids].view(num_tokens, num_ids)


def _fill(logits_tV: Tensor, operands: Operands, tokens: slice, cast_elements: int) -> None:
    """Compute raw logits of some tokens for the whole vocabulary, casting a limited number of weights at a time."""
    for ids in chunk_slices(len(operands.weight), weight_rows(operands, cast_elements)):
        operands.tile(tokens, ids).products(logits_tV[:, ids])


def _live_rows(rows: RowGradients) -> Tensor | None:
    """Return indices of rows with a gradient, or None if skipping the others does not pay.

    On a GPU it does not: the host would wait for the device in every micro-batch to learn how many there are. Sequences
    without a gradient are not in the batch anyway.
    """
    if rows.logprob_grad.device.type != "cpu":
        return None
    live = rows.logprob_grad != 0
    if rows.entropy_grad is not None:
        live |= rows.entropy_grad != 0
    index = live.nonzero().squeeze(1)
    return index if len(index) <= MAX_LIVE_FRACTION * len(live) else None
