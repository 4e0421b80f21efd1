"""Cohort's own configurations."""

from pathlib import Path

from cohort.check.launch import Launch, Said
from cohort.check.readers.trl_yaml import cached_tree, duplicates


def read(path: Path, text: str) -> Launch | None:
    """A configuration of Cohort, or None where the text is none.

    Raises:
        ValueError: not valid YAML.
    """
    tree = cached_tree(text)
    if tree is None or not {"model", "data", "rewards"} <= set(tree.top) or "model" in tree.values:
        return None
    processes = tree.values.get("hardware.processes")
    return Launch(
        framework="cohort",
        form="yaml",
        reason="YAML with the sections model, data and rewards",
        settings=tree.values,
        processes=Said(processes.value, processes.where) if processes and isinstance(processes.value, int) else None,
        findings=duplicates(tree),
    )
