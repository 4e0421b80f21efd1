"""Suggest changes that make a run fit or run faster, cheapest for the experiment first.

Every suggestion is verified by planning the changed run. To add a way to save memory, insert a function into
`_CHANGES_COSTS` at the position that its cost deserves.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cohort.config import AdafactorConfig, Adamw8bitConfig, Config, ReferenceConfig
from cohort.config.adapter import AdapterConfig
from cohort.config.optim import BaseOptimConfig
from cohort.errors import UserError
from cohort.plan.hardware import Hardware
from cohort.plan.predict import Plan, predict_run
from cohort.plan.shape import ModelShape

Changes = Mapping[str, Any]  # by configuration key, or --gpus and --nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A change of configuration and its predicted effect."""

    changes: dict[str, Any]
    costs: str  # what it costs, in words
    saved_bytes: int  # off the peak
    saved_seconds: float  # per step; negative: slower
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


def _idle_gpus(config: Config, plan: Plan) -> Iterator[Changes]:
    if plan.num_idle and config.hardware.processes != "auto":
        yield {"hardware.processes": "auto"}


def _auto_budget(config: Config, plan: Plan) -> Iterator[Changes]:
    if config.train.micro_batch_tokens != "auto":
        yield {"train.micro_batch_tokens": "auto"}


def _fewer_sequences(config: Config, plan: Plan) -> Iterator[Changes]:
    if config.rollout.shares_weights:
        for number in _halvings(config.rollout.max_num_seqs, least=8):
            yield {"rollout.max_num_seqs": number}


def _checkpointing(config: Config, plan: Plan) -> Iterator[Changes]:
    if config.model.gradient_checkpointing is False:
        yield {"model.gradient_checkpointing": "selective"}
    if config.model.gradient_checkpointing is not True:
        yield {"model.gradient_checkpointing": True}


def _offload(config: Config, plan: Plan) -> Iterator[Changes]:
    if not config.model.activation_offload:
        yield {"model.activation_offload": True}


def _offloaded_reference(config: Config, plan: Plan) -> Iterator[Changes]:
    if plan.workload.has_reference and config.model.adapter is None:
        yield {"reference.device": "cpu"}


def _offloaded_optimizer(config: Config, plan: Plan) -> Iterator[Changes]:
    model, optim = config.model, config.optim
    is_on_host = optim.offload or model.parameter_offload
    cannot = optim.name == "muon" or model.adapter is not None or getattr(optim, "stochastic_rounding", False)
    if plan.hardware.on_gpu and not is_on_host and not cannot:
        yield {"optim.offload": True}


def _offloaded_parameters(config: Config, plan: Plan) -> Iterator[Changes]:
    is_on_host = config.optim.offload or config.model.parameter_offload
    cannot = config.optim.name == "muon" or config.model.adapter is not None or config.reference is not None
    if plan.hardware.on_gpu and not is_on_host and not cannot:
        yield {"model.parameter_offload": True}


def _gpus(config: Config, plan: Plan) -> Iterator[Changes]:
    for number in (2, 4, _NODE_GPUS):
        if _may_add_gpus(config, plan) and number > plan.hardware.gpus_per_node:
            yield {"--gpus": number, **_on_all(config)}


def _nodes(config: Config, plan: Plan) -> Iterator[Changes]:
    more = {"--gpus": _NODE_GPUS} if plan.hardware.gpus_per_node < _NODE_GPUS else {}
    for factor in (2, 4, 8) if _may_add_gpus(config, plan) else ():
        yield {"--nodes": plan.hardware.nodes * factor, **more, **_on_all(config)}


def _may_add_gpus(config: Config, plan: Plan) -> bool:
    """Whether to propose more GPUs: not while some are idle."""
    return plan.hardware.on_gpu and not [*_idle_gpus(config, plan)]


def _on_all(config: Config) -> Changes:
    return {} if config.hardware.processes == "auto" else {"hardware.processes": "auto"}


def _adamw_8bit(config: Config, plan: Plan) -> Iterator[Changes]:
    if config.optim.name == "adamw":
        yield {"optim.name": "adamw_8bit"}


def _adafactor(config: Config, plan: Plan) -> Iterator[Changes]:
    """Adafactor, on one process and if it has every `optim` key that is set."""
    given = config.optim.model_fields_set
    is_adamw = config.optim.name in ("adamw", "adamw_8bit")
    if is_adamw and plan.layout.num_training == 1 and given <= AdafactorConfig.model_fields.keys():
        yield {"optim.name": "adafactor"}


def _adapter(config: Config, plan: Plan) -> Iterator[Changes]:
    in_bfloat16 = {"model.dtype": "bfloat16"} if config.model.dtype == "float32" else None
    if config.model.adapter is None:
        for rank in _RANKS:
            yield {"model.adapter": {"rank": rank}}
        if in_bfloat16:
            yield {"model.adapter": {"rank": _RANKS[-1]}, **in_bfloat16}


def _quantized_reference(config: Config, plan: Plan) -> Iterator[Changes]:
    kept = config.reference is None or (config.reference.quantization is None and not config.reference.refresh_every)
    if plan.workload.has_reference and config.model.adapter is None and kept:
        for kind in ("int8", "nf4"):
            yield {"reference.quantization": kind}


def _quantized(config: Config, plan: Plan) -> Iterator[Changes]:
    """Quantization, if the sampler shares the quantized weights."""
    model = config.model
    if model.quantization is not None or not config.rollout.shares_weights or model.dtype == "float64":
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


def _narrower_adapter(config: Config, plan: Plan) -> Iterator[Changes]:
    if config.model.adapter is not None and config.model.adapter.path is None:
        for rank in _halvings(config.model.adapter.rank, least=4):
            yield {"model.adapter.rank": rank}


def _dtype(config: Config, plan: Plan) -> Iterator[Changes]:
    if config.model.dtype == "float32":
        yield {"model.dtype": "bfloat16"}


def _shorter_completions(config: Config, plan: Plan) -> Iterator[Changes]:
    for length in _halvings(config.rollout.max_completion_tokens, least=64):
        yield {"rollout.max_completion_tokens": length}


def _smaller_groups(config: Config, plan: Plan) -> Iterator[Changes]:
    for number in _halvings(config.rollout.num_generations, least=max(2, config.algorithm.min_generations)):
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
_Change = Callable[[Config, Plan], Iterable[Changes]]  # changes of one kind, smallest first
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
    _offloaded_parameters: "time: each micro-batch copies the weights from host memory twice, overlapped with "
    "computation, and updates run on the CPU, whose time is not predicted; same gradient, up to the rounding of "
    "bfloat16 weights",
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


def advise(config: Config, plan: Plan) -> list[Advice]:
    """Suggest minimal changes that make a run fit or, if it fits, changes that make it faster.

    In the order of `docs/memory.md`. If no change of a kind suffices alone, it is combined with earlier kinds.
    """
    return _changes_that_speed_up(config, plan) if plan.fits else _changes_that_fit(config, plan)


def _changes_that_fit(config: Config, plan: Plan) -> list[Advice]:
    found: list[Advice] = []
    made: dict[str, Any] = {}  # changes of earlier kinds, none of them enough alone
    for kind, costs in _CHANGES_COSTS.items():
        for changes in kind(config, plan):
            alone = _evaluate(config, plan, changes, costs)
            together = _evaluate(config, plan, _drop_unneeded(config, plan, {**made, **changes}), costs)
            for advice in (alone, together):
                if advice is not None and advice.fits and changes.items() <= advice.changes.items():
                    found.append(advice)
                    break
            if kind in _SAME_GRADIENT:
                made |= changes
    return _smallest_of_each_kind(found)


def _drop_unneeded(config: Config, plan: Plan, changes: dict[str, Any]) -> dict[str, Any]:
    """Drop the changes that the run fits without, costliest first."""
    for key in reversed(changes):
        fewer = {name: value for name, value in changes.items() if name != key}
        advice = _evaluate(config, plan, fewer, "")
        if advice is not None and advice.fits:
            changes = fewer
    return changes


def _smallest_of_each_kind(found: list[Advice]) -> list[Advice]:
    """Keep the first, which is the smallest, of the changes of the same keys."""
    seen: dict[frozenset[str], Advice] = {}
    for advice in found:
        seen.setdefault(frozenset(advice.changes), advice)
    return list(seen.values())


def _changes_that_speed_up(config: Config, plan: Plan) -> list[Advice]:
    options: list[tuple[Changes, str]] = [(changes, _USES_ALL) for changes in _idle_gpus(config, plan)]
    if config.model.gradient_checkpointing:
        kept = {"model.gradient_checkpointing": False}
        options.append((kept, _MEMORY))
        if config.train.micro_batch_tokens != "auto":  # in case the budget is too large without it
            options.append(({**kept, "train.micro_batch_tokens": "auto"}, _MEMORY))
    if config.rollout.uses_servers and not plan.layout.shared and config.hardware.rollout_gpus == "auto":
        options.append(({"hardware.rollout_gpus": "shared"}, _TURNS))
    options += [(changes, _GPUS) for changes in [*_gpus(config, plan)][:1] or [*_nodes(config, plan)][:1]]
    tried = (_evaluate(config, plan, changes, costs) for changes, costs in options)
    return [a for a in tried if a is not None and a.fits and a.saved_seconds > 0.01 * plan.timing["step_s"].value]


def _evaluate(config: Config, plan: Plan, changes: Changes, costs: str) -> Advice | None:
    """Predict the effect of a change; None if it contradicts the configuration."""
    try:
        other = replan(config, plan.shape, plan.hardware, changes, num_prompts=plan.num_prompts)
    except UserError:
        return None
    return Advice(
        changes=dict(changes),
        costs=costs,
        saved_bytes=plan.memory.peak_bytes - other.memory.peak_bytes,
        saved_seconds=plan.timing["step_s"].value - other.timing["step_s"].value,
        fits=other.fits,
    )


def replan(
    config: Config, shape: ModelShape, hardware: Hardware, changes: Changes, *, num_prompts: int | None = None
) -> Plan:
    """Predict the run with some keys changed, or `--gpus` and `--nodes`.

    Raises:
        UserError: As `predict_run`.
    """
    for key, value in changes.items():
        if key in ("--gpus", "--nodes"):
            hardware = replace(hardware, **{"gpus_per_node" if key == "--gpus" else "nodes": value})
        else:
            config = _changed(config, key.split("."), value)
    return predict_run(config, shape, hardware, num_prompts=num_prompts)


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


def _halvings(number: int, *, least: int) -> Iterator[int]:
    while number // 2 >= least:
        number //= 2
        yield number
