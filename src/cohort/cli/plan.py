"""`cohort plan`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from cohort.cli.options import Debug
from cohort.plan.presets import PRESETS

if TYPE_CHECKING:
    from cohort.config import Config
    from cohort.plan.hardware import Hardware
    from cohort.plan.predict import Plan


def plan(
    config: Annotated[Path | None, typer.Argument(help="YAML file; docs/config.md lists every key.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY.SUB=VALUE]...", help="Change keys of the file.")
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            help="GPUs of each node, or processes that share its CPU. Default: hardware.processes and rollout_gpus, or "
            "8 where processes is auto (1 on a CPU)."
        ),
    ] = None,
    nodes: Annotated[int, typer.Option(help="Machines.")] = 1,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="h100, h200, b200, a100, a100-40, l40s, l20, l4, a10, 4090, 3090; here: what --calibrate has measured "
            "on this machine, its CPU too. Default: h100, or this machine's CPU with hardware.device: cpu."
        ),
    ] = None,
    gpu_memory: Annotated[str | None, typer.Option(help="Of each GPU, such as 80GB. Default: what --gpu has.")] = None,
    model_shape: Annotated[
        str | None,
        typer.Option(help=f"A common model in place of model.path: {', '.join(PRESETS)}; or a size, such as 7b."),
    ] = None,
    max_: Annotated[str | None, typer.Option("--max", help="The most that fits: model, length or generations.")] = None,
    price: Annotated[float | None, typer.Option(min=0, help="Of one GPU for an hour, for the run's cost.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Run the step symbolically, with torch, and compare its memory.")
    ] = False,
    layers: Annotated[
        int | None, typer.Option(min=0, help="That --verify runs, 4 by default, as all are alike; 0: all of them.")
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="Measure this machine once, with torch, for later plans of its hardware."),
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Work out what a run will do, need and take, before anything is loaded. Exit code 1: it does not fit."""
    from cohort.config import load_config
    from cohort.errors import UserError
    from cohort.plan.data import count_prompts, missing_files
    from cohort.plan.predict import predict_run
    from cohort.plan.rollout_engine import with_planned_engine
    from cohort.plan.shape import preset_shape, read_shape

    if calibrate:
        _calibrate(as_json=json_, alone=config is None)
    if config is None:
        if calibrate:
            return
        raise UserError("CONFIG is missing: give a YAML file, or --calibrate to measure this machine")
    if layers is not None and not verify:
        raise UserError(f"--layers: {layers} has no effect without --verify; remove it")
    settings = load_config(config, overrides or ())
    notes = [message for _, message in missing_files(settings, (config or Path()).parent)]
    machines = _machines(settings, gpu=gpu, gpus=gpus, nodes=nodes, gpu_memory=gpu_memory)
    shape = preset_shape(model_shape) if model_shape else read_shape(settings.model.path)
    if settings.rollout.engine == "auto" and machines.on_gpu:
        settings, reason = with_planned_engine(settings, shape, machines)
        taken = "vllm, which a run takes where it is installed" if reason is None else f"local, since {reason}"
        if reason is None and nodes > 1:
            taken = "vllm, which `cohort launch slurm` takes with --rollout-nodes; without, training processes sample"
        notes.append(f"rollout.engine: auto is planned as {taken}")
    predicted = predict_run(settings, shape, machines, num_prompts=count_prompts(settings.data.path))
    verified_layers = (4 if layers is None else layers) if verify else None
    if price is not None and predicted.num_steps is None:
        notes.append("--price: neither the configuration nor the data says how many steps the run has; set train.steps")
    _show(settings, predicted, notes, max_=max_, price=price, verified_layers=verified_layers, as_json=json_)
    if not predicted.fits:
        raise typer.Exit(1)


def _machines(
    settings: "Config", *, gpu: str | None, gpus: int | None, nodes: int, gpu_memory: str | None
) -> "Hardware":
    """What the run is planned for: the CPU of this machine where the configuration says so, else what is named.

    Raises:
        UserError: an option does not fit, by itself or with the configuration.
    """
    from cohort.errors import UserError
    from cohort.plan.calibration import calibration_here
    from cohort.plan.hardware import cpu_here, hardware

    processes, rollout_gpus = settings.hardware.processes, settings.hardware.rollout_gpus
    if settings.hardware.device == "cpu":
        if gpu is not None and gpu.lower() != "here":
            raise UserError(
                f"--gpu: {gpu} has no effect with hardware.device: cpu, which is planned for the CPU of this machine; "
                f"remove it, or use hardware.device=auto"
            )
        gpus = gpus if gpus is not None else 1 if processes == "auto" else processes
        return cpu_here(gpus, nodes=nodes, memory=gpu_memory)
    gpu = gpu or "h100"
    if gpus is None:
        measured = calibration_here() if gpu.lower() == "here" else None
        both = 0 if processes == "auto" else processes + (rollout_gpus if isinstance(rollout_gpus, int) else 0)
        gpus = both or (8 if measured is None or measured.on_gpu else 1)
    return hardware(gpu=gpu, gpus=gpus, nodes=nodes, gpu_memory=gpu_memory)


def _calibrate(*, as_json: bool, alone: bool) -> None:
    """Measure and keep that. As JSON it is shown where no plan follows, which has a JSON of its own."""
    from dataclasses import asdict

    from cohort.cli.plan_calibrate import calibrate
    from cohort.plan.calibration import keep_calibration

    measured = calibrate()
    file = keep_calibration(measured)
    if as_json:
        if alone:
            typer.echo(json.dumps(asdict(measured), indent=2))
        return
    from rich.console import Console

    from cohort.cli.plan_report import print_calibration

    print_calibration(measured, file, Console())


def _show(
    settings: "Config",
    predicted: "Plan",
    notes: list[str],
    *,
    max_: str | None,
    price: float | None,
    verified_layers: int | None,
    as_json: bool,
) -> None:
    """The plan with what else was asked for, to a person or to a program."""
    from cohort.plan.advice import advise

    advice = advise(settings, predicted)
    answer: dict[str, Any] = {**predicted.as_json(), "advice": [a.as_json() for a in advice]}
    answer["notes"] = [*notes, *answer["notes"]]
    if max_ is not None:
        answer["max"], answer["max_problem"] = _largest(settings, predicted, max_)
    if price is not None and "gpu_hours" in answer["timing"]:
        answer["cost"] = price * answer["timing"]["gpu_hours"]["value"]
    if verified_layers is not None:
        from cohort.cli.plan_verify import verify_plan

        answer["verified"] = verify_plan(settings, predicted, layers=verified_layers)
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
        return
    from rich.console import Console

    from cohort.cli.plan_report import print_plan

    print_plan(predicted, advice, answer, Console(), with_servers=settings.rollout.uses_servers)


def _largest(settings: "Config", predicted: "Plan", wanted: str) -> tuple[dict[str, str | int | None], str | None]:
    """The most that fits, and where nothing does why."""
    from cohort.errors import UserError
    from cohort.plan.limits import Limit, largest, why_none_fits

    about = settings, predicted.shape, predicted.hardware
    for limit in get_args(Limit):
        if limit == wanted:
            most = largest(*about, limit)
            return {limit: most}, why_none_fits(*about, limit) if most is None else None
    raise UserError(f"--max: {wanted!r} has to be model, length or generations")
