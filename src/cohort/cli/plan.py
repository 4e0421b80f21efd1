"""`cohort plan`."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cohort.cli.command import Debug, Overrides
from cohort.config import Config, load_config
from cohort.config.hardware import MAX_PROCESSES
from cohort.config.rollout import AutoRolloutConfig
from cohort.errors import UserError
from cohort.plan.advice import Advice, Limit, advise, explain_no_limit, largest
from cohort.plan.dataset import count_prompts, missing_files
from cohort.plan.hardware import Hardware, hardware, local_cpu
from cohort.plan.like import pace_notes, read_pace
from cohort.plan.memory import PHASES, checkpointed_activations
from cohort.plan.predict import Plan, predict_run
from cohort.plan.rollout_engine import plan_engine
from cohort.plan.shape import PRESETS, preset_shape, read_shape

_LABELS = {
    "products_tflops": "matrix products, TFLOP/s",
    "memory_gbytes/s": "memory, GB/s",
    "bus_gbytes/s": "bus between host and GPU, GB/s",
    "training_s": "training, s",
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


def plan(
    config: Annotated[Path, typer.Argument(help="YAML file; docs/config.md lists every key.")],
    overrides: Overrides = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_PROCESSES,
            help="GPUs per node, or processes per CPU. Default: hardware.processes + rollout_gpus, or 8 (CPU: 1) if "
            "processes is auto.",
        ),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, max=MAX_PROCESSES, help="Number of machines.")] = 1,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="h100, h200, b200, a100, a100-40, l40s, l20, l4, a10, 4090, 3090. Default: h100, or this machine's "
            "CPU with hardware.device: cpu."
        ),
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="Memory per GPU, such as 80GB. Default: that of --gpu.")
    ] = None,
    model_shape: Annotated[
        str | None,
        typer.Option(help=f"Preset instead of model.path: {', '.join(PRESETS)}; or a size, such as 7b."),
    ] = None,
    max_: Annotated[
        str | None, typer.Option("--max", help="Find the largest model, length or generations that fits.")
    ] = None,
    price: Annotated[float | None, typer.Option(min=0, help="Price per GPU hour, to print the run's cost.")] = None,
    like: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Run folder whose measured seconds per phase scale the times.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Predict memory, time and GPU layout of a run without loading anything. Exit code 1: it does not fit."""
    settings = load_config(config, overrides or ())
    machines = plan_hardware(settings, gpu=gpu, gpus=gpus, nodes=nodes, gpu_memory=gpu_memory)
    if like is not None:
        machines = replace(machines, pace=read_pace(like))
    predicted, notes = plan_run(settings, machines, config.parent, model_shape=model_shape)
    _print_result(predicted, [*notes, *pace_notes(predicted)], max_=max_, price=price, as_json=json_)
    if not predicted.fits:
        raise typer.Exit(1)


def plan_hardware(
    settings: Config, *, gpu: str | None, gpus: int | None, nodes: int, gpu_memory: str | None
) -> Hardware:
    """Hardware to plan for: this machine's CPU with `hardware.device: cpu`, else as given by the options.

    Raises:
        UserError: an option is invalid, by itself or with the configuration.
    """
    processes, rollout_gpus = settings.hardware.processes, settings.hardware.rollout_gpus
    if settings.hardware.device == "cpu":
        if gpu is not None:
            raise UserError(
                f"--gpu: {gpu} has no effect with hardware.device: cpu, which plans for this machine's CPU; "
                f"remove it, or use hardware.device=auto"
            )
        gpus = gpus if gpus is not None else 1 if processes == "auto" else processes
        return local_cpu(gpus, nodes=nodes, memory=gpu_memory)
    gpu = gpu or "h100"
    if gpus is None:
        both = 0 if processes == "auto" else processes + (rollout_gpus if isinstance(rollout_gpus, int) else 0)
        gpus = both or 8
    return hardware(gpu=gpu, gpus=gpus, nodes=nodes, gpu_memory=gpu_memory)


def plan_run(settings: Config, machines: Hardware, folder: Path, *, model_shape: str | None) -> tuple[Plan, list[str]]:
    """Plan the run, with `rollout.engine: auto` resolved, and collect notes for the user.

    Args:
        settings: the configuration.
        machines: hardware to plan for.
        folder: folder of the configuration file; relative paths are looked up there too.
        model_shape: name of a preset to use instead of `model.path`.
    """
    notes = [message for _, message in missing_files(settings, folder)]
    shape = preset_shape(model_shape) if model_shape else read_shape(settings.model.path)
    if settings.rollout.engine == "auto" and machines.on_gpu:
        settings, reason = plan_engine(settings, shape, machines)
        engine = settings.rollout.engine
        taken = f"{engine}, if it is installed" if reason is None else f"{engine}, since {reason}"
        if reason is None and machines.nodes > 1:
            taken = f"{engine}, as with `cohort launch slurm --rollout-nodes`; without it, training processes sample"
        notes.append(f"rollout.engine: auto is planned as {taken}")
    num_prompts = count_prompts(settings.data.path) if settings.data.path is not None else None
    return predict_run(settings, shape, machines, num_prompts=num_prompts), notes


def _print_result(
    predicted: Plan,
    notes: list[str],
    *,
    max_: str | None,
    price: float | None,
    as_json: bool,
) -> None:
    """Print the plan and the results of --max and --price, as text or JSON."""
    advice = advise(predicted)
    answer: dict[str, Any] = {**predicted.as_json(), "advice": [asdict(a) for a in advice]}
    if price is not None and predicted.num_steps is None:
        notes.append("--price: the number of steps is unknown; set train.steps")
    answer["notes"] = [*notes, *answer["notes"]]
    if max_ is not None:
        answer["max"], answer["max_problem"] = _largest(predicted, max_)
    if price is not None and "gpu_hours" in answer["timing"]:
        answer["cost"] = price * answer["timing"]["gpu_hours"]["value"]
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
    else:
        _print_plan(predicted, advice, answer, Console())


def _largest(predicted: Plan, wanted: str) -> tuple[dict[str, str | int | None], str | None]:
    """Largest value that fits, and the reason if there is none."""
    for limit in get_args(Limit):
        if limit == wanted:
            found = largest(predicted, limit)
            return {limit: found}, explain_no_limit(predicted, limit) if found is None else None
    raise UserError(f"--max: {wanted!r} is unknown; use model, length or generations")


def _print_plan(plan: Plan, advice: Sequence[Advice], answer: dict[str, Any], console: Console) -> None:
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
        also = "" if plan.config.rollout.uses_servers else f", or rollout.engine: {AutoRolloutConfig.prefers}"
        yield f"\nno known change makes it fit; try other GPUs or a smaller model{also}"
    for name, value in answer.get("max", {}).items():
        found = f"none: {answer['max_problem']}" if value is None else f"{value}{_LIMITS[name][1]}"
        yield escape(f"\n{_LIMITS[name][0]} that fits: {found}")
    if "cost" in answer:
        yield f"\ncost: {answer['cost']:.2f}, derived: GPU hours times --price"


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
