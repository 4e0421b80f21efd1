"""Adds the installed ms-swift's keys to the table that `cohort check` reads.

    PYTHONPATH=/path/to/ms-swift-4.6:/path/to/trl-0.28 \
        python bench/framework_keys/ms_swift_keys.py src/cohort_check/keys/ms-swift.json

Run it once for each version of ms-swift, with the transformers and TRL of that version's time. The folder is one of
`pip install --no-deps --target /path/to/ms-swift-4.6 ms-swift==4.6.0`.

The keys are the options of `swift rlhf`. `of` is the class that has the key: one of `PPOArguments` has no effect in
GRPO, one of `TrainingArguments` is of transformers. The oldest version has all of its keys, each later one what differs
from the one before it.
"""

import dataclasses
import enum
import importlib
import json
import sys
import types
import typing
from pathlib import Path
from typing import Any

from key_tables import PARTS, Table, differences, expanded
from transformers import Seq2SeqTrainingArguments

SIMPLE = {bool: "bool", int: "int", float: "float", str: "str", list: "list", dict: "dict"}


def main(path: Path) -> None:
    """Reads the table, sets the installed version's keys, and writes it."""
    tables = expanded(json.loads(path.read_text())["versions"]) if path.exists() else {}
    tables[importlib.import_module("swift.version").__version__] = installed_keys()
    path.write_text(written(differences(tables)))


def installed_keys() -> Table:
    """Every option that `swift rlhf` parses."""
    try:
        cls = importlib.import_module("swift.arguments").RLHFArguments
    except ModuleNotFoundError:  # before 4.0
        cls = importlib.import_module("swift.llm").RLHFArguments
    of_transformers = {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)}
    hints = typing.get_type_hints(cls)
    keys: Table = {}
    for field in dataclasses.fields(cls):
        if field.init:
            own = next((c for c in cls.__mro__ if field.name in vars(c).get("__annotations__", {})), cls)
            of = "TrainingArguments" if field.name in of_transformers else own.__name__
            keys[field.name] = {"of": of, "type": kind(hints[field.name]), "default": default(field)}
    return keys


def default(field: dataclasses.Field[Any]) -> Any:
    """A field's default, as JSON can hold it."""
    value = field.default if field.default is not dataclasses.MISSING else None
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    value = value.value if isinstance(value, enum.Enum) else value
    return value if isinstance(value, bool | int | float | str | list | dict | None) else str(value)


def kind(hint: Any) -> str | list[Any]:
    """The name of a type, or its choices."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(hint) if member is not type(None)]
    else:
        members = [hint]
    for member in members:
        if typing.get_origin(member) is typing.Literal:
            return [choice for choice in typing.get_args(member) if choice is not None]
        if isinstance(member, type) and issubclass(member, enum.Enum):
            return [choice.value for choice in member]
    plain = [typing.get_origin(member) or member for member in members]
    names = [name for of, name in SIMPLE.items() if of in plain]
    several = [name for name in names if name != "str"]
    return several[0] if several else "str"


def written(versions: dict[str, Any]) -> str:
    """JSON with sorted keys and one key of ms-swift in each line."""

    def lines(table: Table, indent: str) -> str:
        told = ",\n".join(
            f"{indent} {json.dumps(name)}: {json.dumps(table[name], sort_keys=True)}" for name in sorted(table)
        )
        return "{\n" + told + "\n" + indent + "}"

    parts = []
    for version, entry in versions.items():
        if entry.keys() <= PARTS:
            inner = ",\n".join(
                f'   "{part}": {json.dumps(entry[part]) if part == "removed" else lines(entry[part], "   ")}'
                for part in sorted(entry)
            )
            parts.append(f'  "{version}": {{\n{inner}\n  }}')
        else:
            parts.append(f'  "{version}": {lines(entry, "  ")}')
    return '{\n "framework": "ms-swift",\n "versions": {\n' + ",\n".join(parts) + "\n }\n}\n"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
