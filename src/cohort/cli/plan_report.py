"""Print a plan or a calibration as text."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cohort.plan.advice import Advice
from cohort.plan.calibration import Calibration
from cohort.plan.memory import PHASES, checkpointed_activations
from cohort.plan.predict import Plan

_LABELS = {
    "products_tflops": "matrix products, TFLOP/s",
    "memory_gbytes/s": "memory, GB/s",
    "bus_gbytes/s": "bus between host and GPU, GB/s",
    "training_s": "training, s",
    "gathering_s": "gathering weights, s",
    "offloading_s": "offloading activations, s",
    "sampling_s": "sampling, s",
    "step_s": "step, s",
    "run_hours": "run, hours",
    "gpu_hours": "run, GPU hours",
}

_LIMITS = {  # --max: label and unit
    "model": ("largest model", ""),
    "length": ("longest completion", " tokens"),
    "generations": ("largest group", " generations"),
}


def print_calibration(measured: Calibration, file: Path, console: Console) -> None:
    """Print a calibration and where it is saved."""
    rates = {
        **{f"matrix products, {dtype}": f"{flops / 1e12:.3g} TFLOP/s" for dtype, flops in measured.flops.items()},
        "memory": _speed(measured.memory_bandwidth),
        "host and device": _speed(measured.host_bandwidth),
        "all-gather, each process": _speed(measured.collective_bandwidth),
        "memory for processes": _gb(measured.memory_bytes),
        "framework, per process": _gb(measured.framework_bytes),
    }
    table = Table(title=f"{measured.device}, {measured.describe()}", title_justify="left", box=None, show_header=False)
    for name, value in rates.items():
        table.add_row(name, value)
    console.print(table)
    console.print(f"saved to {file}; use it with `cohort plan --gpu here`\n", highlight=False, soft_wrap=True)


def _speed(bandwidth: float | None) -> str:
    return "n/a" if bandwidth is None else f"{bandwidth / 1e9:.3g} GB/s"


def print_plan(plan: Plan, advice: Sequence[Advice], answer: dict[str, Any], console: Console) -> None:
    """Print a plan: tables, verdict and advice.

    Args:
        plan: the plan.
        advice: suggested changes.
        answer: the plan as JSON, with the answers to further options.
        console: where to print.
    """
    shape, machines, memory = plan.shape, plan.hardware, plan.memory
    console.print(
        f"[bold]{shape.name}[/bold]: {shape.num_parameters / 1e9:.2f} billion parameters, on {machines.num_gpus} x "
        f"{machines.gpu_name} with {_gb(machines.gpu_memory_bytes)} each ({plan.memory_origins['there'].origin})\n",
        highlight=False,
        soft_wrap=True,
    )
    layout = Table(box=None, show_header=False, pad_edge=False)
    for name, value in _layout_rows(plan):
        layout.add_row(name, value)
    console.print(layout)
    table = Table(title="\nMemory of one training process, GB", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    parts = list(dict.fromkeys(part for phase in memory.phases.values() for part in phase))
    for phase in memory.phases:
        table.add_column(PHASES[phase], justify="right")
    table.add_column("")
    for part in parts:
        sizes = (memory.phases[phase].get(part, 0) for phase in memory.phases)
        origin = plan.memory_origins[part].origin
        table.add_row(part, *(_cell(size) for size in sizes), f"[dim]{origin}[/dim]")
    table.add_row("[bold]total[/bold]", *(f"[bold]{memory.total(phase) / 1e9:.1f}[/bold]" for phase in memory.phases))
    console.print(table)
    if "framework" in parts:
        console.print(f"[dim]framework: {plan.memory_origins['framework'].how}[/dim]", soft_wrap=True)
    kept = checkpointed_activations(plan.workload)
    console.print(
        f"[dim]activations of the same micro-batch: {_gb(kept[False])} without checkpointing, {_gb(kept['selective'])} "
        f"with selective, {_gb(kept[True])} with true (model.gradient_checkpointing)[/dim]",
        highlight=False,
        soft_wrap=True,
    )
    for line in _verdict(plan, advice, answer):
        console.print(line, highlight=False, soft_wrap=True)


def _layout_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    layout, micro_batches = plan.layout, plan.micro_batches
    prompts, updates = plan.config.train.prompts_per_step, plan.config.train.updates_per_rollout
    yield (
        "one step, over all processes",
        f"{prompts} prompts x {plan.config.rollout.num_generations} = {plan.completions_per_step} completions, "
        f"{updates} optimizer step{'s' * (updates > 1)}",
    )
    sampling = "the same" if layout.shared else str(layout.num_sampling or "external")
    yield "training / rollout GPUs", f"{layout.num_training} / {sampling} ({layout.reason})"
    if plan.num_idle:
        yield "idle GPUs", f"{plan.num_idle} of {plan.hardware.num_gpus}"
    if plan.config.rollout.num_generations == 1:
        yield "prompts per step and process", f"{micro_batches.prompts_per_rank:.4g}, with one completion each"
    else:
        yield "prompts per step and process", f"{micro_batches.prompts_per_rank:.4g}"
        yield "completions per step and process", f"{micro_batches.completions_per_rank:.4g}"
    num = micro_batches.completions_per_micro_batch
    completions = "one completion" if num == 1 else f"at most {num} completions"
    yield (
        "micro-batches per step and process",
        f"{micro_batches.num_micro_batches}, of {completions} "
        f"(train.micro_batch_tokens: {micro_batches.budget_tokens})",
    )
    if plan.workload.critic is not None:
        critic = plan.workload.critic.shape
        yield "critic", f"{critic.num_parameters / 1e9:.2f} billion parameters ({critic.name})"
    if plan.steps_per_epoch is not None:
        yield "steps per epoch", f"{plan.steps_per_epoch:.4g} ({plan.num_prompts} prompts)"
    if plan.num_steps is not None:
        yield "steps, optimizer steps of the run", f"{plan.num_steps}, {plan.num_updates}"
    for name, number in plan.timing.items():
        yield _LABELS[name], f"{_digits(number.value, 3)}  [dim]{number.origin}: {number.how}[/dim]"


def _verdict(plan: Plan, advice: Sequence[Advice], answer: dict[str, Any]) -> Iterator[str]:
    memory, headroom = plan.memory, plan.headroom_bytes
    peak = f"peak {_gb(memory.peak_bytes)} in {PHASES[memory.peak_phase]}"
    if plan.fits:
        yield f"\n[green]fits[/green]: {peak}, {_gb(headroom)} to spare"
    elif headroom < 0:
        yield f"\n[red]does not fit[/red]: {peak}, {_gb(-headroom)} too much"
    else:
        yield f"\n[red]does not fit[/red]: {peak} in training, and servers do not fit alongside it"
    for note in answer["notes"]:
        yield f"note: {escape(note)}"
    trl = _gb(plan.trl_bytes)
    yield f"the same completions padded, with full logits (TRL's default): {trl}, derived"
    if advice:
        yield "\nwhat would fit:" if not plan.fits else "\nwhat would be faster:"
        for change in advice:
            size = f"{_gb(abs(change.saved_bytes))} {'less' if change.saved_bytes > 0 else 'more'}"
            yield escape(f"  {change.as_arguments()}: {size}, {_saved_time(change)}; costs {change.costs}")
    elif not plan.fits:
        also = "" if plan.config.rollout.uses_servers else ", or rollout.engine: vllm"
        yield f"\nno known change makes it fit; try other GPUs or a smaller model{also}"
    for name, value in answer.get("max", {}).items():
        found = f"none: {answer['max_problem']}" if value is None else f"{value}{_LIMITS[name][1]}"
        yield escape(f"\n{_LIMITS[name][0]} that fits: {found}")
    if "cost" in answer:
        yield f"\ncost: {answer['cost']:.2f}, derived: GPU hours times --price"
    if "verified" in answer:
        found = answer["verified"]
        yield (
            f"\nsymbolic run of {found['layers']} layers: {_gb(found['tracked_bytes'])} in backward, and "
            f"{_gb(found['predicted_bytes'])} by the closed form ({found['ratio']:.3f})"
        )


def _saved_time(change: Advice) -> str:
    if change.saved_seconds is None:
        return "time not predicted"
    if change.saved_seconds == 0:
        return "same predicted time"
    return f"{_digits(abs(change.saved_seconds), 2)} s per step {'less' if change.saved_seconds > 0 else 'more'}"


def _cell(size: int) -> str:
    """Format a cell of the table in GB."""
    return "" if size == 0 else "<0.1" if size < 50_000_000 else f"{size / 1e9:.1f}"


def _digits(value: float, number: int) -> str:
    """Format with `number` significant digits and no exponent."""
    return f"{float(f'{value:.{number}g}'):,g}" if abs(value) < 1e6 else f"{value:,.0f}"


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
