"""Collect a step's groups: sample, score, and resample groups without signal (dynamic sampling).

P prompts per step.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass

import numpy as np

from cohort.config import Config
from cohort.metrics import has_equal_rewards, rollout_metrics
from cohort.plan import RunSchedule
from cohort.records import ScoredGroup
from cohort.rewards import RewardRunner
from cohort.rollout import Prefetcher, Prompts, RolloutCollector, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGroups:
    """Groups sampled for a step."""

    groups: Sequence[ScoredGroup]  # [P] groups to train on
    replaced: Sequence[ScoredGroup]  # groups without signal that others replaced
    metrics: Mapping[str, float]

    @property
    def num_trajectories(self) -> int:
        """Number of trajectories to train on."""
        return sum(len(group.trajectories) for group in self.groups)

    @property
    def num_completion_tokens(self) -> int:
        """Number of tokens sampled, replaced groups included."""
        return sum(len(t.sampled_token_ids) for group in (*self.groups, *self.replaced) for t in group.trajectories)


@dataclass(frozen=True, slots=True)
class GroupCollector:
    """Collects scored groups, one step at a time.

    A step resamples groups whose rewards are all equal, at most `max_rounds` times (dynamic sampling: DAPO,
    arXiv:2503.14476).
    """

    prefetcher: Prefetcher
    rewards: RewardRunner
    _: KW_ONLY
    prompts_per_step: int  # P
    max_rounds: int
    reward_parts: Sequence[str] = ()  # individual rewards that must be equal too, for advantages that compare them

    def collect(self, step: int, phase: Callable[[str], AbstractContextManager[None]]) -> StepGroups:
        """Collect the groups of a step, always P of them, in order of completion.

        Args:
            step: number of steps done.
            phase: timer of the phases "rollout" (waiting for groups) and "reward".

        Raises:
            UserError: a prompt cannot be sampled, or a reward function failed.
            TrainingError: the rollout engine failed.
        """
        sampled: list[ScoredGroup] = []
        counts: Counter[str] = Counter()
        for round_number in range(self.max_rounds + 1):
            num_missing = self.prompts_per_step - sum(map(self._has_signal, sampled))
            if num_missing == 0:
                break
            with phase("rollout"):
                groups = self.prefetcher.take(step, num_missing)
            with phase("reward"):  # a few resampled groups may all be unscored by chance; a whole step may not
                sampled += self.rewards.score(groups, require_scores=round_number == 0, during=f"step {step + 1}")
            counts.update(self.rewards.counts())
        trained, replaced = self._select(sampled)
        return StepGroups(
            groups=trained,
            replaced=replaced,
            metrics={
                **rollout_metrics(sampled),
                **{f"rewards/{name}": float(count) for name, count in counts.items()},
                **self._metrics(trained, num_replaced=len(replaced)),
            },
        )

    def _has_signal(self, group: ScoredGroup) -> bool:
        return not has_equal_rewards(group, parts=self.reward_parts)

    def _select(self, sampled: Sequence[ScoredGroup]) -> tuple[list[ScoredGroup], list[ScoredGroup]]:
        """Split into groups to train on (those with signal, filled up to P with others) and replaced groups."""
        num_missing = self.prompts_per_step - sum(map(self._has_signal, sampled))
        trained: list[ScoredGroup] = []
        replaced: list[ScoredGroup] = []
        for group in sampled:
            if self._has_signal(group):
                trained.append(group)
            elif num_missing > 0:
                num_missing -= 1
                trained.append(group)
            else:
                replaced.append(group)
        return trained, replaced

    def _metrics(self, trained: Sequence[ScoredGroup], *, num_replaced: int) -> dict[str, float]:
        staleness = [self.prefetcher.staleness(group.trajectories) for group in trained]
        return {
            "rollout/resampled_ratio": num_replaced / (len(trained) + num_replaced),
            "rollout/staleness_mean": float(np.mean(staleness)),
            "rollout/staleness_max": max(staleness),
            **{f"rollout/{name}": float(count) for name, count in self.prefetcher.counts().items()},
        }


def build_group_collector(
    config: Config,
    plan: RunSchedule,
    collector: RolloutCollector,
    prompts: Prompts,
    rewards: RewardRunner,
) -> GroupCollector:
    """Build the group collector, with sampling ahead and dynamic sampling as configured."""
    rollout = config.rollout
    prefetcher = Prefetcher(
        collector,
        prompts,
        SamplingParams.for_training(rollout),
        seed=config.train.seed,
        prompts_per_step=plan.prompts_per_step,
        num_steps=plan.num_steps,
        updates_per_step=plan.updates_per_rollout,
        max_staleness=rollout.max_staleness if rollout.samples_ahead else 0,
        drop_stale=rollout.samples_ahead and rollout.stale_completions == "drop",
    )
    by_part = any(part.compares_reward_parts for part in config.algorithm.components())
    return GroupCollector(
        prefetcher,
        rewards,
        prompts_per_step=plan.prompts_per_step,
        max_rounds=rollout.resample,
        reward_parts=[name for name, weight in rewards.weights.items() if weight] if by_part else (),
    )
