"""Critics whose values are not all 0, the engine that trains them, and the naive way."""

from typing import Any

import torch
from torch import Tensor

from cohort.algorithms import build_algorithm
from cohort.config import AdamwConfig, AlgorithmConfig, TrainConfig
from cohort.learner import CriticEngine, TokenBudget
from cohort.models import Critic
from cohort.records import TrainSequence
from tiny import make_model

PPO = build_algorithm(AlgorithmConfig(name="ppo"), max_completion_tokens=32)
assert PPO.critic is not None
CPU = torch.device("cpu")


def make_critic(kind: str = "llama", *, dtype: torch.dtype = torch.float64, **overrides: Any) -> Critic:
    """A critic whose values are not all 0."""
    model = make_model(kind, dtype=dtype, **overrides)
    Critic.replace_head(model)
    torch.manual_seed(5)
    torch.nn.init.normal_(model.value_head.weight)
    torch.nn.init.normal_(model.value_head.bias)
    return Critic(model, device=CPU, compute_dtype=dtype, pad_token_id=0)


def naive_values(critic: Critic, sequence: TrainSequence) -> Tensor:
    """One unpadded row through the body: what it makes of the future before each token of the completion."""
    ids = torch.from_numpy(sequence.token_ids).long().unsqueeze(0)
    hidden = critic.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
    return critic.model.value_head(hidden)[:-1][torch.from_numpy(sequence.loss_mask[1:])][:, 0]


def engine_of(critic: Critic, *, optim: AdamwConfig | None = None, **train_keys: Any) -> CriticEngine:
    config = TrainConfig(**train_keys)
    return CriticEngine(
        critic,
        config,
        optim,
        budget=TokenBudget(10_000),
        learning_rate=lambda _: config.learning_rate,
        temperature=1.0,
        reference=None,
    )
