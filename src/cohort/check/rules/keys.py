"""The keys of each framework by version, from `check/keys/*.json`, which `bench/framework_keys/` makes."""

import difflib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from cohort.check.tables import load_table

Version = tuple[int, ...]
Keys = Mapping[str, Mapping[str, Any]]  # by key: type or choices, default, and the class that has it (`of`)


def parse_version(text: str) -> Version:
    """`0.18.0` as (0, 18, 0); anything that is not a number (`1.2.dev0`) ends it."""
    parts: list[int] = []
    for part in text.split("."):
        if not part.isdecimal():
            break
        parts.append(int(part))
    return tuple(parts)


@lru_cache
def key_tables(framework: str) -> Mapping[Version, Keys]:
    """All keys of every version in the table, oldest first."""
    tables: dict[Version, Keys] = {}
    keys: dict[str, Any] = {}
    for version, table in load_table(f"keys/{framework}.json")["versions"].items():
        added, removed = (table.get(name, {}) for name in ("added", "removed")) if tables else (table, ())
        changed = table.get("changed", {}) if tables else {}
        keys = {key: value for key, value in {**keys, **added, **changed}.items() if key not in removed}
        tables[parse_version(version)] = keys
    return tables


def known_keys(framework: str, version: Version) -> Keys:
    """The keys of a version, or of the newest minor version in the table that is not newer, or of the oldest."""
    tables = key_tables(framework)
    if version in tables:
        return tables[version]
    return tables[max((known for known in tables if known[:2] <= version[:2]), default=min(tables))]


def launcher_keys(framework: str) -> frozenset[str]:
    """Options of the command that starts the processes, which the framework's own files may have too."""
    return frozenset(load_table(f"keys/{framework}.json")["launcher"])


def unknown_key(framework: str, version: Version, key: str, known: Keys, new: str = "") -> tuple[str, tuple[str, ...]]:
    """Describe a key that a version lacks, and return the known one that it should be (`new`, if that is known)."""
    text = f"{'TRL' if framework == 'trl' else framework} {'.'.join(map(str, version))} does not know {key}"
    if new in known:
        return f"{text}, which is called {new} now", (new,)
    having = [".".join(map(str, other)) for other, keys in key_tables(framework).items() if key in keys]
    history = f", which is there from {having[0]} to {having[-1]}" if having else ""
    return text + history, tuple(difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.85))
