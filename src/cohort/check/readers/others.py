"""Cohort's own configurations, and formats that are only recognized: prime-rl and OpenRLHF."""

import tomllib
from dataclasses import replace
from pathlib import Path

from cohort.check.launch import Launch
from cohort.check.readers.shell import Command
from cohort.check.readers.yaml_tree import YamlTree


def read_cohort(path: Path, text: str, tree: YamlTree) -> Launch | None:
    """Read a configuration of Cohort; None for any other file."""
    if not {"model", "data", "rewards"} <= tree.nested_once().keys() or "model" in tree.values:
        return None
    processes = tree.values.get("hardware.processes")
    return Launch(
        framework="cohort",
        form="yaml",
        reason="YAML with the sections model, data and rewards",
        settings=tree.values,
        processes=processes if processes and isinstance(processes.value, int) else None,
        findings=tree.duplicates(),
    )


_PRIME = Launch(
    framework="prime-rl",
    form="toml",
    reason="TOML with sections of prime-rl",
    settings={},
    not_checked="prime-rl is not checked",
)


def read_toml(path: Path, text: str) -> Launch | None:
    """Recognize a configuration of prime-rl; None for any other file.

    Raises:
        ValueError: not valid TOML.
    """
    found = set(tomllib.loads(text))
    signs = {"orchestrator", "rollouts_per_example", "step_per_rollout", "max_off_policy_steps"} & found
    parts = {"trainer", "inference", "deployment", "model", "env", "train", "optim", "data", "sampling"} & found
    return _PRIME if signs or len(parts) > 2 else None


def read_shell(path: Path, text: str, command: Command, server: Command | None) -> Launch | None:
    """Recognize a command that trains with OpenRLHF or prime-rl; None for any other command."""
    texts = [word.text for word in command.words]
    if any(text.startswith("openrlhf.cli.train_") for text in texts):
        reason = f"a shell script that starts OpenRLHF at {command.where}"
        return replace(_PRIME, framework="openrlhf", form="shell", reason=reason, not_checked="OpenRLHF is not checked")
    if ("rl" in texts[:4] and "@" in texts) or any("prime_rl" in text for text in texts[:6]):
        return replace(_PRIME, form="shell", reason=f"a shell script that starts prime-rl at {command.where}")
    return None
