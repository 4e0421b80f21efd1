"""Load configurations: YAML, overrides, validation with actionable messages, and path resolution."""

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from cohort.config.algorithm import CustomFunction
from cohort.config.catalogue import COMPONENTS
from cohort.config.data import RewardConfig
from cohort.config.schema import UNIONS, Config, sections_in
from cohort.config.yaml_text import read_yaml
from cohort.errors import UserError

CONFIG_HEADER = "# Written by cohort: a run's configuration with every default.\n"
_MAX_FILE_BYTES = 200_000
_MAX_ERRORS = 20  # per report
_ALGORITHM_NOTE = "# `algorithm` lists only what differs from its name's defaults: see `cohort algorithms NAME`.\n"


def load_config(path: str | Path, overrides: Sequence[str] = (), *, without: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply `key.sub=value` overrides, validate, and make paths absolute.

    Input paths are resolved against the file's folder, then the working directory; `run.dir` is relative to the working
    directory.

    Args:
        path: YAML file.
        overrides: applied in order.
        without: keys of the file to ignore, as `section.key`.

    Raises:
        UserError: the file is missing or not YAML, a key is unknown, or a value is invalid.
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
        _apply_override(merged, override)
    try:
        config = Config.model_validate(merged)
    except ValidationError as error:
        raise UserError(_explain_all(error.errors())) from None
    return _with_absolute_paths(config, base_dir or Path.cwd())


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
    return value


def _apply_override(raw: dict[str, Any], override: str) -> None:
    """Set one `key.sub=value` in place; list entries are addressed by index (`rewards.0.weight=0.5`)."""
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
    # pydantic also reports a list whose only entry is invalid as too short, which would mislead
    nested = {e["loc"][0] for e in errors if len(e["loc"]) > 1}
    reported = [e for e in errors if e["type"] != "too_short" or e["loc"][0] not in nested]
    shown = reported[:_MAX_ERRORS]
    last_of_place = {e["loc"][:-1]: n for n, e in enumerate(shown)}
    lines = [
        (_explain(e) + _known_keys(e, last_of_place[e["loc"][:-1]] == n)).rstrip("; ") for n, e in enumerate(shown)
    ]
    if len(reported) > len(shown):
        lines.append(f"and {len(reported) - len(shown):,} more mistakes")
    return "\n".join(lines)


def _known_keys(error: ErrorDetails, is_last: bool) -> str:
    """Return the keys of a section, after the last unknown key reported for it."""
    if error["type"] != "extra_forbidden" or not is_last:
        return ""
    *place, _ = error["loc"]
    section, name = _section_at(error["loc"]), ".".join(str(p) for p in place) or "the configuration"
    if place and place[0] in UNIONS:
        name = f"{place[0]} {section.model_fields[UNIONS[str(place[0])]].default}"
    return f"{name} has: {', '.join(section.model_fields)}"


def _explain(error: ErrorDetails) -> str:
    """Format one pydantic error as `field: value, rule, what works`."""
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
    """Return the intended key: the same name in the one other section that has it, else a similar one here."""
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
    """Return the classes of a union section by their discriminator value."""
    return {section.model_fields[UNIONS[name]].default: section for section in _SECTIONS[name]}


def _others_with(name: str, key: str) -> list[str]:
    """Return the members of a union section that have a key which the chosen one lacks."""
    if name not in UNIONS:
        return []
    return [other for other, section in _members(name).items() if key in section.model_fields]


def _section_at(loc: Sequence[str | int]) -> type[BaseModel]:
    """Return the section class at an error's location."""
    if not loc or loc[0] not in _SECTIONS:
        return Config
    section = _SECTIONS[str(loc[0])][0]
    if loc[0] in UNIONS and len(loc) > 1:
        section = _members(str(loc[0])).get(str(loc[1]), section)
    inner = _SECTIONS.get(f"{loc[0]}.{loc[1]}") if len(loc) > 1 else None
    return inner[0] if inner else section


_SECTIONS = {name: sections_in(field.annotation) for name, field in Config.model_fields.items()}
_SECTIONS |= {  # nested sections
    f"{name}.{key}": inner
    for name, sections in _SECTIONS.items()
    for section in sections
    for key, field in section.model_fields.items()
    if (inner := sections_in(field.annotation))
}


def _with_absolute_paths(config: Config, base_dir: Path) -> Config:
    """Make every existing path absolute, so that the configuration works from any directory."""
    folders = (base_dir, Path.cwd())

    def resolve(path: str) -> str:
        for folder in folders:
            candidate = folder / os.path.expanduser(path)
            if os.path.exists(candidate):  # Path.exists raises for names that are too long
                return str(candidate.resolve())
        return path  # a Hub id, or missing: whoever reads it reports that

    def resolve_function(use: str) -> str:
        file, colon, function = use.rpartition(":")
        return f"{resolve(file)}:{function}" if colon and file.endswith(".py") else use

    def component(choice: str | CustomFunction) -> str | CustomFunction:
        return replace(choice, use=resolve_function(choice.use)) if isinstance(choice, CustomFunction) else choice

    def reward(entry: RewardConfig) -> RewardConfig:
        return entry.model_copy(update={"use": resolve_function(entry.use)})

    adapter: dict[str, Any] = {}
    if config.model.adapter is not None and config.model.adapter.path is not None:
        adapter = {"adapter": config.model.adapter.model_copy(update={"path": resolve(config.model.adapter.path)})}
    updates: dict[str, Any] = {
        "model": config.model.model_copy(update={"path": resolve(config.model.path)} | adapter),
        "data": config.data.model_copy(update={"path": resolve(config.data.path)}),
        "rewards": tuple(reward(entry) for entry in config.rewards),
        "algorithm": config.algorithm.model_copy(
            update={kind: component(getattr(config.algorithm, kind)) for kind in COMPONENTS}
        ),
        "rollout": config.rollout.in_folders(folders),
        "run": config.run.model_copy(update={"dir": str(Path(os.path.expanduser(config.run.dir)).absolute())}),
    }
    if config.critic is not None and config.critic.path is not None:
        updates["critic"] = config.critic.model_copy(update={"path": resolve(config.critic.path)})
    if config.eval is not None:
        updates["eval"] = config.eval.model_copy(update={"path": resolve(config.eval.path)})
    return config.model_copy(update=updates)
