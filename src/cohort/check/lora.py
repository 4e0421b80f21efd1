"""LoRA settings of other trainers as keys of `model.adapter`: for conversion and memory."""

import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any

from cohort.check.launch import Settings

PEFT_PREFIX = "trainer.peft_config."  # of what the reader of Python finds in `LoraConfig(...)`
# by framework: names of keys, and defaults
NAMES: Mapping[str, Any] = tomllib.loads(resources.files("cohort.check").joinpath("memory.toml").read_text())
_USUAL_TARGETS = ["q_proj", "v_proj"]  # peft's own for Llama, Qwen, Mistral and most others


def read_lora(settings: Settings, framework: str) -> tuple[dict[str, Any], list[str]]:
    """The keys of `model.adapter`, and notes on what they cannot say. `framework`: or peft, for `LoraConfig(...)`."""
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
    """Of a TRL or Open-R1 run; None where all weights are trained."""
    if settings.said("trainer.peft_config") == "LoraConfig":
        settings.said(f"{PEFT_PREFIX}task_type")  # there is no other here
        return read_lora(settings, "peft")
    return read_lora(settings, "trl") if settings.flag("use_peft") else None


def swift_lora(settings: Settings) -> tuple[dict[str, Any], list[str]] | None:
    """Of an ms-swift run; None for another tuner."""
    tuner = settings.text("tuner_type", settings.text("train_type", "lora"))
    return read_lora(settings, "ms-swift") if tuner == "lora" else None


def verl_lora(settings: Settings) -> tuple[dict[str, Any], list[str]] | None:
    """Of a verl run; None where all weights are trained."""
    rank = settings.whole(NAMES["verl"]["lora"]["rank"], 0, minimum=0)
    return read_lora(settings, "verl") if rank else None


def _targets(said: Any, key: str, *, all_linear: bool) -> tuple[str | list[str], list[str]]:
    """All linear layers or the names of some. A single text is a pattern to peft, unless it is a plain name."""
    listed = [said] if isinstance(said, str) else list(map(str, said)) if isinstance(said, list | tuple | set) else []
    if "all-linear" in listed or (not listed and all_linear):
        return "all-linear", []
    if not listed:
        told = f"{key.removeprefix('trainer.')} is not said; {' and '.join(_USUAL_TARGETS)} are what peft takes"
        return list(_USUAL_TARGETS), [f"{told} for most models"]
    if all(re.fullmatch(r"[\w.]+", name) for name in listed):
        return listed, []
    return "all-linear", [f"no equivalent: {key} {said!r:.80} is a pattern; all linear layers are taken"]
