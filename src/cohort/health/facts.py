"""What rules need to know of a run's configuration."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from cohort.config import ALGORITHMS, COMPONENTS, Component

_OFF = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}  # with which the policy itself is sampled
_SHAPES = ("overlong", "repetition_penalty")  # endings of the built-in rewards that only shape others


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts of a run beside its metrics."""

    num_steps: int = 0  # of the whole run; 0: not known
    weights: Mapping[str, float] = field(default_factory=dict)  # of rewards by name; others weigh 1
    objective: str = ""  # the reward that defines success in evaluations
    shaping: Collection[str] = ()  # rewards that only shape others and may have no effect for long
    compares_groups: bool = True  # only groups with different rewards have a signal
    adds_rewards: bool = True  # False: the advantage normalizes each reward
    prompts_per_step: float = 0.0  # 0: not known
    max_grad_norm: float = 1.0
    max_turns: int = 8
    token_limit: str = "the token limit"  # keys that cut completions
    samples_from_policy: bool = True  # nothing but the temperature changes the distribution that is sampled from
    logprob_tolerance: float = 0.3  # nats


def logprob_tolerance(*, has_bfloat16: bool) -> float:
    """Largest difference of a logprob between batches of different shape that rounding explains, in nats."""
    return 0.3 if has_bfloat16 else 1e-3


def facts_of(config: Mapping[str, Any] | None) -> RunFacts:
    """Return the facts in a run's `config.yaml`, of any version and possibly damaged.

    The run itself knows better what its functions say of themselves, and in which dtypes it computes.
    """

    def setting(section: str, key: str, default: Any) -> Any:
        """Return a key, or the default if there is none of the same type."""
        values = (config or {}).get(section)
        value = values.get(key, default) if isinstance(values, Mapping) else default
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return value if isinstance(value, type(default)) or (number and isinstance(default, float)) else default

    rewards = (config or {}).get("rewards")
    entries = [e for e in rewards if isinstance(e, Mapping)] if isinstance(rewards, list) else []
    names = [str(e.get("name") or str(e.get("use")).rpartition(":")[2]) for e in entries]
    weights = [entry.get("weight", 1.0) for entry in entries]
    advantage = _advantage(setting("algorithm", "name", "grpo"), (config or {}).get("algorithm"))
    is_group = setting("rollout", "num_generations", 2) > 1 and setting("algorithm", "kl_in", "loss") != "reward"
    computes_float32 = setting("model", "compute_dtype", "") == "float32" or setting("hardware", "device", "") == "cpu"
    is_float32 = computes_float32 and setting("model", "dtype", "float32") == "float32"
    return RunFacts(
        num_steps=setting("train", "steps", 0),
        objective=setting("eval", "success_reward", "") or next(iter(names), ""),
        weights={n: float(w) for n, w in zip(names, weights, strict=True) if isinstance(w, int | float)},
        shaping={name for name, e in zip(names, entries, strict=True) if str(e.get("use")).endswith(_SHAPES)},
        compares_groups=is_group and advantage is not None and not advantage.learns_from_equal_rewards,
        adds_rewards=advantage is None or not advantage.compares_reward_parts,
        prompts_per_step=setting("train", "prompts_per_step", 0.0),
        max_grad_norm=setting("train", "max_grad_norm", 1.0),
        max_turns=setting("rollout", "max_turns", 8),
        samples_from_policy=all(setting("rollout", key, off) == off for key, off in _OFF.items()),
        logprob_tolerance=logprob_tolerance(has_bfloat16=not is_float32),
    )


def _advantage(algorithm: str, section: Any) -> Component | None:
    """Return the built-in advantage of a named algorithm and its section; None if it is a function of the user."""
    named = ALGORITHMS.get(algorithm)
    advantage = section.get("advantage") if isinstance(section, Mapping) else None
    advantage = advantage or (named.advantage if named else None)
    return COMPONENTS["advantage"].get(advantage) if isinstance(advantage, str) else None
