"""Write `docs/config.md` from the schema: `python tools/docs/config_page.py > docs/config.md`."""

import inspect
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel

from cohort.config.algorithm import AlgorithmConfig, CustomFunction
from cohort.config.catalogue import components_reading
from cohort.config.schema import UNIONS, Config, sections_in

_INTRO = """# Configuration

Generated from `src/cohort/config/` by `make docs`; do not edit.

A configuration is a YAML file with the sections below. Override keys on the command line:
`cohort train CONFIG.yaml train.steps=50 rewards.0.weight=0.5`. Unknown keys and keys without effect are errors;
for a key of TRL, the error names the key and the value that mean the same here.
Input paths are resolved against the folder of the YAML file, then the working directory; `run.dir` is relative to the
working directory.

`cohort.train` takes the path of such a file, or the same sections as a mapping, in which functions, classes and rows
may stand where the file has paths. [python.md](python.md) has more.

A configuration that `cohort convert` wrote may begin with the list `decide_first`; `cohort train` refuses until it is
empty ([check.md](check.md#conversion)).
"""


def render() -> str:
    """Return the whole page."""
    parts = [_INTRO]
    for name, field in Config.model_fields.items():
        sections = sections_in(field.annotation)
        shared = _shared_rows(sections) if name in UNIONS else []
        if shared:
            parts.append(_table(f"`{name}`", f"Keys for every `{UNIONS[name]}`.", shared))
        for section in sections:
            parts.append(_section(name, section, optional=not field.is_required(), without=shared))
        nested = {f"{name}.{key}": inner for section in sections for key, inner in section.model_fields.items()}
        parts += [
            _section(key, one, optional=True) for key, inner in nested.items() for one in sections_in(inner.annotation)
        ]
    return "\n".join(dict.fromkeys(parts))


def _shared_rows(sections: Sequence[type[BaseModel]]) -> list[str]:
    """Return the rows of the keys that all sections have, with the same meaning."""
    return [row for row in key_rows(sections[0]) if all(row in key_rows(section) for section in sections)]


def _section(name: str, section: type[BaseModel], *, optional: bool, without: Collection[str] = ()) -> str:
    title = f"`{name}`"
    if name in UNIONS:
        key = UNIONS[name]
        title += f" with `{key}: {section.model_fields[key].default}`"
    if name == "rewards":
        title += " (a list of these)"
    if not optional:
        title += ", required"
    return _table(
        title, inspect.cleandoc(section.__doc__ or ""), [row for row in key_rows(section) if row not in without]
    )


def _table(title: str, text: str, rows: Sequence[str]) -> str:
    head = "| key | type | default | meaning |\n| --- | --- | --- | --- |"
    return "\n".join([f"## {title}", "", text, "", head, *rows, ""])


def key_rows(section: type[BaseModel]) -> list[str]:
    """Return the row of each key."""
    rows = []
    for key, field in section.model_fields.items():
        meaning = (field.description or "").replace("|", "\\|")
        if section is AlgorithmConfig and (components := components_reading(key)):
            meaning += " Read by " + ", ".join(f"`{name}`" for name in components) + "."
        rows.append(f"| `{field.alias or key}` | {_type(field.annotation)} | {_default(field)} | {meaning} |")
    return rows


def _type(annotation: Any) -> str:
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a section"
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) is Annotated:
        return _type(get_args(annotation)[0])
    if get_origin(annotation) is tuple:
        return f"list of {_type(get_args(annotation)[0])}"
    if get_origin(annotation) is dict:
        return "mapping"
    if get_args(annotation):  # a union
        return " or ".join(_type(argument) for argument in get_args(annotation))
    names = {str: "text", int: "integer", float: "number", bool: "true or false", CustomFunction: "a function"}
    return names.get(annotation, str(annotation))


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, tuple):
        value = list(value)
    text = yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()
    return f"`{text}`"


if __name__ == "__main__":
    print(render(), end="")
