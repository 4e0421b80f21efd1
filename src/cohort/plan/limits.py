"""Find the largest model, completion length or group size that fits (`cohort plan --max`)."""

from dataclasses import replace
from typing import Literal

from cohort.errors import UserError
from cohort.plan.advice import Changes, replan
from cohort.plan.memory import PHASES
from cohort.plan.predict import Plan, largest_number
from cohort.plan.shape import PRESETS, ModelShape, preset_shape

Limit = Literal["model", "length", "generations"]
_MAX_VALUE = 1 << 22  # upper bound of the search, in tokens or generations


def largest(plan: Plan, limit: Limit) -> str | int | None:
    """Largest value that fits with `train.micro_batch_tokens: auto` and all else unchanged; None if nothing fits.

    Lengths are bounded by the model's positions.

    Returns:
        Name of a preset, number of completion tokens, or number of generations.
    """

    def fits(plan: Plan, changes: Changes) -> bool:
        try:
            return _replan(plan, changes).fits
        except UserError:
            return False

    if limit == "model":
        return next((m.name for m in _presets_by_size() if fits(replace(plan, shape=m), {})), None)
    key, low, high = _range(plan, limit)
    return largest_number(lambda n: fits(plan, {key: n}), low, high)


def explain_no_limit(plan: Plan, limit: Limit) -> str:
    """Explain why not even the smallest value fits, after `largest` has returned None (same arguments)."""
    changes: dict[str, int] = {}
    if limit == "model":
        plan = replace(plan, shape=_presets_by_size()[-1])
        smallest = f"the smallest known model, {plan.shape.name},"
    else:
        key, low, high = _range(plan, limit)
        if high < low:
            return f"prompts of {plan.config.rollout.max_prompt_tokens} tokens leave no positions for completions"
        changes, smallest = {key: low}, f"{key}: {low}"
    try:
        other = _replan(plan, changes)
    except UserError as error:
        return str(error)
    if other.layout.problem is not None:
        return f"even with {smallest} {other.layout.problem}"
    return (
        f"even {smallest} needs {other.memory.peak_bytes / 1e9:.1f} GB per GPU in "
        f"{PHASES[other.memory.peak_phase]}, of {plan.hardware.gpu_memory_bytes / 1e9:.1f} GB available"
    )


def _replan(plan: Plan, changes: Changes) -> Plan:
    return replan(plan, {"train.micro_batch_tokens": "auto", **changes})


def _presets_by_size() -> list[ModelShape]:
    """All presets, largest first."""
    return sorted(map(preset_shape, PRESETS), key=lambda m: -m.num_parameters)


def _range(plan: Plan, limit: Literal["length", "generations"]) -> tuple[str, int, int]:
    """Key of a limit, its smallest possible value and the largest to try."""
    if limit == "generations":
        return "rollout.num_generations", plan.config.algorithm.min_generations, _MAX_VALUE
    positions = plan.shape.max_positions
    high = _MAX_VALUE if positions is None else positions - plan.config.rollout.max_prompt_tokens
    return plan.config.rollout.max_new_tokens_key, 1, high
