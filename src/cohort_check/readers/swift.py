"""ms-swift: `swift rlhf --rlhf_type grpo` in shell scripts, and the same keys as YAML."""

from dataclasses import replace
from pathlib import Path

from cohort_check.launch import Launch, Unread
from cohort_check.readers.files import YamlTree, count_of
from cohort_check.readers.launcher import read_command, with_recipe
from cohort_check.readers.shell import Command

MEGATRON = "Megatron"
_RAY = "ms-swift on Ray, which trains with Megatron"
_ELSEWHERE = Unread("(recipe)", "", "the command names no rlhf_type; check the configuration file that it names")


def read_shell(path: Path, text: str, command: Command, server: Command | None) -> Launch | None:
    """Read a command that trains with ms-swift's GRPO; None for any other command."""
    on_megatron = command.has("megatron", "rlhf") or command.has("swift.cli._megatron.rlhf")
    module = {"rlhf.py", "swift.cli.rlhf", "--rlhf_type", "--rlhf_type=grpo"} & {word.name for word in command.words}
    if not (on_megatron or command.has("swift", "rlhf") or module):
        return None
    launch = with_recipe(read_command(command, "ms-swift", path.parent, server), path.parent)
    kind = launch.settings.get("rlhf_type")
    if kind is None:
        launch = replace(launch, unread=(*launch.unread, replace(_ELSEWHERE, where=command.where)))
    elif kind.value != "grpo":
        return None
    return replace(launch, not_checked=MEGATRON) if on_megatron else launch


def read_yaml(path: Path, text: str, tree: YamlTree) -> Launch | None:
    """Read a YAML file with ms-swift's keys; None for any other file."""
    if "rlhf_type" not in tree.values or tree.values["rlhf_type"].value != "grpo":
        return None
    gpus = tree.values.get("ENV.CUDA_VISIBLE_DEVICES")
    return tree.launch(
        "ms-swift",
        "YAML with rlhf_type: grpo",
        {key: said for key, said in tree.top.items() if key not in ("gpus", "ENV")},
        not_checked=_RAY if "train.gpus" in tree.values else None,
        processes=count_of(tree.values, "ENV.NPROC_PER_NODE"),
        training_gpus=tuple(str(gpus.value).split(",")) if gpus else None,
    )
