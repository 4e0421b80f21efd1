"""Load configurations: YAML, overrides, validation with actionable messages, and path resolution."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from cohort.config.algorithm import unknown_name
from cohort.config.data import DataConfig, SourceConfig
from cohort.config.other_trainers import explain_trl_key
from cohort.config.rewards import REWARD_SETTINGS
from cohort.config.rollout import ENVIRONMENT_FORMS
from cohort.config.schema import UNIONS, Config, sections_in
from cohort.errors import UserError, did_you_mean, excerpt, suggest

_MAX_VALUES = 100_000


def compose(text: str) -> yaml.Node | None:
    """Parse a YAML document into nodes; None if it is empty.

    Raises:
        ValueError: invalid YAML, nested too deeply, or more than 100,000 values counting every use of an anchor. The
            message has the position, if the parser knows it.
    """
    with _readable_errors():
        node = yaml.compose(text, Loader=_Loader)
        if node is not None and len(list(islice(_expanded(node), _MAX_VALUES + 1))) > _MAX_VALUES:
            raise ValueError(f"more than {_MAX_VALUES:,} values, counting every use of an anchor")
    return node


def read_yaml(text: str) -> Any:
    """Read the value of a YAML document. Duplicate keys are an error (PyYAML would drop all but the last).

    Raises:
        ValueError: as `compose`, or a duplicate key, or a value that does not fit its tag.
    """
    node = compose(text)
    if node is None:
        return None
    with _readable_errors():
        return _Loader("").construct_document(node)


@contextmanager
def _readable_errors() -> Iterator[None]:
    """Raise `ValueError` with the position and the problem in one line."""
    try:
        yield
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(where + ", ".join(filter(None, (error.problem, error.context)))) from error
    except yaml.YAMLError as error:
        raise ValueError(str(error).replace("\n", " ")) from error
    except RecursionError as error:
        raise ValueError("nested too deeply, or an anchor contains itself") from error


def _expanded(node: yaml.Node) -> Iterator[yaml.Node]:
    """Yield a node and all nodes in it, once for every use of an anchor."""
    yield node
    for child in node.value if isinstance(node, yaml.CollectionNode) else ():
        for part in child if isinstance(child, tuple) else (child,):  # keys and values of a mapping
            yield from _expanded(part)


class _Loader(yaml.SafeLoader):
    """Reports duplicate keys and values that do not fit their tags."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct a dict."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"duplicate key {key.value!r}", problem_mark=key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Construct the value of a node."""
        try:
            return super().construct_object(node, deep)
        except (KeyError, ValueError, AttributeError, TypeError, OverflowError) as error:  # `!!bool maybe`
            kind = node.tag.rpartition(":")[2]
            raise yaml.MarkedYAMLError(
                problem=f"{str(node.value)[:60]!r} is not a valid {kind}", problem_mark=node.start_mark
            ) from error


CONFIG_HEADER = "# Written by cohort: a run's configuration with every default.\n"
_MAX_FILE_BYTES = 200_000
_MAX_ERRORS = 20  # per report
_OF_ALL_SOURCES = ("map", "prompt", "system_prompt")  # keys of a source that `data` has beside its sources, too
_ALGORITHM_NOTE = "# `algorithm` lists only what differs from its name's defaults: see `cohort algorithms NAME`.\n"


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, without: Sequence[str] = (), base_dir: Path | None = None
) -> Config:
    """Read a YAML file, apply `key.sub=value` overrides, validate, and make paths absolute.

    Input paths are resolved against the file's folder, then the working directory; `run.dir` is relative to the working
    directory.

    Args:
        path: YAML file.
        overrides: applied in order.
        without: keys of the file to ignore, as `section.key`.
        base_dir: used instead of the file's folder.

    Raises:
        UserError: the file is missing or not YAML, a key is unknown, or a value is invalid.
    """
    path = Path(path)
    try:
        text = _read_text(path)
    except FileNotFoundError:
        here = sorted(p.name for p in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
        raise UserError(f"{path}: no such configuration file{did_you_mean(path.name, here)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    try:
        raw = read_yaml(text)
    except ValueError as error:
        raise UserError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(raw, dict):
        raise UserError(f"{path}: a configuration is a mapping of sections (model, data, ...), not {raw!r:.60}")
    for key in without:
        section, _, name = key.partition(".")
        if isinstance(raw.get(section), dict):
            raw[section].pop(name, None)
    return config_from_dict(raw, overrides, base_dir=base_dir or path.parent)


def _read_text(path: Path) -> str:
    """Read a text file, refusing files too large to be a configuration."""
    if (size := path.stat().st_size) > _MAX_FILE_BYTES:
        raise UserError(
            f"{path}: {size:,} bytes, and a configuration has at most {_MAX_FILE_BYTES:,}; is this another file?"
        )
    return path.read_text(encoding="utf-8")


def config_from_dict(raw: Mapping[str, Any], overrides: Sequence[str] = (), *, base_dir: Path | None = None) -> Config:
    """Validate a nested mapping like `load_config` does a file. Paths are resolved against `base_dir` first.

    Raises:
        UserError: a key is unknown or a value is invalid.
    """
    merged = _plain_copy(raw)
    for override in overrides:
        apply_override(merged, override)
    try:
        return Config.model_validate(merged, context=(base_dir or Path.cwd(), Path.cwd()))
    except ValidationError as error:
        raise UserError(_explain_all(error.errors(), merged)) from None


def to_yaml(config: Config) -> str:
    """Dump the configuration with defaults as YAML that `load_config` reads back to an equal one.

    Settings implied by `algorithm.name` are left out, so that changing the name changes the algorithm.
    """
    text = yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return CONFIG_HEADER + _ALGORITHM_NOTE + text


class _Dumper(yaml.SafeDumper):
    """Quotes text with Unicode line breaks, which YAML would read back as spaces."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Return the text as a node."""
        style = '"' if any(character in data for character in "\x85\u2028\u2029") else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


def _plain_copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _plain_copy(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_copy(v) for v in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Set one `key.sub=value` in place; list entries are addressed by index (`rewards.0.weight=0.5`)."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"override {override!r}: must look like key.sub=value, such as train.steps=100")
    try:
        value = _plain_copy(_override_value(text))
    except ValueError as error:
        raise UserError(f"override {override!r}: the value is not valid YAML: {error}") from error
    *parents, last = key.split(".")
    node: Any = raw
    for depth, part in enumerate(parents):
        if isinstance(node, list):
            node = node[_list_index(node, part, override, ".".join(parents[:depth]))]
        elif isinstance(node, dict):
            if node.get(part) is None:
                node[part] = {}
            node = node[part]
        if not isinstance(node, dict | list):
            raise UserError(f"override {override!r}: {'.'.join(parents[: depth + 1])} is {node!r}, which has no keys")
    if isinstance(node, list):
        node[_list_index(node, last, override, ".".join(parents))] = value
    else:
        node[last] = value


@lru_cache(maxsize=1024)
def _override_value(text: str) -> Any:
    """Read a value; planning tries the same few hundreds of times."""
    return read_yaml(text)


def _list_index(items: list[Any], part: str, override: str, field: str) -> int:
    if field == "data" and part in DataConfig.model_fields:
        value = override.partition("=")[2]
        works = f"a key for all of them stands beside the list: write data: {{sources: [...], {part}: {value}}}"
        if part in SourceConfig.model_fields and part not in _OF_ALL_SOURCES:
            works = f"say it of one: data.0.{part}={value}"
        raise UserError(f"override {override!r}: data is a list of sources; {works}")
    if not part.isdecimal() or int(part) >= len(items):
        positions = f"must be a list position from 0 to {len(items) - 1}" if items else "the list is empty"
        raise UserError(f"override {override!r}: {part!r}: {positions}")
    return int(part)


def _explain_all(errors: Sequence[ErrorDetails], raw: Mapping[str, Any]) -> str:
    for error in errors:
        error["loc"] = tuple(part for part in error["loc"] if part not in ENVIRONMENT_FORMS)
    shown = errors[:_MAX_ERRORS]
    last_of_place = {e["loc"][:-1]: n for n, e in enumerate(shown)}
    lines = [_explain(e, raw, list_keys=last_of_place[e["loc"][:-1]] == n) for n, e in enumerate(shown)]
    if len(errors) > len(shown):
        lines.append(f"and {len(errors) - len(shown):,} more mistakes")
    return "\n".join(lines)


def _explain_unknown_key(error: ErrorDetails, field: str, raw: Mapping[str, Any], list_keys: bool) -> str:
    """Suggest what an unknown key was meant to be, and list the keys of its section."""
    *place, key = map(str, error["loc"])
    section, name = _section_at(error["loc"], raw), field.rpartition(".")[0] or "the configuration"
    if place[:1] == ["rewards"] and "args" in place:
        return f"{field}: unknown key{suggest(key, _keys(section), 'It takes')}"
    if of_trl := explain_trl_key(key, error["input"], raw):
        return f"{field}: unknown key; {key} is TRL's: {of_trl}"
    text = f"{field}: unknown key{_nearest_key(key, section)}"
    if len(place) == 2 and place[0] in UNIONS:
        said = UNIONS[place[0]]
        name = f"{place[0]} {section.model_fields[said].default}"
        others = [member for member, other in _members(place[0]).items() if key in other.model_fields]
        if others:
            said = f"{place[0]}.{said}"
            text = f"{field}: only {said}: {' or '.join(others)} has this key; remove it, or use {said}: {others[0]}"
    return text + f"{' ' if text.endswith('?') else '; '}{name} has: {', '.join(section.model_fields)}" * list_keys


def _explain(error: ErrorDetails, raw: Mapping[str, Any], *, list_keys: bool) -> str:
    """Format one pydantic error as `field: value, rule, what works`; list a section's keys for an unknown one."""
    loc, section = list(error["loc"]), _section_at(error["loc"], raw)
    if loc and loc[0] in UNIONS and len(loc) > 1:  # a discriminated union puts the chosen name into the location
        del loc[1]
    field = ".".join(str(p) for p in loc)
    value, kind = error["input"], error["type"]
    if kind == "extra_forbidden":
        return _explain_unknown_key(error, field, raw, list_keys)
    if kind == "missing":
        return f"{field}: missing; this key is required"
    if kind == "union_tag_invalid":
        key = UNIONS[field]
        return f"{field}.{key}: {value[key]!r} {unknown_name(str(value[key]), list(_members(field)))}"
    message = error["msg"].removeprefix("Value error, ")
    if kind == "value_error" and isinstance(value, Mapping):  # a rule over several keys: the message names them
        return f"{field}: {message}" if field else message
    if kind in ("model_type", "model_attributes_type"):
        keys = ": " + ", ".join(section.model_fields)
        if field in UNIONS:
            keys = f", such as {{{UNIONS[field]}: {list(_members(field))[-1]}}}"
        message = f"a section is a mapping of keys{keys}"
    if kind == "tuple_type":
        example = "[{use: math}]" if field == "rewards" else "[tensorboard]"
        message = "must be a list" + f", such as {example}" * (".args." not in field)
    shown = excerpt(value)
    return f"{field}: {shown}: {message[0].lower()}{message[1:]}"


def _nearest_key(wrong: str, section: type[BaseModel]) -> str:
    """Suggest the same name in the one other section that has it, else a similar one here."""
    elsewhere = [
        f"{'rewards.0' if name == 'rewards' else name}.{wrong}"
        for name, sections in _SECTIONS.items()
        if section not in sections and any(wrong in other.model_fields for other in sections)
    ]
    return f"; did you mean {elsewhere[0]}?" if len(elsewhere) == 1 else did_you_mean(wrong, section.model_fields)


def _members(name: str) -> dict[str, type[BaseModel]]:
    """Return the classes of a union section by their discriminator value."""
    return {section.model_fields[UNIONS[name]].default: section for section in _SECTIONS[name]}


def _keys(section: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in section.model_fields.items()]


def _section_at(loc: Sequence[str | int], raw: Mapping[str, Any]) -> type[BaseModel]:
    """Return the section class at an error's location."""
    if not loc or loc[0] not in _SECTIONS:
        return Config
    if loc[0] == "rewards" and loc[2:3] == ("args",):
        settings = REWARD_SETTINGS[raw["rewards"][loc[1]]["use"]]
        field = settings.model_fields.get(str(loc[3])) if len(loc) > 4 else None  # of several keys, such as `criteria`
        return next(iter(sections_in(field.annotation)), settings) if field else settings
    section, keys = _SECTIONS[str(loc[0])][0], list(loc[1:])
    if loc[0] in UNIONS and keys:
        section = _members(str(loc[0])).get(str(keys.pop(0)), section)
    inner = _SECTIONS.get(f"{loc[0]}.{keys[0]}") if keys else None
    return inner[0] if inner else section


_SECTIONS = {name: sections_in(field.annotation) for name, field in Config.model_fields.items()}
_SECTIONS |= {  # nested sections
    f"{name}.{key}": inner
    for name, sections in _SECTIONS.items()
    for section in sections
    for key, field in section.model_fields.items()
    if (inner := sections_in(field.annotation))
}
