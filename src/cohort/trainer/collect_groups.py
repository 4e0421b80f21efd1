"""The groups that a step trains on: sampled, judged, and replaced where they teach nothing. P prompts per step."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from cohort.config import Config
from cohort.metrics import has_equal_rewards, rollout_metrics
from cohort.plan import RunPlan
from cohort.records import ScoredGroup
from cohort.rewards import RewardRunner
from cohort.rollout import Prefetcher, Prompts, RolloutCollector, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """What was sampled for a step."""

    groups: Sequence[ScoredGroup]  # [P] that are trained on
    replaced: Sequence[ScoredGroup]  # that are not, because they teach nothing and others took their places
    metrics: Mapping[str, float]

    @property
    def num_trajectories(self) -> int:
        """All that are trained on."""
        return sum(len(group.trajectories) for group in self.groups)

    @property
    def num_completion_tokens(self) -> int:
        """All that were sampled."""
        return sum(len(t.token_ids) for group in (*self.groups, *self.replaced) for t in group.trajectories)


class Gatherer:
    """Prompts to scored groups."""

    def __init__(
        self,
        prefetcher: Prefetcher,
        rewards: RewardRunner,
        *,
        prompts_per_step: int,
        max_rounds: int,
        reward_parts: Sequence[str] = (),
    ):
        """With `max_rounds` 0 every group is trained on.

        Args:
            prefetcher: gives the groups.
            rewards: judge them.
            prompts_per_step: P.
            max_rounds: how often a step asks for more groups, in the place of those whose rewards are all equal
                (dynamic sampling: DAPO, arXiv:2503.14476).
            reward_parts: rewards that each have to be equal as well, for an advantage that looks at them one by one.
        """
        self.prefetcher = prefetcher
        self._rewards = rewards
        self._prompts_per_step = prompts_per_step
        self._max_rounds = max_rounds
        self._reward_parts = reward_parts

    def gather(self, step: int, phase: Callable[[str], AbstractContextManager[None]]) -> Gathered:
        """The groups of a step, P of them whatever their rewards are, in the order in which they were there.

        Args:
            step: steps done before.
            phase: counts the time of "rollout", which is waiting for groups, and of "reward".

        Raises:
            UserError: a prompt cannot be sampled, or a reward does not work.
            TrainingError: the engine cannot go on.
        """
        sampled: list[ScoredGroup] = []
        counts: Counter[str] = Counter()
        for round_number in range(self._max_rounds + 1):
            missing = self._prompts_per_step - sum(map(self._teaches, sampled))
            if missing == 0:
                break
            with phase("rollout"):
                groups = self.prefetcher.take(step, missing)
            with phase("reward"):  # that nothing can be judged shows in a whole step, and may be chance in a few groups
                sampled += self._rewards.score(groups, require_scores=round_number == 0, during=f"step {step + 1}")
            counts.update(self._rewards.counts())
        trained, replaced = self._choose(sampled)
        return Gathered(
            groups=trained,
            replaced=replaced,
            metrics={
                **rollout_metrics(sampled),
                **{f"rewards/{name}": float(count) for name, count in counts.items()},
                **self._metrics(trained, num_replaced=len(replaced)),
            },
        )

    def _teaches(self, group: ScoredGroup) -> bool:
        return not has_equal_rewards(group, parts=self._reward_parts)

    def _choose(self, sampled: Sequence[ScoredGroup]) -> tuple[list[ScoredGroup], list[ScoredGroup]]:
        """The groups that teach something, filled up to P with the first of the others; and the rest of those."""
        room = self._prompts_per_step - sum(map(self._teaches, sampled))
        chosen: list[ScoredGroup] = []
        rest: list[ScoredGroup] = []
        for group in sampled:
            if self._teaches(group):
                chosen.append(group)
            elif room > 0:
                room -= 1
                chosen.append(group)
            else:
                rest.append(group)
        return chosen, rest

    def _metrics(self, trained: Sequence[ScoredGroup], *, num_replaced: int) -> dict[str, float]:
        staleness = [self.prefetcher.staleness(group.trajectories) for group in trained]
        return {
            "rollout/resampled_ratio": num_replaced / (len(trained) + num_replaced),
            "rollout/staleness_mean": float(np.mean(staleness)),
            "rollout/staleness_max": max(staleness),
            **{f"rollout/{name}": float(count) for name, count in self.prefetcher.counts().items()},
        }


def build_gatherer(
    config: Config,
    plan: RunPlan,
    collector: RolloutCollector,
    prompts: Prompts,
    rewards: RewardRunner,
) -> Gatherer:
    """What `config` says of sampling ahead and of groups that teach nothing."""
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
    return Gatherer(
        prefetcher,
        rewards,
        prompts_per_step=plan.prompts_per_step,
        max_rounds=rollout.resample,
        reward_parts=[name for name, weight in rewards.weights.items() if weight] if by_part else (),
    )
