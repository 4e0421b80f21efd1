"""Write `docs/api.md` from the docstrings: `python tools/docs/api_page.py > docs/api.md`."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

import cohort
import cohort.trl
from cohort.records import RolloutGroup, ScoredGroup, Trajectory

_INTRO = """# Python API

Generated from the docstrings by `make docs`; do not edit. [python.md](python.md) shows how to use `cohort.Trainer`, and
[trl-fields.md](trl-fields.md) has the fields of `GRPOConfig`.
"""
_RECORDS = (RolloutGroup, ScoredGroup, Trajectory)  # what groups and reports have in them
_SECTION = re.compile(r"^(Args|Returns|Raises|Example):{1,2}$")
_ENTRY = re.compile(r"^(\*{0,2}\w+): (.*)$")
_WIDTH = 100


def render() -> str:
    """Return the whole page."""
    parts = [_INTRO, "## `cohort`\n"]
    parts += [_object(f"cohort.{name}", getattr(cohort, name)) for name in sorted(cohort.__all__)]
    parts += ["## `cohort.trl`\n"]
    parts += [_object(f"cohort.trl.{name}", getattr(cohort.trl, name)) for name in cohort.trl.__all__]
    parts += ["## Records\n", *(_object(kind.__name__, kind) for kind in _RECORDS)]
    return "\n".join(parts).rstrip() + "\n"


def _object(name: str, value: Any) -> str:
    """Return the part of a class or function, with the public members of a class."""
    parts = [f"### `{name}`\n"]
    if not inspect.isclass(value):
        return "\n".join([*parts, _signature(name, value), *_doc(value)])
    if "__init__" in vars(value) and not is_dataclass(value):
        parts += [_signature(name, value.__init__), *_doc(value), *_doc(value.__init__)]
    else:
        parts += _doc(value)
    if is_dataclass(value) and value is not cohort.trl.GRPOConfig:
        hints = inspect.get_annotations(value)
        parts.append("".join(f"- `{field}: {_type(hint)}`\n" for field, hint in hints.items()))
    members = {name: found for kind in reversed(value.__mro__) if _is_ours(kind) for name, found in vars(kind).items()}
    for member, found in members.items():
        if not member.startswith("_") and (inspect.isfunction(found) or isinstance(found, property)):
            parts.append(_member(name.rpartition(".")[2], member, found))
    return "\n".join(parts)


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith("cohort")


def _member(owner: str, name: str, found: Any) -> str:
    if isinstance(found, property):
        returned = _type(inspect.signature(found.fget).return_annotation)
        return "\n".join([f"#### `{owner}.{name}: {returned}`\n", *_doc(found)])
    return "\n".join([f"#### `{owner}.{name}`\n", _signature(name, found), *_doc(found)])


def _signature(name: str, function: Any) -> str:
    signature = inspect.signature(function)
    parameters = [parameter for parameter in signature.parameters.values() if parameter.name != "self"]
    text = _as_text(name, signature.replace(parameters=parameters))
    if len(text) > _WIDTH:
        inner = text[text.index("(") + 1 : text.rindex(")")]
        text = f"{name}(\n    " + ",\n    ".join(_split(inner)) + ",\n" + text[text.rindex(")") :]
    return f"```python\n{text}\n```\n"


def _as_text(name: str, signature: inspect.Signature) -> str:
    returned = signature.return_annotation
    shown = "" if returned in (inspect.Signature.empty, None) else f" -> {_type(returned)}"
    plain = signature.replace(return_annotation=inspect.Signature.empty)
    return f"{name}{_shorten(str(plain))}{shown}"


def _split(parameters: str) -> Iterator[str]:
    """Yield the parameters of a signature, at the commas outside of brackets."""
    depth, start = 0, 0
    for place, character in enumerate(parameters):
        depth += (character in "[({") - (character in "])}")
        if character == "," and not depth:
            yield parameters[start:place].strip()
            start = place + 1
    yield parameters[start:].strip()


def _type(annotation: Any) -> str:
    return _shorten(annotation if isinstance(annotation, str) else inspect.formatannotation(annotation))


def _shorten(text: str) -> str:
    """Leave out the modules of types."""
    return re.sub(r"\b(?:[a-z_][\w]*\.)+([A-Z])", r"\1", text).replace("'", "")


def _doc(value: Any) -> Iterator[str]:
    """Yield the lines of a docstring in Markdown: its sections are lists, and examples are code."""
    section = ""
    for line in (inspect.getdoc(value) or "").splitlines():
        if found := _SECTION.match(line.strip()):
            section = found[1]
            yield "```python" if section == "Example" else f"**{section}**\n"
        elif section == "Example":
            if line.strip():
                yield line.removeprefix("    ")
        elif section and (entry := _ENTRY.match(line.removeprefix("    "))):
            yield f"- `{entry[1]}`: {entry[2]}"
        elif section in ("Args", "Raises") and line.strip():
            yield f"  {line.strip()}"
        else:
            yield line.strip()
    if section == "Example":
        yield "```"
    yield ""


if __name__ == "__main__":
    print(render(), end="")
