"""ms-swift: `swift rlhf --rlhf_type grpo` and `megatron rlhf` in shell scripts, and the same keys as YAML."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cohort.check.launch import Launch, Said, Unread
from cohort.check.readers.files import read_text
from cohort.check.readers.launcher import read_launcher, sharding_of
from cohort.check.readers.options import find_command, gpus_of, parse_options
from cohort.check.readers.shell import Command, parse_shell
from cohort.check.readers.shell_words import why_unread
from cohort.check.readers.trl_yaml import cached_tree, duplicates, nested_once
from cohort.errors import UserError

MEGATRON = "megatron"  # a setting of ours: whether the Megatron rules hold


def read_shell(path: Path, text: str) -> Launch | None:
    """The GRPO commands of a script, or None where there is none."""
    commands = parse_shell(text)
    starts = find_command(commands, ("swift", "rlhf"), ("megatron", "rlhf"), ("rlhf.py",))
    runs = [command for command in starts if _is_grpo(command, path.parent)]
    if not runs:
        return None
    first, *others = (_launch_of(run, commands, path.parent) for run in runs)
    return replace(first, others=tuple(others))


def _launch_of(run: Command, commands: Sequence[Command], folder: Path) -> Launch:
    where = f"the command on line {run.line}"
    launcher = read_launcher(run, where, folder)
    options = parse_options(launcher.script or run.words, where)
    settings = {**_config_settings(run, folder), **options.settings}
    if any(word.text.rsplit("/", 1)[-1] == "megatron" for word in run.words):
        settings[MEGATRON] = Said(True, where)
    servers = find_command(commands, ("swift", "rollout"))
    hints = [name for name in ("NPROC_PER_NODE", "NNODES") if name in run.env and run.env[name].missing]
    # Without NPROC_PER_NODE ms-swift starts no torchrun: one process, with all visible GPUs.
    alone = launcher.processes is None and not hints and MEGATRON not in settings
    return Launch(
        framework="ms-swift",
        form="shell",
        reason=f"a shell script that starts GRPO with ms-swift on line {run.line}",
        settings=settings,
        unread=(
            *options.unread,
            *launcher.unread,
            *(Unread(name, where, why_unread(run.env[name].missing)) for name in hints),
        ),
        processes=Said(1, f"{where}, which has no NPROC_PER_NODE") if alone else launcher.processes,
        processes_per_node=launcher.per_node,
        sharding=sharding_of(settings, folder),
        training_gpus=launcher.gpus,
        server_gpus=gpus_of(servers[0].env) if servers else None,
        server=parse_options(servers[0].words, f"line {servers[0].line}").settings if servers else {},
    )


def _is_grpo(command: Command, folder: Path) -> bool:
    settings = {**_config_settings(command, folder), **parse_options(command.words, "").settings}
    return "rlhf_type" in settings and settings["rlhf_type"].value == "grpo"


def _config_settings(command: Command, folder: Path) -> dict[str, Said]:
    """The settings of the YAML or JSON file that may be the first argument, or that of --config."""
    for word in command.words:
        path = folder / word.text
        if word.text.endswith((".yaml", ".yml", ".json")) and not word.missing and path.is_file():
            try:
                launch = read_yaml(path, read_text(path))
            except (UserError, ValueError):
                continue  # deepspeed's own files are JSON too
            return dict(launch.settings) if launch else {}
    return {}


def read_yaml(path: Path, text: str) -> Launch | None:
    """A YAML file with ms-swift's keys, flat or with its groups for Ray, or None where it is none.

    Raises:
        ValueError: not valid YAML.
    """
    tree = cached_tree(text)
    if tree is None or str(tree.values.get("rlhf_type", Said("", "")).value) != "grpo":
        return None
    on_ray = "train.gpus" in tree.values
    groups = {"train", "rollout", "teacher"}
    settings = nested_once(tree)
    if on_ray:
        settings = {key: said for key, said in settings.items() if key not in groups}
        for key, said in tree.values.items():  # the training group's own keys stand before the shared ones
            group, _, rest = key.partition(".")
            if group == "train":
                settings[rest] = said
            elif group in groups:
                settings[key] = said
        settings[MEGATRON] = Said(True, "train.gpus")
    processes = tree.values.get("train.gpus") or tree.values.get("ENV.NPROC_PER_NODE")
    gpus = tree.values.get("ENV.CUDA_VISIBLE_DEVICES")
    return Launch(
        framework="ms-swift",
        form="yaml",
        reason="YAML with rlhf_type: grpo",
        settings={key: said for key, said in settings.items() if key not in ("gpus", "ENV")},
        sharding=sharding_of(settings, path.parent),
        processes=Said(int(processes.value), processes.where)
        if processes and str(processes.value).isdecimal()
        else None,
        training_gpus=tuple(str(gpus.value).split(",")) if gpus else None,
        findings=duplicates(tree),
    )
