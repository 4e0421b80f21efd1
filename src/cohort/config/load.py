"""Reading a configuration: YAML, overrides, validation with messages that say what to change, and paths."""

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from cohort.config.algorithm import OwnFunction
from cohort.config.catalogue import COMPONENTS
from cohort.config.data import RewardConfig
from cohort.config.schema import UNIONS, Config, sections_in
from cohort.config.yaml_text import read_yaml
from cohort.errors import UserError

WRITTEN_BY_COHORT = "# Written by cohort: a run's configuration with every default.\n"
_MAX_FILE_BYTES = 200_000
_MAX_ERRORS = 20  # that are told at a time
_OF_ALGORITHM = "# Of `algorithm`, what its name does not say already: see `cohort algorithms NAME`.\n"


def load_config(path: str | Path, overrides: Sequence[str] = (), *, without: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply `key.sub=value` overrides, validate, and make paths absolute.

    Input paths are looked up in the file's folder first, then in the working directory; `run.dir` is relative to the
    working directory.

    Args:
        path: of the file.
        overrides: applied one after the other.
        without: keys of the file, as `section.key`, that are read past.

    Raises:
        UserError: the file is missing or not YAML, a key is unknown, a value does not fit.
    """
    path = Path(path)
    try:
        text = _read_text(path)
    except FileNotFoundError:
        here = sorted(p.name for p in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, here, n=1)
        raise UserError(f"{path}: no such configuration file{f'; did you mean {near[0]}?' if near else ''}") from None
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
    return config_from_dict(raw, overrides, base_dir=path.parent)


def _read_text(path: Path) -> str:
    """The text of a file that may be a configuration."""
    if (size := path.stat().st_size) > _MAX_FILE_BYTES:
        raise UserError(
            f"{path}: {size:,} bytes, and a configuration has at most {_MAX_FILE_BYTES:,}; is this another file?"
        )
    return path.read_text(encoding="utf-8")


def config_from_dict(raw: Mapping[str, Any], overrides: Sequence[str] = (), *, base_dir: Path | None = None) -> Config:
    """Validate a nested mapping as `load_config` does a file. Paths are looked up in `base_dir` first.

    Raises:
        UserError: a key is unknown or a value does not fit.
    """
    merged = _plain_copy(raw)
    for override in overrides:
        _apply_override(merged, override)
    try:
        config = Config.model_validate(merged)
    except ValidationError as error:
        raise UserError(_explain_all(error.errors())) from None
    return _with_absolute_paths(config, base_dir or Path.cwd())


def to_yaml(config: Config) -> str:
    """The configuration, defaults included, as YAML that `load_config` reads back to an equal one.

    What `algorithm.name` says already is not written, so that changing the name changes the algorithm.
    """
    text = yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return WRITTEN_BY_COHORT + _OF_ALGORITHM + text


class _Dumper(yaml.SafeDumper):
    """Quotes text with Unicode's own line breaks, which would be read back as spaces."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """The text as a node."""
        style = '"' if any(character in data for character in "\x85\u2028\u2029") else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


def _plain_copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _plain_copy(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_copy(v) for v in value]
    return value


def _apply_override(raw: dict[str, Any], override: str) -> None:
    """Set one `key.sub=value` in place; list entries go by number (`rewards.0.weight=0.5`)."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"override {override!r}: must look like key.sub=value, such as train.steps=100")
    try:
        value = read_yaml(text)
    except ValueError as error:
        raise UserError(f"override {override!r}: the value is not valid YAML: {error}") from error
    *parents, last = key.split(".")
    node: Any = raw
    for depth, part in enumerate(parents):
        if isinstance(node, list):
            node = node[_list_index(node, part, override)]
        elif isinstance(node, dict):
            if node.get(part) is None:
                node[part] = {}
            node = node[part]
        if not isinstance(node, dict | list):
            raise UserError(f"override {override!r}: {'.'.join(parents[: depth + 1])} is {node!r}, which has no keys")
    if isinstance(node, list):
        node[_list_index(node, last, override)] = value
    else:
        node[last] = value


def _list_index(items: list[Any], part: str, override: str) -> int:
    if not part.isdecimal() or int(part) >= len(items):
        positions = f"must be a list position from 0 to {len(items) - 1}" if items else "the list is empty"
        raise UserError(f"override {override!r}: {part!r}: {positions}")
    return int(part)


def _explain_all(errors: Sequence[ErrorDetails]) -> str:
    # A list whose only entry is wrong is also reported as too short: that second message would mislead.
    nested = {e["loc"][0] for e in errors if len(e["loc"]) > 1}
    told = [e for e in errors if e["type"] != "too_short" or e["loc"][0] not in nested]
    shown = told[:_MAX_ERRORS]
    last_of_place = {e["loc"][:-1]: n for n, e in enumerate(shown)}
    lines = [
        (_explain(e) + _known_keys(e, last_of_place[e["loc"][:-1]] == n)).rstrip("; ") for n, e in enumerate(shown)
    ]
    if len(told) > len(shown):
        lines.append(f"and {len(told) - len(shown):,} more mistakes")
    return "\n".join(lines)


def _known_keys(error: ErrorDetails, is_last: bool) -> str:
    """The keys that a section has, behind the last one of it that is unknown."""
    if error["type"] != "extra_forbidden" or not is_last:
        return ""
    *place, _ = error["loc"]
    section, name = _section_at(error["loc"]), ".".join(str(p) for p in place) or "the configuration"
    if place and place[0] in UNIONS:
        name = f"{place[0]} {section.model_fields[UNIONS[str(place[0])]].default}"
    return f"{name} has: {', '.join(section.model_fields)}"


def _explain(error: ErrorDetails) -> str:
    """One pydantic error as `field: value, rule, what works`."""
    loc, section = list(error["loc"]), _section_at(error["loc"])
    if loc and loc[0] in UNIONS and len(loc) > 1:  # a discriminated union puts the chosen name into the location
        del loc[1]
    field = ".".join(str(p) for p in loc)
    value, kind = error["input"], error["type"]
    if kind == "extra_forbidden":
        if len(error["loc"]) == 3 and (others := _others_with(str(loc[0]), str(loc[1]))):
            said = f"{loc[0]}.{UNIONS[str(loc[0])]}"
            return f"{field}: only {said}: {' or '.join(others)} has this key; remove it, or use {said}: {others[0]}; "
        known = list(section.model_fields)
        meant = _nearest_key(str(loc[-1]), known, section)
        return f"{field}: unknown key; " + (f"did you mean {meant}? " if meant else "")
    if kind == "missing":
        return f"{field}: missing; this key is required"
    if kind == "union_tag_invalid":
        key = UNIONS[field]
        name, known = value[key], list(_members(field))
        near = difflib.get_close_matches(str(name), known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"{field}.{key}: {name!r} is not one of {', '.join(known)}{hint}"
    message = error["msg"].removeprefix("Value error, ")
    if kind == "value_error" and isinstance(value, Mapping):  # a rule over several keys: the message names them
        return f"{field}: {message}" if field else message
    if kind in ("model_type", "model_attributes_type"):
        message = f"a section is a mapping of keys: {', '.join(section.model_fields)}"
        if field in UNIONS:
            key = UNIONS[field]
            message = f"a section is a mapping of keys, such as {{{key}: {list(_members(field))[-1]}}}"
    if kind == "too_short":
        message = "at least one reward is needed, such as [{use: math}]"
    if kind == "tuple_type":
        message = "must be a list, such as " + ("[{use: math}]" if field == "rewards" else "[tensorboard]")
    if field == "hardware.device":
        message = "must be auto, cpu, cuda or cuda:N"
    return f"{field}: {_shortened(repr(value))}: {message[0].lower()}{message[1:]}"


def _nearest_key(wrong: str, here: Sequence[str], section: type[BaseModel]) -> str | None:
    """The key that was meant: the same one where only one other section has it, or a similar one here."""
    elsewhere = [
        f"{'rewards.0' if name == 'rewards' else name}.{wrong}"
        for name, sections in _SECTIONS.items()
        if section not in sections and any(wrong in other.model_fields for other in sections)
    ]
    if len(elsewhere) == 1:
        return elsewhere[0]
    near = difflib.get_close_matches(wrong, here, n=1)
    return near[0] if near else None


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def _members(name: str) -> dict[str, type[BaseModel]]:
    """The sections that there are of this name, by the value that says which."""
    return {section.model_fields[UNIONS[name]].default: section for section in _SECTIONS[name]}


def _others_with(name: str, key: str) -> list[str]:
    """Where a section is one of several: those that have a key, which the chosen one lacks."""
    if name not in UNIONS:
        return []
    return [other for other, section in _members(name).items() if key in section.model_fields]


def _section_at(loc: Sequence[str | int]) -> type[BaseModel]:
    """The section of the configuration in which an error's location lies."""
    if not loc or loc[0] not in _SECTIONS:
        return Config
    section = _SECTIONS[str(loc[0])][0]
    if loc[0] in UNIONS and len(loc) > 1:
        section = _members(str(loc[0])).get(str(loc[1]), section)
    inner = _SECTIONS.get(f"{loc[0]}.{loc[1]}") if len(loc) > 1 else None
    return inner[0] if inner else section


_SECTIONS = {name: sections_in(field.annotation) for name, field in Config.model_fields.items()}
_SECTIONS |= {  # and those in sections
    f"{name}.{key}": inner
    for name, sections in _SECTIONS.items()
    for section in sections
    for key, field in section.model_fields.items()
    if (inner := sections_in(field.annotation))
}


def _with_absolute_paths(config: Config, base_dir: Path) -> Config:
    """The same configuration with every path that exists made absolute, so that it means the same from anywhere."""
    folders = (base_dir, Path.cwd())

    def found(path: str) -> str:
        for folder in folders:
            candidate = folder / os.path.expanduser(path)
            if os.path.exists(candidate):  # Path.exists raises for names that are too long
                return str(candidate.resolve())
        return path  # an id of a hub, or missing: the reader of it says which

    def of_user(use: str) -> str:
        file, colon, function = use.rpartition(":")
        return f"{found(file)}:{function}" if colon and file.endswith(".py") else use

    def component(choice: str | OwnFunction) -> str | OwnFunction:
        return replace(choice, use=of_user(choice.use)) if isinstance(choice, OwnFunction) else choice

    def reward(entry: RewardConfig) -> RewardConfig:
        return entry.model_copy(update={"use": of_user(entry.use)})

    adapter: dict[str, Any] = {}
    if config.model.adapter is not None and config.model.adapter.path is not None:
        adapter = {"adapter": config.model.adapter.model_copy(update={"path": found(config.model.adapter.path)})}
    updates: dict[str, Any] = {
        "model": config.model.model_copy(update={"path": found(config.model.path)} | adapter),
        "data": config.data.model_copy(update={"path": found(config.data.path)}),
        "rewards": tuple(reward(entry) for entry in config.rewards),
        "algorithm": config.algorithm.model_copy(
            update={kind: component(getattr(config.algorithm, kind)) for kind in COMPONENTS}
        ),
        "rollout": config.rollout.in_folders(folders),
        "run": config.run.model_copy(update={"dir": str(Path(os.path.expanduser(config.run.dir)).absolute())}),
    }
    if config.critic is not None and config.critic.path is not None:
        updates["critic"] = config.critic.model_copy(update={"path": found(config.critic.path)})
    if config.eval is not None:
        updates["eval"] = config.eval.model_copy(update={"path": found(config.eval.path)})
    return config.model_copy(update=updates)
