"""Functions of the critic: GAE, returns, value loss and value metrics.

P prompts, G generations, L loss tokens of the step's longest completion, T loss tokens of a micro-batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from cohort.algorithms.loss_weights import token_mean
from cohort.algorithms.statistics import AdvantageInputs, token_rewards, whiten_tokens
from cohort.packing.batch import LossOutput, ValueInputs
from cohort.records import FloatArray, TrainSequence

ValueLoss = Callable[[ValueInputs], LossOutput]


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticFunctions:
    """Targets and loss of the critic; both are pure functions."""

    returns: Callable[[AdvantageInputs], Tensor]  # -> [P, G, L], targets of its values
    loss: ValueLoss


def gae(x: AdvantageInputs, *, gamma: float, gae_lambda: float, whiten_advantages: bool) -> Tensor:
    """Generalized advantage estimation (arXiv:1506.02438, eq. 16) [P, G, L], whitened over the step's scored tokens."""
    advantages = _unwhitened(x, gamma=gamma, gae_lambda=gae_lambda)
    return whiten_tokens(advantages, x, std_epsilon=1e-8) if whiten_advantages else advantages


def gae_returns(x: AdvantageInputs, *, gamma: float, gae_lambda: float) -> Tensor:
    """Value targets [P, G, L]: old values plus advantages, never whitened."""
    return _unwhitened(x, gamma=gamma, gae_lambda=gae_lambda) + _values(x)


def _unwhitened(x: AdvantageInputs, *, gamma: float, gae_lambda: float) -> Tensor:
    """A_t = d_t + gamma lambda A_(t+1) with d_t = r_t + gamma V_(t+1) - V_t; V and A are 0 after the last token.

    Truncated completions are treated as finished: their reward was computed for the tokens they have.
    """
    values = _values(x)
    following = torch.cat([values[..., 1:], torch.zeros_like(values[..., :1])], dim=-1)
    deltas = token_rewards(x) + gamma * following - values  # 0 past the end of a completion
    if gamma * gae_lambda == 1:
        return deltas.flip(-1).cumsum(dim=-1).flip(-1)
    advantages = torch.zeros_like(deltas)
    last = torch.zeros_like(deltas[..., 0])
    for t in reversed(range(deltas.shape[-1])):
        last = deltas[..., t] + gamma * gae_lambda * last
        advantages[..., t] = last
    return advantages


def clipped_value(x: ValueInputs, *, value_clip: float) -> LossOutput:
    """PPO's clipped value loss [T]: the larger of the squared errors of the value and of the clipped value, halved.

    The value is clipped to within `value_clip` of the old value (arXiv:1707.06347, as usually implemented).

    Metrics: fraction of tokens whose clipped error is larger.
    """
    clipped_values = x.old_values + (x.values - x.old_values).clamp(-value_clip, value_clip)
    errors, clipped_errors = (x.values - x.returns).square(), (clipped_values - x.returns).square()
    return LossOutput(
        per_token_loss=0.5 * torch.maximum(errors, clipped_errors),
        token_metrics={"value/clip_ratio": (clipped_errors > errors).to(errors.dtype)},
    )


def critic_sequences(sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
    """Return the sequences that train the critic, weighted for a mean over all of their tokens."""
    chosen = [s for s in sequences if len(s.returns)]
    lengths = np.array([s.num_loss_tokens for s in chosen], dtype=np.int64)
    weights = token_mean(lengths, np.ones(len(chosen), dtype=bool))
    return [
        replace(s, loss_weights=np.broadcast_to(weight, s.num_loss_tokens))
        for s, weight in zip(chosen, weights, strict=True)
    ]


def value_metrics(sequences: Sequence[TrainSequence], values: Mapping[int, FloatArray]) -> dict[str, float]:
    """Return the mean value and the explained variance of the critic; empty without a critic.

    Args:
        sequences: sequences of the step.
        values: values before the critic's update, by sequence index.

    Returns:
        `value/mean`, and `value/explained_variance`: 1 is a perfect prediction of the returns, 0 is no better than a
        constant. The latter is left out if all returns are equal.
    """
    chosen = [s for s in sequences if len(s.returns)]
    if not chosen:
        return {}
    predicted = np.concatenate([values[s.index] for s in chosen])
    returns = np.concatenate([s.returns for s in chosen])
    metrics = {"value/mean": float(predicted.mean())}
    if returns.var() > 0:
        metrics["value/explained_variance"] = float(1 - (returns - predicted).var() / returns.var())
    return metrics


def _values(x: AdvantageInputs) -> Tensor:
    assert x.values is not None, "this advantage needs values, but there is no critic"
    return x.values
