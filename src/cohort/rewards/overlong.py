"""The `overlong` reward: a penalty that grows over the last tokens before the limit (DAPO, arXiv:2503.14476)."""

from collections.abc import Sequence


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
