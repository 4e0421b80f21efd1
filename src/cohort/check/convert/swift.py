"""ms-swift to Cohort."""

import re
from typing import Any

from cohort.check.convert.draft import LOSSES, SCALES, Draft
from cohort.check.lora import SWIFT, read_lora
from cohort.check.quantization import swift_bits
from cohort.check.readers.swift import MEGATRON
from cohort.check.rules.start import Start

# losses that TRL has and ms-swift has not are left to what is said of an unknown one
_LOSSES = {name: parts for name, parts in LOSSES.items() if name not in ("luspo", "vespo")}
_BATCH = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "generation_batch_size",
    "steps_per_generation",
    "global_batch_size",
    "micro_batch_size",
    "rlhf_type",
    MEGATRON,
)


def from_swift(draft: Draft, start: Start | None) -> None:
    """Fills the draft. Defaults that differ from Cohort's are ms-swift's."""
    settings = draft.settings
    draft.path("model.path", named=settings.said("model"), missing="MODEL")
    draft.path("data.path", named=_datasets(draft), missing="train.jsonl")
    draft.put("data.prompt", "messages")
    draft.copy({"data.system_prompt": ("system", "text"), "rollout.max_prompt_tokens": ("max_length", "whole")})
    draft.rewards(settings.said("reward_funcs"), settings.said("reward_weights"))
    for key in _BATCH:
        settings.said(key)
    draft.batch(start, settings.whole("num_generations", 8))
    draft.put("rollout.max_completion_tokens", settings.whole("max_completion_length", 512, maximum=10**9))
    draft.put("rollout.temperature", 0.9)
    draft.transformers_keys(epochs=3.0)
    if "learning_rate" not in settings:
        draft.note("to fill in: train.learning_rate, whose default in ms-swift depends on the tuner")
    top_k = settings.number("top_k", None)
    draft.put("rollout.top_k", int(top_k) if top_k and top_k > 0 else None)
    _algorithm(draft)
    dtype = settings.text("torch_dtype")
    draft.put("model.dtype", dtype if dtype in ("float32", "bfloat16") else None)
    _adapter(draft)
    if settings.flag("use_vllm"):
        draft.put("rollout.engine", "vllm")
        if settings.text("vllm_mode") == "colocate":
            draft.put("hardware.rollout_gpus", "shared")
            draft.copy(
                {
                    "rollout.tensor_parallel": ("vllm_tensor_parallel_size", "whole"),
                    "rollout.gpu_memory_utilization": ("vllm_gpu_memory_utilization", "number"),
                }
            )
    else:
        draft.put("rollout.engine", "local")
    draft.quantized(swift_bits(settings))
    if settings.flag("dynamic_sample"):
        draft.put("rollout.resample", settings.whole("max_resample_times", 3))


def _datasets(draft: Draft) -> Any:
    """What `--dataset` names. `name#1000` is a sample of so many rows there."""
    said = draft.settings.said("dataset")
    names = []
    for name in said if isinstance(said, list) else [said]:
        match = re.fullmatch(r"(.+)#(\d+)", name) if isinstance(name, str) else None
        if match:
            draft.note(f"no equivalent: {name} is a sample of {match[2]} rows there; all of {match[1]} are taken")
        names.append(match[1] if match else name)
    return names


def _adapter(draft: Draft) -> None:
    """LoRA is the default there, but with Megatron."""
    settings = draft.settings
    default = "full" if MEGATRON in settings else "lora"
    tuner = settings.text("tuner_type", settings.text("train_type", default))
    if tuner == "lora":
        draft.adapter(read_lora(settings, SWIFT))
    elif tuner != "full":
        draft.note(f"no equivalent: tuner {tuner}; all weights are trained here")


def _algorithm(draft: Draft) -> None:
    settings = draft.settings
    loss = settings.text("loss_type", "grpo")
    if loss not in _LOSSES:
        draft.note(f"no equivalent: loss {loss}; grpo stands in its place")
    policy_loss, loss_weight = _LOSSES.get(loss, _LOSSES["grpo"])
    policy_loss = draft.ratio_level(loss, policy_loss)
    beta = settings.number("beta", 0.04)
    in_reward = settings.flag("kl_in_reward") and beta > 0
    draft.algorithm(
        loss,
        {"advantage": _advantage(draft), "policy_loss": policy_loss, "loss_weight": loss_weight},
        beta=beta,
        kl_in="reward" if in_reward else None,
        kl_estimator="k1" if in_reward else None,
        **draft.bounds(loss, policy_loss),
        tau_positive=settings.number("tau_pos", None),
        tau_negative=settings.number("tau_neg", None),
        top_entropy_quantile=settings.number("top_entropy_quantile", None),
    )


def _advantage(draft: Draft) -> str:
    """Of an estimator and what it divides by, whose default depends on it."""
    estimator = draft.settings.text("advantage_estimator", "grpo")
    default = {"rloo": "none", "reinforce_plus_plus": "batch"}.get(estimator, "group")
    scale = draft.reward_scale(default)
    if scale == "gdpo":
        return "per_reward_mean_std"
    if (estimator, scale) == ("rloo", "none"):
        return "leave_one_out"
    if (estimator, scale) == ("reinforce_plus_plus", "batch"):
        return "group_mean_whitened"
    if estimator != "grpo":
        draft.note(f"no equivalent: advantage_estimator {estimator} with scale_rewards {scale}")
    return SCALES.get(scale, "group_mean_std")
