"""Logprobs of tokens from hidden states, without the logits of a whole batch.

A tile of logits is made, folded into the softmax statistics of its rows, and made again in backward. So a head costs
8TVH floating-point operations instead of 6TVH and no memory of T x V; `linear_loss` knows the loss in forward and makes
each tile once. Neither depends on the caller's autocast: the hidden states' dtype alone decides what is multiplied.

T scored tokens, H hidden, V vocabulary, R rank of an adapter; t tokens of a tile.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial

from cohort.plan.tiles import CPU_TILE_ELEMENTS, TILE_ELEMENTS, loss_tile_elements, loss_tile_tokens
from cohort.policy.logit_products import GradientSums, Operands, gradient_rows, spans, tile_shape, weight_rows
from cohort.policy.logit_tiles import LogitTransform, RowGradients, RunningSoftmax, differentiate_, fold

# Rows without a gradient are left out of backward when no more than this part of all rows has one.
LIVE_ROWS = 0.75

TokenLoss = Callable[[Tensor, Tensor | None, slice], Tensor]


class LinearLoss(NamedTuple):
    """A loss, and what it was computed from."""

    loss: Tensor  # sum over tokens; carries the gradient
    logprobs: Tensor  # [T], detached
    entropy: Tensor | None  # [T] in nats, detached; None where none is wanted


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
    """Logprob of each target under softmax(head(hidden) / temperature), and the entropy of that distribution.

    Both are differentiable, once. The factors of matrix products have the dtype of `hidden_TH`, to which a weight of
    another dtype is cast tile by tile; products, logits, statistics and the sums that become gradients are float32
    (float64 with float64 hidden states), since bfloat16 logits cost 1e-2 of logprob. A gradient is rounded once, to the
    dtype of what it belongs to.

    Args:
        hidden_TH: [T, H] last hidden states at the positions that predict the targets.
        weight_VH: [V, H] weight of the language-model head. A DTensor is gathered, and its gradient is the sum over
            ranks of what each rank's tokens give.
        targets_T: [T] int64 token ids. The logprob of an id beyond the vocabulary is NaN.
        bias: [V] of the head.
        temperature: divides the logits, after scale and softcap.
        scale: multiplies the logits (Cohere, Granite).
        softcap: logits become softcap * tanh(logits / softcap) (Gemma 2).
        adapter: features [T, R] and weight [V, R] of a low-rank addition to the head: their product is added to
            hidden @ weight^T.
        entropy: whether to compute it.
        tile_elements: largest number of logits held at a time; by default what suits the device. Where all fit, they
            are kept for backward.

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
    """The sum of a token-level loss of logprobs, with the head's gradients made in forward (6TVH operations).

    Equal to `token_loss` of `linear_logprobs`, where a token's loss depends on no other token's logprob. Gradients are
    kept in float32 until backward multiplies them by the loss's own gradient: [V, H] of it where the weight is trained.

    The arguments are those of `linear_logprobs`, and:

    Args:
        token_loss: takes logprobs [t], entropy [t] (None unless asked for) and which tokens they belong to, and
            returns their weighted losses [t]. Called once per tile, of at least one token, in order; whatever else it
            computes with gets no gradient.
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
    """Whole logits [T, V] of the head, without gradient, computed as `linear_logprobs` does."""
    operands = _operands(hidden_TH, weight_VH, bias, adapter)
    logits = hidden_TH.new_empty(len(hidden_TH), len(operands.weight), dtype=operands.dtype)
    with _no_autocast(operands):
        _fill(logits, operands, slice(None), TILE_ELEMENTS)
        bias_V = operands.tile(slice(None), slice(None)).bias
        return LogitTransform(scale=scale, softcap=softcap).apply(logits, bias_V, out=logits)


def token_logprobs(
    logits_TV: Tensor, targets_T: Tensor, temperature: float, *, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Logprob of each target under softmax(logits / temperature) [T], and the entropy [T] in nats or None."""
    log_p = torch.log_softmax(logits_TV if temperature == 1.0 else logits_TV / temperature, dim=-1)
    logprobs = log_p.gather(-1, targets_T.unsqueeze(-1)).squeeze(-1)
    return logprobs, -(log_p.exp() * log_p).sum(dim=-1) if entropy else None


class _LinearLogprobs(torch.autograd.Function):
    """One vocabulary tile after the other; of each, one tile of tokens after the other."""

    @staticmethod
    def forward(
        ctx: Any, targets: Tensor, transform: LogitTransform, entropy: bool, tile_elements: int, *tensors: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        operands = Operands(*tensors)
        running = RunningSoftmax.start(targets, dtype=operands.dtype, entropy=entropy)
        t, v = tile_shape(operands, tile_elements)
        buffer = operands.hidden.new_empty(t * v, dtype=operands.dtype)
        with _no_autocast(operands):
            for ids in spans(len(operands.weight), v):
                of_ids = operands.of_ids(ids)
                for tokens in spans(len(targets), t):
                    part = of_ids.tile(tokens, slice(None))
                    tile = part.products(_tile_of(buffer, tokens, ids))
                    fold(tile, running.rows(tokens), targets[tokens] - ids.start, part.bias, transform)
        logprobs, entropies, logsumexp = running.result()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(targets, logsumexp, entropies, *tensors)
        ctx.transform, ctx.tile_elements = transform, tile_elements
        # A tile that has everything serves the first backward pass, which overwrites it; a second makes it anew.
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
    """Each vocabulary tile is summed over all tokens before the next one, so that its gradient is written once."""
    sums = GradientSums.zeros(operands, wanted, by_vocabulary=True)
    if kept is not None:
        t, v = kept.shape
        buffer = kept.view(-1)
    else:
        t, v = tile_shape(operands, tile_elements)
        buffer = operands.hidden.new_empty(t * v, dtype=operands.dtype)
    with _no_autocast(operands):
        for ids in spans(len(operands.weight), v):
            of_ids, sums_of_ids = operands.of_ids(ids), sums.of_vocabulary(ids, operands.dtype)
            for tokens in spans(len(targets), t):
                part, tile = of_ids.tile(tokens, slice(None)), _tile_of(buffer, tokens, ids)
                if kept is None:
                    part.products(tile)
                differentiate_(tile, rows.rows(tokens), targets[tokens] - ids.start, part.bias, transform)
                part.add_gradients(sums_of_ids.tile(tokens, slice(None)), tile)
            sums.store(ids, sums_of_ids)
    return sums


class _LinearLoss(torch.autograd.Function):
    """One tile of tokens after the other, each with the whole vocabulary: its loss needs all of it."""

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
        everything = RunningSoftmax.start(targets, dtype=operands.dtype, entropy=entropy)
        loss = buffer.new_zeros(())
        with _no_autocast(operands):
            for tokens in spans(len(targets), size):
                tile = _tile_of(buffer, tokens, slice(0, num_ids))
                _fill(tile, operands, tokens, copied)
                running = everything.rows(tokens)
                fold(tile, running, targets[tokens], bias, transform)
                part_of_loss, rows = _differentiated(token_loss, running, tokens)
                loss += part_of_loss
                if any(wanted):
                    differentiate_(tile, rows, targets[tokens], bias, transform)
                    for ids in spans(num_ids, gradient_rows(operands, copied)):
                        operands.tile(tokens, ids).add_gradients(sums.tile(tokens, ids), tile[:, ids])
        logprobs, entropies, _ = everything.result()
        ctx.mark_non_differentiable(*(x for x in (logprobs, entropies) if x is not None))
        ctx.set_materialize_grads(False)
        ctx.sums = sums  # not saved as tensors are: backward multiplies them where they are
        ctx.dtypes = [None if x is None else x.dtype for x in tensors]
        return loss, logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        sums, ctx.sums = ctx.sums, None
        if sums is None:
            raise RuntimeError("the gradients that were made in forward serve one backward pass")
        grads = (None if x is None else x.mul_(loss_grad).to(dtype) for x, dtype in zip(sums, ctx.dtypes, strict=True))
        return None, None, None, None, None, None, *grads


def _differentiated(token_loss: TokenLoss, running: RunningSoftmax, tokens: slice) -> tuple[Tensor, RowGradients]:
    """The loss of a tile's tokens, and its gradients by their logprobs and entropies."""
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
    return Operands(
        hidden,
        _whole(weight),
        None if bias is None else _whole(bias),
        features,
        None if adapter_weight is None else _whole(adapter_weight),
    )


def _whole(weight: Tensor) -> Tensor:
    """A sharded weight gathered. Without `Partial`, its gradient would be this rank's part of its own tokens' alone."""
    if not isinstance(weight, DTensor):
        return weight
    return weight.full_tensor(grad_placements=[Partial()] * weight.device_mesh.ndim)


def _no_autocast(operands: Operands) -> torch.autocast:
    """Autocast leaves products that are written to a given tensor alone; results are not to hang on that."""
    return torch.autocast(operands.hidden.device.type, enabled=False)


def _tile_of(buffer: Tensor, tokens: slice, ids: slice) -> Tensor:
    """The part of a buffer that a tile takes, [t, v]."""
    t, v = tokens.stop - tokens.start, ids.stop - ids.start
    return buffer[: t * v].view(t, v)


def _fill(tile_tV: Tensor, operands: Operands, tokens: slice, tile_elements: int) -> None:
    """Raw logits of some tokens and the whole vocabulary, by as many weights as may be cast at a time."""
    for ids in spans(len(operands.weight), weight_rows(operands, tile_elements)):
        operands.tile(tokens, ids).products(tile_tV[:, ids])


def _live_rows(rows: RowGradients) -> Tensor | None:
    """Which rows have a gradient, where leaving the others out pays; None where all are to be computed."""
    live = rows.logprob_grad != 0
    if rows.entropy_grad is not None:
        live |= rows.entropy_grad != 0
    index = live.nonzero().squeeze(1)
    return index if len(index) <= LIVE_ROWS * len(live) else None
