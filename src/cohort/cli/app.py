"""The `cohort` command and its subcommands train, serve, launch and demo."""

import faulthandler
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from cohort import __version__
from cohort.cli.algorithms import algorithms
from cohort.cli.check import check, convert
from cohort.cli.command import Commands, Debug, Overrides, is_rank, report_failures, set_run
from cohort.cli.doctor import doctor
from cohort.cli.evaluate import evaluate
from cohort.cli.init import init
from cohort.cli.merge import merge
from cohort.cli.plan import plan
from cohort.cli.reward import reward
from cohort.cli.rollout import rollout
from cohort.cli.verify import verify
from cohort.cli.view import view
from cohort.config import load_config
from cohort.errors import UserError
from cohort.processes.this_process import print_loading_notice
from cohort.run.provenance import versions

app = typer.Typer(
    name="cohort",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_versions(wanted: bool) -> None:
    if wanted:
        installed = versions()
        others = [
            f"{'Python' if name == 'python' else name} {installed[name]}" for name in installed if name != "cohort"
        ]
        typer.echo(f"cohort {__version__} ({', '.join(others)})")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the versions and exit.", is_eager=True, callback=_print_versions),
    ] = False,
) -> None:
    """Train language models with GRPO and related algorithms, with any batch shape and number of GPUs."""


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="YAML file; docs/config.md lists every key.")],
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Fail unless run.dir already holds this run.")] = False,
    view: Annotated[bool, typer.Option("--view", help="Start the page that shows the run, as run.view: true.")] = False,
    debug: Debug = False,
) -> None:
    """Train a model. Run the same command again to resume from the last checkpoint.

    On several machines, torchrun starts it: torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d
    --rdzv-endpoint HOST:PORT -m cohort train CONFIG.
    """
    settings = load_config(config, [*(overrides or ()), *(["run.view=true"] if view else [])])
    set_run(settings)
    if is_rank():
        from cohort.launch import train_rank

        train_rank(settings, resume=resume)
        return
    print_loading_notice()
    from cohort.display.console import SafeStdout
    from cohort.launch import train as run_training

    result = run_training(settings, resume=resume)
    print(f"model:   {result.final_dir}\nmetrics: {result.run_dir / 'metrics.jsonl'}", file=SafeStdout(), flush=True)


app.command("eval")(evaluate)


@app.command()
def serve(
    config: Annotated[Path, typer.Argument(help="YAML file of the run, with rollout.engine: vllm.")],
    overrides: Overrides = None,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on; 0.0.0.0: all interfaces. Clients need the secret in rollout.secret_file, which "
            "HTTP does not encrypt: use addresses other than 127.0.0.1 only on trusted networks."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    print_only: Annotated[
        bool, typer.Option("--print-only", help="Print the shell command without running it.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Run a vLLM server for a training run on another machine, which lists it in rollout.urls."""
    # for the run, which reads the same file; this server has one of these addresses
    settings = load_config(config, overrides or (), without=["rollout.urls", "rollout.api_key_env"])
    print_loading_notice()
    from cohort.launch.serve import as_shell, serve_command
    from cohort.launch.serve import serve as run_server

    if print_only:
        typer.echo(as_shell(*serve_command(settings, host=host, port=port)))
    else:
        run_server(settings, host=host, port=port)


launch = typer.Typer(
    help="Start a script on several GPUs of this machine, or a run on a cluster.", no_args_is_help=True
)
app.add_typer(launch, name="launch")


@launch.command(context_settings={"allow_interspersed_args": False})  # options after the script are the script's
def local(
    script: Annotated[Path, typer.Argument(help="Python script that calls `trainer.train()` of a `cohort.Trainer`.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGUMENT]...", help="Of the script.")] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Training processes. Default: one per GPU; 1 without GPUs.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Run a script on several training processes, as torchrun does. Run the same command again to resume."""
    print_loading_notice()
    import torch

    from cohort.launch.local import run_script

    run_script(script, arguments or (), num_processes=processes or max(1, torch.cuda.device_count()))


@launch.command()
def slurm(
    config: Annotated[Path, typer.Argument(help="YAML file, on a file system that all nodes share.")],
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(min=1, help="Training nodes.")] = 1,
    min_nodes: Annotated[
        int | None, typer.Option(min=1, help="Keep running with at least this many nodes. Default: all.")
    ] = None,
    rollout_nodes: Annotated[int, typer.Option(min=0, help="Additional nodes for vLLM servers.")] = 0,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=0, help="GPUs per node. Default: 8, or 0 with hardware.device: cpu.")
    ] = None,
    time: Annotated[str, typer.Option(help="Time limit of the job.")] = "24:00:00",
    partition: Annotated[str | None, typer.Option(help="Slurm partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm account.")] = None,
    job_name: Annotated[str, typer.Option(help="Slurm job name.")] = "cohort",
    max_restarts: Annotated[int, typer.Option(min=0, help="Maximum restarts of the processes within the job.")] = 3,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Rendezvous port.")] = 29500,
    setup: Annotated[
        Path | None, typer.Option(help="File with bash that the script runs first, such as `module load cuda`.")
    ] = None,
    container: Annotated[
        str | None,
        typer.Option(
            help="Image with Cohort, in which everything runs: a .sif file or an address with :// by apptainer, others "
            "by Pyxis."
        ),
    ] = None,
    mount: Annotated[
        list[str] | None,
        typer.Option(
            help="Folder for the container, as /HERE or /HERE:/THERE; repeatable. The working directory and the "
            "folders of CONFIG and run.dir are there."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Write the script to this file; -: print it.")] = Path("-"),
    debug: Debug = False,
) -> None:
    """Write an sbatch script for a run on one node or several. Words after -- are options of sbatch, such as --qos."""
    given = dict(locals())
    for name in ("config", "overrides", "mount", "out", "debug"):
        del given[name]
    from cohort.launch.slurm import SlurmOptions, slurm_script

    words = overrides or []
    first_option = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    overrides, sbatch = words[:first_option], words[first_option:]
    settings = load_config(config, overrides)
    options = SlurmOptions(**given, mounts=mount or (), sbatch=sbatch)
    script = slurm_script(settings, config_path=config, overrides=overrides, options=options)
    if str(out) == "-":
        typer.echo(script, nl=False)
        return
    try:
        out.write_text(script, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out: {str(out)!r} cannot be written: {error.strerror}") from error
    typer.echo(f"written; submit with: sbatch {shlex.quote(str(out))}")


@app.command()
def demo(
    task: Annotated[
        str, typer.Option(help="words: word problems; tools: questions that need a tool; code: functions.")
    ] = "words",
    seed: Annotated[int, typer.Option(help="Random seed of data order and sampling.")] = 0,
    processes: Annotated[int, typer.Option(help="Training processes.")] = 1,
    engine: Annotated[str, typer.Option(help="Rollout engine: local, or vllm from $COHORT_VLLM_PYTHON.")] = "local",
    out: Annotated[
        Path | None, typer.Option(help="Run folder. Default: runs/demo, or the next free runs/demo-N.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Train a small model on word problems, tools or code with GRPO: a minute or two, no GPU, no downloads."""
    print_loading_notice()
    from cohort.demo.run import run_demo

    run_demo(task=task, seed=seed, out=out, processes=processes, engine=engine)


app.command()(init)
app.command()(algorithms)
app.command()(plan)
app.command()(rollout)
app.command()(doctor)
app.command()(check)
app.command()(convert)
app.command()(merge)
app.command()(reward)
app.command()(verify)
app.command()(view)


def main() -> None:
    """Run a command.

    Exit codes: 0 success, 1 the run failed, 2 user error, 70 internal error, 128 + N killed by signal N.
    """
    if sys.stderr is sys.__stderr__ and sys.stderr is not None:
        faulthandler.enable()  # print a traceback on segfaults
    with report_failures():
        app()
