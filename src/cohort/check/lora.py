"""LoRA settings of other trainers as keys of `model.adapter`: for conversion and memory."""

import re
from collections.abc import Mapping
from typing import Any

from cohort.check.launch import Settings
from cohort.check.tables import load_table

PEFT_PREFIX = "trainer.peft_config."  # of what the reader of Python finds in `LoraConfig(...)`
# by framework: names of keys, and defaults
NAMES: Mapping[str, Any] = load_table("memory.toml")
_USUAL_TARGETS = ["q_proj", "v_proj"]  # peft's own for Llama, Qwen, Mistral and most others


def read_lora(settings: Settings, framework: str) -> tuple[dict[str, Any], list[str]]:
    """Return the keys of `model.adapter`, and notes on differences. `framework` is peft for `LoraConfig(...)`."""
    names = NAMES[framework]["lora"]
    usual = names["usual"]
    targets, notes = _targets(settings.said(names["targets"]), names["targets"], all_linear="all_linear" in usual)
    keys: dict[str, Any] = {
        "rank": settings.whole(names["rank"], usual["rank"]),
        "alpha": float(settings.number(names["alpha"], usual["alpha"])),
        "targets": targets,
    }
    dropout = float(settings.number(names["dropout"], usual["dropout"])) if "dropout" in names else 0.0
    flags = {key: True for key in ("rslora", "dora") if key in names and settings.flag(names[key])}
    return {**keys, **({"dropout": dropout} if dropout else {}), **flags}, notes


def trl_lora(settings: Settings) -> tuple[dict[str, Any], list[str]] | None:
    """Read the LoRA settings of a TRL or Open-R1 run; None if all weights are trained."""
    if settings.said("trainer.peft_config") == "LoraConfig":
        settings.said(f"{PEFT_PREFIX}task_type")  # there is no other here
        return read_lora(settings, "peft")
    return read_lora(settings, "trl") if settings.flag("use_peft") else None


def swift_lora(settings: Settings) -> tuple[dict[str, Any], list[str]] | None:
    """Read the LoRA settings of an ms-swift run; None for another tuner."""
    tuner = settings.text("tuner_type", settings.text("train_type", "lora"))
    return read_lora(settings, "ms-swift") if tuner == "lora" else None


def verl_lora(settings: Settings) -> tuple[dict[str, Any], list[str]] | None:
    """Read the LoRA settings of a verl run; None if all weights are trained."""
    rank = settings.whole(NAMES["verl"]["lora"]["rank"], 0, minimum=0)
    return read_lora(settings, "verl") if rank else None


def _targets(said: Any, key: str, *, all_linear: bool) -> tuple[str | list[str], list[str]]:
    """All linear layers or the names of some. A single text is a pattern to peft, unless it is a plain name."""
    listed = [said] if isinstance(said, str) else list(map(str, said)) if isinstance(said, list | tuple | set) else []
    if "all-linear" in listed or (not listed and all_linear):
        return "all-linear", []
    if not listed:
        usual = " and ".join(_USUAL_TARGETS)
        note = f"{key.removeprefix('trainer.')} is not set; using {usual}, peft's default for most models"
        return list(_USUAL_TARGETS), [note]
    if all(re.fullmatch(r"[\w.]+", name) for name in listed):
        return listed, []
    return "all-linear", [f"no equivalent: {key} {said!r:.80} is a pattern; all linear layers are taken"]
