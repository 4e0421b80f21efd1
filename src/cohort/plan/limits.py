"""Find the largest model, completion length or group size that fits (`cohort plan --max`)."""

from typing import Literal

from cohort.config import Config
from cohort.errors import UserError
from cohort.plan.advice import Changes, replan
from cohort.plan.hardware import Hardware
from cohort.plan.memory import PHASES
from cohort.plan.predict import largest_number
from cohort.plan.presets import PRESETS
from cohort.plan.shape import ModelShape, preset_shape

Limit = Literal["model", "length", "generations"]
_MOST = 1 << 22  # upper bound of the search, in tokens or generations
_FREE: Changes = {"train.micro_batch_tokens": "auto"}


def largest(config: Config, shape: ModelShape, hardware: Hardware, limit: Limit) -> str | int | None:
    """Largest value that fits with `train.micro_batch_tokens: auto` and all else unchanged; None if nothing fits.

    Lengths are bounded by the model's positions.

    Returns:
        Name of a preset, number of completion tokens, or number of generations.
    """

    def fits(changes: Changes, of: ModelShape = shape) -> bool:
        try:
            return replan(config, of, hardware, {**_FREE, **changes}).fits
        except UserError:
            return False

    if limit == "model":
        return next((m.name for m in _presets_by_size() if fits({}, m)), None)
    key, least, most = _range(config, shape, limit)
    return largest_number(lambda n: fits({key: n}), least, most)


def explain_no_limit(config: Config, shape: ModelShape, hardware: Hardware, limit: Limit) -> str:
    """Explain why not even the smallest value fits, after `largest` has returned None (same arguments)."""
    changes: dict[str, int] = {}
    if limit == "model":
        shape = _presets_by_size()[-1]
        least = f"the smallest known model, {shape.name},"
    else:
        key, number, most = _range(config, shape, limit)
        if most < number:
            return f"prompts of {config.rollout.max_prompt_tokens} tokens leave no positions for completions"
        changes, least = {key: number}, f"{key}: {number}"
    try:
        plan = replan(config, shape, hardware, {**_FREE, **changes})
    except UserError as error:
        return str(error)
    if plan.layout.problem is not None:
        return f"even with {least} {plan.layout.problem}"
    return (
        f"even {least} needs {plan.memory.peak_bytes / 1e9:.1f} GB per GPU in {PHASES[plan.memory.peak_phase]}, "
        f"of {hardware.gpu_memory_bytes / 1e9:.1f} GB available"
    )


def _presets_by_size() -> list[ModelShape]:
    """All presets, largest first."""
    return sorted(map(preset_shape, PRESETS), key=lambda m: -m.num_parameters)


def _range(config: Config, shape: ModelShape, limit: Literal["length", "generations"]) -> tuple[str, int, int]:
    """Key of a limit, its smallest possible value and the largest to try."""
    if limit == "generations":
        return "rollout.num_generations", config.algorithm.min_generations, _MOST
    positions = shape.max_positions
    most = _MOST if positions is None else positions - config.rollout.max_prompt_tokens
    return "rollout.max_completion_tokens", 1, most
