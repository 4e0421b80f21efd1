"""ms-swift: `swift rlhf --rlhf_type grpo` in shell scripts, and the same keys as YAML."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from cohort.check.launch import Launch, Setting
from cohort.check.readers.launcher import read_command, read_sharding, with_recipe
from cohort.check.readers.shell import Command
from cohort.check.readers.yaml_tree import YamlTree

MEGATRON = "Megatron is not checked"
_RAY = "ms-swift on Ray, which trains with Megatron, is not checked"


def read_shell(path: Path, text: str, command: Command, server: Command | None) -> Launch | None:
    """Read a command that trains with ms-swift's GRPO, and its configuration file; None for any other command."""
    on_megatron = command.has("megatron", "rlhf")
    if not (on_megatron or command.has("swift", "rlhf") or any(word.name == "rlhf.py" for word in command.words)):
        return None
    launch = read_command(command, "ms-swift", path.parent, server)
    for word, after in pairwise(command.words):
        if word.name in ("rlhf", "rlhf.py") and after.text.endswith((".yaml", ".yml", ".json")):
            launch = replace(launch, settings={"config": Setting(after.text, after.where), **launch.settings})
    launch = with_recipe(launch, path.parent)
    kind = launch.settings.get("rlhf_type")
    if (kind.value != "grpo") if kind else not any(entry.key == "(recipe)" for entry in launch.unread):
        return None
    return replace(_checked(launch), not_checked=MEGATRON) if on_megatron else _checked(launch)


def _checked(launch: Launch) -> Launch:
    """Drop sections that are not training settings. Ray configurations are not checked."""
    train = launch.settings.get("train")
    on_ray = train is not None and isinstance(train.value, dict) and "gpus" in train.value
    settings = {key: said for key, said in launch.settings.items() if key not in ("gpus", "ENV")}
    return replace(launch, settings=settings, not_checked=_RAY if on_ray else None)


def read_yaml(path: Path, text: str, tree: YamlTree) -> Launch | None:
    """Read a YAML file with ms-swift's keys; None for any other file."""
    if str(tree.values.get("rlhf_type", Setting("", "")).value) != "grpo":
        return None
    settings = tree.nested_once()
    processes = tree.values.get("ENV.NPROC_PER_NODE", Setting("", ""))
    gpus = tree.values.get("ENV.CUDA_VISIBLE_DEVICES")
    launch = Launch(
        framework="ms-swift",
        form="yaml",
        reason="YAML with rlhf_type: grpo",
        settings=settings,
        sharding=read_sharding(settings, path.parent),
        processes=replace(processes, value=int(processes.value)) if str(processes.value).isdecimal() else None,
        training_gpus=tuple(str(gpus.value).split(",")) if gpus else None,
        findings=tree.duplicates(),
    )
    return _checked(launch)
