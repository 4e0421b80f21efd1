"""The most that some hardware can train: the largest model, the longest completion, the largest group."""

from collections.abc import Callable
from typing import Literal

from cohort.config import Config
from cohort.errors import UserError
from cohort.plan.advice import Changes, replan
from cohort.plan.hardware import Hardware
from cohort.plan.memory import PHASES
from cohort.plan.presets import PRESETS
from cohort.plan.shape import ModelShape, preset_shape

Limit = Literal["model", "length", "generations"]
_MOST = 1 << 22  # of tokens and of generations; what is limited by other things is not memory's to say
_FREE: Changes = {"train.micro_batch_tokens": "auto"}


def largest(config: Config, shape: ModelShape, hardware: Hardware, limit: Limit) -> str | int | None:
    """The largest that fits with everything else as it is, and the micro-batch budget `auto`; None where nothing does.

    The length is at most what the model has positions for.

    Returns:
        the name of a preset, a number of completion tokens, or a number of generations.
    """

    def fits(changes: Changes, of: ModelShape = shape) -> bool:
        try:
            return replan(config, of, hardware, {**_FREE, **changes}).fits
        except UserError:
            return False

    if limit == "model":
        return next((m.name for m in _models() if fits({}, m)), None)
    key, least, most = _range(config, shape, limit)
    return _largest_number(lambda n: fits({key: n}), least, most)


def why_none_fits(config: Config, shape: ModelShape, hardware: Hardware, limit: Limit) -> str:
    """Of a limit for which `largest` has found nothing, why not even the least fits.

    Args:
        config: as for `largest`.
        shape: as for `largest`.
        hardware: as for `largest`.
        limit: as for `largest`.
    """
    changes: dict[str, int] = {}
    if limit == "model":
        shape = _models()[-1]
        least = f"the smallest model known here, {shape.name},"
    else:
        key, number, most = _range(config, shape, limit)
        if most < number:
            return f"prompts of {config.rollout.max_prompt_tokens} tokens leave none of the model's positions"
        changes, least = {key: number}, f"{key}: {number}"
    try:
        plan = replan(config, shape, hardware, {**_FREE, **changes})
    except UserError as error:
        return str(error)
    if plan.layout.problem is not None:
        return f"even with {least} {plan.layout.problem}"
    return (
        f"even {least} needs {plan.memory.peak_bytes / 1e9:.1f} GB of each GPU in {PHASES[plan.memory.peak_phase]}, "
        f"and they have {hardware.gpu_memory_bytes / 1e9:.1f} GB"
    )


def _models() -> list[ModelShape]:
    """The largest first."""
    return sorted(map(preset_shape, PRESETS), key=lambda m: -m.num_parameters)


def _range(config: Config, shape: ModelShape, limit: Literal["length", "generations"]) -> tuple[str, int, int]:
    """A limit's key, the least that it can be and the most that is tried."""
    if limit == "generations":
        return "rollout.num_generations", config.algorithm.min_generations, _MOST
    positions = shape.max_positions
    most = _MOST if positions is None else positions - config.rollout.max_prompt_tokens
    return "rollout.max_completion_tokens", 1, most


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
