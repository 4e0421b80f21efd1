"""Adds the installed TRL's keys to the table that `cohort check` reads.

    PYTHONPATH=/path/to/trl-0.16 python bench/framework_keys/trl_keys.py src/cohort_check/keys/trl.json

Run it once for each version of TRL, with a Python whose transformers is of that version's time (4 before TRL 1.0).
The folder is one of `pip install --no-deps --target /path/to/trl-0.16 trl==0.16.1`.

The oldest version has all of its keys, each later one what differs from the one before it. `of` is the class that has
the key: an option of `trl grpo` may be of any of them, an argument of `GRPOConfig(...)` only of that class or of
`TrainingArguments`. `launcher` lists the options of `accelerate launch`, which `trl grpo` and its YAML take as well.
"""

import dataclasses
import enum
import importlib
import importlib.metadata
import json
import re
import sys
import types
import typing
from pathlib import Path
from typing import Any

from accelerate.commands.launch import launch_command_parser
from key_tables import Key, Table, differences, expanded
from transformers import TrainingArguments

SCRIPT_CLASSES = (
    ("trl", "ScriptArguments"),
    ("trl.scripts.grpo", "GRPOScriptArguments"),
    ("trl", "DatasetMixtureConfig"),
    ("trl", "ModelConfig"),
    ("trl.trainer.grpo_config", "GRPOConfig"),
)
SIMPLE = {bool: "bool", int: "int", float: "float", str: "str", list: "list", dict: "dict", tuple: "list", set: "list"}


def main(path: Path) -> None:
    """Reads the table, sets the installed version's keys, and writes it."""
    told = json.loads(path.read_text()) if path.exists() else {"framework": "trl", "launcher": [], "versions": {}}
    tables = expanded(told["versions"])
    tables[installed_version()] = installed_keys()
    launcher = sorted({option.dest for option in launch_command_parser()._actions} - {"help", "training_script_args"})
    path.write_text(written(sorted({*told["launcher"], *launcher}), differences(tables)))


def installed_version() -> str:
    """TRL's version."""
    return importlib.metadata.version("trl")


def installed_keys() -> Table:
    """Every key of the classes that `trl grpo` parses."""
    keys: Table = {}
    for module, name in SCRIPT_CLASSES:
        cls = getattr(importlib.import_module(module), name, None)
        for field in dataclasses.fields(cls) if cls else ():
            if field.init:
                keys[field.name] = key(field, name)
    for field in dataclasses.fields(TrainingArguments):
        if field.name in keys:
            keys[field.name]["of"] = "TrainingArguments"
    return keys


def key(field: dataclasses.Field[Any], of: str) -> Key:
    """A field's type, default, and whether its help calls it deprecated."""
    told: Key = {"of": of, "type": kind(field)}
    default = field.default if field.default is not dataclasses.MISSING else None
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    default = default.value if isinstance(default, enum.Enum) else default
    told["default"] = default if isinstance(default, bool | int | float | str | list | dict | None) else str(default)
    help_text = str(field.metadata.get("help", ""))
    if re.match(r"\W*(this (argument|parameter|field) is )?deprecated", help_text, re.IGNORECASE):
        new = re.search(r"[Uu]se `(?:--)?(\w+)`", help_text)
        told["deprecated"] = new.group(1) if new else True
    return told


def kind(field: dataclasses.Field[Any]) -> str | list[Any]:
    """The name of a field's type, or its choices."""
    if field.metadata.get("choices"):
        return list(field.metadata["choices"])
    hint: Any = field.type
    if isinstance(hint, str):
        hint = next((of for of in SIMPLE if re.search(rf"\b{of.__name__}\b", hint)), str)
    members = [hint]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(hint) if member is not type(None)]
    for member in members:
        if typing.get_origin(member) is typing.Literal:
            return list(typing.get_args(member))
        if isinstance(member, type) and issubclass(member, enum.Enum):
            return [choice.value for choice in member]
    plain = [typing.get_origin(member) or member for member in members]
    names = [name for of, name in SIMPLE.items() if of in plain]
    several = [name for name in names if name != "str"]
    return several[0] if several else "str"


def written(launcher: list[str], versions: dict[str, Any]) -> str:
    """JSON with sorted keys and one key of TRL in each line."""

    def lines(table: Table, indent: str) -> str:
        told = ",\n".join(
            f"{indent} {json.dumps(name)}: {json.dumps(table[name], sort_keys=True)}" for name in sorted(table)
        )
        return "{\n" + told + "\n" + indent + "}"

    parts = []
    for version, entry in versions.items():
        if entry.keys() <= {"added", "removed", "changed"}:
            inner = ",\n".join(
                f'   "{part}": {json.dumps(entry[part]) if part == "removed" else lines(entry[part], "   ")}'
                for part in sorted(entry)
            )
            parts.append(f'  "{version}": {{\n{inner}\n  }}')
        else:
            parts.append(f'  "{version}": {lines(entry, "  ")}')
    head = f'{{\n "framework": "trl",\n "launcher": {json.dumps(launcher)},\n "versions": {{\n'
    return head + ",\n".join(parts) + "\n }\n}\n"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
