"""A run's configuration and provenance: what differs from the defaults and between runs. Secrets are hidden."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from cohort.config.algorithm import AlgorithmConfig
from cohort.config.schema import UNIONS, Config, sections_in
from cohort.run.provenance import hide, hide_in_text
from cohort_view.run import ViewedRun
from cohort_view.values import mapping, text


def config_info(run: ViewedRun) -> dict[str, Any]:
    """Return the configuration and provenance of a run."""
    config = mapping(run.config)
    starts = [event for event in run.events if event.event == "start"]
    last = starts[-1].values if starts else {}
    return {
        "changed": changed_keys(config),
        "yaml": yaml.safe_dump(hide(config), sort_keys=False, allow_unicode=True, width=120) if config else "",
        "command": text(last, "command"),
        "commit": text(last, "commit"),
        "versions": mapping(last, "versions"),
        "starts": [{"timestamp": start.timestamp, "step": start.step, **start.values} for start in starts],
        "problems": run.problems,
    }


def differences(runs: Sequence[ViewedRun]) -> dict[str, Any]:
    """Return the keys in which the configurations of runs differ. Runs without a configuration are left out."""
    unknown = [run.id for run in runs if not run.config]
    runs = [run for run in runs if run.config]
    flat = {run.id: dict(_flat(mapping(run.config))) for run in runs}
    hidden = {run.id: dict(_flat(hide(mapping(run.config)))) for run in runs}
    changed = {run.id: [change["key"] for change in changed_keys(mapping(run.config))] for run in runs}
    found = []
    for key in dict.fromkeys(key for values in flat.values() for key in values):
        having = [run for run in flat if key in flat[run]]
        is_set = any(key == c or key.startswith(f"{c}.") for run in having for c in changed[run])
        # a key that another version does not know counts only if it is set
        is_different = _differ([flat[run][key] for run in having]) or (len(having) < len(flat) and is_set)
        if is_different and key != "run.dir":
            found.append({"key": hide_in_text(key), "values": {run: hidden[run].get(key) for run in having}})
    return {"keys": found, "unknown": unknown}


def changed_keys(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the keys whose values are not the defaults, secrets hidden."""
    given = {key: value for key, value in config.items() if key != "algorithm"}
    return [*_changed(given, Config, ""), *_changed_of_algorithm(mapping(config, "algorithm"))]


def _changed(values: Mapping[str, Any], section: type[BaseModel], place: str) -> Iterator[dict[str, Any]]:
    """Yield the keys of a section that differ from its defaults. Keys that it does not know count as changed."""
    for key, value in values.items():
        field = section.model_fields.get(str(key))
        inner = sections_in(field.annotation) if field is not None else []
        parts = value if isinstance(value, list) and value else [value]
        if inner and all(isinstance(part, Mapping) for part in parts):
            for number, part in enumerate(parts):
                name = f"{place}{key}.{number}." if isinstance(value, list) else f"{place}{key}."
                yield from _changed(part, _variant(inner, part, UNIONS.get(str(key))), name)
            continue
        default = None
        if field is not None and not field.is_required():
            default = to_jsonable_python(field.get_default(call_default_factory=True), fallback=str)
            if value == default:
                continue
        yield _changed_key(f"{place}{key}", value, default)


def _changed_of_algorithm(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the keys of `algorithm`: a run lists there only what differs from the defaults of its name."""
    name = values.get("name")
    default_name = AlgorithmConfig.model_fields["name"].default
    if values and name != default_name:
        yield _changed_key("algorithm.name", name, default_name)
    defaults: dict[str, Any] = {}
    with suppress(ValueError):  # an algorithm of another version
        defaults = dict(AlgorithmConfig(name=str(name)))
    for key, value in values.items():
        default = to_jsonable_python(defaults.get(str(key)), fallback=str)
        if key != "name" and value != default:
            yield _changed_key(f"algorithm.{key}", value, default)


def _changed_key(key: str, value: Any, default: Any) -> dict[str, Any]:
    return {"key": hide_in_text(key), "value": hide(value, key), "default": default}


def _variant(sections: Sequence[type[BaseModel]], values: Mapping[str, Any], named_by: str | None) -> type[BaseModel]:
    """Return the class of a section that has several, such as `rollout` with `engine: vllm`."""
    if named_by is not None:
        for section in sections:
            if section.model_fields[named_by].default == values.get(named_by):
                return section
    return sections[0]


def _flat(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings and lists by their keys, as in `rewards.0.weight`."""
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    if not items:
        yield place.removesuffix("."), value
    for key, inner in items:
        yield from _flat(inner, f"{place}{key}.")


def _differ(values: Sequence[Any]) -> bool:
    return any(value != values[0] or isinstance(value, bool) != isinstance(values[0], bool) for value in values)
