"""Cohort's own configurations, and formats that are only recognized: prime-rl and OpenRLHF."""

import re
from dataclasses import replace
from pathlib import Path

from cohort_check.findings import load_table
from cohort_check.launch import Launch
from cohort_check.readers.files import YamlTree, count_of


def read_cohort(path: Path, text: str, tree: YamlTree) -> Launch | None:
    """Read a configuration of Cohort; None for any other file."""
    if not {"model", "data", "rewards"} <= tree.top.keys() or "model" in tree.values:
        return None
    processes = count_of(tree.values, "hardware.processes")
    return tree.launch("cohort", "YAML with the sections model, data and rewards", tree.values, processes=processes)


def recognize(path: Path, text: str) -> Launch | None:
    """Recognize a TOML file or a script of prime-rl or OpenRLHF; None for any other file."""
    for framework, entry in load_table("recognized.toml").items():
        if found := re.search(entry["pattern"], text):
            reason, told = f"it has {found[0]!r}", entry["not_checked"]
            launch = Launch(framework=framework, form="shell", reason=reason, settings={}, not_checked=told)
            return replace(launch, form="toml") if path.suffix == ".toml" else launch
    return None
