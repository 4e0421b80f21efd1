"""Whether GPU memory is enough, if the GPU and the model's shape are known.

Cohort's files are planned as `cohort plan` does; for other trainers the parts are added up. These are estimates, so a
run that needs up to a tenth too much passes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from cohort.check.findings import Finding
from cohort.check.launch import Launch, Sharding
from cohort.check.rules.cohort import nested
from cohort.check.rules.common import counted
from cohort.check.rules.memory_parts import RunMemory
from cohort.check.rules.memory_read import Estimate
from cohort.config import Config, config_from_dict
from cohort.config.adapter import AdapterConfig
from cohort.errors import UserError
from cohort.plan.advice import advise
from cohort.plan.hardware import GPUS, Hardware
from cohort.plan.predict import predict_run
from cohort.plan.rollout_engine import plan_engine
from cohort.plan.shape import try_read_shape

_MARGIN = 1.1  # estimates are good to a tenth
_MAX_FIXES = 6


@dataclass(frozen=True, slots=True)
class MemoryVerdict:
    """Whether memory suffices: in words, and as a finding if it does not."""

    text: str
    findings: tuple[Finding, ...] = ()


def cohort_memory(launch: Launch, machines: Hardware) -> MemoryVerdict:
    """Check a configuration of Cohort by its plan."""
    try:
        config, processes = _with_processes(config_from_dict(nested(launch)), launch, machines.num_gpus)
        if config.hardware.device == "cpu":
            return MemoryVerdict("not checked: hardware.device: cpu uses no GPU")
        shape = try_read_shape(config.model.path)
        if shape is None:
            return MemoryVerdict(f"not checked: the shape of model {config.model.path} is not known")
        config, _ = plan_engine(config, shape, machines)
        plan = predict_run(config, shape, machines)
    except UserError as error:
        return MemoryVerdict(f"not checked: {error}")  # has a finding of its own
    text = plan.layout.problem or (
        f"{plan.memory.peak_bytes / 1e9:.1f} GB of each GPU in {plan.memory.peak_phase} with {processes} by `cohort "
        f"plan`, and they have {machines.gpu_memory_bytes / 1e9:.1f} GB"
    )
    if plan.layout.problem is None and plan.memory.peak_bytes <= _MARGIN * machines.gpu_memory_bytes:
        return MemoryVerdict(f"{_enough(plan.memory.peak_bytes, machines.gpu_memory_bytes)}: {text}")
    nearest = tuple(advice.as_arguments() for advice in advise(plan)[:4])
    return MemoryVerdict(f"is not enough: {text}", (Finding("CHK019", "model.path", text, nearest),))


def _enough(needed: float, memory: int) -> str:
    return "is enough" if needed <= memory else "may be enough: estimates are good to a tenth"


def _with_processes(config: Config, launch: Launch, num_gpus: int) -> tuple[Config, str]:
    """Return the configuration with the processes of the launch, and these in words.

    `--world-sizes` gives GPUs, which processes and servers share, as `cohort plan --gpus` does.
    """
    said, processes = launch.processes, config.hardware.processes
    where = f" ({said.where})" if said else ""
    if said is not None and said.where != "--world-sizes":
        processes = int(said.value)
        text = f"{counted(processes)}{where}"
    elif processes == "auto":
        text = f"hardware.processes: auto on {num_gpus} GPUs{where}"
    else:
        text = f"{counted(processes)}, as nothing else works with this configuration"
    hardware = config.hardware.model_copy(update={"processes": processes})
    return config.model_copy(update={"hardware": hardware}), text


def run_memory(estimate: Estimate, machines: Hardware) -> MemoryVerdict:
    """Check a run of another trainer."""
    run, memory = estimate.run, machines.gpu_memory_bytes
    phase, needed = run.peak(memory)
    listed = ", ".join(f"{size / 1e9:.1f} {part}" for part, size in run.phases(memory)[phase].items())
    text = (
        f"about {needed / 1e9:.1f} GB of each GPU in {phase} with {counted(run.processes)} ({listed}), and they have "
        f"{memory / 1e9:.1f} GB; assumes {'; '.join(estimate.assumes)}"
    )
    if needed <= _MARGIN * memory:
        return MemoryVerdict(f"{_enough(needed, memory)}: {text}")
    firsts = [(words, _first_fit(run, kind, memory)) for kind, words in estimate.fixes.items()]
    fixes = tuple(words.format(first[0]) for words, first in firsts if first is not None)
    if not fixes:
        larger = sorted((size, name) for name, (_, size) in GPUS.items() if run.peak(size)[1] <= size)
        fixes = tuple(f"--gpu {name}" for _, name in larger[:1])
    return MemoryVerdict(f"is not enough: {text}", (Finding("CHK019", estimate.key, text, fixes[:_MAX_FIXES]),))


def _first_fit(run: RunMemory, kind: str, memory: int) -> tuple[object, RunMemory] | None:
    """The smallest change of a kind with which the run fits."""
    return next((change for change in _changed(run, kind) if change[1].peak(memory)[1] <= memory), None)


def _changed(run: RunMemory, kind: str) -> Iterator[tuple[object, RunMemory]]:
    """Values for the framework's own words, and the run with each; the smallest change first."""
    engine = run.engine
    if kind in _HALVED:
        size = getattr(run, _HALVED[kind]) or 0
        while size := size // 2:
            yield size, replace(run, **{_HALVED[kind]: cast(Any, size)})
    elif kind in ("sleeps", "leave") and engine is not None:
        yield None, replace(run, engine=replace(engine, **_CHANGES[kind]))
    elif kind == "share" and engine is not None:
        for share in (part / 20 for part in range(18, 1, -1) if part / 20 < engine.share):
            yield share, replace(run, engine=replace(engine, share=share))
    elif kind not in ("share", "sleeps", "leave") and (
        kind != "quantized" or (run.adapter is not None and run.shape.experts == 1)
    ):
        yield None, replace(run, **_CHANGES[kind])


_HALVED = {"sequences": "sequences", "budget": "token_budget"}
_CHANGES: Mapping[str, Any] = {
    "sleeps": {"sleeps": True},  # of the engine
    "leave": {"weights_leave": True, "optimizer_leaves": True},
    "checkpointing": {"checkpointing": True},
    "fused": {"logit_copies": 0},
    "sharded": {"sharding": Sharding(3, "deepspeed")},
    "optimizer_on_host": {"sharding": Sharding(3, "deepspeed", True, False)},
    "all_on_host": {"sharding": Sharding(3, "deepspeed", True, True)},
    "adapter": {"adapter": AdapterConfig(), "has_reference": False},
    "quantized": {"quantized_bits": 4},
}
