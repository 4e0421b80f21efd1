"""Suggest changes that make a run fit or run faster, and find the largest model or size that fits (`--max`).

Every suggestion is verified by planning the changed run. To add a way to save memory, insert a function into
`_CHANGES_COSTS` at the position that its cost deserves.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from cohort.config import AdafactorConfig, Adamw8bitConfig, ReferenceConfig
from cohort.config.model import AdapterConfig
from cohort.config.optim import BaseOptimConfig
from cohort.errors import UserError
from cohort.plan.memory import PHASES
from cohort.plan.predict import Plan, largest_number, predict_run
from cohort.plan.shape import PRESETS, ModelShape, preset_shape

Changes = Mapping[str, Any]  # by configuration key, or --gpus and --nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A change of configuration and its predicted effect."""

    changes: dict[str, Any]
    costs: str  # what it costs, in words
    saved_bytes: int  # off the peak
    saved_seconds: float | None  # per step; negative: slower; None on a CPU without --like
    fits: bool

    def as_arguments(self) -> str:
        """The change as command-line arguments."""
        return " ".join(_as_argument(key, value) for key, value in self.changes.items())


def _as_argument(key: str, value: Any) -> str:
    if isinstance(value, dict):
        inner = ", ".join(f"{name}: {inner}" for name, inner in value.items())
        return f"'{key}={{{inner}}}'"
    return f"{key}{' ' if key.startswith('--') else '='}{str(value).lower() if isinstance(value, bool) else value}"


_NODE_GPUS = 8  # largest proposal for one machine
_RANKS = (64, 16)  # proposed LoRA ranks


def _idle_gpus(plan: Plan) -> Iterator[Changes]:
    if plan.num_idle and plan.config.hardware.processes != "auto":
        yield {"hardware.processes": "auto"}


def _auto_budget(plan: Plan) -> Iterator[Changes]:
    if plan.config.train.micro_batch_tokens != "auto":
        yield {"train.micro_batch_tokens": "auto"}


def _fewer_sequences(plan: Plan) -> Iterator[Changes]:
    if plan.config.rollout.shares_weights:
        for number in _halvings(plan.config.rollout.max_num_seqs, minimum=8):
            yield {"rollout.max_num_seqs": number}


def _checkpointing(plan: Plan) -> Iterator[Changes]:
    if plan.config.model.gradient_checkpointing is False:
        yield {"model.gradient_checkpointing": "selective"}
    if plan.config.model.gradient_checkpointing is not True:
        yield {"model.gradient_checkpointing": True}


def _offload(plan: Plan) -> Iterator[Changes]:
    if not plan.config.model.activation_offload:
        yield {"model.activation_offload": True}


def _offloaded_reference(plan: Plan) -> Iterator[Changes]:
    if plan.workload.has_reference and plan.config.model.adapter is None:
        yield {"reference.device": "cpu"}


def _offloaded_optimizer(plan: Plan) -> Iterator[Changes]:
    if _can_offload(plan) and not getattr(plan.config.optim, "stochastic_rounding", False):
        yield {"optim.offload": True}


def _offloaded_parameters(plan: Plan) -> Iterator[Changes]:
    if _can_offload(plan) and plan.config.reference is None:
        yield {"model.parameter_offload": True}


def _can_offload(plan: Plan) -> bool:
    """Whether the optimizer or the parameters can be offloaded and are not yet."""
    model, optim = plan.config.model, plan.config.optim
    is_on_host = optim.offload or model.parameter_offload
    return plan.hardware.on_gpu and not is_on_host and optim.name != "muon" and model.adapter is None


def _gpus(plan: Plan) -> Iterator[Changes]:
    for number in (2, 4, _NODE_GPUS):
        if _may_add_gpus(plan) and number > plan.hardware.gpus_per_node:
            yield {"--gpus": number, **_on_all(plan)}


def _nodes(plan: Plan) -> Iterator[Changes]:
    more = {"--gpus": _NODE_GPUS} if plan.hardware.gpus_per_node < _NODE_GPUS else {}
    for factor in (2, 4, 8) if _may_add_gpus(plan) else ():
        yield {"--nodes": plan.hardware.nodes * factor, **more, **_on_all(plan)}


def _may_add_gpus(plan: Plan) -> bool:
    """Whether to propose more GPUs: not while some are idle."""
    return plan.hardware.on_gpu and not [*_idle_gpus(plan)]


def _on_all(plan: Plan) -> Changes:
    return {} if plan.config.hardware.processes == "auto" else {"hardware.processes": "auto"}


def _adamw_8bit(plan: Plan) -> Iterator[Changes]:
    if plan.config.optim.name == "adamw":
        yield {"optim.name": "adamw_8bit"}


def _adafactor(plan: Plan) -> Iterator[Changes]:
    """Propose Adafactor for a single process, if Adafactor has every `optim` key that is set."""
    optim = plan.config.optim
    has_keys = optim.model_fields_set <= AdafactorConfig.model_fields.keys()
    if optim.name in ("adamw", "adamw_8bit") and plan.layout.num_training == 1 and has_keys:
        yield {"optim.name": "adafactor"}


def _adapter(plan: Plan) -> Iterator[Changes]:
    if plan.config.model.adapter is None:
        for rank in _RANKS:
            yield {"model.adapter": {"rank": rank}}
        if plan.config.model.dtype == "float32":
            yield {"model.adapter": {"rank": _RANKS[-1]}, "model.dtype": "bfloat16"}


def _quantized_reference(plan: Plan) -> Iterator[Changes]:
    reference = plan.config.reference
    may_round = reference is None or (reference.quantization is None and not reference.refresh_every)
    if plan.workload.has_reference and plan.config.model.adapter is None and may_round:
        for kind in ("int8", "nf4"):
            yield {"reference.quantization": kind}


def _quantized(plan: Plan) -> Iterator[Changes]:
    """Propose quantization, if the sampler uses the training weights."""
    model = plan.config.model
    if model.quantization is not None or not plan.config.rollout.shares_weights or model.dtype == "float64":
        return
    if model.adapter is not None:
        if not model.adapter.dora:
            yield {"model.quantization": "int8"}
            yield {"model.quantization": "nf4"}
        return
    adapter = {"model.adapter": {"rank": _RANKS[-1]}, "model.quantization": "nf4"}
    yield adapter
    if model.dtype == "float32":
        yield {**adapter, "model.dtype": "bfloat16"}


def _narrower_adapter(plan: Plan) -> Iterator[Changes]:
    adapter = plan.config.model.adapter
    if adapter is not None and adapter.path is None:
        for rank in _halvings(adapter.rank, minimum=4):
            yield {"model.adapter.rank": rank}


def _dtype(plan: Plan) -> Iterator[Changes]:
    if plan.config.model.dtype == "float32":
        yield {"model.dtype": "bfloat16"}


def _shorter_completions(plan: Plan) -> Iterator[Changes]:
    rollout = plan.config.rollout
    for length in _halvings(rollout.max_new_tokens, minimum=64):
        yield {rollout.max_new_tokens_key: length}


def _smaller_groups(plan: Plan) -> Iterator[Changes]:
    for number in _halvings(plan.config.rollout.num_generations, minimum=max(2, plan.config.algorithm.min_generations)):
        yield {"rollout.num_generations": number}


_MEMORY = "memory; same gradient"
_GPUS = "GPUs; same gradient"
_LORA = (
    "the experiment: a low-rank update only; raise the learning rate about 10 times (a bfloat16 base is rounded, the "
    "adapter is not)"
)
_QLORA = (
    "the experiment: the adapter trains on quantized weights (QLoRA); slower, by a time that is not predicted; needs "
    "cohort-rl[quantization]"
)
_TURNS = "GPU memory, which servers and training then share in turn; same gradient"
_USES_ALL = "nothing: uses idle GPUs; same gradient"
_Change = Callable[[Plan], Iterable[Changes]]  # changes of one kind, smallest first
_SAME_GRADIENT: Mapping[_Change, str] = {  # may be combined with later kinds
    _idle_gpus: _USES_ALL,
    _auto_budget: "nothing; same gradient",
    _fewer_sequences: "time; same gradient",
    _checkpointing: "time; same gradient",
    _offload: "time, if copies take longer than the computation that hides them; same gradient",
    _offloaded_reference: "time: loads the reference from host memory once per step; same gradient",
}
_CHANGES_COSTS: Mapping[_Change, str] = {  # cheapest for the experiment first
    **_SAME_GRADIENT,
    _offloaded_optimizer: "time: each update copies gradients to host memory and weights back, and runs on the CPU, "
    "whose time is not predicted; same gradient, up to the rounding of bfloat16 weights",
    _offloaded_parameters: "time: each micro-batch copies the weights from host memory twice and gradients back, "
    "and updates run on the CPU, whose time is not predicted; same gradient, up to the rounding of bfloat16 weights",
    _gpus: _GPUS,
    _nodes: _GPUS,
    _adamw_8bit: "precision: 8-bit optimizer moments; needs the package torchao",
    _quantized_reference: "the experiment: KL to a quantized reference; slower, by a time that is not predicted; needs "
    "cohort-rl[quantization]",
    _dtype: "precision: needs a learning rate of 1e-5 or more",
    _adafactor: "the experiment: another optimizer, whose learning rate is relative to the weight",
    _narrower_adapter: "the experiment: an update of lower rank",
    _adapter: _LORA,
    _quantized: _QLORA,
    _shorter_completions: "the experiment: shorter completions",
    _smaller_groups: "the experiment: smaller groups",
}


def advise(plan: Plan) -> list[Advice]:
    """Suggest minimal changes that make a run fit or, if it fits, changes that make it faster.

    In the order of `docs/memory.md`. If no change of a kind suffices alone, it is combined with earlier kinds.
    """
    return _changes_that_speed_up(plan) if plan.fits else _changes_that_fit(plan)


def _changes_that_fit(plan: Plan) -> list[Advice]:
    found: dict[frozenset[str], Advice] = {}  # by changed keys: the first, which is the smallest change
    made: dict[str, Any] = {}  # changes of earlier kinds, none of them enough alone
    for kind, costs in _CHANGES_COSTS.items():
        for changes in kind(plan):
            alone = _evaluate(plan, changes, costs)
            together = _evaluate(plan, _drop_unneeded(plan, {**made, **changes}), costs)
            for advice in (alone, together):
                if advice is not None and advice.fits and changes.items() <= advice.changes.items():
                    found.setdefault(frozenset(advice.changes), advice)
                    break
            if kind in _SAME_GRADIENT:
                made |= changes
    return list(found.values())


def _drop_unneeded(plan: Plan, changes: dict[str, Any]) -> dict[str, Any]:
    """Drop the changes that the run fits without, costliest first."""
    for key in reversed(changes):
        fewer = {name: value for name, value in changes.items() if name != key}
        advice = _evaluate(plan, fewer, "")
        if advice is not None and advice.fits:
            changes = fewer
    return changes


def _changes_that_speed_up(plan: Plan) -> list[Advice]:
    config = plan.config
    options: list[tuple[Changes, str]] = [(changes, _USES_ALL) for changes in _idle_gpus(plan)]
    if config.model.gradient_checkpointing:
        kept = {"model.gradient_checkpointing": False}
        options.append((kept, _MEMORY))
        if config.train.micro_batch_tokens != "auto":  # in case the budget is too large without it
            options.append(({**kept, "train.micro_batch_tokens": "auto"}, _MEMORY))
    if config.rollout.uses_servers and not plan.layout.shared and config.hardware.rollout_gpus == "auto":
        options.append(({"hardware.rollout_gpus": "shared"}, _TURNS))
    options += [(changes, _GPUS) for changes in [*_gpus(plan)][:1] or [*_nodes(plan)][:1]]
    tried = (_evaluate(plan, changes, costs) for changes, costs in options)
    return [
        a for a in tried if a is not None and a.fits and (a.saved_seconds or 0) > 0.01 * plan.timing["step_s"].value
    ]


def _evaluate(plan: Plan, changes: Changes, costs: str) -> Advice | None:
    """Predict the effect of a change; None if it contradicts the configuration."""
    try:
        other = replan(plan, changes)
    except UserError:
        return None
    return Advice(
        changes=dict(changes),
        costs=costs,
        saved_bytes=plan.memory.peak_bytes - other.memory.peak_bytes,
        saved_seconds=plan.timing["step_s"].value - other.timing["step_s"].value if plan.timing else None,
        fits=other.fits,
    )


def replan(plan: Plan, changes: Changes) -> Plan:
    """Predict the run with some keys changed, or `--gpus` and `--nodes`.

    Raises:
        UserError: as `predict_run`.
    """
    config, hardware = plan.config, plan.hardware
    for key, value in changes.items():
        if key in ("--gpus", "--nodes"):
            hardware = replace(hardware, **{"gpus_per_node" if key == "--gpus" else "nodes": value})
        else:
            config = _changed(config, key.split("."), value)
    return predict_run(config, plan.shape, hardware, num_prompts=plan.num_prompts)


def _changed(section: Any, path: list[str], value: Any) -> Any:
    """Copy a section with one key, possibly nested, changed."""
    name, *rest = path
    if rest:
        value = _changed(getattr(section, name) or ReferenceConfig(), rest, value)  # no other section can be missing
    elif name == "adapter":
        value = AdapterConfig(**value)
    elif name == "name" and isinstance(section, BaseOptimConfig):
        kinds = {"adamw_8bit": Adamw8bitConfig, "adafactor": AdafactorConfig}
        return kinds[value](**section.model_dump(include=section.model_fields_set - {name}))
    return section.model_copy(update={name: value})


def _halvings(number: int, *, minimum: int) -> Iterator[int]:
    while number // 2 >= minimum:
        number //= 2
        yield number


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
