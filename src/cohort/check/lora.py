"""LoRA as other trainers write it, as keys of `model.adapter`: for conversion and for the judgement of memory."""

import re
from dataclasses import dataclass
from typing import Any

from cohort.check.launch import Settings

PEFT_PREFIX = "trainer.peft_config."  # of what the reader of Python finds in `LoraConfig(...)`
_USUAL_TARGETS = ("q_proj", "v_proj")  # peft's own for Llama, Qwen, Mistral and most others


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraNames:
    """What a trainer calls the keys of an adapter, and what they are where they are not said."""

    rank: str
    alpha: str
    targets: str
    dropout: str | None = None
    rslora: str | None = None
    dora: str | None = None
    usual: tuple[int, float, float] = (16, 32.0, 0.0)  # rank, alpha, dropout
    all_linear: bool = False  # whether all linear layers are the targets that are meant by none


TRL = LoraNames(
    rank="lora_r",
    alpha="lora_alpha",
    targets="lora_target_modules",
    dropout="lora_dropout",
    rslora="use_rslora",
    dora="use_dora",
    usual=(16, 32.0, 0.05),
)
PEFT = LoraNames(
    rank=f"{PEFT_PREFIX}r",
    alpha=f"{PEFT_PREFIX}lora_alpha",
    targets=f"{PEFT_PREFIX}target_modules",
    dropout=f"{PEFT_PREFIX}lora_dropout",
    rslora=f"{PEFT_PREFIX}use_rslora",
    dora=f"{PEFT_PREFIX}use_dora",
    usual=(8, 8.0, 0.0),
)
SWIFT = LoraNames(
    rank="lora_rank",
    alpha="lora_alpha",
    targets="target_modules",
    dropout="lora_dropout",
    rslora="use_rslora",
    dora="use_dora",
    usual=(8, 32.0, 0.05),
    all_linear=True,
)
VERL = LoraNames(
    rank="actor_rollout_ref.model.lora_rank",
    alpha="actor_rollout_ref.model.lora_alpha",
    targets="actor_rollout_ref.model.target_modules",
    usual=(8, 16.0, 0.0),
    all_linear=True,
)


def read_lora(settings: Settings, names: LoraNames) -> tuple[dict[str, Any], list[str]]:
    """The keys of `model.adapter`, and notes on what they cannot say."""
    rank, alpha, dropout = names.usual
    targets, notes = _targets(settings.said(names.targets), names)
    keys: dict[str, Any] = {
        "rank": settings.whole(names.rank, rank),
        "alpha": float(settings.number(names.alpha, alpha)),
        "targets": targets,
    }
    dropout = float(settings.number(names.dropout, dropout)) if names.dropout else dropout
    if dropout:
        keys["dropout"] = dropout
    for key, name in (("rslora", names.rslora), ("dora", names.dora)):
        if name and settings.flag(name):
            keys[key] = True
    return keys, notes


def trl_lora(settings: Settings) -> tuple[dict[str, Any], list[str]] | None:
    """Of a TRL or Open-R1 run; None where all weights are trained."""
    if settings.said("trainer.peft_config") == "LoraConfig":
        settings.said(f"{PEFT_PREFIX}task_type")  # there is no other here
        return read_lora(settings, PEFT)
    return read_lora(settings, TRL) if settings.flag("use_peft") else None


def _targets(said: Any, names: LoraNames) -> tuple[str | list[str], list[str]]:
    """All linear layers or the names of some. A single text is a pattern to peft, unless it is a plain name."""
    listed = [said] if isinstance(said, str) else list(map(str, said)) if isinstance(said, list | tuple | set) else []
    if not listed:
        if names.all_linear:
            return "all-linear", []
        usual = list(_USUAL_TARGETS)
        key = names.targets.removeprefix("trainer.")
        return usual, [f"{key} is not said; {' and '.join(usual)} are what peft takes for most models"]
    if "all-linear" in listed:
        return "all-linear", []
    if all(re.fullmatch(r"[\w.]+", name) for name in listed):
        return listed, []
    return "all-linear", [f"no equivalent: {names.targets} {said!r:.80} is a pattern; all linear layers are taken"]
