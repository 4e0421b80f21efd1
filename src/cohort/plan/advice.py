"""Suggest changes that make a run fit or run faster, and find the largest model or size that fits (`--max`).

Every suggestion is verified by planning the changed run. To add a way to save memory, yield it with its cost
from one of the functions below, at the position that its cost deserves.
"""

from collections.abc import Iterator, Mapping
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
_MEMORY = "memory; same gradient"
_GPUS = "GPUs; same gradient"
_ON_CPU = "on the CPU, whose time is not predicted; same gradient, up to the rounding of bfloat16 weights"
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
_Kind = tuple[str, list[Changes]]  # what changes of a kind cost, and these, smallest first


def _with_the_same_gradient(plan: Plan) -> Iterator[_Kind]:
    """Yield the kinds of changes that cost nothing or time. They may be combined with later kinds."""
    config, model = plan.config, plan.config.model
    yield _USES_ALL, _use_idle_gpus(plan)
    if config.train.micro_batch_tokens != "auto":
        yield "nothing; same gradient", [{"train.micro_batch_tokens": "auto"}]
    if config.rollout.shares_weights:
        fewer = _halvings(config.rollout.max_num_seqs, minimum=8)
        yield "time; same gradient", [{"rollout.max_num_seqs": number} for number in fewer]
    kinds = {False: ("selective", True), "selective": (True,), True: ()}[model.gradient_checkpointing]
    yield "time; same gradient", [{"model.gradient_checkpointing": kind} for kind in kinds]
    if not model.activation_offload:
        costs = "time, if copies take longer than the computation that hides them; same gradient"
        yield costs, [{"model.activation_offload": True}]
    if plan.workload.has_reference and model.adapter is None:
        costs = "time: loads the reference from host memory once per step; same gradient"
        yield costs, [{"reference.device": "cpu"}]


def _with_more_hardware(plan: Plan) -> Iterator[_Kind]:
    """Yield the kinds of changes that use host memory or more GPUs."""
    model, optim, hardware = plan.config.model, plan.config.optim, plan.hardware
    is_on_host = optim.offload or model.parameter_offload
    if hardware.on_gpu and not is_on_host and optim.name != "muon" and model.adapter is None:
        if not getattr(optim, "stochastic_rounding", False):
            costs = "time: each update copies gradients to host memory and weights back, and runs"
            yield f"{costs} {_ON_CPU}", [{"optim.offload": True}]
        if plan.config.reference is None:
            costs = (
                "time: each micro-batch copies the weights from host memory twice and gradients back, and updates run"
            )
            yield f"{costs} {_ON_CPU}", [{"model.parameter_offload": True}]
    yield _GPUS, _more_gpus(plan)
    yield _GPUS, _more_nodes(plan)


def _with_another_result(plan: Plan) -> Iterator[_Kind]:
    """Yield the kinds of changes of precision or of the experiment, cheapest first."""
    config, model = plan.config, plan.config.model
    if config.optim.name == "adamw":
        yield "precision: 8-bit optimizer moments; needs the package torchao", [{"optim.name": "adamw_8bit"}]
    reference, adapter = config.reference, model.adapter
    may_round = reference is None or (reference.quantization is None and not reference.refresh_every)
    if plan.workload.has_reference and adapter is None and may_round:
        costs = (
            "the experiment: KL to a quantized reference; slower, by a time that is not predicted; needs "
            "cohort-rl[quantization]"
        )
        yield costs, [{"reference.quantization": kind} for kind in ("int8", "nf4")]
    if model.dtype == "float32":
        yield "precision: needs a learning rate of 1e-5 or more", [{"model.dtype": "bfloat16"}]
    has_keys = config.optim.model_fields_set <= AdafactorConfig.model_fields.keys()
    if config.optim.name in ("adamw", "adamw_8bit") and plan.layout.num_training == 1 and has_keys:
        costs = "the experiment: another optimizer, whose learning rate is relative to the weight"
        yield costs, [{"optim.name": "adafactor"}]
    yield from _of_adapters(plan)
    rollout = config.rollout
    lengths = _halvings(rollout.max_new_tokens, minimum=64)
    yield "the experiment: shorter completions", [{rollout.max_new_tokens_key: length} for length in lengths]
    numbers = _halvings(rollout.num_generations, minimum=max(2, config.algorithm.min_generations))
    yield "the experiment: smaller groups", [{"rollout.num_generations": number} for number in numbers]


def _of_adapters(plan: Plan) -> Iterator[_Kind]:
    """Yield the kinds of changes that narrow, add or quantize an adapter's base; quantized ones sample themselves."""
    model, adapter = plan.config.model, plan.config.model.adapter
    can_quantize = model.quantization is None and plan.config.rollout.shares_weights and model.dtype != "float64"
    if adapter is not None:
        if adapter.path is None:
            ranks = _halvings(adapter.rank, minimum=4)
            yield "the experiment: an update of lower rank", [{"model.adapter.rank": rank} for rank in ranks]
        if can_quantize and not adapter.dora:
            yield _QLORA, [{"model.quantization": kind} for kind in ("int8", "nf4")]
        return
    narrow = {"model.adapter": {"rank": _RANKS[-1]}}
    halved = [{"model.dtype": "bfloat16"}] if model.dtype == "float32" else []
    yield _LORA, [*({"model.adapter": {"rank": rank}} for rank in _RANKS), *({**narrow, **more} for more in halved)]
    if can_quantize:
        quantized = {**narrow, "model.quantization": "nf4"}
        yield _QLORA, [quantized, *({**quantized, **more} for more in halved)]


def _use_idle_gpus(plan: Plan) -> list[Changes]:
    return [{"hardware.processes": "auto"}] if plan.num_idle and plan.config.hardware.processes != "auto" else []


def _more_gpus(plan: Plan) -> list[Changes]:
    numbers = (2, 4, _NODE_GPUS) if _may_add_gpus(plan) else ()
    return [{"--gpus": number, **_on_all(plan)} for number in numbers if number > plan.hardware.gpus_per_node]


def _more_nodes(plan: Plan) -> list[Changes]:
    more = {"--gpus": _NODE_GPUS} if plan.hardware.gpus_per_node < _NODE_GPUS else {}
    factors = (2, 4, 8) if _may_add_gpus(plan) else ()
    return [{"--nodes": plan.hardware.nodes * factor, **more, **_on_all(plan)} for factor in factors]


def _may_add_gpus(plan: Plan) -> bool:
    """Whether to propose more GPUs: not while some are idle."""
    return plan.hardware.on_gpu and not _use_idle_gpus(plan)


def _on_all(plan: Plan) -> Changes:
    return {} if plan.config.hardware.processes == "auto" else {"hardware.processes": "auto"}


def advise(plan: Plan) -> list[Advice]:
    """Suggest minimal changes that make a run fit or, if it fits, changes that make it faster.

    In the order of `docs/memory.md`. If no change of a kind suffices alone, it is combined with earlier kinds.
    """
    return _changes_that_speed_up(plan) if plan.fits else _changes_that_fit(plan)


def _changes_that_fit(plan: Plan) -> list[Advice]:
    found: dict[frozenset[str], Advice] = {}  # by changed keys: the first, which is the smallest change
    made: dict[str, Any] = {}  # changes of earlier kinds with the same gradient, none of them enough alone
    same = [*_with_the_same_gradient(plan)]
    for number, (costs, kind) in enumerate([*same, *_with_more_hardware(plan), *_with_another_result(plan)]):
        for changes in kind:
            alone = _evaluate(plan, changes, costs)
            together = _evaluate(plan, _drop_unneeded(plan, {**made, **changes}), costs)
            for advice in (alone, together):
                if advice is not None and advice.fits and changes.items() <= advice.changes.items():
                    found.setdefault(frozenset(advice.changes), advice)
                    break
            if number < len(same):
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
    options: list[tuple[Changes, str]] = [(changes, _USES_ALL) for changes in _use_idle_gpus(plan)]
    if config.model.gradient_checkpointing:
        kept = {"model.gradient_checkpointing": False}
        options.append((kept, _MEMORY))
        if config.train.micro_batch_tokens != "auto":  # in case the budget is too large without it
            options.append(({**kept, "train.micro_batch_tokens": "auto"}, _MEMORY))
    if config.rollout.uses_servers and not plan.layout.shared and config.hardware.rollout_gpus == "auto":
        options.append(({"hardware.rollout_gpus": "shared"}, _TURNS))
    options += [(changes, _GPUS) for changes in _more_gpus(plan)[:1] or _more_nodes(plan)[:1]]
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
