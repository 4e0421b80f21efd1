"""Rewards that depend on length: overlong penalties, and correct answers scaled by length."""

import math
from collections.abc import Sequence
from typing import Any

from cohort.config.rewards import AccuracySettings, CosineSettings, OverlongSettings, SoftOverlongSettings
from cohort.rewards.builtin import BuiltinReward, Columns, RewardContext
from cohort.rewards.completion_text import completion_text
from cohort.rewards.math import VERDICT_REWARDS, GradedReward, Grader


class OverlongReward(BuiltinReward[OverlongSettings | SoftOverlongSettings]):
    """0.0 up to `buffer_tokens` before the limit, then linearly down to -penalty at the limit.

    DAPO's soft overlong punishment (eq. 13). The limit is `rollout.max_completion_tokens`, also in evaluations. With
    several turns it is that of all sampled tokens: max_turns x max_completion_tokens, or max_trajectory_tokens if that
    is lower. The penalty is added to the other rewards, times its weight, and is shaping only: a completion without
    another score stays unscored. `open_r1.soft_overlong` and `trl.soft_overlong` have a limit of their own.
    """

    shapes = True

    def check(self) -> None:
        """See `BuiltinReward`."""
        limit, buffer, _ = self._schedule()
        if buffer > limit:
            raise ValueError(
                f"buffer_tokens: {buffer} must be at most {limit}, the most tokens that can be sampled "
                "(rollout.max_completion_tokens)"
            )

    def __call__(self, completion_ids: Sequence[Sequence[int]]) -> list[float]:
        """Return one reward per completion."""
        limit, buffer, penalty = self._schedule()
        over = [len(ids) - (limit - buffer) for ids in completion_ids]
        return [-penalty * min(tokens / (buffer or 1), 1.0) if tokens > 0 else 0.0 for tokens in over]

    def _schedule(self) -> tuple[int, int, float]:
        """Return the limit, the tokens before it over which the penalty grows, and the penalty."""
        if isinstance(self.settings, SoftOverlongSettings):
            return self.settings.max_completion_len, self.settings.soft_punish_cache, 1.0
        return self.context.max_completion_tokens, self.settings.buffer_tokens, self.settings.penalty


class CosineReward(GradedReward[CosineSettings]):
    """A cosine schedule over the length: short is best for correct answers and worst for wrong ones.

    Appendix C.1 of "Demystifying Long Chain-of-Thought Reasoning in LLMs" (arXiv:2502.03373). TRL counts tokens, and
    completions longer than `max_len` count as `max_len`. Open-R1 counts characters, and lets the cosine rise again.
    """

    def __init__(
        self, settings: CosineSettings, context: RewardContext, *, grader: Grader, counts_tokens: bool
    ) -> None:
        """Create the reward.

        Args:
            settings: its arguments.
            context: its run.
            grader: how answers are graded.
            counts_tokens: TRL's form; else Open-R1's, in which an unparsable gold answer scores 1.0.
        """
        super().__init__(settings, context, grader=grader)
        self._counts_tokens = counts_tokens

    def __call__(
        self, completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], columns: Columns
    ) -> list[float | None]:
        """Return one reward per completion; None if it was not graded."""
        s = self.settings
        if self._counts_tokens:
            progress = [min(len(ids) / s.max_len, 1.0) for ids in completion_ids]
        else:
            progress = [len(completion_text(completion)) / s.max_len for completion in completions]
        rewards: list[float | None] = []
        for verdict, share in zip(self.grade(completions, columns[s.answer_column]), progress, strict=True):
            correct = VERDICT_REWARDS[verdict]
            # the reward at the schedule's end and at its start
            low, high = (
                (s.min_value_correct, s.max_value_correct) if correct else (s.max_value_wrong, s.min_value_wrong)
            )
            scaled = low + 0.5 * (high - low) * (1.0 + math.cos(share * math.pi))
            if verdict == "gold_unparsable" and not self._counts_tokens:
                rewards.append(1.0)
            else:
                rewards.append(None if correct is None else scaled)
        return rewards


class LengthReward(GradedReward[AccuracySettings]):
    """Kimi k1.5's length reward (arXiv:2501.12599): 0.5 for the shortest completion down to -0.5 for the longest.

    A wrong answer gets at most 0. Lengths are in characters and compared over all completions of the call, as in
    Open-R1; all rewards are 0.0 if they are equal. An unparsable gold answer counts as answered correctly.
    """

    per_group = False

    def __call__(self, completions: Sequence[Any], columns: Columns) -> list[float | None]:
        """Return one reward per completion; None if it was not graded."""
        lengths = [len(completion_text(completion)) for completion in completions]
        shortest, longest = min(lengths), max(lengths)
        if shortest == longest:
            self.last_counts = {}
            return [0.0] * len(lengths)
        rewards: list[float | None] = []
        for verdict, length in zip(self.grade(completions, columns[self.settings.answer_column]), lengths, strict=True):
            value = 0.5 - (length - shortest) / (longest - shortest)
            if verdict in ("correct", "gold_unparsable"):
                rewards.append(value)
            else:
                rewards.append(None if VERDICT_REWARDS[verdict] is None else min(0.0, value))
        return rewards
