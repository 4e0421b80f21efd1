"""Other trainers' names for keys and rewards: one table for conversions and for errors about unknown keys."""

import math
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

TRL_TABLES = ("messages", "transformers", "reference", "evaluation", "trl", "trl_vllm", "trl_adapter")
_BATCH = "per_device_train_batch_size"


@cache
def equivalents() -> dict[str, dict[str, Any]]:
    """Return the tables of `other_trainers.yaml`: of trl, verl and rewards. They are shared: do not change them."""
    loaded: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("other_trainers.yaml").read_text(encoding="utf-8"))
    return loaded


@cache
def grpo_config_fields() -> dict[str, dict[str, str]]:
    """Return what fields of TRL's `GRPOConfig` are in `cohort.trl`, with a note: refused, dropped, read and no_effect.

    Fields of the other tables of "trl" may have none. They are shared: do not change them.
    """
    said = equivalents()["trl"]["fields"]
    no_effect = {name: why for why, names in said["no_effect"].items() for name in names.split()}
    return {
        "refused": said["refused"],
        "dropped": {name: why or no_effect[name] for name, why in said["dropped"].items()},
        "read": dict.fromkeys(said["read"].split(), ""),
        "no_effect": no_effect,
    }


def explain_trl_key(key: str, value: Any, raw: Mapping[str, Any]) -> str | None:
    """Say what to use instead of a key of TRL; None if it is none, or has the same name here.

    Args:
        key: the unknown key, without its section.
        value: its value.
        raw: the whole configuration, for the keys that a batch size depends on.
    """
    if key == _BATCH:
        return _explain_batch(value, raw)
    if advice := equivalents()["trl"]["advice"].get(key):
        return str(advice)
    for table in TRL_TABLES:
        found = dict(_equivalents(equivalents()["trl"][table], key, value))
        if found:
            same = any(ours.rpartition(".")[2] == key for ours in found)
            return None if same else "use " + " and ".join(ours + said for ours, said in found.items())
    return None


def _equivalents(rows: Mapping[str, Any], key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the keys of Cohort that a table has for a key, with ": value" where that is known."""
    for ours, row in rows.items():
        row = {"from": row} if isinstance(row, str) else row
        if key in row["from"].split():
            if "values" in row:
                value = row["values"].get(str(value).lower())
            elif isinstance(value, float | int) and not isinstance(value, bool) and value <= row.get("over", -math.inf):
                value = None
            yield ours, "" if value is None else f": {_as_yaml(value)}"


def _as_yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()


def _explain_batch(per_device: Any, raw: Mapping[str, Any]) -> str:
    """Return the prompts of a step: TRL counts the completions of one process and one micro-batch."""
    sections = [raw, *(section for section in raw.values() if isinstance(section, Mapping))]

    def given(key: str, default: int) -> int:
        found = next((section[key] for section in sections if key in section), default)
        return found if type(found) is int and found > 0 else default

    if type(per_device) is not int or per_device < 1:
        return "use train.prompts_per_step"
    accumulation, processes = given("gradient_accumulation_steps", 1), given("processes", 1)
    generations = given("num_generations", 8)
    prompts = math.ceil(per_device * accumulation * processes / generations)
    return (
        f"use train.prompts_per_step: {prompts} ({per_device} completions x gradient_accumulation_steps {accumulation} "
        f"x {processes} GPUs / num_generations {generations})"
    )
