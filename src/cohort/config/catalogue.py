"""What algorithms are made of, and those that have a name: texts and numbers, without the functions themselves.

A component is a pure function in `cohort.algorithms`, under the same name there. The keys of the configuration that it
reads are its keyword arguments.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One function of an algorithm."""

    formula: str
    source: str  # paper
    keys: Mapping[str, Any] = field(default_factory=dict)  # that it reads, and their defaults
    min_generations: int = 1  # completions of a prompt that it takes
    whole_completions: bool = False  # a token's loss depends on the other tokens of its completion
    needs_critic: bool = False  # it looks at values


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedAlgorithm:
    """A choice of three components, and of numbers for what they read."""

    title: str
    source: str  # paper
    when: str  # to use it
    advantage: str
    policy_loss: str
    loss_weight: str
    defaults: Mapping[str, Any] = field(default_factory=dict)  # where they are not the component's


CLIP = {"clip_low": 0.2, "clip_high": 0.2}

ADVANTAGES: dict[str, Component] = {
    "group_mean_std": Component(
        formula="(r - mean(group)) / (std(group) + std_epsilon)",
        source="arXiv:2402.03300",
        keys={"std_epsilon": 1e-4},
        min_generations=2,
    ),
    "group_mean": Component(formula="r - mean(group)", source="arXiv:2503.20783", min_generations=2),
    "gae": Component(
        formula="sum over k of (gamma * gae_lambda)^k * (r_(t+k) + gamma * V_(t+k+1) - V_(t+k))",
        source="arXiv:1506.02438",
        keys={"gamma": 1.0, "gae_lambda": 1.0, "whiten_advantages": True},
        needs_critic=True,
    ),
}
POLICY_LOSSES: dict[str, Component] = {
    "clipped": Component(
        formula="-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)",
        source="arXiv:1707.06347",
        keys=CLIP,
    ),
}
LOSS_WEIGHTS: dict[str, Component] = {
    "sequence_mean": Component(formula="1 / (N * length)", source="arXiv:2402.03300"),
    "token_mean": Component(formula="1 / (tokens of the step)", source="arXiv:2503.14476"),
    "constant": Component(formula="1 / (N * rollout.max_completion_tokens)", source="arXiv:2503.20783"),
}
COMPONENTS: dict[str, dict[str, Component]] = {
    "advantage": ADVANTAGES,
    "policy_loss": POLICY_LOSSES,
    "loss_weight": LOSS_WEIGHTS,
}
ALGORITHMS: dict[str, NamedAlgorithm] = {
    "grpo": NamedAlgorithm(
        title="GRPO",
        source="arXiv:2402.03300",
        when="the usual choice",
        advantage="group_mean_std",
        policy_loss="clipped",
        loss_weight="sequence_mean",
    ),
    "dr_grpo": NamedAlgorithm(
        title="Dr. GRPO",
        source="arXiv:2503.20783",
        when="wrong answers grow longer and longer",
        advantage="group_mean",
        policy_loss="clipped",
        loss_weight="constant",
    ),
    "dapo": NamedAlgorithm(
        title="DAPO",
        source="arXiv:2503.14476",
        when="long chains of thought; entropy falls too fast",
        advantage="group_mean_std",
        policy_loss="clipped",
        loss_weight="token_mean",
        defaults={"clip_high": 0.28},
    ),
    "ppo": NamedAlgorithm(
        title="PPO",
        source="arXiv:1707.06347",
        when="one completion per prompt, and memory for a critic",
        advantage="gae",
        policy_loss="clipped",
        loss_weight="token_mean",
    ),
}


def is_users_own(component: str) -> bool:
    """Whether it names a function of the user's, as file.py:function or package.module:function."""
    return ":" in component


def with_one_completion() -> list[str]:
    """The algorithms that learn from one completion of a prompt."""
    return [name for name, a in ALGORITHMS.items() if ADVANTAGES[a.advantage].min_generations == 1]


def with_a_critic() -> list[str]:
    """The algorithms that train a critic beside the policy."""
    return [name for name, a in ALGORITHMS.items() if ADVANTAGES[a.advantage].needs_critic]
