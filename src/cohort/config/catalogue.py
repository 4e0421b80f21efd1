"""Catalogue of algorithms and their components: formulas, papers and parameters, without torch.

A component's function is the pure function of the same name in `cohort.algorithms`; it takes the entry's parameters as
keyword arguments. The keys of the `algorithm` section, their validation, `cohort algorithms` and the docs are derived
from these entries.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Parameter:
    """A keyword argument of a component's function, set by the key of the same name in the `algorithm` section."""

    value_type: type
    default: Any
    description: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """A built-in advantage, policy loss or loss weight."""

    formula: str
    source: str  # paper
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    min_generations: int = 1  # completions per prompt needed for a signal
    min_completions: int = 1  # completions per step needed for a signal, if all tokens of one have the same reward
    sequence_level: bool = False  # a token's loss depends on the other tokens of its trajectory
    learns_without_advantage: bool = False  # tokens with advantage 0 have a gradient
    needs_critic: bool = False
    uses_token_rewards: bool = False  # reads rewards per token, which differ within a completion with kl_in: reward
    learns_from_equal_rewards: bool = False  # a group of equal rewards may have advantages other than 0
    compares_reward_parts: bool = False  # a group learns if any reward part differs, even if the sums are equal
    allows_negative_rewards: bool = True
    kl_in_reward_conflict: str | None = None  # why kl_in: reward is not supported
    needs_uniform_advantage: bool = False  # one ratio per completion, so its tokens must share one advantage
    has_ratio: bool = True  # the loss has an importance ratio to the old policy

    @property
    def defaults(self) -> dict[str, Any]:
        """Default value of each parameter."""
        return {key: parameter.default for key, parameter in self.parameters.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedAlgorithm:
    """A named combination of three components, with its own parameter defaults."""

    title: str
    source: str  # paper
    when: str  # when to use it
    advantage: str
    policy_loss: str
    loss_weight: str
    defaults: Mapping[str, Any] = field(default_factory=dict)  # that differ from the components' defaults


STD = {"std_epsilon": Parameter(float, 1e-4, "Added to the standard deviation.", ge=0)}
CLIP_LOW = Parameter(
    float,
    0.2,
    "Lower clip of the ratio: 1 - clip_low (gmpo: exp(-clip_low)). The ratio is exactly 1 at the first update of a "
    "rollout, so this matters with `train.updates_per_rollout` above 1.",
    ge=0,
    lt=1,
)
CLIP_HIGH = Parameter(float, 0.2, "Upper clip of the ratio: 1 + clip_high (gmpo: exp(clip_high)). See clip_low.", ge=0)


def _clip(low: float, high: float) -> dict[str, Parameter]:
    return {"clip_low": replace(CLIP_LOW, default=low), "clip_high": replace(CLIP_HIGH, default=high)}


ADVANTAGES: dict[str, Component] = {
    "group_mean_std": Component(
        formula="(r - mean(group)) / (std(group) + std_epsilon)",
        source="arXiv:2402.03300",
        parameters=STD,
        min_generations=2,
    ),
    "group_mean": Component(formula="r - mean(group)", source="arXiv:2503.20783", min_generations=2),
    "leave_one_out": Component(formula="r - mean(others of the group)", source="arXiv:2402.14740", min_generations=2),
    "batch_mean_std": Component(
        formula="(R_t - mean(R)) / (std(R) + std_epsilon) over the step's tokens; R_t: reward from token t on",
        source="arXiv:2501.03262",
        parameters=STD,
        min_completions=2,
        uses_token_rewards=True,
        learns_from_equal_rewards=True,
    ),
    "group_mean_whitened": Component(
        formula="batch_mean_std of R_t - mean(group)",
        source="arXiv:2501.03262",
        parameters=STD,
        min_generations=2,
        uses_token_rewards=True,
    ),
    "group_mean_batch_std": Component(
        formula="(r - mean(group)) / (std(r of the step) + std_epsilon)",
        source="arXiv:2508.08221",
        parameters=STD,
        min_generations=2,
    ),
    "per_reward_mean_std": Component(
        formula="whiten(sum over rewards k of weight_k * group_mean_std(r_k)) over the step's completions",
        source="arXiv:2601.05242",
        parameters=STD,
        min_generations=2,
        compares_reward_parts=True,
        kl_in_reward_conflict="it whitens each reward separately, and the KL penalty is not one of the rewards",
    ),
    "max_likelihood": Component(
        formula="(r - mean(group)) / mean(group); 0 where the mean is 0",
        source="arXiv:2602.02710",
        min_generations=2,
        allows_negative_rewards=False,
        kl_in_reward_conflict="it needs rewards of at least 0, and the penalty makes them negative",
    ),
    "max_at_k": Component(
        formula="G * mean over sets S of at_k completions of (max(S) - max(S without this one))",
        source="arXiv:2505.15201",
        parameters={"at_k": Parameter(int, 4, "k of the max@k objective; at most rollout.num_generations.", ge=2)},
        min_generations=2,
    ),
    "gae": Component(
        formula="sum over k of (gamma * gae_lambda)^k * (r_(t+k) + gamma * V_(t+k+1) - V_(t+k)); "
        "whitened: (A - mean(A)) / (std(A) + 1e-8) over the step's tokens",
        source="arXiv:1506.02438",
        parameters={
            "gamma": Parameter(float, 1.0, "Discount per token.", gt=0, le=1),
            "gae_lambda": Parameter(
                float, 1.0, "GAE lambda. 1: unbiased, high variance; lower: more bias, less variance.", ge=0, le=1
            ),
            "whiten_advantages": Parameter(
                bool, True, "Normalize advantages to mean 0 and standard deviation 1 over the step's tokens."
            ),
        },
        needs_critic=True,
        uses_token_rewards=True,
        learns_from_equal_rewards=True,
    ),
}
POLICY_LOSSES: dict[str, Component] = {
    "clipped": Component(
        formula="-min(min(ratio, delta) * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)",
        source="arXiv:1707.06347; delta: arXiv:1912.09729",
        parameters={
            **_clip(0.2, 0.2),
            "delta": Parameter(
                float,
                None,
                "Dual clip: upper bound on the ratio of tokens with negative advantage. Must be above 1 + clip_high; "
                "3 is usual. Default: off.",
                gt=1,
            ),
        },
    ),
    "gspo": Component(
        formula="-min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A), s = exp(mean over tokens of log(ratio))",
        source="arXiv:2507.18071",
        parameters=_clip(3e-4, 4e-4),
        sequence_level=True,
        needs_uniform_advantage=True,
    ),
    "gspo_token": Component(
        formula="as gspo with s_t = sg(s) * p_t / sg(p_t); sg: without a gradient",
        source="arXiv:2507.18071",
        parameters=_clip(3e-4, 4e-4),
        sequence_level=True,
    ),
    "cispo": Component(
        formula="-sg(min(ratio, 1 + clip_high)) * A * log p",
        source="arXiv:2506.13585",
        parameters={"clip_high": replace(CLIP_HIGH, default=4.0)},
    ),
    "sapo": Component(
        formula="-4 / tau * sigmoid(tau * (ratio - 1)) * A, tau = tau_positive where A > 0, else tau_negative",
        source="arXiv:2511.20347",
        parameters={
            "tau_positive": Parameter(float, 1.0, "Temperature of the gate for tokens with positive advantage.", gt=0),
            "tau_negative": Parameter(float, 1.05, "Temperature of the gate for other tokens.", gt=0),
        },
    ),
    "vespo": Component(
        formula="-sg(w^k * exp(lambda * (1 - w))) * A * log p, w = product of the completion's ratios",
        source="arXiv:2602.10693",
        parameters={
            "vespo_k_positive": Parameter(
                float, 2.0, "Exponent for tokens with nonnegative advantage (VESPO's k+).", ge=0
            ),
            "vespo_lambda_positive": Parameter(
                float, 3.0, "Decay for tokens with nonnegative advantage (VESPO's lambda+).", gt=0
            ),
            "vespo_k_negative": Parameter(
                float, 3.0, "Exponent for tokens with negative advantage (VESPO's k-).", ge=0
            ),
            "vespo_lambda_negative": Parameter(float, 2.0, "Decay for negative advantage (VESPO's lambda-).", gt=0),
        },
        sequence_level=True,
    ),
    "gmpo": Component(
        formula="-s * A, s = exp(mean over tokens of log(ratio), bounded by -clip_low for A < 0, clip_high for A > 0)",
        source="arXiv:2507.20673",
        parameters=_clip(0.4, 0.4),
        sequence_level=True,
        needs_uniform_advantage=True,
    ),
    "reinforce": Component(formula="-A * log p", source="doi:10.1007/BF00992696", has_ratio=False),
}
LOSS_WEIGHTS: dict[str, Component] = {
    "sequence_mean": Component(formula="1 / (N * length)", source="arXiv:2402.03300"),
    "token_mean": Component(formula="1 / (tokens of the step)", source="arXiv:2503.14476"),
    "sequence_sum": Component(formula="1 / N", source="arXiv:2402.14740"),
    "constant": Component(
        formula="1 / (all completions of the step * rollout.max_completion_tokens); with turns, * the maximum of "
        "sampled tokens per trajectory",
        source="arXiv:2503.20783",
    ),
}
COMPONENTS: dict[str, dict[str, Component]] = {
    "advantage": ADVANTAGES,
    "policy_loss": POLICY_LOSSES,
    "loss_weight": LOSS_WEIGHTS,
}


ALGORITHMS: dict[str, NamedAlgorithm] = {
    name: NamedAlgorithm(**entry)
    for name, entry in tomllib.loads(Path(__file__).with_name("algorithms.toml").read_text(encoding="utf-8")).items()
}


def parameters() -> dict[str, Parameter]:
    """Return the parameters of all components by key, without defaults, which may differ between components."""
    found: dict[str, Parameter] = {}
    for component in (component for known in COMPONENTS.values() for component in known.values()):
        for key, parameter in component.parameters.items():
            shared = replace(parameter, default=None)
            assert found.setdefault(key, shared) == shared, f"{key} is declared twice, and differently"
    return found


def single_completion_algorithms() -> list[str]:
    """Return the algorithms that can train with one completion per prompt."""
    return [name for name, a in ALGORITHMS.items() if ADVANTAGES[a.advantage].min_generations == 1]


def components_reading(key: str) -> list[str]:
    """Return the names of the components that read a key."""
    return [name for known in COMPONENTS.values() for name, component in known.items() if key in component.parameters]


def critic_algorithms() -> list[str]:
    """Return the algorithms that train a critic."""
    return [name for name, a in ALGORITHMS.items() if ADVANTAGES[a.advantage].needs_critic]


def suggest_instead(name: str, advantage: object, algorithms: list[str]) -> str:
    """Suggest a replacement for an advantage: an algorithm name if the name implies it, else another advantage.

    Args:
        name: current `algorithm.name`.
        advantage: current `algorithm.advantage`.
        algorithms: algorithms whose advantages would work.
    """
    if advantage == ALGORITHMS[name].advantage:
        return "algorithm.name: " + " or ".join(algorithms)
    return "algorithm.advantage: " + " or ".join(dict.fromkeys(ALGORITHMS[other].advantage for other in algorithms))
