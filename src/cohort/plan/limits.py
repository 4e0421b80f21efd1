"""The most that some hardware can train: the largest model, the longest completion, the largest group."""

from collections.abc import Callable
from typing import Literal

from cohort.config import Config
from cohort.errors import UserError
from cohort.plan.advice import replan
from cohort.plan.hardware import Hardware
from cohort.plan.shape import PRESETS, ModelShape, preset_shape

Limit = Literal["model", "length", "generations"]
_MOST = 1 << 22  # of tokens and of generations; what is limited by other things is not memory's to say


def largest(config: Config, shape: ModelShape, hardware: Hardware, limit: Limit) -> str | int | None:
    """The largest that fits with everything else as it is, and the micro-batch budget `auto`; None where nothing does.

    Returns:
        the name of a preset, a number of completion tokens, or a number of generations.
    """

    def fits(changes: dict[str, int], of: ModelShape = shape) -> bool:
        try:
            return replan(config, of, hardware, {"train.micro_batch_tokens": "auto", **changes}).fits
        except UserError:
            return False

    if limit == "model":
        models = sorted(map(preset_shape, PRESETS), key=lambda m: -m.num_parameters)
        return next((m.name for m in models if fits({}, m)), None)
    key, least = {"length": ("max_completion_tokens", 1), "generations": ("num_generations", 2)}[limit]
    return _largest_number(lambda n: fits({f"rollout.{key}": n}), least)


def _largest_number(fits: Callable[[int], bool], least: int) -> int | None:
    """The largest number that fits, where every smaller one does."""
    if not fits(least):
        return None
    low, high = least, least * 2
    while high < _MOST and fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
