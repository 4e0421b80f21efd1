"""Cohort's sections from TRL's arguments, by the table that `cohort convert` and messages use too."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from cohort.config.catalogue import COMPONENTS, parameters
from cohort.config.other_trainers import equivalents
from cohort.errors import UserError
from cohort.trl.config import TRACKERS, GRPOConfig

Sections = dict[str, dict[str, Any]]
_ADAMW_ONLY = ("beta1", "beta2", "epsilon")
_SAMPLING = {  # in generation_kwargs, which replace the arguments of the same meaning
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_completion_tokens",
}
NEVER = 10**9  # steps


def sections(args: GRPOConfig, *, world_size: int = 1) -> Sections:
    """Return the sections of a run with these arguments.

    Raises:
        UserError: a value has no equivalent.
    """
    tables = equivalents()["trl"]
    said = _Reader(args)
    said.copy(tables["transformers"])
    said.copy(tables["trl"])
    if args.beta:
        said.copy(tables["reference"])
    if args.use_vllm:
        said.copy(tables["trl_vllm"])
    found = said.sections
    _algorithm(args, found["algorithm"])
    if not found["optim"]["name"].startswith("adamw"):
        for key in _ADAMW_ONLY:
            found["optim"].pop(key, None)
    _steps(args, found, world_size)
    _engine(args, found["rollout"])
    # transformers 5.17 has another name for it
    checkpointing = getattr(args, "activation_checkpointing", getattr(args, "gradient_checkpointing", False))
    found["model"]["gradient_checkpointing"] = bool(checkpointing)
    if not torch.cuda.is_available():
        found["model"].pop("compute_dtype", None)  # bf16 is TRL's default, and slow on CPUs
    _model(args, found["model"])
    if args.use_cpu or args.no_cuda:
        found["hardware"]["device"] = "cpu"
    found["run"]["log"] = [name for name in args.report_to or () if name in TRACKERS]  # "all" has others too
    found["run"].pop("dir", None)
    return found


class _Reader:
    """Reads the rows of the table from arguments; see `cohort_check.convert.draft.Draft.copy` for what a row says."""

    def __init__(self, args: GRPOConfig):
        self._args = args
        self.sections: Sections = {name: {} for name in ("model", "rollout", "train", "optim", "hardware", "run")}

    def copy(self, rows: Mapping[str, Any]) -> None:
        """Set the keys of some rows."""
        for ours, row in rows.items():
            row = {"from": row} if isinstance(row, str) else row
            if "if" in row and not getattr(self._args, row["if"]):
                self._put(ours, row.get("else"))
            elif not any(self._has(key) for key in row.get("unless", "").split()):
                self._put(ours, self._read(row))

    def _read(self, row: Mapping[str, Any]) -> Any:
        for key in row["from"].split():
            value = self._value(key)
            if value is not None:
                break
        else:
            return row.get("default")
        value = getattr(value, "value", value)
        if "over" in row and value <= row["over"]:
            return None
        if "values" in row:
            if str(value).lower() not in row["values"]:
                raise UserError(f"{key}: {value!r} has no equivalent; use one of {', '.join(row['values'])}")
            return row["values"][str(value).lower()]
        return [value] if row.get("type") == "texts" and isinstance(value, str) else value

    def _value(self, key: str) -> Any:
        name, _, inner = key.partition(".")
        value = getattr(self._args, name, None)
        return as_dict(value, name).get(inner) if inner else value

    def _put(self, key: str, value: Any) -> None:
        if value is not None:
            *path, name = key.split(".")
            section = self.sections
            for part in path:
                section = section.setdefault(part, {})
            section[name] = value

    def _has(self, key: str) -> bool:
        section, _, name = key.partition(".")
        return name in self.sections.get(section, {})


def as_dict(value: Any, name: str) -> dict[str, Any]:
    """Return an argument that is a dict, or JSON of one.

    Raises:
        UserError: it is neither.
    """
    try:
        found = json.loads(value) if isinstance(value, str) else value or {}
    except ValueError:
        found = value
    if not isinstance(found, Mapping):
        raise UserError(f"{name}: must be a dict, not {value!r}")
    return dict(found)


def _algorithm(args: GRPOConfig, given: dict[str, Any]) -> None:
    """Translate TRL's settings into Cohort's components, and leave out what has no effect with them."""
    scales = equivalents()["trl"]["scales"]
    if args.scale_rewards not in scales:
        raise UserError(f"scale_rewards: {args.scale_rewards!r} must be group, batch or none")
    given["advantage"] = scales[args.scale_rewards]
    if args.multi_objective_aggregation == "normalize_then_sum":
        given["advantage"] = "per_reward_mean_std"
    if args.importance_sampling_level == "sequence" and given["policy_loss"] == "clipped":
        given["policy_loss"] = "gspo_token" if given.get("top_entropy_quantile", 1) < 1 else "gspo"
    if args.loss_type == "cispo":  # TRL's is the cap itself, and one below 1 scales all gradients
        given["clip_high"] = max(given["clip_high"], 1.0) - 1
        if not given["clip_high"]:
            del given["clip_high"]
    parts = {kind: given[kind] for kind in COMPONENTS}
    effective = {key for kind, part in parts.items() for key in COMPONENTS[kind][part].parameters}
    for key in [key for key in given if key in parameters() and key not in effective]:
        del given[key]
    if not args.beta:
        given.pop("kl_unbiased", None)


def _steps(args: GRPOConfig, found: Sections, world_size: int) -> None:
    """Set the prompts of a step and how many there are. TRL counts completions, and optimizer steps."""
    train = found["train"]
    per_device = args.per_gpu_train_batch_size or args.per_device_train_batch_size
    completions = per_device * args.gradient_accumulation_steps * world_size
    train["prompts_per_step"] = math.ceil(completions / (args.num_generations or 8))
    if "steps" in train:
        train["steps"] = math.ceil(train["steps"] / args.num_iterations)
    warmup = args.warmup_ratio or args.warmup_steps
    if 0 < warmup < 1:
        train["warmup_ratio"] = warmup
    elif warmup:
        train["warmup_steps"] = math.ceil(warmup / args.num_iterations)
    found["run"]["checkpoint_every"] = NEVER  # the trainer saves when its control says so
    found["run"]["keep_checkpoints"] = 1  # models of earlier steps are in checkpoint-N


def _engine(args: GRPOConfig, rollout: dict[str, Any]) -> None:
    rollout["engine"] = "vllm" if args.use_vllm else "local"
    if args.use_vllm and args.vllm_mode == "colocate":
        rollout["gpu_memory_utilization"] = args.vllm_gpu_memory_utilization
    if args.use_vllm and args.vllm_tensor_parallel_size > 1:
        rollout["tensor_parallel"] = args.vllm_tensor_parallel_size
    rollout.setdefault("max_prompt_tokens", 8192)  # TRL has no limit
    given = as_dict(args.generation_kwargs, "generation_kwargs")
    rollout |= {_SAMPLING[name]: value for name, value in given.items() if name in _SAMPLING and value is not None}
    others = given.keys() - _SAMPLING.keys() - {"stop", "stop_strings", "tokenizer", "use_cache", "pad_token_id"}
    if given.get("do_sample"):
        others.remove("do_sample")  # it always samples
    if others:
        known = ", ".join(["stop", "stop_strings", *_SAMPLING])
        raise UserError(f"generation_kwargs: {', '.join(sorted(others))}: not supported; use {known}")


def _model(args: GRPOConfig, model: dict[str, Any]) -> None:
    known = {"dtype", "torch_dtype", "attn_implementation", "trust_remote_code", "use_cache", "device_map"}
    known |= {"low_cpu_mem_usage"}
    given = as_dict(args.model_init_kwargs, "model_init_kwargs")
    others = {name for name in given.keys() - known if given[name] not in (None, "main")}  # "main": a revision
    if others:
        raise UserError(f"model_init_kwargs: {', '.join(sorted(others))}: not supported; load the model yourself")
    if given.get("trust_remote_code"):
        model["trust_remote_code"] = True


def model_section(model: Any, peft_config: Any, quantization_config: Any) -> dict[str, Any]:
    """Return the `model` section for a model, its adapter and its quantization.

    Raises:
        UserError: the adapter or the quantization has no equivalent.
    """
    section: dict[str, Any] = {"path": model}
    if peft_config is not None:
        config = model.config if isinstance(model, PreTrainedModel) else _try_config(str(model))
        section["adapter"] = adapter_section(peft_config, getattr(config, "model_type", None))
    if quantization_config is not None:
        if not (quantization_config.load_in_4bit or quantization_config.load_in_8bit):
            raise UserError("quantization_config is not supported; use load_in_4bit=True or load_in_8bit=True")
        section["quantization"] = "nf4" if quantization_config.load_in_4bit else "int8"
    return section


def _try_config(path: str) -> Any:
    """Return the configuration of a model, None where it cannot be read: an error for later."""
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError):
        return None


def model_id(model: Any) -> str:
    """Return the path or id of a model, or of what a model object was loaded from; empty if it is unknown."""
    return model if isinstance(model, str) else str(getattr(getattr(model, "config", None), "_name_or_path", ""))


def short_name(model: Any) -> str:
    """Return the last part of a model's path or id."""
    return (model_id(model) or "model").rstrip("/").rpartition("/")[2]


def adapter_section(peft_config: Any, model_type: str | None) -> dict[str, Any]:
    """Return `model.adapter` for a `peft.LoraConfig`.

    Raises:
        UserError: it is another kind of adapter, or its targets are a pattern.
    """
    if getattr(peft_config.peft_type, "value", peft_config.peft_type) != "LORA":
        raise UserError(f"peft_config: {type(peft_config).__name__} is not supported; use LoraConfig")
    targets = peft_config.target_modules or _usual_targets(model_type)
    if isinstance(targets, str) and targets != "all-linear":
        raise UserError(
            f"peft_config.target_modules: {targets!r} is a pattern; use names, such as ['q_proj', 'v_proj']"
        )
    if peft_config.modules_to_save:
        raise UserError(
            "peft_config.modules_to_save is not supported: the adapter's base is frozen; leave it out, or list "
            "lm_head and embed_tokens in target_modules"
        )
    given = {
        "rank": peft_config.r,
        "alpha": peft_config.lora_alpha,
        "targets": targets if targets == "all-linear" else sorted(targets),
        "dropout": peft_config.lora_dropout,
        "rslora": peft_config.use_rslora,
        "dora": peft_config.use_dora,
    }
    return {key: value for key, value in given.items() if value}


def _usual_targets(model_type: str | None) -> Sequence[str]:
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as MAPPING

    return list(MAPPING.get(str(model_type), ("q_proj", "v_proj")))


def is_text(rows: Any) -> bool | None:
    """Return whether the first prompt is text; None if there is none, or if rows can be read only once."""
    first = rows[0] if hasattr(rows, "__len__") and len(rows) else None
    if not hasattr(rows, "__len__") and hasattr(rows, "__iter__") and iter(rows) is not rows:
        first = next(iter(rows), None)
    prompt = first.get("prompt") if isinstance(first, Mapping) else None
    return None if prompt is None else isinstance(prompt, str)


def check_form(held_out: Any, *, trained: bool | None) -> None:
    """Refuse held-out prompts in another form than the training prompts: the template is used for all or none.

    Args:
        held_out: rows, or several sets by name.
        trained: whether the training prompts are text, if that matters.

    Raises:
        UserError: one is text, the other messages.
    """
    for each in held_out.values() if isinstance(held_out, Mapping) else (held_out,):
        if None not in (found := (is_text(each), trained)) and found[0] != found[1]:
            forms = ["text" if form else "messages" for form in found]
            raise UserError(
                f"eval_dataset: its prompts are {forms[0]}, those of train_dataset {forms[1]}; use one form for both"
            )
