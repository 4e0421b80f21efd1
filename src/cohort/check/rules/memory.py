"""Whether the memory of the GPUs suffices, where the GPU and the model's shape are known.

Cohort's files are planned as `cohort plan` does; of other trainers the parts are added up. The numbers are estimates,
so what needs up to a tenth too much is not told.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any

from cohort.check.findings import Finding
from cohort.check.launch import Launch, Sharding
from cohort.check.rules.cohort import nested
from cohort.check.rules.gpus import counted
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
_WIDEST_TRIED = 64  # processes
_MOST_TOLD = 6
_FEW = 3  # single changes, below which pairs are tried
_SHARES = tuple(part / 20 for part in range(18, 1, -1))  # 0.9 down to 0.1


@dataclass(frozen=True, slots=True)
class MemoryVerdict:
    """Whether memory suffices: in words, and as a finding where it does not."""

    told: str
    findings: tuple[Finding, ...] = ()


def cohort_memory(launch: Launch, machines: Hardware) -> MemoryVerdict:
    """Of a configuration of Cohort, by its plan."""
    try:
        config, processes = _with_processes(config_from_dict(nested(launch)), launch, machines.num_gpus)
        if config.hardware.device == "cpu":
            return MemoryVerdict("not judged: hardware.device: cpu uses no GPU")
        shape = try_read_shape(config.model.path)
        if shape is None:
            return MemoryVerdict(f"not judged: the shape of model {config.model.path} is not known")
        config, _ = plan_engine(config, shape, machines)
        plan = predict_run(config, shape, machines)
    except UserError as error:
        return MemoryVerdict(f"not judged: {error}")  # told by other rules too
    text = plan.layout.problem or (
        f"{plan.memory.peak_bytes / 1e9:.1f} GB of each GPU in {plan.memory.peak_phase} with {processes} by `cohort "
        f"plan`, and they have {machines.gpu_memory_bytes / 1e9:.1f} GB"
    )
    if plan.layout.problem is None and plan.memory.peak_bytes <= _MARGIN * machines.gpu_memory_bytes:
        return MemoryVerdict(f"{_enough(plan.memory.peak_bytes, machines.gpu_memory_bytes)}: {text}")
    nearest = tuple(advice.as_arguments() for advice in advise(plan)[:4])
    return MemoryVerdict(f"does not suffice: {text}", (Finding("CHK019", "model.path", text, nearest),))


def _enough(needed: float, memory: int) -> str:
    return "suffices" if needed <= memory else "may suffice, as estimates are good to a tenth"


def _with_processes(config: Config, launch: Launch, num_gpus: int) -> tuple[Config, str]:
    """The configuration with the processes that the launch names, and these in words.

    What `--world-sizes` names are GPUs, which processes and servers share, as `cohort plan --gpus` has it.
    """
    said, processes = launch.processes, config.hardware.processes
    if said is not None and said.where != "--world-sizes":
        processes = int(said.value)
        told = f"{counted(processes)} ({said.where})"
    elif said is not None and processes == "auto":
        processes, told = "auto", f"hardware.processes: auto on {num_gpus} GPUs ({said.where})"
    elif processes == "auto":
        told = f"hardware.processes: auto on {num_gpus} GPUs"
    else:
        told = f"{counted(processes)}, as nothing else works with this configuration"
    hardware = config.hardware.model_copy(update={"processes": processes})
    return config.model_copy(update={"hardware": hardware}), told


def run_memory(estimate: Estimate, machines: Hardware) -> MemoryVerdict:
    """Of a run of another trainer."""
    run, memory = estimate.run, machines.gpu_memory_bytes
    phase, needed = run.peak(memory)
    listed = ", ".join(f"{size / 1e9:.1f} {part}" for part, size in run.phases(memory)[phase].items())
    text = (
        f"about {needed / 1e9:.1f} GB of each GPU in {phase} with {counted(run.processes)} ({listed}), and they have "
        f"{memory / 1e9:.1f} GB; assumes {'; '.join(estimate.assumes)}"
    )
    if needed <= _MARGIN * memory:
        return MemoryVerdict(f"{_enough(needed, memory)}: {text}")
    nearest = tuple(_nearest(estimate, memory))[:_MOST_TOLD]
    return MemoryVerdict(f"does not suffice: {text}", (Finding("CHK019", estimate.key, text, nearest),))


def _nearest(estimate: Estimate, memory: int) -> Iterator[str]:
    """Changes that make it fit by the same sum: the smallest of each kind; few of them: pairs too; none: a GPU."""

    def fits(run: RunMemory) -> bool:
        return run.peak(memory)[1] <= memory

    ways = _ways(estimate)
    firsts = [next(_first(way, estimate.run, fits), None) for way in ways]
    found = [first for first in firsts if first is not None]
    if len(found) < _FEW:
        alone = [way for way, first in zip(ways, firsts, strict=True) if first is None]
        for one, other in combinations(alone, 2):
            text, change = one[-1]  # the largest change of the one, the smallest of the other
            found += [f"{text} and {more}" for more in _first(other, change(estimate.run), fits)]
    yield from found
    if not found:
        gpus = sorted((size, name) for name, (_, size) in GPUS.items() if size > memory)
        larger = next((name for size, name in gpus if estimate.run.peak(size)[1] <= size), None)
        if larger is not None:
            yield f"--gpu {larger}"


_Way = list[tuple[str, Callable[[RunMemory], RunMemory]]]  # changes of one kind, the smallest first


def _first(way: _Way, run: RunMemory, fits: Callable[[RunMemory], bool]) -> Iterator[str]:
    text = next((text for text, change in way if fits(change(run))), None)
    if text is not None:
        yield text


def _ways(estimate: Estimate) -> list[_Way]:
    """What could be changed, that costs the experiment the least first."""
    run, words, engine = estimate.run, estimate.words, estimate.run.engine
    ways: list[_Way] = []

    def add(kind: str, applies: bool, *changes: tuple[object, Callable[[RunMemory], RunMemory]]) -> None:
        if applies and kind in words and changes:
            ways.append([(words[kind].format(value), change) for value, change in changes])

    def halves(value: int | None, name: str) -> list[tuple[object, Callable[[RunMemory], RunMemory]]]:
        sizes = [size for times in range(1, 16) if (size := (value or 0) >> times)]
        return [(size, partial(_with_number, name, size)) for size in sizes]

    add("sequences", run.token_budget is None, *halves(run.sequences, "sequences"))
    add("budget", True, *halves(run.token_budget, "token_budget"))
    add("checkpointing", not run.checkpointing, (None, partial(_with, checkpointing=True)))
    add("fused", run.logit_copies > 0, (None, partial(_with, logit_copies=0)))
    if engine is not None:
        leaves = engine.weights_leave and engine.optimizer_leaves
        smaller = [share for share in _SHARES if share < engine.share]
        add("sleeps", not engine.sleeps, (None, partial(_with_engine, sleeps=True)))
        away = partial(_with_engine, weights_leave=True, optimizer_leaves=True)
        add("leave", engine.sleeps and not leaves, (None, away))
        add("share", True, *((share, partial(_with_engine, share=share)) for share in smaller))
    several, on = run.processes > 1, run.sharding
    add("sharded", on.stage < 3 and several, (None, partial(_with, sharding=Sharding(3, "deepspeed"))))
    if on.stage > 0 and run.shards == run.processes:
        wider = range(run.processes + 1, _WIDEST_TRIED + 1)
        ways.append([(f"GPUs={n}", partial(_with, processes=n, shards=n)) for n in wider])
    for kind, weights in (("optimizer_on_host", False), ("all_on_host", True)):
        there = Sharding(3, "fsdp" if on.by == "fsdp" else "deepspeed", True, weights)
        add(kind, there != on and several, (None, partial(_with, sharding=there)))
    adapter = AdapterConfig()
    add("adapter", run.adapter is None, (None, partial(_with, adapter=adapter, has_reference=False)))
    quantizes = run.adapter is not None and run.quantized_bits != 4 and run.shape.experts == 1
    add("quantized", quantizes, (None, partial(_with, quantized_bits=4)))
    return [way for way in ways if way]


def _with(run: RunMemory, **changes: Any) -> RunMemory:
    return replace(run, **changes)


def _with_number(name: str, value: int, run: RunMemory) -> RunMemory:
    return _with(run, **{name: value})


def _with_engine(run: RunMemory, **changes: Any) -> RunMemory:
    return replace(run, engine=replace(run.engine, **changes)) if run.engine else run
