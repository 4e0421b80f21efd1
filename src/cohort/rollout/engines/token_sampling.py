"""Token sampling by inverse CDF, with one random stream per model call.

N rows, V vocabulary.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cohort.rollout.engines.base import CallKey

_PURPOSES = {"train": 0, "eval": 1, "parity": 2}


def prompt_seed(key: CallKey) -> tuple[int, ...]:
    """Return the part of a key that the trajectories of a group share, as entropy for a `SeedSequence`."""
    return _PURPOSES[key.purpose], key.seed, key.step, key.epoch, key.prompt_id


def turn_seed(key: CallKey) -> tuple[int, ...]:
    """Return additional entropy for turns after the first."""
    return (key.turn,) if key.turn else ()


def uniform_stream(key: CallKey, count: int) -> NDArray[np.float64]:
    """Return the first `count` uniform numbers in [0, 1) of a call's random stream (Philox, counter-based)."""
    name = (*prompt_seed(key), key.index, *turn_seed(key))
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(name))).random(count)


def sample_tokens(
    logits_NV: Tensor, uniforms_N: Tensor, *, temperature: float, top_p: float = 1.0, top_k: int = 0
) -> tuple[Tensor, Tensor]:
    """Sample one token per row by inversion of the cumulative distribution.

    Args:
        logits_NV: [N, V], float32 or wider.
        uniforms_N: [N] float64 in [0, 1).
        temperature: divides the logits; 0 is greedy.
        top_p: keep the smallest set of most likely tokens with at least this total probability.
        top_k: keep the k most likely tokens; 0 keeps all.

    Returns:
        tokens [N] int64 and their logprobs [N] under the distribution sampled from (greedy: at temperature 1).
    """
    if temperature == 0:
        log_p = torch.log_softmax(logits_NV, dim=-1)
        tokens = log_p.argmax(dim=-1)
    else:
        log_p = torch.log_softmax(logits_NV if temperature == 1 else logits_NV / temperature, dim=-1)
        if top_k > 0 or top_p < 1:
            log_p = torch.log_softmax(_keep_likeliest(log_p, top_p=top_p, top_k=top_k), dim=-1)
        # float64: in float32 the sum over a large vocabulary would lose the tail
        cumulative = log_p.exp().cumsum(dim=-1, dtype=torch.float64)
        # right=True: the first token whose cumulative probability exceeds u, so one of probability 0 is never chosen
        tokens = torch.searchsorted(cumulative, (uniforms_N * cumulative[:, -1]).unsqueeze(-1), right=True).squeeze(-1)
        tokens.clamp_(max=logits_NV.shape[-1] - 1)
    return tokens, log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def _keep_likeliest(log_p: Tensor, *, top_p: float, top_k: int) -> Tensor:
    """Set logprobs outside top-k, then outside top-p of the rest, to -inf. Keeps ties."""
    if 0 < top_k < log_p.shape[-1]:
        kth = log_p.topk(top_k, dim=-1).values[:, -1:]
        log_p = torch.log_softmax(log_p.masked_fill(log_p < kth, -torch.inf), dim=-1)
    if top_p < 1:
        ordered = log_p.sort(dim=-1, descending=True).values
        mass_before = ordered.exp().cumsum(dim=-1) - ordered.exp()
        last_kept = ordered.masked_fill(mass_before >= top_p, torch.inf).amin(dim=-1, keepdim=True)
        log_p = log_p.masked_fill(log_p < last_kept, -torch.inf)
    return log_p
