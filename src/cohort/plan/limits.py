"""The most that some hardware can train: the largest model, the longest completion, the largest group."""

from collections.abc import Callable
from typing import Literal

from cohort.config import Config
from cohort.errors import UserError
from cohort.plan.advice import replan
from cohort.plan.hardware import Hardware
from cohort.plan.presets import PRESETS
from cohort.plan.shape import ModelShape, preset_shape

Limit = Literal["model", "length", "generations"]
_MOST = 1 << 22  # of tokens and of generations; what is limited by other things is not memory's to say


def largest(config: Config, shape: ModelShape, hardware: Hardware, limit: Limit) -> str | int | None:
    """The largest that fits with everything else as it is, and the micro-batch budget `auto`; None where nothing does.

    The length is at most what the model has positions for.

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
    key, least = {
        "length": ("max_completion_tokens", 1),
        "generations": ("num_generations", config.algorithm.min_generations),
    }[limit]
    most = _MOST
    if limit == "length" and shape.max_positions is not None:
        most = shape.max_positions - config.rollout.max_prompt_tokens
    return _largest_number(lambda n: fits({f"rollout.{key}": n}), least, most)


def _largest_number(fits: Callable[[int], bool], least: int, most: int) -> int | None:
    """The largest number up to `most` that fits, where every smaller one does."""
    if most < least or not fits(least):
        return None
    if fits(most):
        return most
    low, high = least, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
