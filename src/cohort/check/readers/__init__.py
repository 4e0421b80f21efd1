"""One module for each format; each says what a file holds, or that it is something else."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cohort.check.launch import Launch
from cohort.check.readers import cohort_yaml, swift, trl_python, trl_shell, trl_yaml, verl
from cohort.check.readers.files import read_text
from cohort.check.readers.launcher import read_launcher
from cohort.check.readers.shell import parse_shell
from cohort.check.readers.slurm import on_job, read_job
from cohort.errors import UserError

__all__ = ["FORMATS", "read_launch"]

FORMATS = (
    "a Cohort configuration (model, data, rewards), a TRL or Open-R1 recipe (YAML), Python with GRPOConfig(...), a "
    "shell script or YAML of ms-swift (--rlhf_type grpo), a shell script or YAML of verl (actor_rollout_ref), a shell "
    "script that starts GRPO with TRL"
)
_Reader = Callable[[Path, str], Launch | None]
_YAML: tuple[_Reader, ...] = (cohort_yaml.read, verl.read_yaml, swift.read_yaml, trl_yaml.read)
_SHELL: tuple[_Reader, ...] = (verl.read_shell, swift.read_shell, trl_shell.read)


def read_launch(path: Path, *, launched_with: str | None = None) -> Launch:
    """What a file says. `launched_with` is the command that starts it, where the file does not hold it.

    Raises:
        UserError: the file cannot be read, or is none of the formats.
    """
    text = read_text(path)
    try:
        launch = _read(path, text)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
    except RecursionError:
        raise UserError(f"{path}: nested too deeply") from None
    return _launched(launch, launched_with) if launched_with else launch


def _read(path: Path, text: str) -> Launch:
    for reader in _readers(path, text):
        launch = reader(path, text)
        if launch is not None:
            return on_job(launch, read_job(text)) if launch.form == "shell" else launch
    if path.suffix in (".yaml", ".yml"):
        tree = trl_yaml.cached_tree(text)
        if tree and {"distributed_type", "compute_environment"} & set(tree.top):
            raise UserError(
                f"{path}: a configuration of accelerate, which trains nothing by itself; give it to the recipe's "
                f"check: "
                f'--launch "accelerate launch --config_file {path}"'
            )
        if tree and {"model_name_or_path", "per_device_train_batch_size"} & set(tree.top):
            raise UserError(f"{path}: a recipe without any key of GRPO (num_generations, reward_funcs, ...)")
    if _readers(path, text) is _SHELL and trl_shell.awaits_recipe(text):
        raise UserError(
            f"{path}: trains what its own arguments name; check that recipe, and say how it is started: cohort check "
            f'recipes/MODEL/grpo/config_NAME.yaml --launch "sbatch --nodes=2 {path} --accelerator zero3"'
        )
    raise UserError(f"{path}: none of the formats that are known: {FORMATS}")


def _readers(path: Path, text: str) -> tuple[_Reader, ...]:
    suffix = path.suffix.lower()
    if suffix == ".py":
        return (trl_python.read,)
    if suffix in (".sh", ".bash", ".slurm", ".sbatch", ".zsh") or text.startswith("#!"):
        return _SHELL
    return _YAML


def _launched(launch: Launch, command: str) -> Launch:
    """The same run, started by this command."""
    commands = parse_shell(command)
    if len(commands) != 1:
        raise UserError(
            f"--launch {command!r}: must be one command, such as 'accelerate launch --num_processes 7' or "
            f"'sbatch --nodes=2 slurm/train.slurm'"
        )
    vllm = launch.settings.get("use_vllm")
    uses_vllm = str(vllm.value).lower() in ("true", "1", "yes") if vllm else False
    launcher = read_launcher(commands[0], "--launch", Path.cwd(), uses_vllm=uses_vllm)
    if launcher.processes is None and launcher.gpus is None and not launcher.findings:
        raise UserError(
            f"--launch {command!r}: says neither processes nor GPUs; accelerate launch (--num_processes, "
            f"--config_file), torchrun (--nproc_per_node, --nnodes), sbatch (--nodes), NPROC_PER_NODE=N and "
            f"CUDA_VISIBLE_DEVICES are read"
        )
    return replace(
        launch,
        others=tuple(_launched(other, command) for other in launch.others),
        processes=launcher.processes or launch.processes,
        processes_per_node=launcher.per_node if launcher.processes else launch.processes_per_node,
        training_gpus=launcher.gpus or launch.training_gpus,
        sharding=launcher.sharding or launch.sharding,
        unread=(*launch.unread, *launcher.unread),
        findings=(*launch.findings, *launcher.findings),
    )
