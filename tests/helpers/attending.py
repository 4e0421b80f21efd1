"""Attention over segments in tests: what goes in, the dense computation, and a stand-in for the fused kernel."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from cohort.models.attention.cascade import AttentionSpec
from cohort.packing.segments import CACHED_PREFIX, NO_PARENT, AttentionMetadata, build_attention_metadata

Groups = list[tuple[int, list[int]]]  # tokens of each prompt and of its completions
LENGTHS = st.integers(1, 90)
GROUPS = st.lists(st.tuples(LENGTHS, st.lists(LENGTHS, max_size=4)), min_size=1, max_size=3)
UNEVEN: Groups = [(5, [3, 1, 7]), (1, [2, 70]), (100, [3, 66, 9]), (4, [])]


def segments_of(groups: Groups, prefix: tuple[int, list[int]] | None = None) -> AttentionMetadata:
    """A row of prompts and their completions, after the completions of a cached prefix."""
    num_prefix, completions = prefix or (0, [])
    lengths, parents = list(completions), [CACHED_PREFIX] * len(completions)
    for prompt_length, completion_lengths in groups:
        parent = len(lengths)
        lengths += [prompt_length, *completion_lengths]
        parents += [NO_PARENT, *[parent] * len(completion_lengths)]
    return build_attention_metadata(lengths, parents, prefix_tokens=num_prefix)


PLAIN = AttentionSpec(scale=0.3)


def dense_mask(attn_metadata: AttentionMetadata, spec: AttentionSpec = PLAIN) -> Tensor:
    """Which keys of prefix and row each query sees, [S, P + S], sequence by sequence."""
    num_before, num_tokens = attn_metadata.prefix_tokens, attn_metadata.num_tokens
    mask = torch.zeros(num_tokens, num_before + num_tokens, dtype=torch.bool)
    starts = [num_before + sum(attn_metadata.lengths[:n]) for n in range(len(attn_metadata.lengths))]
    for start, length, parent in zip(starts, attn_metadata.lengths, attn_metadata.parents, strict=True):
        history = {NO_PARENT: [], CACHED_PREFIX: list(range(num_before))}.get(parent)
        if history is None:
            history = list(range(starts[parent], starts[parent] + attn_metadata.lengths[parent]))
        sequence = torch.tensor([*history, *range(start, start + length)])
        key = torch.arange(len(sequence))
        query = key[len(history) :].unsqueeze(1)
        sees = key <= query
        if spec.window is not None:
            sees &= query - key < spec.window
        if spec.chunk is not None:
            sees &= query // spec.chunk == key // spec.chunk
        mask[sequence[len(history) :].unsqueeze(1) - num_before, sequence] = sees
    return mask


def make_inputs(
    attn_metadata: AttentionMetadata, *, dtype: torch.dtype = torch.float64, value_dim: int = 8
) -> dict[str, Tensor]:
    """Queries of 6 heads, keys and values of 2, and those of the prefix."""
    torch.manual_seed(0)
    num_tokens, num_before = attn_metadata.num_tokens, attn_metadata.prefix_tokens
    shapes = {
        "query": (num_tokens, 6, 8),
        "key": (num_tokens, 2, 8),
        "value": (num_tokens, 2, value_dim),
        "prefix_key": (num_before, 2, 8),
        "prefix_value": (num_before, 2, value_dim),
    }
    return {name: torch.randn(*shape, dtype=dtype, requires_grad=True) for name, shape in shapes.items()}


def reference(x: dict[str, Tensor], attn_metadata: AttentionMetadata, spec: AttentionSpec = PLAIN) -> Tensor:
    key, value = torch.cat([x["prefix_key"], x["key"]]), torch.cat([x["prefix_value"], x["value"]])
    key, value = key.repeat_interleave(3, dim=1), value.repeat_interleave(3, dim=1)
    scores = torch.einsum("qhd,khd->hqk", x["query"], key) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores.masked_fill(~dense_mask(attn_metadata, spec), -math.inf)
    if spec.sinks is not None:
        scores = torch.cat([scores, spec.sinks[:, None, None].expand(-1, scores.shape[1], 1)], dim=-1)
    probs = scores.softmax(dim=-1)[..., : len(key)]
    return torch.einsum("hqk,khd->qhd", probs, value)


def run(backend: Any, x: dict[str, Tensor], attn_metadata: AttentionMetadata, spec: AttentionSpec = PLAIN) -> Tensor:
    prefix = (x["prefix_key"], x["prefix_value"]) if attn_metadata.prefix_tokens else None
    return backend(x["query"], x["key"], x["value"], attn_metadata, spec, prefix=prefix)


def worst_error(
    backend: Any,
    attn_metadata: AttentionMetadata,
    spec: AttentionSpec = PLAIN,
    *,
    expected_spec: AttentionSpec | None = None,
    value_dim: int = 8,
    dtype: torch.dtype = torch.float64,
) -> float:
    """Largest difference from the dense mask (of `expected_spec`, if given), in outputs and in gradients."""
    x = make_inputs(attn_metadata, dtype=dtype, value_dim=value_dim)
    actual, expected = run(backend, x, attn_metadata, spec), reference(x, attn_metadata, expected_spec or spec)
    upstream = torch.randn_like(expected)
    differences = [actual - expected]
    used = [t for name, t in x.items() if attn_metadata.prefix_tokens or not name.startswith("prefix")]
    used += [] if spec.sinks is None else [spec.sinks]
    for mine, theirs in zip(
        torch.autograd.grad(actual, used, upstream), torch.autograd.grad(expected, used, upstream), strict=True
    ):
        differences.append(mine - theirs)
    return max(d.abs().max().item() for d in differences)


def sequences(
    query: Tensor,
    key: Tensor,
    ends: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    *,
    causal: bool,
    scale: float,
    window_size_left: int = -1,
    window_size_right: int = -1,
) -> Iterator[tuple[slice, slice, Tensor]]:
    """For each sequence of the fused kernel its queries, its keys and its scores, [query heads, queries, keys]."""
    group = query.shape[1] // key.shape[1]
    for n, x in enumerate((query, key)):
        assert ends[n].dtype == torch.int32 and len(x) == ends[n][-1] and longest[n] == ends[n].diff().max()
    for n in range(len(ends[0]) - 1):
        queries, keys = (slice(int(e[n]), int(e[n + 1])) for e in ends)
        scores = torch.einsum("qhd,khd->hqk", query[queries], key[keys].repeat_interleave(group, dim=1)) * scale
        if causal:
            mask, last = torch.ones(scores.shape[1:], dtype=torch.bool), scores.shape[2] - scores.shape[1]
            mask = mask.tril(last) if window_size_left < 0 else mask.tril(last).triu(last - window_size_left)
            assert window_size_right == (-1 if window_size_left < 0 else 0)
            scores = scores.masked_fill(~mask, -math.inf)
        yield queries, keys, scores


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    max_queries: int,
    max_keys: int,
    dropout: float,
    causal: bool,
    debug: bool,
    *,
    scale: float,
    num_splits: int = 1,
    **window: int,
) -> tuple[Tensor, ...]:
    """What the fused kernel puts out, sequence by sequence: outputs [T, heads, dim], log-sum-exps [heads, T]."""
    assert (dropout, debug, num_splits) == (0, False, 1)
    out, lse = torch.empty_like(query), query.new_empty(query.shape[1], len(query))
    ends, longest, group = (query_ends, key_ends), (max_queries, max_keys), query.shape[1] // key.shape[1]
    for queries, keys, scores in sequences(query, key, ends, longest, causal=causal, scale=scale, **window):
        v = value[keys].repeat_interleave(group, dim=1)
        out[queries] = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v)
        lse[:, queries] = scores.logsumexp(dim=-1)
    return out, lse, torch.empty(0), torch.empty(0), torch.empty(0)


def flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    max_queries: int,
    max_keys: int,
    dropout: float,
    causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float,
    **window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Its backward: probabilities by the log-sum-exps, and the sum over all keys by the outputs, that are given."""
    assert lse.shape == (query.shape[1], len(query)) and lse.is_contiguous() and dropout == 0
    grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    ends, longest, group = (query_ends, key_ends), (max_queries, max_keys), query.shape[1] // key.shape[1]
    for queries, keys, scores in sequences(query, key, ends, longest, causal=causal, scale=scale, **window):
        k, v = (x[keys].repeat_interleave(group, dim=1) for x in (key, value))
        probs = torch.exp(scores - lse[:, queries, None])
        delta = (grad[queries] * out[queries]).sum(dim=-1).T.unsqueeze(-1)
        grad_scores = probs * (torch.einsum("qhd,khd->hqk", grad[queries], v) - delta) * scale
        grads[0][queries] = torch.einsum("hqk,khd->qhd", grad_scores, k)
        grads[1][keys] = torch.einsum("hqk,qhd->khd", grad_scores, query[queries]).unflatten(1, (-1, group)).sum(dim=2)
        grads[2][keys] = torch.einsum("hqk,qhd->khd", probs, grad[queries]).unflatten(1, (-1, group)).sum(dim=2)
    return grads
