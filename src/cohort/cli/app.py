"""The `cohort` command and its subcommands train, eval, view, serve, launch and demo."""

import os
import sys
import tempfile
import traceback
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

from cohort import __version__
from cohort.cli.algorithms import algorithms
from cohort.cli.check import check, convert
from cohort.cli.crash_report import report_crash, set_run_dir
from cohort.cli.eval_config import eval_config
from cohort.cli.merge import merge
from cohort.cli.options import Debug, Overrides
from cohort.cli.plan import plan
from cohort.cli.reward import reward
from cohort.cli.rollout import rollout
from cohort.cli.verify import verify
from cohort.cli.view import view
from cohort.config import load_config
from cohort.errors import TrainingError, UserError
from cohort.processes.this_process import print_loading_notice
from cohort.ranks.stopping import dedicate_process
from cohort.run.provenance import untested_versions, versions


class _Commands(TyperGroup):
    """Run a command and turn expected exceptions into a message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command. Exit codes: 1 the run failed, 2 user error, 130 interrupted before the run began."""
        try:
            return super().invoke(ctx)
        except (UserError, TrainingError) as error:
            if "--debug" in sys.argv:
                traceback.print_exc()
            else:
                # launchers tell a rank that caused a failure from one that noticed it by the name
                name = f"{type(error).__name__}: " if _is_rank() and isinstance(error, TrainingError) else ""
                typer.echo("\n".join([f"error: {name}{error}", *untested_versions()]), err=True)
            raise SystemExit(2 if isinstance(error, UserError) else 1) from None
        except OSError as error:
            if "--debug" in sys.argv or (message := _describe_place(error)) is None:
                raise
            typer.echo(f"error: {message}", err=True)
            raise SystemExit(2) from None
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise SystemExit(130) from None


def _is_rank() -> bool:
    """Whether this process is a rank that torchrun or `cohort train` started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _describe_place(error: OSError) -> str | None:
    """Say what is wrong with the files and folders here; None if an error has another cause."""
    if isinstance(error, PermissionError) and error.filename is not None:
        return f"{error.filename}: permission denied; give a path that this user may use, or change its permissions"
    try:
        tempfile.gettempdir()
    except FileNotFoundError as none:
        if str(error) == str(none):
            return "no folder for temporary files can be written to; set TMPDIR to one that can"
    return None


class _OutputLostError(OSError):
    """Writing a command's result to standard output failed."""


class _Output:
    """Standard output whose write errors have their own exception type, unlike those of files."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> Any:
        try:
            return self._stream.write(text)
        except OSError as error:
            raise _OutputLostError(*error.args) from error

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            raise _OutputLostError(*error.args) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


app = typer.Typer(
    name="cohort",
    cls=_Commands,
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
    set_run_dir(Path(settings.run.dir))
    if _is_rank():
        from cohort.launch import train_rank

        train_rank(settings, resume=resume)
        return
    print_loading_notice()
    from cohort.display.console import SafeStdout
    from cohort.launch import train as run_training

    result = run_training(settings, resume=resume)
    print(f"model:   {result.final_dir}\nmetrics: {result.run_dir / 'metrics.jsonl'}", file=SafeStdout(), flush=True)


@app.command("eval")
def evaluate(
    model: Annotated[str, typer.Argument(help="Model folder, Hugging Face id, or folder of a finished run.")],
    data: Annotated[
        str | None,
        typer.Option(help="JSONL, JSON, Parquet or CSV file, folder, or `datasets` id. Default for a run: its own."),
    ] = None,
    reward: Annotated[
        list[str] | None,
        typer.Option(help="Reward as in `rewards.use`; the first one defines success. Default for a run: its own."),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Prompt column. Default: prompt.")] = None,
    split: Annotated[str | None, typer.Option(help="Split of a folder or dataset id. Default: test.")] = None,
    system_prompt: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    chat_template: Annotated[
        bool | None,
        typer.Option("--chat-template/--no-chat-template", help="Render prompts with the model's chat template."),
    ] = None,
    num_samples: Annotated[int | None, typer.Option(help="k completions per prompt, for mean@k and pass@k.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; 0 is greedy. Default: 0, or 0.6 for k > 1.")
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling; 1 (default): off.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Top-k sampling; 0 (default): off.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop string, which ends a completion. Default for a run: its own.")
    ] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(help="Longest prompt. Default: 512.")] = None,
    max_completion_tokens: Annotated[int | None, typer.Option(help="Longest completion. Default: 256.")] = None,
    max_prompts: Annotated[int | None, typer.Option(help="Evaluate the first N prompts only.")] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed. Default: 0.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    reward_args: Annotated[str | None, typer.Option(help="Keyword arguments of the first reward, as YAML.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write completions to this Parquet file.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the metrics as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Evaluate a model on a dataset: accuracy, mean@k, pass@k. A run is evaluated with its own settings."""
    given = {name: value for name, value in locals().items() if name not in ("model", "out", "json_", "debug")}
    config = eval_config(model, given)
    print_loading_notice()
    from cohort.cli.evaluate import run_eval

    run_eval(config, out=out, as_json=json_)


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
    # rollout.urls is for the run, which reads the same file; this server has one of these addresses.
    settings = load_config(config, overrides or (), without=["rollout.urls"])
    print_loading_notice()
    from cohort.launch.serve import as_shell, serve_command
    from cohort.launch.serve import serve as run_server

    if print_only:
        typer.echo(as_shell(*serve_command(settings, host=host, port=port)))
    else:
        run_server(settings, host=host, port=port)


launch = typer.Typer(help="Run on a cluster.", no_args_is_help=True)
app.add_typer(launch, name="launch")


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
    out: Annotated[Path, typer.Option(help="Write the script to this file; -: print it.")] = Path("-"),
    debug: Debug = False,
) -> None:
    """Write an sbatch script for a multi-node run."""
    given = {name: value for name, value in locals().items() if name not in ("config", "overrides", "out", "debug")}
    from cohort.launch.slurm import SlurmOptions, slurm_script

    settings = load_config(config, overrides or ())
    script = slurm_script(settings, config_path=config, overrides=overrides or (), options=SlurmOptions(**given))
    if str(out) == "-":
        typer.echo(script, nl=False)
        return
    try:
        out.write_text(script, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out: {str(out)!r} cannot be written: {error.strerror}") from error
    typer.echo(f"written; submit with: sbatch {out}")


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


app.command()(algorithms)
app.command()(plan)
app.command()(rollout)
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
    dedicate_process()
    output: Any = None if sys.stdout is None else _Output(sys.stdout)  # None: closed
    try:
        with redirect_stdout(output), report_crash(_OutputLostError):
            app()
    except _OutputLostError as error:
        print(f"error: standard output: {error.strerror}", file=sys.stderr)
        raise SystemExit(1) from None
