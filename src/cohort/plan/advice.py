"""The nearest changes that make a run fit, or run faster, ranked by what they cost the experiment.

Every change is planned with the model that planned the run; none is named that does not do what is said of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from cohort.config import Config
from cohort.errors import UserError
from cohort.plan.hardware import Hardware
from cohort.plan.predict import Plan, predict_run
from cohort.plan.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A change, by key of the configuration, and what it is predicted to bring."""

    changes: dict[str, Any]
    costs: str  # what it costs the experiment, or the run
    saved_bytes: int  # of the peak
    saved_seconds: float  # of a step; negative: it takes longer
    fits: bool

    def told(self) -> str:
        """The change as it is written on the command line."""
        return " ".join(
            f"{key}{' ' if key.startswith('--') else '='}{str(value).lower() if isinstance(value, bool) else value}"
            for key, value in self.changes.items()
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "changes": self.changes,
            "costs": self.costs,
            "saved_bytes": self.saved_bytes,
            "saved_seconds": self.saved_seconds,
            "fits": self.fits,
        }


_CHANGES_NOTHING = "nothing: the gradient is the same"
_MEMORY = "memory; the gradient is the same"
_TIME = "time; the gradient is the same"
_TRANSFERS = "time, which is not predicted; the gradient is the same"
_GPUS = "GPUs; the gradient is the same"
_ROUNDS = "precision: needs a learning rate of 1e-5 or more"
_SHORTER = "the experiment: completions are cut off earlier"
_SMALLER = "the experiment: groups are smaller"


def advise(config: Config, plan: Plan) -> list[Advice]:
    """Changes of a run that does not fit: those that make it fit, each as small as it can be. Of one that does: faster.

    The order is that of `docs/memory.md`. Where no single change of a kind suffices, the kinds before it are made too.
    """
    return _faster(config, plan) if plan.fits else _fitting(config, plan)


def _fitting(config: Config, plan: Plan) -> list[Advice]:
    found: list[Advice] = []
    made: dict[str, Any] = {}  # changes of earlier kinds, none of which was enough
    for changes, costs in _in_order(config, plan):
        alone = _try(config, plan, changes, costs)
        together = _try(config, plan, _needed(config, plan, {**made, **changes}), costs)
        for advice in (alone, together):
            if advice is not None and advice.fits and changes.items() <= advice.changes.items():
                found.append(advice)
                break
        if costs in (_CHANGES_NOTHING, _TIME, _TRANSFERS):  # later kinds may build on these
            made |= changes
    return _smallest_of_each_kind(found)


def _needed(config: Config, plan: Plan, changes: dict[str, Any]) -> dict[str, Any]:
    """Without the changes that make no difference to whether it fits, the costliest of which are left out first."""
    for key in reversed(changes):
        fewer = {name: value for name, value in changes.items() if name != key}
        advice = _try(config, plan, fewer, "")
        if advice is not None and advice.fits:
            changes = fewer
    return changes


def _smallest_of_each_kind(found: list[Advice]) -> list[Advice]:
    """Of the changes of the same keys, the first one: they are tried from the smallest on."""
    seen: dict[frozenset[str], Advice] = {}
    for advice in found:
        seen.setdefault(frozenset(advice.changes), advice)
    return list(seen.values())


def _in_order(config: Config, plan: Plan) -> Iterator[tuple[dict[str, Any], str]]:
    if config.train.micro_batch_tokens != "auto":
        yield {"train.micro_batch_tokens": "auto"}, _CHANGES_NOTHING
    if config.rollout.engine == "local" and config.rollout.max_num_seqs > 8:
        for number in _halves(config.rollout.max_num_seqs, least=8):
            yield {"rollout.max_num_seqs": number}, _TIME
    if config.model.gradient_checkpointing is False:
        yield {"model.gradient_checkpointing": "selective"}, _TIME
    if config.model.gradient_checkpointing is not True:
        yield {"model.gradient_checkpointing": True}, _TIME
    if not config.model.activation_offload:
        yield {"model.activation_offload": True}, _TRANSFERS
    for factor in (2, 4, 8):
        yield {"--nodes": plan.hardware.nodes * factor}, _GPUS
    if config.model.dtype == "float32":
        yield {"model.dtype": "bfloat16"}, _ROUNDS
    for length in _halves(config.rollout.max_completion_tokens, least=64):
        yield {"rollout.max_completion_tokens": length}, _SHORTER
    for number in _halves(config.rollout.num_generations, least=2):
        yield {"rollout.num_generations": number}, _SMALLER


def _faster(config: Config, plan: Plan) -> list[Advice]:
    options: list[tuple[dict[str, Any], str]] = []
    if config.model.gradient_checkpointing:
        kept = {"model.gradient_checkpointing": False}
        options.append((kept, _MEMORY))
        if config.train.micro_batch_tokens != "auto":  # where the budget is too large without
            options.append(({**kept, "train.micro_batch_tokens": "auto"}, _MEMORY))
    options.append(({"--nodes": plan.hardware.nodes * 2}, _GPUS))
    tried = (_try(config, plan, changes, costs) for changes, costs in options)
    return [a for a in tried if a is not None and a.fits and a.saved_seconds > 0.01 * plan.timing["step_s"].value]


def _try(config: Config, plan: Plan, changes: dict[str, Any], costs: str) -> Advice | None:
    """What a change brings; None where it contradicts the rest."""
    try:
        other = replan(config, plan.shape, plan.hardware, changes, num_prompts=plan.num_prompts)
    except UserError:
        return None
    return Advice(
        changes=changes,
        costs=costs,
        saved_bytes=plan.memory.peak_bytes - other.memory.peak_bytes,
        saved_seconds=plan.timing["step_s"].value - other.timing["step_s"].value,
        fits=other.fits,
    )


def replan(
    config: Config, shape: ModelShape, hardware: Hardware, changes: dict[str, Any], *, num_prompts: int | None = None
) -> Plan:
    """The plan with some keys changed; `--nodes` is of the hardware.

    Raises:
        UserError: as `predict_run`.
    """
    for key, value in changes.items():
        if key == "--nodes":
            hardware = replace(hardware, nodes=value)
            continue
        section, name = key.split(".")
        part = getattr(config, section).model_copy(update={name: value})
        config = config.model_copy(update={section: part})
    return predict_run(config, shape, hardware, num_prompts=num_prompts)


def _halves(number: int, *, least: int) -> Iterator[int]:
    while number // 2 >= least:
        number //= 2
        yield number
