"""Attention of blocks of queries to blocks of keys, with its log-sum-exp and a backward that takes a merged one.

What comes out is in float32 or wider: of 16 bits it is a part of a sum, which is rounded when it is whole.

B blocks of L queries and K keys; G query heads to each key head.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, causal: bool = False, hidden: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention and the log-sum-exp of its scores.

    Args:
        query: [B, L, query heads, dim].
        key: [B, K, key heads, dim].
        value: [B, K, key heads, value dim].
        scale: multiplies the scores.
        causal: query i sees keys 0 .. i.
        hidden: [B, K], keys that no query sees; at least one other is in each block.

    Returns:
        outputs [B, L, query heads, value dim], and log-sum-exps [B, L, query heads].
    """
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if _has_flash(query, value):
        q, k, v = _widened(q, k, v)
        out, lse = _flash(q, k, v, 0.0, causal, attn_mask=_mask(hidden, q), scale=scale)
    else:
        scores = _scores(q, k, scale, causal, hidden)
        lse = scores.logsumexp(dim=-1)
        out = wide_product(_grouped(torch.exp(scores - lse.unsqueeze(-1)).to(v.dtype), k.shape[1]), v)
        out = out.view(*lse.shape, -1)
    return out.transpose(1, 2), lse.transpose(1, 2)


def attend_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    causal: bool = False,
    hidden: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value by these keys, where `out` and `lse` are of all keys that the queries see."""
    grad, q, k, v, o, log_sum = (x.transpose(1, 2) for x in (grad_out, query, key, value, out, lse))
    if _has_flash(query, value):
        grad, q, k, v, o = _widened(grad, q, k, v, o)
        grads = _flash_backward(grad, q, k, v, o, log_sum, 0.0, causal, attn_mask=_mask(hidden, q), scale=scale)
    else:
        grads = _backward(grad, q, k, v, o, log_sum, scale, causal, hidden)
    grad_q, grad_k, grad_v = (x.transpose(1, 2) for x in grads)
    return grad_q, grad_k, grad_v


def _has_flash(query: Tensor, value: Tensor) -> bool:
    """Whether the fused kernel of CPUs computes it: it takes any strides and grouped heads, and one head size."""
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


def _widened(*tensors: Tensor) -> Iterator[Tensor]:
    """For the fused kernel of CPUs, which would round to 16 bits, and whose backward of 16 bits is slower."""
    return (x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors)


def _mask(hidden: Tensor | None, q: Tensor) -> Tensor | None:
    """What the fused kernel adds to scores of q [B, query heads, L, dim]: [B, 1, L, K], no memory for the queries."""
    if hidden is None:
        return None
    zero = torch.zeros((), dtype=q.dtype, device=q.device)
    return zero.where(~hidden, -torch.inf)[:, None, None].expand(-1, -1, q.shape[2], -1)


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool, hidden: Tensor | None) -> Tensor:
    """Scores [B, query heads, L, K] in float32 or wider, -inf where a query does not see a key."""
    scores = wide_product(_grouped(q, k.shape[1]), k.mT).view(*q.shape[:3], -1) * scale
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores if hidden is None else scores.masked_fill(hidden[:, None, None], -torch.inf)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """The product of matrices [B, heads, ..., ...], of narrow ones in float32 as fused attention has its scores."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    if a.device.type == "cuda":
        product = torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32)
        return product.unflatten(0, a.shape[:2])
    return a.float() @ b.float()


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
    hidden: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`attend_backward` of tensors [B, heads, tokens, ...] by matrix products."""
    heads = k.shape[1]
    probs = torch.exp(_scores(q, k, scale, causal, hidden) - lse.unsqueeze(-1))
    delta = (grad.to(probs.dtype) * out.to(probs.dtype)).sum(dim=-1, keepdim=True)
    grad_probs = wide_product(_grouped(grad, heads), v.mT).view(probs.shape)
    grad_scores = _grouped((probs * (grad_probs - delta) * scale).to(q.dtype), heads)
    grad_q = wide_product(grad_scores, k).view(q.shape)
    grad_k = wide_product(grad_scores.mT, _grouped(q, heads))
    grad_v = wide_product(_grouped(probs.to(v.dtype), heads).mT, _grouped(grad, heads))
    return grad_q, grad_k, grad_v


def _grouped(x: Tensor, num_key_heads: int) -> Tensor:
    """[B, query heads, L, ...] as [B, key heads, G * L, ...]: query heads of one key head as further queries of it."""
    return x.reshape(x.shape[0], num_key_heads, -1, x.shape[-1])
