"""The nearest changes that make a run fit, or run faster, ranked by what they cost the experiment.

Every change is planned with the model that planned the run; none is named that does not do what is said of it. A new
way to save memory is one more `_Kind` in `_KINDS`, at the place that its cost gives it.
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

Changes = Mapping[str, Any]  # by key of the configuration; --gpus and --nodes are of the hardware


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
        return " ".join(_told(key, value) for key, value in self.changes.items())

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "changes": self.changes,
            "costs": self.costs,
            "saved_bytes": self.saved_bytes,
            "saved_seconds": self.saved_seconds,
            "fits": self.fits,
        }


def _told(key: str, value: Any) -> str:
    if isinstance(value, dict):
        inner = ", ".join(f"{name}: {inner}" for name, inner in value.items())
        return f"'{key}={{{inner}}}'"
    return f"{key}{' ' if key.startswith('--') else '='}{str(value).lower() if isinstance(value, bool) else value}"


@dataclass(frozen=True, slots=True)
class _Kind:
    """Changes of one kind, from the smallest on."""

    changes: Callable[[Config, Plan], Iterable[Changes]]
    costs: str
    changes_gradient: bool = False  # if not, later kinds may build on it


_NODE_GPUS = 8  # the most that is proposed for one machine
_RANKS = (64, 16)  # of adapters


def _idle_gpus(config: Config, plan: Plan) -> Iterator[Changes]:
    if plan.num_idle and config.hardware.processes != "auto":
        yield {"hardware.processes": "auto"}


def _budget(config: Config, plan: Plan) -> Iterator[Changes]:
    if config.train.micro_batch_tokens != "auto":
        yield {"train.micro_batch_tokens": "auto"}


def _sampled(config: Config, plan: Plan) -> Iterator[Changes]:
    if config.rollout.shares_weights:
        for number in _halves(config.rollout.max_num_seqs, least=8):
            yield {"rollout.max_num_seqs": number}


def _checkpointing(config: Config, plan: Plan) -> Iterator[Changes]:
    if config.model.gradient_checkpointing is False:
        yield {"model.gradient_checkpointing": "selective"}
    if config.model.gradient_checkpointing is not True:
        yield {"model.gradient_checkpointing": True}


def _offload(config: Config, plan: Plan) -> Iterator[Changes]:
    if not config.model.activation_offload:
        yield {"model.activation_offload": True}


def _parked_reference(config: Config, plan: Plan) -> Iterator[Changes]:
    if plan.work.has_reference and config.model.adapter is None:
        yield {"reference.device": "cpu"}


def _state_on_host(config: Config, plan: Plan) -> Iterator[Changes]:
    model, optim = config.model, config.optim
    is_on_host = optim.offload or model.parameter_offload
    cannot = optim.name == "muon" or model.adapter is not None or getattr(optim, "stochastic_rounding", False)
    if plan.hardware.on_gpu and not is_on_host and not cannot:
        yield {"optim.offload": True}


def _weights_on_host(config: Config, plan: Plan) -> Iterator[Changes]:
    is_on_host = config.optim.offload or config.model.parameter_offload
    cannot = config.optim.name == "muon" or config.model.adapter is not None or config.reference is not None
    if plan.hardware.on_gpu and not is_on_host and not cannot:
        yield {"model.parameter_offload": True}


def _gpus(config: Config, plan: Plan) -> Iterator[Changes]:
    for number in (2, 4, _NODE_GPUS):
        if _wants_more_gpus(config, plan) and number > plan.hardware.gpus_per_node:
            yield {"--gpus": number, **_on_all(config)}


def _nodes(config: Config, plan: Plan) -> Iterator[Changes]:
    more = {"--gpus": _NODE_GPUS} if plan.hardware.gpus_per_node < _NODE_GPUS else {}
    for factor in (2, 4, 8) if _wants_more_gpus(config, plan) else ():
        yield {"--nodes": plan.hardware.nodes * factor, **more, **_on_all(config)}


def _wants_more_gpus(config: Config, plan: Plan) -> bool:
    """Not where those that are there stand idle."""
    return plan.hardware.on_gpu and not [*_idle_gpus(config, plan)]


def _on_all(config: Config) -> Changes:
    return {} if config.hardware.processes == "auto" else {"hardware.processes": "auto"}


def _moments_in_8_bits(config: Config, plan: Plan) -> Iterator[Changes]:
    if config.optim.name == "adamw":
        yield {"optim.name": "adamw_8bit"}


def _adafactor(config: Config, plan: Plan) -> Iterator[Changes]:
    """Where it can move the weights, which are those of one process, and has all keys that are given."""
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
    if plan.work.has_reference and config.model.adapter is None and kept:
        for kind in ("int8", "nf4"):
            yield {"reference.quantization": kind}


def _quantized(config: Config, plan: Plan) -> Iterator[Changes]:
    """Where what samples has the quantized weights too."""
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
        for rank in _halves(config.model.adapter.rank, least=4):
            yield {"model.adapter.rank": rank}


def _dtype(config: Config, plan: Plan) -> Iterator[Changes]:
    if config.model.dtype == "float32":
        yield {"model.dtype": "bfloat16"}


def _shorter(config: Config, plan: Plan) -> Iterator[Changes]:
    for length in _halves(config.rollout.max_completion_tokens, least=64):
        yield {"rollout.max_completion_tokens": length}


def _smaller_groups(config: Config, plan: Plan) -> Iterator[Changes]:
    for number in _halves(config.rollout.num_generations, least=max(2, config.algorithm.min_generations)):
        yield {"rollout.num_generations": number}


_MEMORY = "memory; the gradient is the same"
_GPUS = "GPUs; the gradient is the same"
_LORA = (
    "the experiment: only a sum of low rank is learned; give it a learning rate some 10 times as high (a base in "
    "bfloat16 is rounded, the adapter is not)"
)
_QLORA = (
    "the experiment: the adapter learns on weights that are rounded to fewer bits (QLoRA), and more time, which is not "
    "predicted; needs cohort-rl[quantization]"
)
_TURNS = "GPUs' memory, which servers and training then share in turn; the gradient is the same"
_USES_ALL = "nothing: GPUs stand idle, and the gradient is the same"
_KINDS = (  # those that cost the experiment the least come first
    _Kind(_idle_gpus, _USES_ALL),
    _Kind(_budget, "nothing: the gradient is the same"),
    _Kind(_sampled, "time; the gradient is the same"),
    _Kind(_checkpointing, "time; the gradient is the same"),
    _Kind(_offload, "time where copies take longer than the computation beside them; the gradient is the same"),
    _Kind(_parked_reference, "time: the reference comes from host memory once a step; the gradient is the same"),
    _Kind(
        _state_on_host,
        "time: each update sends gradients to host memory and weights back, and is made there by the CPU, whose time "
        "is not predicted; the gradient is the same, to the rounding of bfloat16 weights",
        changes_gradient=True,
    ),
    _Kind(
        _weights_on_host,
        "time: each micro-batch brings the weights from host memory twice, beside the computation, and updates are "
        "made by the CPU, whose time is not predicted; the gradient is the same, to the rounding of bfloat16 weights",
        changes_gradient=True,
    ),
    _Kind(_gpus, _GPUS, changes_gradient=True),
    _Kind(_nodes, _GPUS, changes_gradient=True),
    _Kind(
        _moments_in_8_bits,
        "the optimizer's rounding: moments in 8 bits; needs the package torchao",
        changes_gradient=True,
    ),
    _Kind(
        _quantized_reference,
        "the experiment: KL is measured from rounded weights, and more time, which is not predicted; needs "
        "cohort-rl[quantization]",
        changes_gradient=True,
    ),
    _Kind(_dtype, "precision: needs a learning rate of 1e-5 or more", changes_gradient=True),
    _Kind(
        _adafactor,
        "the experiment: another optimizer, whose learning rate is relative to a weight",
        changes_gradient=True,
    ),
    _Kind(_narrower_adapter, "the experiment: a sum of lower rank is learned", changes_gradient=True),
    _Kind(_adapter, _LORA, changes_gradient=True),
    _Kind(_quantized, _QLORA, changes_gradient=True),
    _Kind(_shorter, "the experiment: completions are cut off earlier", changes_gradient=True),
    _Kind(_smaller_groups, "the experiment: groups are smaller", changes_gradient=True),
)


def advise(config: Config, plan: Plan) -> list[Advice]:
    """Changes of a run that does not fit: those that make it fit, each as small as it can be. Of one that does: faster.

    The order is that of `docs/memory.md`. Where no single change of a kind suffices, the kinds before it are made too.
    """
    return _faster(config, plan) if plan.fits else _fitting(config, plan)


def _fitting(config: Config, plan: Plan) -> list[Advice]:
    found: list[Advice] = []
    made: dict[str, Any] = {}  # changes of earlier kinds, none of which was enough
    for kind in _KINDS:
        for changes in kind.changes(config, plan):
            alone = _try(config, plan, changes, kind.costs)
            together = _try(config, plan, _needed(config, plan, {**made, **changes}), kind.costs)
            for advice in (alone, together):
                if advice is not None and advice.fits and changes.items() <= advice.changes.items():
                    found.append(advice)
                    break
            if not kind.changes_gradient:
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


def _faster(config: Config, plan: Plan) -> list[Advice]:
    options: list[tuple[Changes, str]] = [(changes, _USES_ALL) for changes in _idle_gpus(config, plan)]
    if config.model.gradient_checkpointing:
        kept = {"model.gradient_checkpointing": False}
        options.append((kept, _MEMORY))
        if config.train.micro_batch_tokens != "auto":  # where the budget is too large without
            options.append(({**kept, "train.micro_batch_tokens": "auto"}, _MEMORY))
    if config.rollout.uses_servers and not plan.layout.shared and config.hardware.rollout_gpus == "auto":
        options.append(({"hardware.rollout_gpus": "shared"}, _TURNS))
    options += [(changes, _GPUS) for changes in [*_gpus(config, plan)][:1] or [*_nodes(config, plan)][:1]]
    tried = (_try(config, plan, changes, costs) for changes, costs in options)
    return [a for a in tried if a is not None and a.fits and a.saved_seconds > 0.01 * plan.timing["step_s"].value]


def _try(config: Config, plan: Plan, changes: Changes, costs: str) -> Advice | None:
    """What a change brings; None where it contradicts the rest."""
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
    """The plan with some keys changed; `--gpus` and `--nodes` are of the hardware.

    Raises:
        UserError: as `predict_run`.
    """
    for key, value in changes.items():
        if key in ("--gpus", "--nodes"):
            hardware = replace(hardware, **{"gpus_per_node" if key == "--gpus" else "nodes": value})
        else:
            config = _changed(config, key.split("."), value)
    return predict_run(config, shape, hardware, num_prompts=num_prompts)


def _changed(section: Any, path: list[str], value: Any) -> Any:
    """The section with one of its keys, or of a section inside, changed."""
    name, *rest = path
    if rest:
        value = _changed(getattr(section, name) or ReferenceConfig(), rest, value)  # no other section is missing
    elif name == "adapter":
        value = AdapterConfig(**value)
    elif name == "name" and isinstance(section, BaseOptimConfig):
        kinds = {"adamw_8bit": Adamw8bitConfig, "adafactor": AdafactorConfig}
        return kinds[value](**section.model_dump(include=section.model_fields_set - {name}))
    return section.model_copy(update={name: value})


def _halves(number: int, *, least: int) -> Iterator[int]:
    while number // 2 >= least:
        number //= 2
        yield number
