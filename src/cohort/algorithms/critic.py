"""What a critic adds: generalised advantages, the returns that it learns, and its loss.

P prompts, G generations, L loss tokens of the longest completion of the step, T of a micro-batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from cohort.algorithms.inputs import AdvantageInputs
from cohort.algorithms.statistics import whiten_tokens
from cohort.algorithms.weights import token_mean
from cohort.batch import LossOutput, ValueInputs
from cohort.records import FloatArray, TrainSequence, scatter

ValueLoss = Callable[[ValueInputs], LossOutput]


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticFunctions:
    """What a critic is taught, and how far it is from that: both pure."""

    returns: Callable[[AdvantageInputs], Tensor]  # -> [P, G, L], what its values are to be
    loss: ValueLoss


def gae(x: AdvantageInputs, *, gamma: float, gae_lambda: float, whiten_advantages: bool) -> Tensor:
    """Generalised advantage estimates (arXiv:1506.02438, eq. 16) [P, G, L], whitened over the step's judged tokens."""
    advantages = _unwhitened(x, gamma=gamma, gae_lambda=gae_lambda)
    return whiten_tokens(advantages, x, std_epsilon=1e-8) if whiten_advantages else advantages


def gae_returns(x: AdvantageInputs, *, gamma: float, gae_lambda: float) -> Tensor:
    """What the critic's values are to be, [P, G, L]: its estimates of before plus the advantages, never whitened."""
    return _unwhitened(x, gamma=gamma, gae_lambda=gae_lambda) + _values(x)


def _unwhitened(x: AdvantageInputs, *, gamma: float, gae_lambda: float) -> Tensor:
    """A_t = d_t + gamma lambda A_(t+1) with d_t = r_t + gamma V_(t+1) - V_t; V and A are 0 after the last token.

    A completion that was cut off at the token limit ends there like any other: its reward was given for what there is.
    """
    values = _values(x)
    following = torch.cat([values[..., 1:], torch.zeros_like(values[..., :1])], dim=-1)
    deltas = x.token_rewards + gamma * following - values  # 0 beyond a completion, where rewards and values are
    if gamma * gae_lambda == 1:
        return deltas.flip(-1).cumsum(dim=-1).flip(-1)
    advantages = torch.zeros_like(deltas)
    after = torch.zeros_like(deltas[..., 0])
    for t in reversed(range(deltas.shape[-1])):
        after = deltas[..., t] + gamma * gae_lambda * after
        advantages[..., t] = after
    return advantages


def clipped_value(x: ValueInputs, *, value_clip: float) -> LossOutput:
    """Half the squared error of a value, or of the value moved by `value_clip` at most, whichever is larger [T].

    As implementations of PPO (arXiv:1707.06347) have it. The metric is the share of tokens where the second counts.
    """
    moved = x.old_values + (x.values - x.old_values).clamp(-value_clip, value_clip)
    free, bounded = (x.values - x.returns).square(), (moved - x.returns).square()
    return LossOutput(
        per_token_loss=0.5 * torch.maximum(free, bounded),
        token_metrics={"value/clip_ratio": (bounded > free).to(free.dtype)},
    )


def with_returns(sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
    """The sequences that the critic learns from, with its loss weights: the mean over all of their tokens."""
    chosen = [s for s in sequences if len(s.returns)]
    lengths = np.array([s.num_loss_tokens for s in chosen], dtype=np.int64)
    weights = token_mean(lengths, np.ones(len(chosen), dtype=bool))
    return [replace(s, loss_weights=scatter(s.loss_mask, weight)) for s, weight in zip(chosen, weights, strict=True)]


def value_metrics(sequences: Sequence[TrainSequence], values: Mapping[int, FloatArray]) -> dict[str, float]:
    """How well the critic foresaw the step's returns; nothing without a critic.

    Args:
        sequences: of the step.
        values: of the critic before it learned from them, by index.

    Returns:
        the mean value, and the share of the returns' variance over tokens that the values explain: 1 is all of it, 0 as
        much as a constant does. Left out where the returns do not vary.
    """
    chosen = [s for s in sequences if len(s.returns)]
    if not chosen:
        return {}
    foreseen = np.concatenate([values[s.index][s.loss_mask] for s in chosen])
    returns = np.concatenate([s.returns[s.loss_mask] for s in chosen])
    metrics = {"value/mean": float(foreseen.mean())}
    if returns.var() > 0:
        metrics["value/explained_variance"] = float(1 - (returns - foreseen).var() / returns.var())
    return metrics


def _values(x: AdvantageInputs) -> Tensor:
    assert x.values is not None, "an advantage that asks for values was built without a critic"
    return x.values
