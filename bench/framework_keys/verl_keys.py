"""Write the keys of verl's PPO configuration to src/cohort_check/keys/verl.json.

Run it once for each version, oldest first, with a Python that has that version of verl installed:

    python bench/framework_keys/verl_keys.py

Hydra composes `ppo_trainer.yaml` with its default engine (FSDP), so these are the keys that an override may set
without `+`. The first version in the file is complete; the later ones hold what differs from the one before.
"""

import importlib.util
import json
import re
import sys
import types
import typing
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

TABLE = Path(__file__).parents[2] / "src" / "cohort" / "check" / "keys" / "verl.json"
FOLLOWS = re.compile(r"^\$\{(?:oc\.select:)?([\w.]+)[^{}]*\}$")
TYPES = {bool: "bool", int: "int", float: "float", str: "str", list: "list", tuple: "list", dict: "dict"}

Keys = dict[str, dict[str, Any]]


def config_folder() -> Path:
    """Return the folder of verl's configuration, without importing verl's trainer."""
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("verl is not installed")
    return Path(spec.submodule_search_locations[0]) / "trainer" / "config"


def installed_version(folder: Path) -> str:
    """Return the version of the installed package, or of the source tree that is on the path."""
    try:
        return version("verl")
    except PackageNotFoundError:
        return (folder.parents[1] / "version" / "version").read_text().strip()


def type_name(hint: Any) -> str | None:
    """Name the type of an annotation, `Optional[int]` as "int"; None if it is not one of ours."""
    members = [member for member in typing.get_args(hint) if member is not types.NoneType]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return type_name(members[0]) if len(members) == 1 else None
    return TYPES.get(typing.get_origin(hint) or hint)


def annotations(node: DictConfig) -> dict[str, Any]:
    """Return the annotations of the dataclass that `_target_` names; empty if it cannot be imported."""
    target = OmegaConf.to_container(node).get("_target_")
    if not target:
        return {}
    try:
        return typing.get_type_hints(get_class(target))
    except Exception as error:
        print(f"{target}: types are those of the defaults ({error})", file=sys.stderr)
        return {}


def collect(node: DictConfig, prefix: str = "") -> Keys:
    """Return every leaf below a node: its type, its default, and the key that the default follows."""
    keys: Keys = {}
    hints = annotations(node)
    for name, raw in OmegaConf.to_container(node).items():
        key = f"{prefix}{name}"
        if isinstance(raw, dict) and raw:
            keys |= collect(node[name], f"{key}.")
            continue
        if OmegaConf.is_missing(node, name):
            keys[key] = {"type": type_name(hints.get(name)) or "any", "default": None, "required": True}
            continue
        default = OmegaConf.to_container(node[name]) if OmegaConf.is_config(node[name]) else node[name]
        kind = TYPES.get(type(default)) or type_name(hints.get(name)) or "any"
        if kind == "int" and type_name(hints.get(name)) == "float":
            kind = "float"
        keys[key] = {"type": kind, "default": default}
        followed = FOLLOWS.match(raw) if isinstance(raw, str) else None
        if followed:
            keys[key]["follows"] = followed[1]
    return keys


def merged(versions: dict[str, Any]) -> Keys:
    """Apply the differences of all versions in order."""
    keys: Keys = {}
    for entry in versions.values():
        if "added" not in entry:
            keys = dict(entry)
            continue
        keys = {key: value for key, value in keys.items() if key not in entry["removed"]}
        keys |= entry["added"] | entry["changed"]
    return keys


def difference(before: Keys, after: Keys) -> dict[str, Any]:
    """Return what a version adds, removes and changes."""
    return {
        "added": {key: after[key] for key in after.keys() - before.keys()},
        "removed": sorted(before.keys() - after.keys()),
        "changed": {key: after[key] for key in after.keys() & before.keys() if after[key] != before[key]},
    }


def rows(keys: Keys, indent: str) -> str:
    """One key per line, sorted."""
    lines = [f"{indent}{json.dumps(key)}: {json.dumps(keys[key], sort_keys=True)}" for key in sorted(keys)]
    return ",\n".join(lines)


def as_json(versions: dict[str, Any]) -> str:
    """Return the table as JSON with one key per line."""
    parts = []
    for name, entry in versions.items():
        if "added" not in entry:
            parts.append(f'    "{name}": {{\n{rows(entry, " " * 6)}\n    }}')
            continue
        groups = []
        for group in ("added", "changed"):
            body = f"\n{rows(entry[group], ' ' * 8)}\n      " if entry[group] else ""
            groups.append(f'      "{group}": {{{body}}}')
        removed = ",\n".join(f"        {json.dumps(key)}" for key in entry["removed"])
        groups.append(f'      "removed": [\n{removed}\n      ]' if removed else '      "removed": []')
        parts.append(f'    "{name}": {{\n' + ",\n".join(groups) + "\n    }")
    return '{\n  "framework": "verl",\n  "versions": {\n' + ",\n".join(parts) + "\n  }\n}\n"


def main() -> None:
    """Add the installed version to the table."""
    folder = config_folder()
    with initialize_config_dir(config_dir=str(folder), version_base=None):
        keys = collect(compose(config_name="ppo_trainer"))
    versions = json.loads(TABLE.read_text())["versions"] if TABLE.exists() else {}
    name = installed_version(folder)
    if name in versions:
        sys.exit(f"{TABLE.name} already has verl {name}")
    versions[name] = difference(merged(versions), keys) if versions else keys
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    TABLE.write_text(as_json(versions))
    print(f"verl {name}: {len(keys)} keys")


if __name__ == "__main__":
    main()
