"""`cohort plan`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console

from cohort.cli.options import Debug, Overrides
from cohort.cli.plan_report import print_calibration, print_plan
from cohort.config import Config, load_config
from cohort.config.hardware import MAX_PROCESSES
from cohort.errors import UserError
from cohort.plan.advice import advise
from cohort.plan.calibration import local_calibration, save_calibration
from cohort.plan.dataset import count_prompts, missing_files
from cohort.plan.hardware import Hardware, hardware, local_cpu
from cohort.plan.limits import Limit, explain_no_limit, largest
from cohort.plan.predict import Plan, predict_run
from cohort.plan.rollout_engine import plan_engine
from cohort.plan.shape import PRESETS, preset_shape, read_shape


def plan(
    config: Annotated[Path | None, typer.Argument(help="YAML file; docs/config.md lists every key.")] = None,
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
            help="h100, h200, b200, a100, a100-40, l40s, l20, l4, a10, 4090, 3090; here: this machine as measured by "
            "--calibrate. Default: h100, or this machine's CPU with hardware.device: cpu."
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
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine once, for later plans (imports torch).")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Predict memory, time and GPU layout of a run without loading anything. Exit code 1: it does not fit."""
    if calibrate:
        _calibrate(as_json=json_, alone=config is None)
    if config is None:
        if calibrate:
            return
        raise UserError("CONFIG is missing; give a YAML file, or --calibrate to measure this machine")
    settings = load_config(config, overrides or ())
    machines = plan_hardware(settings, gpu=gpu, gpus=gpus, nodes=nodes, gpu_memory=gpu_memory)
    predicted, notes = plan_run(settings, machines, config.parent, model_shape=model_shape)
    _print_result(predicted, notes, max_=max_, price=price, as_json=json_)
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
        if gpu is not None and gpu.lower() != "here":
            raise UserError(
                f"--gpu: {gpu} has no effect with hardware.device: cpu, which plans for this machine's CPU; "
                f"remove it, or use hardware.device=auto"
            )
        gpus = gpus if gpus is not None else 1 if processes == "auto" else processes
        return local_cpu(gpus, nodes=nodes, memory=gpu_memory)
    gpu = gpu or "h100"
    if gpus is None:
        measured = local_calibration() if gpu.lower() == "here" else None
        both = 0 if processes == "auto" else processes + (rollout_gpus if isinstance(rollout_gpus, int) else 0)
        gpus = both or (8 if measured is None or measured.on_gpu else 1)
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
        taken = "vllm, if it is installed" if reason is None else f"local, since {reason}"
        if reason is None and machines.nodes > 1:
            taken = "vllm, as with `cohort launch slurm --rollout-nodes`; without it, training processes sample"
        notes.append(f"rollout.engine: auto is planned as {taken}")
    num_prompts = count_prompts(settings.data.path) if settings.data.path is not None else None
    return predict_run(settings, shape, machines, num_prompts=num_prompts), notes


def _calibrate(*, as_json: bool, alone: bool) -> None:
    """Measure this machine and save the result. JSON is printed only if `alone`: a plan prints its own."""
    from cohort.cli.plan_calibrate import calibrate  # imports torch

    measured = calibrate()
    file = save_calibration(measured)
    if not as_json:
        print_calibration(measured, file, Console())
    elif alone:
        typer.echo(json.dumps(asdict(measured), indent=2))


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
        print_plan(predicted, advice, answer, Console())


def _largest(predicted: Plan, wanted: str) -> tuple[dict[str, str | int | None], str | None]:
    """Largest value that fits, and the reason if there is none."""
    for limit in get_args(Limit):
        if limit == wanted:
            found = largest(predicted, limit)
            return {limit: found}, explain_no_limit(predicted, limit) if found is None else None
    raise UserError(f"--max: {wanted!r} is unknown; use model, length or generations")
