"""The keys of each framework by version, from `check/keys/*.json`, which `bench/framework_keys/` makes."""

import difflib
from collections.abc import Iterable, Mapping
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


def key_history(framework: str, key: str) -> str:
    """When a key that a version lacks was there, such as "from 0.16.1 to 0.17.0"; empty if never."""
    having = [".".join(map(str, version)) for version, keys in key_tables(framework).items() if key in keys]
    if len(having) < 2:
        return f"in {having[0]}" if having else ""
    return f"from {having[0]} to {having[-1]}"


def nearest_keys(key: str, known: Iterable[str]) -> tuple[str, ...]:
    """The known key that is spelled most alike, if any is."""
    return tuple(difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.85))
