"""Evaluation on held-out prompts: mean@k, pass@k and reward parts, with its own sampling parameters.

P prompts, k completions each.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cohort.errors import UserError
from cohort.metrics.rollouts import rollout_metrics, source_metrics
from cohort.records import Prompt, ScoredGroup
from cohort.rewards import RewardRunner
from cohort.rollout import RolloutCollector, SamplingParams, StepKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Prompts and settings of a run's evaluations."""

    prompts: Sequence[Prompt]
    num_dropped_overlong: int  # prompts dropped because they are too long
    sampling: SamplingParams
    seed: int
    success_reward: str  # name of the reward that defines success
    success_threshold: float
    prompts_at_a_time: int
    source_column: str | None = None  # says what source of a mixture a row is of


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """Metrics of one evaluation, with the scored completions behind them."""

    accuracy: float  # fraction of completions that succeed (mean@k), broken trajectories excluded
    metrics: Mapping[str, float]  # names begin with eval/
    groups: Sequence[ScoredGroup]


def evaluate(
    evaluation: Evaluation,
    collector: RolloutCollector,
    rewards: RewardRunner,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> EvalResult:
    """Sample k completions for every prompt and score them.

    Random streams are the same at every step, so that two evaluations differ only by the policy.

    Args:
        evaluation: prompts and settings.
        collector: samples from the current policy.
        rewards: must include the reward that defines success.
        on_progress: called with the number of prompts done and the total.
    """
    key = StepKey(purpose="eval", seed=evaluation.seed, step=0)
    groups: list[ScoredGroup] = []
    total = len(evaluation.prompts)
    on_progress(0, total)
    for start in range(0, total, evaluation.prompts_at_a_time):
        chunk = evaluation.prompts[start : start + evaluation.prompts_at_a_time]
        sampled = collector.collect(chunk, evaluation.sampling, key)
        groups += rewards.score(sampled, during="an evaluation")
        collector.release(sampled)
        on_progress(len(groups), total)
    success_PK = success(groups, evaluation.success_reward, evaluation.success_threshold)
    intact_PK = np.array([[not trajectory.is_broken for trajectory in group.trajectories] for group in groups])
    k = evaluation.sampling.num_generations
    accuracy = float(success_PK[intact_PK].mean())
    metrics: dict[str, float] = {
        "accuracy": accuracy,
        f"mean@{k}": accuracy,
        f"pass@{k}": float(success_PK[intact_PK.any(axis=1)].any(axis=1).mean()),
    }
    of_groups = rollout_metrics(groups)
    if evaluation.source_column is not None:
        of_groups |= source_metrics(groups, success_PK, column=evaluation.source_column)
    metrics |= {
        "num_prompts": of_groups.pop("num_groups"),
        "num_dropped_overlong": evaluation.num_dropped_overlong,
        **of_groups,
    }
    own = {f"eval/{name}": value for name, value in metrics.items()}
    return EvalResult(accuracy=accuracy, metrics=rewards.take_logged(own, prefix="eval/"), groups=groups)


def success(groups: Sequence[ScoredGroup], reward: str, threshold: float) -> np.ndarray:
    """Return which completions succeed, bool [P, k]: `reward` is at least `threshold`. Unscored completions fail."""
    part_PK = np.stack([group.reward_parts[reward] for group in groups])
    return np.nan_to_num(part_PK, nan=-np.inf) >= threshold


def pick_success_reward(wanted: str | None, names: Sequence[str], *, field: str = "eval.success_reward") -> str:
    """Return the name of the reward that defines success: `wanted`, or the first.

    Raises:
        UserError: there is no such reward.
    """
    if wanted is None:
        return names[0]
    if wanted not in names:
        raise UserError(f"{field}: {wanted!r} is not a reward; must be one of {', '.join(names)}")
    return wanted
