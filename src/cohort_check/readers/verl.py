"""verl: `key=value` overrides in shell scripts, and the YAML that `--cfg job --resolve` prints."""

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from cohort_check.launch import Launch, Setting, Unread
from cohort_check.readers.files import YamlTree
from cohort_check.readers.launcher import gpus_of, unknown_word
from cohort_check.readers.shell import Command, Word
from cohort_check.rules.common import VERL, key_tables

_OVERRIDE = re.compile(r"(\+{0,2})([A-Za-z_][\w@]*(?:[./][\w@-]+)*)=(.*)", re.DOTALL)
_SECTIONS = ("actor_rollout_ref.", "algorithm.", "trainer.", "data.")
_GPUS = {"trainer.n_gpus_per_node": 8, "trainer.nnodes": 1}  # with verl's defaults
_OWN_CONFIG = "ppo_trainer"  # of which verl's defaults are known


def read_shell(path: Path, text: str, command: Command, server: Command | None) -> Launch | None:
    """Read a command that trains with verl; None for any other command."""
    if sum(word.text.lstrip("+").startswith(_SECTIONS) for word in command.words) < 2:
        return None
    settings: dict[str, Setting] = {}
    unread: dict[str, Unread] = {}
    config, module = _OWN_CONFIG, VERL
    types = {key: entry.get("type") for table in key_tables("verl").values() for key, entry in table.items()}
    for word, after in pairwise((*command.words, Word(""))):
        match = _OVERRIDE.fullmatch(word.text)
        if word.text.startswith(("--config-name", "-cn")):
            named = replace(word, text=word.text.partition("=")[2]) if "=" in word.text else after
            config = named.text.removesuffix(".yaml")
            if config != _OWN_CONFIG:
                reason = "; ".join(named.missing) or f"it starts from {config}"
                unread["(config)"] = Unread("(config)", word.where, reason)
        elif word.text == "-m" or (word.name.endswith((".py", ".sh")) and not match):
            name = after.text if word.text == "-m" else word.text.lstrip("./").removesuffix(".py").replace("/", ".")
            module = name[max(name.rfind("verl.trainer."), name.rfind("recipe."), 0) :]
            settings, unread = {}, {}  # words before are of the launcher
        elif match and (word.missing or (not match[3] and types.get(match[2]) in ("int", "float", "bool"))):
            settings.pop(match[2], None)  # the last one counts
            unread[match[2]] = Unread(match[2], word.where, "; ".join(word.missing) or "empty here")
        elif match:
            unread.pop(match[2], None)
            settings[match[2]] = Setting(_hydra_value(match[3]), word.where, added=match[1])
        elif word.missing and word.text in ("", "$@") and (settings or unread):  # after the program's own words
            unread[word.where] = unknown_word(word)
    resolve = f"`python -m {module} <the same overrides> --cfg job --resolve > resolved.yaml`"
    for key, entry in [*unread.items()][:1]:
        unread[key] = replace(entry, reason=f"{entry.reason}; {resolve} makes a file to check in its place")
    return Launch(
        framework="verl",
        form="shell",
        reason=f"a shell script with verl's overrides at {command.where}",
        settings=settings,
        program=module,
        unread=tuple(unread.values()),
        not_checked=_not_checked(settings, config),
        processes=_processes(settings, unread, "" if "(config)" in unread else command.where),
        training_gpus=gpus_of(command),
    )


def read_yaml(path: Path, text: str, tree: YamlTree) -> Launch | None:
    """Read a YAML file with verl's sections, such as `--cfg job --resolve` prints; None for any other file."""
    if not any(key.startswith("actor_rollout_ref.") for key in tree.values):
        return None
    reason = "refers to another place; `--cfg job --resolve` makes a file without that"
    places = {key: said for key, said in tree.values.items() if "${" in str(said.value)}
    settings = {key: said for key, said in tree.values.items() if key not in places}
    unread = tuple(Unread(key, said.where, reason) for key, said in places.items())
    kind, processes = "YAML with actor_rollout_ref", _processes(settings, places, "")
    return tree.launch("verl", kind, settings, unread=unread, not_checked=_not_checked(settings), processes=processes)


def _not_checked(settings: Mapping[str, Setting], config: str = "") -> str | None:
    """Why the run is not checked: the rules are those of verl's own trainer with FSDP."""
    keys = ("model_engine", "actor@actor_rollout_ref.actor", "actor_rollout_ref.actor.strategy")
    engines = [str(settings[key].value) for key in keys if key in settings]
    if "megatron" in " ".join([config, *engines]):
        return "Megatron"
    other = [f"verl's engine {engine}" for engine in engines if not engine.startswith(("dp", "fsdp"))]
    return other[0] if other else None


def _hydra_value(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    return text if value is None and text.lower() not in ("null", "~") else value


def _processes(settings: Mapping[str, Setting], unread: Mapping[str, Any], where: str) -> Setting | None:
    """GPUs of all nodes, with verl's defaults; None if they are not known. `where` is their place if none is set."""
    counts = [settings[key].value if key in settings else default for key, default in _GPUS.items()]
    place = next((settings[key].where for key in _GPUS if key in settings), where)
    plain = all(isinstance(count, int) and 0 < count < 1_000_000 for count in counts)
    return Setting(counts[0] * counts[1], place) if place and plain and not _GPUS.keys() & unread.keys() else None
