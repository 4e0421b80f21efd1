"""Rewards that depend on length: overlong penalties, and correct answers scaled by length."""

import math
from collections.abc import Sequence
from typing import Any

from cohort.rewards.completion_text import completion_text
from cohort.rewards.function import check_number, column_values
from cohort.rewards.math import VERDICT_REWARDS, AnswerGrader, GradedReward


class OverlongReward:
    """0.0 up to max_completion_tokens - buffer_tokens, then linearly down to -penalty at max_completion_tokens.

    DAPO's soft overlong punishment (eq. 13). The limit is `rollout.max_completion_tokens`, also in evaluations. With
    several turns it is that of all sampled tokens: max_turns x max_completion_tokens, or max_trajectory_tokens if that
    is lower. The penalty is added to the other rewards, times its weight, and is shaping only: a completion without
    another score stays unscored.

    Arguments (in `rewards[i].args`):
        buffer_tokens: tokens before the limit over which the penalty grows; at most the limit.
        penalty: penalty at the limit, above 0. Default 1.0.
    """

    __name__ = "overlong"
    shapes = True

    def __init__(self, max_completion_tokens: int):
        self._limit = max_completion_tokens

    def required_columns(self, *, buffer_tokens: int, penalty: float = 1.0) -> Sequence[str]:
        """See `ChecksArguments`."""
        if type(buffer_tokens) is not int or not 1 <= buffer_tokens <= self._limit:
            raise ValueError(
                f"buffer_tokens: {buffer_tokens!r} must be a whole number from 1 to {self._limit}, the most tokens "
                f"that can be sampled (rollout.max_completion_tokens)"
            )
        if not isinstance(penalty, int | float) or not penalty > 0:
            raise ValueError(f"penalty: {penalty!r} must be a number above 0")
        return ()

    def __call__(
        self, completion_ids: Sequence[Sequence[int]], *, buffer_tokens: int, penalty: float = 1.0
    ) -> list[float]:
        """Return one reward per completion."""
        free = self._limit - buffer_tokens
        return [-penalty * min(max(len(ids) - free, 0) / buffer_tokens, 1.0) for ids in completion_ids]


class SoftOverlongReward:
    """0.0 up to max_completion_len - soft_punish_cache tokens, then linearly down to -1.0 at max_completion_len.

    Shaping only: a completion that no other reward scores stays unscored.

    Arguments (in `rewards[i].args`):
        max_completion_len: tokens at which the penalty is -1.0; longer completions get no more.
        soft_punish_cache: tokens before over which the penalty grows.
    """

    shapes = True

    def required_columns(self, *, max_completion_len: int, soft_punish_cache: int) -> Sequence[str]:
        """See `ChecksArguments`."""
        check_number("max_completion_len", max_completion_len, minimum=1, whole=True)
        check_number("soft_punish_cache", soft_punish_cache, minimum=0, maximum=max_completion_len, whole=True)
        return ()

    def __call__(
        self, completion_ids: Sequence[Sequence[int]], *, max_completion_len: int, soft_punish_cache: int
    ) -> list[float]:
        """Return one reward per completion."""
        free = max_completion_len - soft_punish_cache

        def penalty(length: int) -> float:
            if length <= free:
                return 0.0
            return -1.0 if length > max_completion_len else (free - length) / soft_punish_cache

        return [penalty(len(ids)) for ids in completion_ids]


class CosineReward(GradedReward):
    """A cosine schedule over the length: short is best for correct answers and worst for wrong ones.

    Appendix C.1 of "Demystifying Long Chain-of-Thought Reasoning in LLMs" (arXiv:2502.03373). TRL counts tokens, and
    completions longer than `max_len` count as `max_len`. Open-R1 counts characters, and lets the cosine rise again.

    Arguments (in `rewards[i].args`):
        max_len: length at which the schedule ends. Default for Open-R1: 1000.
        min_value_wrong: reward of the shortest wrong answer. Default -1.0.
        max_value_wrong: reward of the longest wrong answer. Default -0.5.
        min_value_correct: reward of the longest correct answer. Default 0.5.
        max_value_correct: reward of the shortest correct answer. Default 1.0.
        answer_column: dataset column with the gold answer. Default "solution".
        deadline_s: seconds per answer. Default 10.
    """

    def __init__(self, grader: AnswerGrader, *, counts_tokens: bool, default_max_len: int | None = None) -> None:
        """Create the reward.

        Args:
            grader: grades the answers.
            counts_tokens: TRL's form; else Open-R1's, in which an unparsable gold answer scores 1.0.
            default_max_len: default of `max_len`; None: it must be given.
        """
        super().__init__(grader)
        self._counts_tokens = counts_tokens
        self._default_max_len = default_max_len

    def required_columns(
        self,
        *,
        max_len: int | None = None,
        min_value_wrong: float = -1.0,
        max_value_wrong: float = -0.5,
        min_value_correct: float = 0.5,
        max_value_correct: float = 1.0,
        answer_column: str = "solution",
        deadline_s: float = 10.0,
    ) -> Sequence[str]:
        """See `ChecksArguments`."""
        if max_len is not None or self._default_max_len is None:
            check_number("max_len", max_len, minimum=1, whole=True)
        for name in ("min_value_wrong", "max_value_wrong", "min_value_correct", "max_value_correct"):
            check_number(name, locals()[name])
        check_number("deadline_s", deadline_s, above=0)
        return (answer_column,)

    def __call__(
        self,
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        *,
        max_len: int | None = None,
        min_value_wrong: float = -1.0,
        max_value_wrong: float = -0.5,
        min_value_correct: float = 0.5,
        max_value_correct: float = 1.0,
        answer_column: str = "solution",
        deadline_s: float = 10.0,
        **columns: Sequence[Any],
    ) -> list[float | None]:
        """Return one reward per completion; None if it was not graded."""
        longest = max_len or self._default_max_len
        assert longest is not None, "required_columns refuses it"
        if self._counts_tokens:
            progress = [min(len(ids) / longest, 1.0) for ids in completion_ids]
        else:
            progress = [len(completion_text(completion)) / longest for completion in completions]
        rewards: list[float | None] = []
        verdicts = self.grade(completions, column_values(columns, answer_column), deadline_s=deadline_s)
        for verdict, share in zip(verdicts, progress, strict=True):
            correct = VERDICT_REWARDS[verdict]
            # the reward at the schedule's end and at its start
            low, high = (min_value_correct, max_value_correct) if correct else (max_value_wrong, min_value_wrong)
            scaled = low + 0.5 * (high - low) * (1.0 + math.cos(share * math.pi))
            if verdict == "gold_unparsable" and not self._counts_tokens:
                rewards.append(1.0)
            else:
                rewards.append(None if correct is None else scaled)
        return rewards


class LengthReward(GradedReward):
    """Kimi k1.5's length reward (arXiv:2501.12599): 0.5 for the shortest completion down to -0.5 for the longest.

    A wrong answer gets at most 0. Lengths are in characters and compared over all completions of the call, as in
    Open-R1; all rewards are 0.0 if they are equal. An unparsable gold answer counts as answered correctly.

    Arguments (in `rewards[i].args`):
        answer_column: dataset column with the gold answer. Default "solution".
        deadline_s: seconds per answer. Default 10.
    """

    def required_columns(self, *, answer_column: str = "solution", deadline_s: float = 10.0) -> Sequence[str]:
        """See `ChecksArguments`."""
        check_number("deadline_s", deadline_s, above=0)
        return (answer_column,)

    def __call__(
        self,
        completions: Sequence[Any],
        *,
        answer_column: str = "solution",
        deadline_s: float = 10.0,
        **columns: Sequence[Any],
    ) -> list[float | None]:
        """Return one reward per completion; None if it was not graded."""
        lengths = [len(completion_text(completion)) for completion in completions]
        shortest, longest = min(lengths), max(lengths)
        if shortest == longest:
            self.grader.last_counts = {}
            return [0.0] * len(lengths)
        rewards: list[float | None] = []
        verdicts = self.grade(completions, column_values(columns, answer_column), deadline_s=deadline_s)
        for verdict, length in zip(verdicts, lengths, strict=True):
            value = 0.5 - (length - shortest) / (longest - shortest)
            if verdict in ("correct", "gold_unparsable"):
                rewards.append(value)
            else:
                rewards.append(None if VERDICT_REWARDS[verdict] is None else min(0.0, value))
        return rewards
