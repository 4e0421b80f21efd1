"""`cohort plan`."""

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cohort.cli.command import Debug, Overrides
from cohort.cli.sweep import run_sweep
from cohort.config import Config, load_config
from cohort.config.hardware import MAX_PROCESSES
from cohort.config.rollout import AutoRolloutConfig
from cohort.errors import UserError
from cohort.plan.advice import Advice, Limit, advise, explain_no_limit, largest, replan
from cohort.plan.dataset import count_prompts, missing_files
from cohort.plan.hardware import GPUS, Hardware, Pace, hardware, local_cpu
from cohort.plan.lengths import Lengths, answer_lengths, parse_lengths
from cohort.plan.like import Comparison, compare_run, pace_notes, read_pace
from cohort.plan.memory import PHASES, checkpointed_activations
from cohort.plan.predict import Plan, predict_wanted
from cohort.plan.proposal import path_of, propose
from cohort.plan.shape import PRESETS, find_shape, read_shape
from cohort.plan.timing import digits

_LABELS = {
    "products_tflops": "matrix products, TFLOP/s",
    "memory_gbytes/s": "memory, GB/s",
    "bus_gbytes/s": "bus between host and GPU, GB/s",
    "training_s": "training, s",
    "offloading_s": "offloading activations, s",
    "gathering_s": "gathering and scattering shards, s",
    "reducing_s": "reducing gradients between copies, s",
    "sampling_s": "sampling, s",
    "publish_s": "publishing weights, s",
    "step_s": "step, s",
    "run_hours": "run, hours",
    "gpu_hours": "run, GPU hours",
}

_PHASE_TIMES = ("training_s", "sampling_s", "publish_s", "step_s")

_LIMITS = {  # --max: label and unit
    "model": ("largest model", ""),
    "length": ("longest completion", " tokens"),
    "generations": ("largest group", " generations"),
}


def plan(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="YAML file; docs/config.md lists every key. Without one, --model prints a configuration that fits."
        ),
    ] = None,
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
        typer.Option(help=f"{', '.join(GPUS)}. Default: h100, or this machine's CPU with hardware.device: cpu."),
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="Memory per GPU, such as 80GB. Default: that of --gpu.")
    ] = None,
    gpu_tflops: Annotated[
        float | None, typer.Option(min=1, help="TFLOP/s of dense matrix products. Default: that of --gpu.")
    ] = None,
    gpu_bandwidth: Annotated[
        str | None, typer.Option(help="Memory bandwidth per second, such as 2TB. Default: that of --gpu.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "--model-shape",
            help=f"Model instead of model.path: a preset ({', '.join(PRESETS)}), a size such as 7b, a known Hugging "
            "Face id or a folder.",
        ),
    ] = None,
    max_: Annotated[
        str | None, typer.Option("--max", help="Find the largest model, length or generations that fits.")
    ] = None,
    price: Annotated[float | None, typer.Option(min=0, help="Price per GPU hour, to print the run's cost.")] = None,
    like: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Run folder whose measured seconds per phase scale the times.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Print a run's times and memory beside those of its plan.")
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=VALUES",
            help="Plan several values of gpus or a key: a list such as gpus=2,4,6, or a..b by doubling.",
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the sweep into a PNG, SVG or PDF file.")
    ] = None,
    length: Annotated[
        str | None,
        typer.Option(
            metavar="MEAN[:LONGEST]|COLUMN",
            help="Expected tokens after the prompt, for the times: a number such as 800 or 800:4000, or a column of "
            "the data with reference solutions. Default: those of --like, or the maximum.",
        ),
    ] = None,
    why: Annotated[bool, typer.Option("--why", help="Print the origin of every number, and memory by part.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Predict memory, time and GPU layout of a run without loading anything. Exit code 1: it does not fit."""
    arguments = [*([str(config)] if config and "=" in str(config) else []), *(overrides or ())]
    file = config if config and "=" not in str(config) else None
    on: dict[str, Any] = {"--gpu": gpu, "--gpu-memory": gpu_memory, "--gpu-tflops": gpu_tflops}
    on |= {"--gpus": gpus, "--nodes": None if nodes == 1 else nodes, "--gpu-bandwidth": gpu_bandwidth}
    asked = {"--max": max_, "--why": why or None}
    for_steps = {"--like": like, "--price": price, "--sweep": sweep}
    if against is not None:
        others = {"CONFIG": file, **dict.fromkeys(arguments, True), **on, **asked, **for_steps}
        run = "with --against, which plans the configuration of RUN on the hardware it had; remove it"
        _refuse({**others, "--model": model, "--length": length, "--plot": plot}, run)
        _print_comparison(compare_run(against), as_json=json_)
        return
    _check_sweep(sweep, asked, on, plot=plot)
    given: dict[str, Any] = {"nodes": nodes, "gpu_memory": gpu_memory, "tflops": gpu_tflops, "bandwidth": gpu_bandwidth}
    if file is None:
        _check_proposal(model, {**asked, **for_steps, "--json": json_ or None})
        machines = hardware(gpu=gpu or "h100", gpus=gpus or 8, **given)
        _print_proposal(*_propose(str(model), machines, arguments, length))
        return
    pace = None if like is None else _read_pace(like, length)

    def plan_with(overrides: Sequence[str], *, gpus: int | None = gpus, nodes: int = nodes) -> tuple[Plan, list[str]]:
        settings = load_config(file, overrides)
        machines = plan_hardware(settings, gpu=gpu, gpus=gpus, **{**given, "nodes": nodes})
        lengths = _expected_lengths(settings, length, pace)
        return plan_run(settings, replace(machines, lengths=lengths, pace=pace), file.parent, model=model)

    if sweep is not None:
        run_sweep(
            sweep,
            lambda more, **machines: plan_with([*arguments, *more], **machines),
            price=price,
            as_json=json_,
            picture=plot,
        )
        return
    predicted, notes = plan_with(arguments)
    answer, advice = _answer(predicted, [*notes, *pace_notes(predicted)], max_=max_, price=price)
    if json_:
        typer.echo(json.dumps(answer, indent=2))
    else:
        other = [] if model is None else [f"model.path={path_of(model)}"]
        typed = shlex.join([str(file), *arguments, *other])
        if predicted.hardware.on_gpu and gpu is None and gpu_memory is None:
            typer.echo(_assumed(predicted.hardware))
        _print_plan(predicted, advice, answer, typed, Console(), why=why)
    if not predicted.fits:
        raise typer.Exit(1)


def _assumed(machines: Hardware) -> str:
    """The GPUs that a plan assumes because none are named, and how to name others."""
    others = "for others: --gpus 1 --gpu 4090; for this machine's CPU: hardware.device=cpu"
    return f"assumed: {machines.num_gpus} x {machines.gpu_name} ({others})"


def _refuse(options: Mapping[str, Any], why: str) -> None:
    """Refuse options that are given and have no effect.

    Raises:
        UserError: one is given.
    """
    for name, value in options.items():
        if value is not None:
            raise UserError(f"{name} has no effect {why}")


def _check_sweep(sweep: str | None, asked: Mapping[str, Any], on: Mapping[str, Any], *, plot: Path | None) -> None:
    """Refuse options that a sweep does not use, and those that only a sweep does; `on` are those of the hardware."""
    if sweep is None:
        _refuse({"--plot": plot}, "without --sweep, whose values it draws, such as --sweep gpus=1..64")
        return
    _refuse(asked, "with --sweep, which prints a line per value; plan one value to see it")
    if sweep.startswith("gpus="):
        _refuse({"--gpus": on["--gpus"], "--nodes": on["--nodes"]}, "with --sweep gpus, which sets it; remove it")


def _check_proposal(model: str | None, others: Mapping[str, Any]) -> None:
    """Check that what is asked for without a configuration file is one that is proposed."""
    if model is None:
        raise UserError("give a configuration file, or --model to have one proposed")
    for name, value in others.items():
        if value is not None:
            raise UserError(f"{name} needs a configuration file; write the proposed one to a file first")


def _propose(model: str, machines: Hardware, arguments: Sequence[str], length: str | None) -> tuple[Plan, str]:
    """Return the plan and the text of a configuration for a model on some hardware."""
    lengths = None if length is None else parse_lengths(length)
    proposed, text = propose(model, replace(machines, lengths=lengths), arguments)
    if lengths is not None:
        _check_limit(lengths, proposed.config)
    return proposed, text


def _read_pace(like: Path, length: str | None) -> Pace:
    """Read how fast a run was, by which times are scaled."""
    pace = read_pace(like)
    if pace.lengths is None and length is not None:
        raise UserError(
            f"--length has no effect with --like: {like}, whose metrics do not give the lengths of its completions, so "
            f"that its times are of completions as they were"
        )
    return pace


def _expected_lengths(settings: Config, length: str | None, pace: Pace | None) -> Lengths | None:
    """Return the lengths of completions to plan with: those of --length, else of --like; None: the maximum."""
    lengths = None if pace is None else pace.lengths
    if length is not None:
        is_column = length[:1].isalpha() or length.startswith("_")
        lengths = answer_lengths(settings.data.path, length) if is_column else parse_lengths(length)
        _check_limit(lengths, settings)
    return None if lengths is None else lengths.cut_at(settings.rollout.max_new_tokens)


def _check_limit(lengths: Lengths, settings: Config) -> None:
    """Check that the expected mean length is possible.

    Raises:
        UserError: it exceeds the limit of the configuration.
    """
    rollout = settings.rollout
    if lengths.mean > rollout.max_new_tokens:
        raise UserError(
            f"--length: a mean of {lengths.mean} tokens exceeds {rollout.max_new_tokens_key}: "
            f"{rollout.max_new_tokens}, where completions are cut; raise that key, or expect at most as many"
        )


def _print_proposal(plan: Plan, text: str) -> None:
    """Print a configuration, with the verdict as comments. Exit code 1: nothing fits."""
    verdict = list(_verdict(plan, [], {}, "run.yaml"))[: 2 if plan.fits else 1]
    for line in (*verdict, f"GPUs: {plan.layout.in_words} ({plan.layout.reason})"):
        typer.echo(f"# {Text.from_markup(line).plain}")
    typer.echo(text, nl=False)
    if not plan.fits:
        raise typer.Exit(1)


def plan_hardware(
    settings: Config,
    *,
    gpu: str | None,
    gpus: int | None,
    nodes: int,
    gpu_memory: str | None,
    tflops: float | None = None,
    bandwidth: str | None = None,
) -> Hardware:
    """Hardware to plan for: this machine's CPU with `hardware.device: cpu`, else as given by the options.

    Raises:
        UserError: an option is invalid, by itself or with the configuration.
    """
    processes, rollout_gpus = settings.hardware.processes, settings.hardware.rollout_gpus
    if settings.hardware.device == "cpu":
        for option, value in (("--gpu", gpu), ("--gpu-tflops", tflops), ("--gpu-bandwidth", bandwidth)):
            if value is not None:
                raise UserError(
                    f"{option}: {value} has no effect with hardware.device: cpu, which plans for this machine's CPU; "
                    f"remove it, or use hardware.device=auto"
                )
        gpus = gpus if gpus is not None else 1 if processes == "auto" else processes
        return local_cpu(gpus, nodes=nodes, memory=gpu_memory)
    gpu = gpu or "h100"
    if gpus is None:
        both = 0 if processes == "auto" else processes + (rollout_gpus if isinstance(rollout_gpus, int) else 0)
        gpus = both or 8
    return hardware(gpu=gpu, gpus=gpus, nodes=nodes, gpu_memory=gpu_memory, tflops=tflops, bandwidth=bandwidth)


def plan_run(settings: Config, machines: Hardware, folder: Path, *, model: str | None) -> tuple[Plan, list[str]]:
    """Plan the run, with `rollout.engine: auto` resolved, and collect notes for the user.

    Args:
        settings: the configuration.
        machines: hardware to plan for.
        folder: folder of the configuration file; relative paths are looked up there too.
        model: preset, size, id or folder to use instead of `model.path`.
    """
    notes = [message for _, message in missing_files(settings, folder)]
    shape = find_shape(model) if model else read_shape(settings.model.path)
    num_prompts = _count_prompts(settings, notes)
    predicted = predict_wanted(settings, shape, machines, num_prompts=num_prompts)
    if settings.rollout.engine == "auto" and machines.on_gpu:
        engine, reason = predicted.config.rollout.engine, predicted.engine_reason
        taken = f"{engine}, if it is installed" if reason is None else f"{engine}, since {reason}"
        if reason is None and predicted.layout.rollout_nodes:
            taken = f"{engine}, as with `cohort launch slurm --rollout-nodes`; without it, training processes sample"
        notes.append(f"rollout.engine: auto is planned as {taken}")
    return predicted, notes


def _count_prompts(settings: Config, notes: list[str]) -> int | None:
    """Count the training rows: cheaply if they are those of a file, else as the run reads them; None if not known."""
    data = settings.data
    if data.path is not None and data.is_plain and (settings.eval is None or settings.eval.rows is None):
        return count_prompts(data.path)
    paths = [source.path for source in data.sources] or [data.path]
    if not all(path is not None and Path(path).exists() for path in paths):  # ids are not downloaded
        return None
    from cohort.data import read_training_rows
    from cohort.display import ProgressBar

    try:
        with ProgressBar("reading data") as progress:
            return len(read_training_rows(settings, on_progress=progress.data_progress).train)
    except UserError as error:
        notes.append(f"{error}; `cohort train` will not start")
        return None


def _print_comparison(rows: Sequence[Comparison], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for title in ("", "predicted", "measured", "measured / predicted"):
        table.add_column(title, justify="right" if title else "left")
    for row in rows:
        ratio = f"{row.measured / row.predicted:.2f}" if row.predicted else ""
        predicted = "" if row.predicted is None else digits(row.predicted, 3)
        table.add_row(f"{row.what}, {row.unit}", predicted, digits(row.measured, 3), ratio)
    Console().print(table)


def _answer(
    predicted: Plan, notes: list[str], *, max_: str | None, price: float | None
) -> tuple[dict[str, Any], list[Advice]]:
    """The plan as JSON with the results of --max and --price, and suggested changes."""
    advice = advise(predicted, by_cost=price is not None)
    answer: dict[str, Any] = {
        **predicted.as_json(),
        "advice": [{**asdict(line), "arguments": line.arguments} for line in advice],
    }
    if price is not None and predicted.num_steps is None:
        notes.append("--price: the number of steps is unknown; set train.steps")
    answer["notes"] = [*notes, *answer["notes"]]
    if max_ is not None:
        answer["max"], answer["max_problem"] = _largest(predicted, max_)
    if price is not None and "gpu_hours" in answer["timing"]:
        answer["cost"] = price * answer["timing"]["gpu_hours"]["value"]
    return answer, advice


def _largest(predicted: Plan, wanted: str) -> tuple[dict[str, str | int | None], str | None]:
    """Largest value that fits, and the reason if there is none."""
    for limit in get_args(Limit):
        if limit == wanted:
            found = largest(predicted, limit)
            return {limit: found}, explain_no_limit(predicted, limit) if found is None else None
    raise UserError(f"--max: {wanted!r} is unknown; use model, length or generations")


def _command(plan: Plan, arguments: str) -> str:
    """Command that starts the run."""
    nodes, per_node = plan.hardware.nodes, plan.hardware.gpus_per_node
    if nodes == 1:
        return f"cohort train {arguments}"
    sampling = plan.layout.rollout_nodes
    servers = f" --rollout-nodes {sampling}" if sampling else ""
    return f"cohort launch slurm {arguments} --nodes {nodes - sampling}{servers} --gpus-per-node {per_node} | sbatch"


def _print_plan(
    plan: Plan, advice: Sequence[Advice], answer: dict[str, Any], arguments: str, console: Console, *, why: bool
) -> None:
    """Print a plan: verdict, table, suggested changes and notes.

    Args:
        plan: the plan.
        advice: suggested changes.
        answer: the plan as JSON, with the answers to further options.
        arguments: the file and the overrides, as they are typed.
        console: where to print.
        why: also print where the numbers come from, and the memory by part.
    """

    def show(lines: Iterable[str]) -> None:
        for line in lines:
            console.print(line, highlight=False, soft_wrap=True)

    show(_verdict(plan, advice, answer, arguments))
    layout = Table(box=None, show_header=False, pad_edge=False)
    for name, value in _rows(plan, why=why):
        layout.add_row(name, value)
    console.print(layout)
    if why:
        console.print(_memory_table(plan))
        show(_memory_notes(plan))
    if advice:
        show(["\nwhat would fit:" if not plan.fits else "\nwhat would be faster:", *map(_line, advice)])
    for name, value in answer.get("max", {}).items():
        found = f"none: {answer['max_problem']}" if value is None else f"{value}{_LIMITS[name][1]}"
        show([escape(f"\n{_LIMITS[name][0]} that fits: {found}")])
    show(f"note: {escape(note)}" for note in answer["notes"])
    if not why:
        show(["[dim]--why: the origin of every number, and memory by part[/dim]"])


def _verdict(plan: Plan, advice: Sequence[Advice], answer: dict[str, Any], arguments: str) -> Iterator[str]:
    peak = f"{_gb(plan.memory.peak_bytes)} in {PHASES[plan.memory.peak_phase]}"
    if plan.fits:
        told = [f"{_rounded(plan.timing['step_s'].value)} s per step"] if plan.timing else []
        if "run_hours" in plan.timing:
            hours, gpu_hours = (_rounded(plan.timing[key].value) for key in ("run_hours", "gpu_hours"))
            told.append(f"{hours} h in all ({gpu_hours} GPU hours)")
        told += [f"costs {answer['cost']:.2f}"] if "cost" in answer else []
        yield f"[green]fits[/green]{_checkpointed(plan)}: {', '.join(told) or f'peak {peak}'}"
        yield escape(f"start it: {_command(plan, arguments)}")
    else:
        too_much = f"peak {peak}, {_gb(-plan.headroom_bytes)} too much"
        if plan.headroom_bytes >= 0:
            too_much = f"peak {peak}, and servers do not fit alongside it"
        yield f"[red]does not fit[/red]: {too_much}"
        if advice:
            yield escape(_way_out(plan, advice[0], arguments))
        else:
            also = "" if plan.config.rollout.uses_servers else f", or rollout.engine: {AutoRolloutConfig.prefers}"
            yield f"no known change makes it fit; try other GPUs or a smaller model{also}"
    shape, machines = plan.shape, plan.hardware
    yield (
        f"[bold]{shape.name}[/bold], {shape.num_parameters / 1e9:.2f} billion parameters, on {machines.num_gpus} x "
        f"{machines.gpu_name} with {_gb(machines.gpu_memory_bytes)} each\n"
    )


def _rounded(value: float) -> str:
    """A time with three digits. Below 0.01 it is mostly overhead, which is not predicted."""
    return digits(value, 3) if value >= 0.01 else "less than 0.01"


def _checkpointed(plan: Plan) -> str:
    """What `model.gradient_checkpointing: auto` had to choose for the run to fit; empty if it chose none."""
    if not plan.checkpointing_s:
        return ""
    kind = "selective" if plan.config.model.gradient_checkpointing == "selective" else "full"
    difference = "more" if plan.checkpointing_s > 0 else "less"
    return f" with {kind} checkpointing, {digits(abs(plan.checkpointing_s), 2)} s {difference}"


def _way_out(plan: Plan, advice: Advice, arguments: str) -> str:
    """Command of a run that fits, with its time relative to what the plan would take if it fitted."""
    changes = [text for text in advice.arguments if not text.startswith("--")]
    kept = [text for text in shlex.split(arguments) if text.partition("=")[0] not in advice.changes]
    command = _command(replan(plan, advice.changes), shlex.join([*kept, *changes]))
    time = ""
    if advice.step_s is not None and advice.saved_seconds is not None and plan.layout.problem is None:
        difference = f"{digits(abs(advice.saved_seconds), 2)} s {'less' if advice.saved_seconds > 0 else 'more'}"
        time = f", {digits(advice.step_s, 3)} s per step ({difference})"
    place = f" on {advice.changes['--gpus']} GPUs" if "--gpus" in advice.changes else ""
    return f"fits{place} with: {command}{time}"


def _line(advice: Advice) -> str:
    time = "time not predicted" if advice.step_s is None else f"{_rounded(advice.step_s)} s"
    gpus = f"{advice.layout} GPU{'s' * (advice.num_gpus > 1)}"
    return escape(f"  {time} on {gpus}: {advice.as_arguments()}  # {advice.costs}")


def _rows(plan: Plan, *, why: bool) -> Iterator[tuple[str, str]]:
    layout, micro_batches = plan.layout, plan.micro_batches
    prompts, updates = plan.config.train.prompts_per_step, plan.config.train.updates_per_rollout
    yield (
        "one step, over all processes",
        f"{prompts} prompts x {plan.config.rollout.num_generations} = {plan.completions_per_step} completions, "
        f"{updates} optimizer step{'s' * (updates > 1)}",
    )
    sampling = "the same" if layout.shared else str(layout.num_sampling or "external")
    yield "training / rollout GPUs", f"{layout.num_training} / {sampling} ({layout.reason})"
    if (lengths := plan.hardware.lengths) is not None:
        longest = "" if lengths.longest is None else f", longest {lengths.longest}"
        yield "expected tokens after a prompt", f"mean {lengths.mean}{longest} ({lengths.source})"
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
    if plan.chosen_checkpointing is not None:
        yield "model.gradient_checkpointing: auto", plan.chosen_checkpointing
    if plan.communication is not None:
        yield "communication between GPUs", plan.communication
    if plan.workload.critic is not None:
        critic = plan.workload.critic.shape
        yield "critic", f"{critic.num_parameters / 1e9:.2f} billion parameters ({critic.name})"
    if plan.steps_per_epoch is not None:
        yield "steps per epoch", f"{plan.steps_per_epoch:.4g} ({plan.num_prompts} prompts)"
    if plan.num_steps is not None:
        yield "steps, optimizer steps of the run", f"{plan.num_steps}, {plan.num_updates}"
    for name, number in plan.timing.items():
        if why or name in _PHASE_TIMES:
            origin = f"  [dim]{number.origin}: {number.how}[/dim]" if why else ""
            yield _LABELS[name], f"{digits(number.value, 3)}{origin}"
    if plan.timing:
        yield "the longer phase", _longer_phase(plan)
    memory, spare = plan.memory, f", {_gb(plan.headroom_bytes)} to spare" if plan.headroom_bytes >= 0 else ""
    yield "memory per process", f"{_gb(memory.peak_bytes)} in {PHASES[memory.peak_phase]}{spare}"
    parts = memory.phases[memory.peak_phase]
    largest_parts = sorted(parts, key=lambda part: -parts[part])[:4]
    yield "its largest parts", ", ".join(f"{part} {_gb(parts[part])}" for part in largest_parts)


def _longer_phase(plan: Plan) -> str:
    training, sampling, step = (plan.timing[name].value for name in ("training_s", "sampling_s", "step_s"))
    name = "training" if training > sampling else "sampling"
    return f"{name}, {max(training, sampling) / step:.0%} of the step" + (
        "; the other overlaps" if plan.config.rollout.samples_ahead else ""
    )


def _memory_table(plan: Plan) -> Table:
    memory = plan.memory
    table = Table(title="\nMemory of one training process, GB", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for phase in memory.phases:
        table.add_column(PHASES[phase], justify="right")
    table.add_column("")
    for part in dict.fromkeys(part for phase in memory.phases.values() for part in phase):
        sizes = (memory.phases[phase].get(part, 0) for phase in memory.phases)
        table.add_row(part, *map(_cell, sizes), f"[dim]{plan.memory_origins[part].origin}[/dim]")
    table.add_row("[bold]total[/bold]", *(f"[bold]{memory.total(phase) / 1e9:.1f}[/bold]" for phase in memory.phases))
    return table


def _memory_notes(plan: Plan) -> Iterator[str]:
    origins = plan.memory_origins
    if "framework" in origins:
        yield f"[dim]framework: {origins['framework'].how}[/dim]"
    kept = checkpointed_activations(plan.workload)
    yield (
        f"[dim]activations of the same micro-batch: {_gb(kept[False])} without checkpointing, {_gb(kept['selective'])} "
        f"with selective, {_gb(kept[True])} with true (model.gradient_checkpointing)[/dim]"
    )
    there = origins["there"]
    yield f"[dim]memory of a GPU: {_gb(plan.hardware.gpu_memory_bytes)}, {there.origin}: {there.how}[/dim]"
    trl = _gb(plan.trl_bytes)
    yield f"[dim]the same completions padded, with full logits (TRL's default): {trl}, derived[/dim]"


def _cell(size: int) -> str:
    """Format a cell of the table in GB."""
    return "" if size == 0 else "<0.1" if size < 50_000_000 else f"{size / 1e9:.1f}"


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
