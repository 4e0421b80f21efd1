"""verl: `key=value` overrides in shell scripts, and the YAML that `--cfg job --resolve` prints."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from cohort.check.launch import Launch, Setting, Unread
from cohort.check.readers.launcher import gpus_of, unknown_word
from cohort.check.readers.shell import Command, Word
from cohort.check.readers.swift import MEGATRON
from cohort.check.readers.yaml_tree import YamlTree

_OVERRIDE = re.compile(r"(\+{0,2})([A-Za-z_][\w@]*(?:[./][\w@-]+)*)=(.*)", re.DOTALL)
_SECTIONS = ("actor_rollout_ref.", "algorithm.", "trainer.", "data.")
_GPUS = {"trainer.n_gpus_per_node": 8, "trainer.nnodes": 1}  # with verl's defaults
_OWN_CONFIG = "ppo_trainer"  # of which verl's defaults are known


def read_shell(path: Path, text: str, command: Command, server: Command | None) -> Launch | None:
    """Read a command that trains with verl; None for any other command."""
    if sum(word.text.lstrip("+").startswith(_SECTIONS) for word in command.words) < 2:
        return None
    settings: dict[str, Setting] = {}
    unread: list[Unread] = []
    config, module = Word(_OWN_CONFIG), "verl.trainer.main_ppo"
    for word, after in pairwise((*command.words, Word(""))):
        match = _OVERRIDE.fullmatch(word.text)
        if word.text.startswith(("--config-name", "-cn")):
            config = replace(word, text=word.text.partition("=")[2]) if "=" in word.text else after
        elif word.text == "-m":
            module = after.text
        elif match and word.missing:
            settings.pop(match[2], None)  # the last one counts
            unread.append(Unread(match[2], word.where, "; ".join(word.missing)))
        elif match:
            settings[match[2]] = Setting(_hydra_value(match[3]), word.where, added=match[1])
        elif word.missing and word.text in ("", "$@") and (settings or unread):  # after the program's own words
            unread.append(unknown_word(word))
    unread = [entry for entry in unread if entry.key not in settings]
    based = bool(config.missing) or config.text.removesuffix(".yaml") != _OWN_CONFIG
    if based:
        unread.append(Unread("(config)", config.where, "; ".join(config.missing) or f"it starts from {config.text}"))
    if unread:
        resolve = f"python -m {module} <the same overrides> --cfg job --resolve > resolved.yaml"
        unread[0] = replace(unread[0], reason=f"{unread[0].reason}; `{resolve}` makes a file to check in its place")
    return Launch(
        framework="verl",
        form="shell",
        reason=f"a shell script with verl's overrides at {command.where}",
        settings=settings,
        program=module,
        unread=tuple(unread),
        not_checked=_not_checked(settings, config.text, module),
        processes=_processes(settings, unread, None if based else command.where),
        training_gpus=gpus_of(command),
    )


def read_yaml(path: Path, text: str, tree: YamlTree) -> Launch | None:
    """Read a YAML file with verl's sections, such as `--cfg job --resolve` prints; None for any other file."""
    if not any(key.startswith("actor_rollout_ref.") for key in tree.values):
        return None
    message = "refers to another place: {:.60}; `--cfg job --resolve` makes a file without that"
    settings: dict[str, Setting] = {}
    unread: list[Unread] = []
    for key, said in tree.values.items():
        if isinstance(said.value, str) and "${" in said.value:
            unread.append(Unread(key, said.where, message.format(said.value)))
        else:
            settings[key] = said
    return Launch(
        framework="verl",
        form="yaml",
        reason="YAML with actor_rollout_ref",
        settings=settings,
        unread=tuple(unread),
        not_checked=_not_checked(settings),
        processes=_processes(settings, unread),
        findings=tree.duplicates(),
    )


def _not_checked(settings: Mapping[str, Setting], config: str = "", module: str = "") -> str | None:
    """Why the run is not checked: the rules are those of verl's own trainer with FSDP."""
    keys = ("model_engine", "actor@actor_rollout_ref.actor", "actor_rollout_ref.actor.strategy")
    engines = [str(settings[key].value) for key in keys if key in settings]
    if "megatron" in " ".join([config, *engines]):
        return MEGATRON
    other = [engine for engine in engines if not engine.startswith(("dp", "fsdp"))]
    if other:
        return f"verl's engine {other[0]} is not checked"
    return f"{module}, whose rollouts have GPUs of their own, is not checked" if ".experimental." in module else None


def _hydra_value(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    return text if value is None and text.lower() not in ("null", "~") else value


def _processes(settings: Mapping[str, Setting], unread: Sequence[Unread], where: str | None = None) -> Setting | None:
    """GPUs of all nodes, with verl's defaults if one of the two numbers is set or `where` is given."""
    said = next((settings[key] for key in _GPUS if key in settings), Setting(None, where) if where else None)
    counts = [str(settings[key].value if key in settings else default) for key, default in _GPUS.items()]
    if said is None or any(entry.key in _GPUS for entry in unread) or not all(count.isdecimal() for count in counts):
        return None
    return replace(said, value=int(counts[0][:6]) * int(counts[1][:6]))
