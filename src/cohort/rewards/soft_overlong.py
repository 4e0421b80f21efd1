"""The rewards `trl.soft_overlong` and `open_r1.soft_overlong`: DAPO's soft overlong punishment with TRL's arguments."""

from collections.abc import Sequence

from cohort.rewards.arguments import check_number


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
