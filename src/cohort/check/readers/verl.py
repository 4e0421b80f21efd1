"""verl: dotted overrides of `python -m verl.trainer.main_ppo` in shell scripts, and the same keys as YAML."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from cohort.check.launch import Launch, Said, Unread
from cohort.check.readers.options import gpus_of
from cohort.check.readers.shell import Command, parse_shell
from cohort.check.readers.shell_words import why_unread
from cohort.check.readers.trl_yaml import cached_tree, duplicates

_OVERRIDE = re.compile(r"^(\+{0,2})([A-Za-z_][\w]*(?:[./][\w-]+)*)=(.*)$", re.DOTALL)
_SECTIONS = ("actor_rollout_ref", "algorithm", "trainer", "data")


def read_shell(path: Path, text: str) -> Launch | None:
    """The commands with verl's overrides, or None where there is none."""
    commands = parse_shell(text)
    runs = [command for command in commands if _is_verl(command)]
    if not runs:
        return None
    first, *others = (_launch_of(run) for run in runs)
    return replace(first, others=tuple(others))


def _launch_of(run: Command) -> Launch:
    where = f"the command on line {run.line}"
    settings: dict[str, Said] = {}
    unread: list[Unread] = []
    for before, word in zip(["", *(word.text for word in run.words)], run.words, strict=False):
        match = _OVERRIDE.match(word.text)
        if match and word.missing:
            unread.append(Unread(match[2], where, why_unread(word.missing)))
        elif match:
            settings[match[2]] = Said(_hydra_value(match[3]), where, added=bool(match[1]))
        elif word.missing and not word.text and not before.startswith("-"):
            unread += [Unread("(options)", where, why_unread((name,))) for name in word.missing]
    return Launch(
        framework="verl",
        form="shell",
        reason=f"a shell script with verl's overrides on line {run.line}",
        settings=settings,
        unread=tuple(unread),
        processes=_gpus(settings),
        training_gpus=gpus_of(run.env),
    )


def read_yaml(path: Path, text: str) -> Launch | None:
    """A YAML file with verl's sections, or None where it is none.

    Raises:
        ValueError: not valid YAML.
    """
    tree = cached_tree(text)
    if tree is None or not any(key.startswith("actor_rollout_ref.") for key in tree.values):
        return None
    interpolated = [key for key, said in tree.values.items() if isinstance(said.value, str) and "${" in said.value]
    settings = {key: said for key, said in tree.values.items() if key not in interpolated}
    return Launch(
        framework="verl",
        form="yaml",
        reason="YAML with actor_rollout_ref",
        settings=settings,
        unread=tuple(
            Unread(key, tree.values[key].where, f"refers to another place: {tree.values[key].value:.60}")
            for key in interpolated
        ),
        processes=_gpus(settings),
        findings=duplicates(tree),
    )


def _is_verl(command: Command) -> bool:
    return sum(word.text.lstrip("+").startswith(tuple(f"{name}." for name in _SECTIONS)) for word in command.words) >= 2


def _hydra_value(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    return text if value is None and text.lower() not in ("null", "~") else value


def _gpus(settings: dict[str, Said]) -> Said | None:
    """GPUs of all nodes, where one of the two numbers is said; the other one's default is in verl's own file."""
    per_node = settings.get("trainer.n_gpus_per_node")
    nodes = settings.get("trainer.nnodes")
    if per_node is None and nodes is None:
        return None
    counts = [str(said.value) if said else default for said, default in ((per_node, "8"), (nodes, "1"))]
    where = per_node.where if per_node else nodes.where if nodes else ""
    return Said(int(counts[0]) * int(counts[1]), where) if all(count.isdecimal() for count in counts) else None
