"""TRL, Open-R1 and ms-swift: YAML recipes, and the shell commands that start them."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from cohort.errors import UserError
from cohort_check.findings import load_table
from cohort_check.launch import Framework, Launch, Unread
from cohort_check.readers import trl_python
from cohort_check.readers.files import YamlTree, count_of, find_text
from cohort_check.readers.launcher import NAMES, read_command, with_recipe
from cohort_check.readers.shell import Command, Word
from cohort_check.rules.common import key_tables, known_keys

_NAMES: Mapping[str, Sequence[str]] = load_table("readers/names.yaml")["trl"]
SIGNS = frozenset(_NAMES["signs"])
_KNOWN = {key for table in (known_keys("open-r1", ()), *key_tables("trl").values()) for key in table}
OPEN_R1_ONLY = known_keys("open-r1", ()).keys() - _NAMES["not_only_of_open_r1"]  # keys that others do not have
_ELSEWHERE = Unread("(recipe)", "", "the command names no rlhf_type; check the configuration file that it names")


def read_yaml(path: Path, text: str, tree: YamlTree) -> Launch | None:
    """Read a GRPO recipe; None for any other file."""
    signs = sorted(SIGNS & tree.values.keys())
    of_others = "model_name_or_path" not in tree.top and len(tree.top.keys() - _KNOWN) > len(signs)
    if not signs or of_others or "rlhf_type" in tree.values:  # of ms-swift
        return None
    special = sorted(OPEN_R1_ONLY & tree.values.keys())
    if special:
        return tree.launch("open-r1", f"YAML with {special[0]}, a key of Open-R1", tree.top)
    return tree.launch("trl", f"YAML with {', '.join(signs)}", tree.top)


def read_shell(path: Path, text: str, command: Command, server: Command | None) -> Launch | None:
    """Read a command that trains with TRL or Open-R1, and its recipe; None for any other command."""
    texts = [word.name for word in command.words]
    of_others = texts[0] in ("echo", "pip") or any(name.startswith("openrlhf.") for name in texts)
    launched = bool({*NAMES["starters"]} & {*texts}) and not of_others
    options = {word.text[2:].partition("=")[0].replace("-", "_") for word in command.words if word.text[:2] == "--"}
    script = any(re.search(r"g[rs]po\w*\.py$", name) for name in texts) or "trl.scripts.grpo" in texts
    scripts = [word for word in command.words if word.name.endswith(".py")]
    outside = next((word for word in scripts if word.missing and word.name == ".py"), None)
    serves = server is not None and server.has("trl", "vllm-serve") and bool(scripts)
    own = command.has("trl", "grpo")
    place, found = path, ""
    with contextlib.suppress(UserError, ValueError):
        place, found = find_text(scripts[0].text, path.parent) if launched and scripts else (path, "")
    beside = "GRPOTrainer" in found or "GRPOConfig" in found
    of_trl = own or any(word.text.endswith(tuple(_NAMES["scripts"])) for word in command.words)
    if found and not beside and not of_trl:  # a program of its own
        return None
    if not own and not (launched and (script or outside or serves or beside or SIGNS & options)):
        return None
    launch = read_command(command, "trl", path.parent, server)
    # a script of its own, or a copy of TRL's here, may have more options than TRL
    keys = [key for key in launch.settings if not of_trl or (found and not get_close_matches(key, _KNOWN, 1, 0.85))]
    more = {key: replace(launch.settings[key], added=True) for key in keys}
    launch = replace(launch, settings={**launch.settings, **more})
    if scripts and not own and (beside or not {*SIGNS, "config"} & options):
        read = _with_script(launch, scripts[0], place, found, command)
        launch = launch if of_trl and read.not_checked is None else read
    launch = with_recipe(launch, path.parent)
    processes = launch.processes or (count_of(launch.settings, "num_processes") if own else None)
    special = OPEN_R1_ONLY & set(launch.settings) or (outside and "open_r1" in text)
    framework: Framework = "open-r1" if special else "trl"
    return replace(launch, framework=framework, processes=processes)


def _with_script(launch: Launch, script: Word, place: Path, text: str, command: Command) -> Launch:
    """Add the settings of the Python script that the command starts, if it is found and makes one configuration."""
    try:
        (run,) = trl_python.read(place, text, command)
    except ValueError:
        reason = f"{script.name} sets what it trains; check that file"
        return replace(launch, unread=(*launch.unread, Unread("(recipe)", script.where, reason)))
    unread = (*launch.unread, *run.unread)
    return replace(launch, settings=run.settings, unread=unread, todo=run.todo, not_checked=run.not_checked)


def read_swift_shell(path: Path, text: str, command: Command, server: Command | None) -> Launch | None:
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
    return replace(launch, not_checked="Megatron") if on_megatron else launch


def read_swift_yaml(path: Path, text: str, tree: YamlTree) -> Launch | None:
    """Read a YAML file with ms-swift's keys; None for any other file."""
    if "rlhf_type" not in tree.values or tree.values["rlhf_type"].value != "grpo":
        return None
    gpus = tree.values.get("ENV.CUDA_VISIBLE_DEVICES")
    settings = {key: said for key, said in tree.top.items() if key not in ("gpus", "ENV")}
    found = tree.launch("ms-swift", "YAML with rlhf_type: grpo", settings)
    on_ray = "ms-swift on Ray, which trains with Megatron" if "train.gpus" in tree.values else None
    visible = tuple(str(gpus.value).split(",")) if gpus else None
    processes = count_of(tree.values, "ENV.NPROC_PER_NODE")
    return replace(found, not_checked=on_ray, processes=processes, training_gpus=visible)
