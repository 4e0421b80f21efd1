"""Readers of launch files."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from cohort.check.launch import Launch
from cohort.check.readers import others, swift, trl, trl_python, verl
from cohort.check.readers.files import notebook_code, read_text
from cohort.check.readers.launcher import find_server, on_job, read_command, read_job
from cohort.check.readers.shell import Command, parse_shell
from cohort.check.readers.yaml_tree import YamlTree, read_yaml_tree
from cohort.errors import UserError

__all__ = ["FORMATS", "read_launch"]

FORMATS = (
    "a Cohort configuration (model, data, rewards), a TRL or Open-R1 recipe (YAML), Python with GRPOConfig(...), a "
    "shell script or YAML of ms-swift (--rlhf_type grpo), a shell script or YAML of verl (actor_rollout_ref), a shell "
    "script that starts GRPO with TRL; prime-rl and OpenRLHF are recognized"
)
_MOST_RUNS = 32  # of one file
_YAML: tuple[Callable[[Path, str, YamlTree], Launch | None], ...] = (
    others.read_cohort,
    verl.read_yaml,
    swift.read_yaml,
    trl.read_yaml,
)
_SHELL: tuple[Callable[[Path, str, Command, Command | None], Launch | None], ...] = (
    verl.read_shell,
    swift.read_shell,
    others.read_shell,
    trl.read_shell,
)


def read_launch(path: Path, *, launched_with: str | None = None) -> Launch:
    """Read the runs of a file. `launched_with` is the launch command, if the file does not contain it.

    Raises:
        UserError: the file cannot be read, or has an unknown format.
    """
    text = read_text(path)
    try:
        text = notebook_code(text) if path.suffix == ".ipynb" else text
        command = _launch_command(launched_with) if launched_with else None
        launches = list(islice(_read(path, text, command), _MOST_RUNS + 1))
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
    except RecursionError:
        raise UserError(f"{path}: nested too deeply") from None
    if len(launches) > _MOST_RUNS:
        raise UserError(f"{path}: starts more than {_MOST_RUNS} runs; check them in several files")
    if not launches:
        raise UserError(f"{path}: none of the formats that are known: {FORMATS}")
    if command is not None and path.suffix not in (".py", ".ipynb"):
        launches = [_launched(launch, command) for launch in launches]
    return replace(launches[0], others=tuple(launches[1:]))


def _read(path: Path, text: str, command: Command | None) -> Iterator[Launch]:
    """Yield every run of a file."""
    suffix = path.suffix.lower()
    if suffix in (".py", ".ipynb"):
        yield from trl_python.read(path, text, command)
    elif suffix == ".toml":
        yield from filter(None, [others.read_toml(path, text)])
    elif suffix in (".sh", ".bash", ".slurm", ".sbatch", ".zsh") or text.startswith("#!"):
        job = read_job(text, path.name)
        commands = parse_shell(text, path.name, known=job.variables())
        server = find_server(commands)
        for found in commands:
            runs = filter(None, (read(path, text, found, server) for read in _SHELL))
            yield from (on_job(run, job) for run in islice(runs, 1))
    elif tree := read_yaml_tree(text, path.name):
        yield from islice(filter(None, (read(path, text, tree) for read in _YAML)), 1)


def _launch_command(text: str) -> Command:
    commands = parse_shell(text, "--launch")
    if len(commands) != 1:
        raise UserError(
            f"--launch {text!r}: must be one command, such as 'accelerate launch --num_processes 7' or "
            f"'sbatch --nodes=2 slurm/train.slurm'"
        )
    return commands[0]


def _launched(launch: Launch, command: Command) -> Launch:
    """Apply the processes and options of a launch command to a run."""
    if launch.not_checked is not None:
        return launch
    launched = read_command(command, launch.framework, Path.cwd())
    if command.has("sbatch"):
        return trl.open_r1_nodes(replace(launch, sharding=launched.sharding or launch.sharding), command)
    if not (launched.processes or launched.training_gpus or launched.unread or command.has("trl", "grpo")):
        raise UserError(
            f"--launch {' '.join(word.text for word in command.words)!r}: says neither processes nor GPUs; accelerate "
            f"launch (--num_processes, --config_file), torchrun (--nproc_per_node, --nnodes), sbatch (--nodes), "
            f"NPROC_PER_NODE=N and CUDA_VISIBLE_DEVICES are read"
        )
    trl_processes = trl.starter_processes(launch.settings) if command.has("trl", "grpo") else None
    return replace(
        launch,
        settings={**launch.settings, **{key: said for key, said in launched.settings.items() if key != "config"}},
        processes=launched.processes or trl_processes or launch.processes,
        processes_per_node=launched.processes_per_node if launched.processes else launch.processes_per_node,
        training_gpus=launched.training_gpus or launch.training_gpus,
        sharding=launched.sharding or launch.sharding,
        unread=(*launch.unread, *launched.unread),
    )
