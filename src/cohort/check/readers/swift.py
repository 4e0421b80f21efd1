"""ms-swift: `swift rlhf --rlhf_type grpo` in shell scripts, and the same keys as YAML."""

import contextlib
from dataclasses import replace
from pathlib import Path

from cohort.check.launch import Launch, Said, Unread
from cohort.check.readers.files import find_text
from cohort.check.readers.launcher import read_command, read_sharding
from cohort.check.readers.shell import Command
from cohort.check.readers.yaml_tree import YamlTree, read_yaml_tree
from cohort.errors import UserError

MEGATRON = "Megatron is not checked"
_RAY = "ms-swift on Ray, which trains with Megatron, is not checked"


def read_shell(path: Path, text: str, command: Command, server: Command | None) -> Launch | None:
    """What a command trains with ms-swift's GRPO, with its configuration file, or None where it does not."""
    on_megatron = command.has("megatron", "rlhf")
    if not (on_megatron or command.has("swift", "rlhf") or any(word.name == "rlhf.py" for word in command.words)):
        return None
    launch = read_command(command, "ms-swift", path.parent, server)
    config = _configuration(command, path.parent)
    unread = [replace(entry, key="(recipe)") if entry.key == "config" else entry for entry in launch.unread]
    if config is not None:
        launch = replace(launch, settings={**config.settings, **launch.settings}, not_checked=config.not_checked)
    elif "config" in launch.settings:
        unread.append(Unread("(recipe)", launch.settings["config"].where, "the configuration file cannot be read"))
    kind = launch.settings.get("rlhf_type")
    if (kind.value != "grpo") if kind else not any(entry.key == "(recipe)" for entry in unread):
        return None
    settings = {key: said for key, said in launch.settings.items() if key != "config"}
    sharding = read_sharding(settings, path.parent)
    not_checked = launch.not_checked or (MEGATRON if on_megatron else None)
    return replace(launch, settings=settings, unread=tuple(unread), sharding=sharding, not_checked=not_checked)


def _configuration(command: Command, folder: Path) -> Launch | None:
    """What the file says that `--config` names, or the first argument. DeepSpeed's own files are JSON too."""
    for word in command.words:
        if word.text.endswith((".yaml", ".yml", ".json")):
            with contextlib.suppress(UserError, ValueError):
                path, text = find_text(word.text.rpartition("=")[2], folder)
                tree = read_yaml_tree(text, path.name)
                found = read_yaml(path, text, tree) if tree else None
                if found is not None:
                    return found
    return None


def read_yaml(path: Path, text: str, tree: YamlTree) -> Launch | None:
    """A YAML file with ms-swift's keys, or None where it is none."""
    if str(tree.values.get("rlhf_type", Said("", "")).value) != "grpo":
        return None
    settings = {key: said for key, said in tree.nested_once().items() if key not in ("gpus", "ENV")}
    processes = tree.values.get("ENV.NPROC_PER_NODE", Said("", ""))
    gpus = tree.values.get("ENV.CUDA_VISIBLE_DEVICES")
    return Launch(
        framework="ms-swift",
        form="yaml",
        reason="YAML with rlhf_type: grpo",
        settings=settings,
        not_checked=_RAY if "train.gpus" in tree.values else None,
        sharding=read_sharding(settings, path.parent),
        processes=replace(processes, value=int(processes.value)) if str(processes.value).isdecimal() else None,
        training_gpus=tuple(str(gpus.value).split(",")) if gpus else None,
        findings=tree.duplicates(),
    )
