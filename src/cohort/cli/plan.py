"""`cohort plan`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cohort.cli.options import Debug

if TYPE_CHECKING:
    from rich.console import Console

    from cohort.plan.advice import Advice
    from cohort.plan.predict import Plan

_PHASES = {
    "sampling": "sampling",
    "logprobs": "logprobs",
    "backward": "forward, backward",
    "optimizer": "optimizer",
    "publish": "publish",
}


def plan(
    config: Annotated[Path, typer.Argument(help="YAML file; docs/config.md lists every key.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY.SUB=VALUE]...", help="Change keys of the file.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(help="GPUs of each node. Default: hardware.processes, or 8 where that is auto.")
    ] = None,
    nodes: Annotated[int, typer.Option(help="Machines.")] = 1,
    gpu: Annotated[str, typer.Option(help="h100, h200, b200, a100, l40s, l20, l4, a10, 4090, 3090.")] = "h100",
    gpu_memory: Annotated[str | None, typer.Option(help="Of each GPU, such as 80GB. Default: what --gpu has.")] = None,
    model_shape: Annotated[
        str | None, typer.Option(help="A common model, such as qwen3-8b or 7b, in place of model.path.")
    ] = None,
    max_: Annotated[str | None, typer.Option("--max", help="The most that fits: model, length or generations.")] = None,
    price: Annotated[float | None, typer.Option(help="Of one GPU for an hour, for the run's cost.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Run the step symbolically, with torch, and compare its memory.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Work out what a run will do, need and take, before anything is loaded. Exit code 1: it does not fit."""
    from cohort.config import load_config
    from cohort.errors import UserError
    from cohort.plan.advice import advise
    from cohort.plan.data import count_prompts
    from cohort.plan.hardware import hardware
    from cohort.plan.limits import largest
    from cohort.plan.predict import predict_run
    from cohort.plan.shape import preset_shape, read_shape

    settings = load_config(config, overrides or ())
    processes = settings.hardware.processes
    if gpus is None:
        gpus = 8 if processes == "auto" else processes
    machines = hardware(gpu=gpu, gpus=gpus, nodes=nodes, gpu_memory=gpu_memory)
    shape = preset_shape(model_shape) if model_shape else read_shape(settings.model.path)
    predicted = predict_run(settings, shape, machines, num_prompts=count_prompts(settings.data.path))
    advice = advise(settings, predicted)
    answer: dict[str, Any] = {**predicted.as_json(), "advice": [a.as_json() for a in advice]}
    if max_ is not None:
        limits: dict[str, Literal["model", "length", "generations"]] = {
            "model": "model",
            "length": "length",
            "generations": "generations",
        }
        if max_ not in limits:
            raise UserError(f"--max: {max_!r} has to be model, length or generations")
        answer["max"] = {max_: largest(settings, shape, machines, limits[max_])}
    if price is not None and "gpu_hours" in answer["timing"]:
        answer["cost"] = price * answer["timing"]["gpu_hours"]["value"]
    if verify:
        from cohort.cli.plan_verify import verify_plan

        answer["verified"] = verify_plan(settings, predicted)
    if json_:
        typer.echo(json.dumps(answer, indent=2))
    else:
        from rich.console import Console

        _print(predicted, advice, answer, Console())
    if not predicted.fits:
        raise typer.Exit(1)


def _print(plan: "Plan", advice: "list[Advice]", answer: dict[str, Any], console: "Console") -> None:
    from rich.table import Table

    shape, machines, memory = plan.shape, plan.hardware, plan.memory
    console.print(
        f"[bold]{shape.name}[/bold]: {shape.num_parameters / 1e9:.2f} billion parameters, on {machines.num_gpus} x "
        f"{machines.gpu_name} with {_gb(machines.gpu_memory_bytes)} each\n",
        highlight=False,
    )
    layout = Table(box=None, show_header=False, pad_edge=False)
    for name, value in _layout_rows(plan):
        layout.add_row(name, value)
    console.print(layout)
    table = Table(title="\nMemory of one training process, GB", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    parts = list(dict.fromkeys(part for phase in memory.phases.values() for part in phase))
    for phase in memory.phases:
        table.add_column(_PHASES[phase], justify="right")
    for part in parts:
        sizes = (memory.phases[phase].get(part, 0) for phase in memory.phases)
        table.add_row(part, *(f"{size / 1e9:.1f}" if size else "" for size in sizes))
    table.add_row("[bold]total[/bold]", *(f"[bold]{memory.total(phase) / 1e9:.1f}[/bold]" for phase in memory.phases))
    console.print(table)
    for line in _verdict(plan, advice, answer):
        console.print(line, highlight=False)


def _layout_rows(plan: "Plan") -> Iterator[tuple[str, str]]:
    layout, rows = plan.layout, plan.rows
    sampling = "the same ones" if layout.shared else str(layout.num_sampling or "other people's")
    yield "GPUs that train / that sample", f"{layout.num_training} / {sampling} ({layout.reason})"
    yield "prompts per step, of one process", f"{rows.prompts:.4g}"
    yield "completions per step, of one process", f"{rows.completions:.4g}"
    yield (
        "micro-batches per step, of one process",
        (
            f"{rows.num_micro_batches}, of at most {rows.row_completions} completions "
            f"(train.micro_batch_tokens: {rows.budget_tokens})"
        ),
    )
    if plan.steps_per_epoch is not None:
        yield "steps per epoch", f"{plan.steps_per_epoch:.4g} ({plan.num_prompts} prompts)"
    if plan.num_steps is not None:
        yield "steps of the run", str(plan.num_steps)
    for name, number in plan.timing.items():
        label, _, unit = name.rpartition("_")
        yield f"{label}, {unit}", f"{number.value:.3g}  [dim]{number.origin}: {number.how}[/dim]"


def _verdict(plan: "Plan", advice: "list[Advice]", answer: dict[str, Any]) -> Iterator[str]:
    memory, headroom = plan.memory, plan.headroom_bytes
    peak = f"peak {_gb(memory.peak_bytes)} in {_PHASES[memory.peak_phase]}"
    if plan.fits:
        yield f"\n[green]fits[/green]: {peak}, {_gb(headroom)} to spare"
    else:
        yield f"\n[red]does not fit[/red]: {peak}, {_gb(-headroom)} too much"
    yield f"the same completions at a time, padded and with whole logits (TRL's default): {_gb(plan.trl_bytes)}"
    if advice:
        yield "\nwhat would fit:" if not plan.fits else "\nwhat would be faster:"
        for change in advice:
            seconds = f"{abs(change.saved_seconds):.2g} s a step {'less' if change.saved_seconds > 0 else 'more'}"
            size = f"{_gb(abs(change.saved_bytes))} {'less' if change.saved_bytes > 0 else 'more'}"
            yield f"  {change.told()}: {size}, {seconds}; costs {change.costs}"
    elif not plan.fits:
        yield "\nno change that is known here makes it fit; try other GPUs, a smaller model, or rollout.engine: vllm"
    for name, value in answer.get("max", {}).items():
        yield f"\nlargest {name} that fits: {value if value is not None else 'none'}"
    if "cost" in answer:
        yield f"\ncost: {answer['cost']:.2f}"
    if "verified" in answer:
        found = answer["verified"]
        yield (
            f"\nsymbolic run of {found['layers']} layers: {_gb(found['tracked_bytes'])} in backward, and "
            f"{_gb(found['predicted_bytes'])} by the closed form ({found['ratio']:.3f})"
        )


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
