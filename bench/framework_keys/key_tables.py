"""Tables of keys by version: the oldest one is complete, each later one holds what differs from the one before."""

import re
from typing import Any

Key = dict[str, Any]
Table = dict[str, Key]
PARTS = {"added", "removed", "changed"}


def order(version: str) -> tuple[int, ...]:
    """`0.18.2` as (0, 18, 2)."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def expanded(versions: dict[str, Any]) -> dict[str, Table]:
    """Return the whole table of each version."""
    tables: dict[str, Table] = {}
    keys: Table = {}
    for version in sorted(versions, key=order):
        entry = versions[version]
        if entry.keys() <= PARTS:
            kept = {name: key for name, key in keys.items() if name not in entry.get("removed", ())}
            keys = kept | entry.get("added", {}) | entry.get("changed", {})
        else:
            keys = entry
        tables[version] = keys
    return tables


def differences(tables: dict[str, Table]) -> dict[str, Any]:
    """Return the oldest table, and what each later version changed; versions without a change are left out."""
    result: dict[str, Any] = {}
    before: Table = {}
    for version in sorted(tables, key=order):
        keys = tables[version]
        entry: dict[str, Any] = {
            "added": {name: keys[name] for name in keys.keys() - before.keys()},
            "removed": sorted(before.keys() - keys.keys()),
            "changed": {name: keys[name] for name in keys.keys() & before.keys() if keys[name] != before[name]},
        }
        entry = {part: value for part, value in entry.items() if value}
        if not before:
            result[version] = keys
        elif entry:
            result[version] = entry
        before = keys
    return result
