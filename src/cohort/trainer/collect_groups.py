"""Collect a step's groups: sample, score, and resample groups without signal (dynamic sampling).

P prompts per step.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import KW_ONLY, dataclass

import numpy as np

from cohort.config import Config
from cohort.config.data import SOURCE
from cohort.errors import TrainingError
from cohort.health.reward_health import reward_health_metrics
from cohort.metrics.rollouts import has_equal_rewards, rollout_metrics, source_metrics
from cohort.plan import RunSchedule
from cohort.records import BoolArray, RolloutGroup, ScoredGroup
from cohort.rewards import RewardRunner
from cohort.rollout import Prefetcher, Prompts, RolloutCollector, SamplingParams
from cohort.trainer.evaluation import success


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGroups:
    """Groups sampled for a step."""

    groups: Sequence[ScoredGroup]  # [P] groups to train on
    replaced: Sequence[ScoredGroup]  # groups without signal that others replaced
    dropped: Sequence[ScoredGroup]  # groups of which too few trajectories are intact
    metrics: Mapping[str, float]

    @property
    def num_trajectories(self) -> int:
        """Number of trajectories to train on."""
        return sum(len(group.trajectories) for group in self.groups)

    @property
    def num_completion_tokens(self) -> int:
        """Number of tokens sampled, replaced groups included."""
        groups = (*self.groups, *self.replaced, *self.dropped)
        return sum(t.num_sampled_tokens for group in groups for t in group.trajectories)


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
    max_failed_ratio: float = 1.0  # of a step's trajectories; above it the run ends
    success_reward: str | None = None  # the reward that says whether a completion is right; None: the first
    success_threshold: float = 1.0
    source_column: str | None = None  # says what source of a mixture a row is of
    reward_parts: Sequence[str] = ()  # individual rewards that must be equal too, for advantages that compare them

    def collect(self, step: int, phase: Callable[[str], AbstractContextManager[None]]) -> StepGroups:
        """Collect the groups of a step in order of completion: P, less those of which too few trajectories are intact.

        Args:
            step: number of steps done.
            phase: timer of the phases "rollout" (waiting for groups) and "reward".

        Raises:
            UserError: a prompt cannot be sampled, or a reward function failed.
            TrainingError: the rollout engine failed, or too many trajectories did.
        """
        taken: list[RolloutGroup] = []
        sampled: list[ScoredGroup] = []
        counts: Counter[str] = Counter()
        judged: Counter[str] = Counter()  # completions, by reward
        seconds: dict[str, float] = {}
        for round_number in range(self.max_rounds + 1):
            num_missing = self.prompts_per_step - sum(map(self._has_signal, sampled))
            if num_missing == 0:
                break
            with phase("rollout"):
                groups = self.prefetcher.take(step, num_missing)
            taken += groups
            self._check_failures(taken)
            with phase("reward"):  # a few resampled groups may all be unscored by chance; a whole step may not
                sampled += self.rewards.score(groups, require_scores=round_number == 0, during=f"step {step + 1}")
            counts.update(self.rewards.counts())
            judged.update(self.rewards.num_judged)
            seconds = {name: seconds.get(name, 0.0) + self.rewards.seconds.get(name, 0.0) for name in judged}
            self.prefetcher.collector.release(groups)
        chosen, replaced = self._select(sampled)
        trained = [group for group in chosen if _is_comparable(group)]
        if not trained:
            raise TrainingError(
                f"rollout: in every group of this step, fewer than two trajectories are intact"
                f"{self._first_errors(chosen)}"
            )
        dropped = [group for group in chosen if not _is_comparable(group)]
        return StepGroups(
            groups=trained,
            replaced=replaced,
            dropped=dropped,
            metrics={
                **rollout_metrics(sampled),
                **reward_health_metrics(sampled),
                **self._outcomes(sampled, self.success_reward or next(iter(sampled[0].reward_parts))),
                **{f"rewards/{name}": float(count) for name, count in counts.items()},
                **{f"rewards/{name}/seconds_per_verdict": seconds[name] / number for name, number in judged.items()},
                **self._metrics(trained, num_replaced=len(replaced)),
                "rollout/dropped_groups": float(len(dropped)),
            },
        )

    def _outcomes(self, groups: Sequence[ScoredGroup], reward: str) -> dict[str, float]:
        """Return the shares of groups in which all completions are right, or none is, and what sources have.

        Records the successes of prompts.
        """
        right_PG = success(groups, reward, self.success_threshold)
        shares = {"frac_all_right": right_PG.all(axis=1), "frac_all_wrong": ~right_PG.any(axis=1)}
        outcomes = {name: float(share.mean()) for name, share in shares.items()}
        judged_PG = [np.isfinite(group.reward_parts[reward]) & _intact(group) for group in groups]
        outcomes |= self.prefetcher.prompts.record(
            (group.prompt.id, int((right & judged).sum()), int(judged.sum()))
            for group, right, judged in zip(groups, right_PG, judged_PG, strict=True)
        )
        if self.source_column is not None:
            outcomes |= source_metrics(groups, right_PG, column=self.source_column)
        return outcomes

    def _check_failures(self, groups: Sequence[RolloutGroup]) -> None:
        """Check how many of a step's trajectories infrastructure broke.

        Raises:
            TrainingError: more than `max_failed_ratio` of them; the message has the first reasons.
        """
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        num_broken = sum(trajectory.is_broken for trajectory in trajectories)
        if num_broken > self.max_failed_ratio * len(trajectories):
            raise TrainingError(
                f"rollout.max_failed_ratio: {self.max_failed_ratio:g}: {num_broken} of {len(trajectories)} "
                f"trajectories failed{self._first_errors(groups)}"
            )

    def _first_errors(self, groups: Sequence[RolloutGroup | ScoredGroup]) -> str:
        """Return the first reasons of broken trajectories, as the end of a message. The log folder has tracebacks."""
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        errors = list(dict.fromkeys(t.error or t.end for t in trajectories if t.is_broken))
        reasons = list(dict.fromkeys(error.partition("\n\n")[0] for error in errors))
        more = f"\n... and {len(reasons) - _MAX_ERRORS} other errors" if len(reasons) > _MAX_ERRORS else ""
        if (folder := self.rewards.log_folder) is not None and errors != reasons:
            with suppress(OSError):
                folder.mkdir(exist_ok=True)
                (folder / _ERRORS_FILE).write_text("\n\n\n".join(errors), encoding="utf-8", errors="replace")
                more += f"\n\nThe tracebacks are in {folder / _ERRORS_FILE}"
        return "; the first errors:\n\n" + "\n".join(reasons[:_MAX_ERRORS]) + more

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
            **{f"rollout/{name}": float(count) for name, count in self.prefetcher.collector.counts().items()},
        }


_MAX_ERRORS = 3  # shown when too many trajectories fail
_ERRORS_FILE = "environment.txt"  # in the log folder


def _is_comparable(group: ScoredGroup) -> bool:
    """Whether infrastructure left enough trajectories to compare: two, or the only one."""
    return int(_intact(group).sum()) >= min(2, len(group.trajectories))


def _intact(group: ScoredGroup) -> BoolArray:
    return np.array([not trajectory.is_broken for trajectory in group.trajectories])


def build_group_collector(
    config: Config,
    schedule: RunSchedule,
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
        prompts_per_step=schedule.prompts_per_step,
        num_steps=schedule.num_steps,
        updates_per_step=schedule.updates_per_rollout,
        max_staleness=rollout.max_staleness if rollout.samples_ahead else 0,
        drop_stale=rollout.samples_ahead and rollout.stale_completions == "drop",
    )
    by_part = any(part.compares_reward_parts for part in config.algorithm.components())
    return GroupCollector(
        prefetcher,
        rewards,
        prompts_per_step=schedule.prompts_per_step,
        max_rounds=rollout.resample,
        max_failed_ratio=rollout.max_failed_ratio,
        success_reward=config.eval.success_reward if config.eval else None,
        success_threshold=config.eval.success_threshold if config.eval else 1.0,
        source_column=SOURCE if config.data.sources else None,
        reward_parts=[name for name, weight in rewards.weights.items() if weight] if by_part else (),
    )
