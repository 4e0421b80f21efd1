"""TRL and Open-R1 to Cohort."""

from cohort.check.convert.draft import LOSSES, SCALES, Draft
from cohort.check.lora import trl_lora
from cohort.check.quantization import trl_bits
from cohort.check.rules.start import Start
from cohort.check.rules.trl import Version

_NUMBERS = {
    "tau_positive": "sapo_temperature_pos",
    "tau_negative": "sapo_temperature_neg",
    "vespo_k_positive": "vespo_k_pos",
    "vespo_lambda_positive": "vespo_lambda_pos",
    "vespo_k_negative": "vespo_k_neg",
    "vespo_lambda_negative": "vespo_lambda_neg",
}
_TERMS = ("top_entropy_quantile", "off_policy_mask_threshold", "entropy_coef")  # of the same name here
_BATCH = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "generation_batch_size",
    "steps_per_generation",
    "num_generations",
)


_STARTERS = ("num_processes", "num_machines", "accelerate_config")  # of `trl grpo`, which the launch has read


def from_trl(draft: Draft, start: Start | None, version: Version) -> None:
    """Fills the draft. Defaults that differ from Cohort's are those of this version of TRL."""
    settings = draft.settings
    draft.path("model.path", named=settings.text("model_name_or_path", settings.said("trainer.model")), missing="MODEL")
    draft.path(
        "data.path", named=settings.text("dataset_name", settings.said("trainer.dataset")), missing="train.jsonl"
    )
    draft.copy(
        {
            "data.name": ("dataset_config", "text"),
            "data.split": ("dataset_train_split", "text"),
            "data.prompt": ("dataset_prompt_column", "text"),
            "data.system_prompt": ("system_prompt", "text"),
            "rollout.max_prompt_tokens": ("max_prompt_length", "whole"),
        }
    )
    rewards = settings.said("reward_funcs") or settings.said("trainer.reward_funcs")
    draft.rewards(rewards, settings.said("reward_weights"))
    for key in (*_BATCH, *_STARTERS):
        settings.said(key)
    draft.batch(start, settings.whole("num_generations", 8))
    completion = settings.whole("max_completion_length", 512 if version >= (1, 10) else 256, maximum=10**9)
    draft.put("rollout.max_completion_tokens", completion)
    if "max_prompt_length" not in settings and version >= (0, 26):
        draft.note("prompts have no limit there; here rollout.max_prompt_tokens drops longer ones")
    draft.put("rollout.temperature", 1.0 if version >= (0, 18) else 0.9)
    draft.put("train.learning_rate", 1e-6)
    draft.transformers_keys(epochs=3.0)
    top_k = settings.number("top_k", None)
    draft.put("rollout.top_k", int(top_k) if top_k and top_k > 0 else None)
    _algorithm(draft, version)
    draft.adapter(trl_lora(settings))
    _precision(draft)
    _engine(draft, version)
    draft.quantized(trl_bits(settings))


def _algorithm(draft: Draft, version: Version) -> None:
    settings = draft.settings
    loss = settings.text("loss_type", "dapo" if version >= (0, 22) else "bnpo" if version >= (0, 17) else "grpo")
    if loss not in LOSSES:
        draft.note(f"no equivalent: loss {loss}; grpo stands in its place")
    policy_loss, loss_weight = LOSSES.get(loss, LOSSES["grpo"])
    policy_loss = draft.ratio_level(loss, policy_loss)
    advantage = SCALES.get(draft.reward_scale("group"), "group_mean_std")
    if settings.text("multi_objective_aggregation") == "normalize_then_sum":
        advantage = "per_reward_mean_std"
    beta = settings.number("beta", 0.0 if version >= (0, 19) else 0.04)
    draft.algorithm(
        loss,
        {"advantage": advantage, "policy_loss": policy_loss, "loss_weight": loss_weight},
        beta=beta,
        **draft.bounds(loss, policy_loss),
        **{ours: settings.number(theirs, None) for ours, theirs in _NUMBERS.items()},
        kl_unbiased=True if beta and settings.flag("use_bias_correction_kl") else None,
    )
    draft.copy({f"algorithm.{key}": (key, "number") for key in _TERMS})
    if settings.flag("use_adaptive_entropy"):
        draft.put("algorithm.entropy_target", settings.number("entropy_target", 0.2))
        draft.copy({f"algorithm.{key}": (key, "number") for key in ("entropy_coef_delta", "entropy_coef_max")})


def _precision(draft: Draft) -> None:
    dtype = draft.settings.text("torch_dtype", draft.settings.text("dtype", draft.settings.text("trainer.dtype")))
    if dtype in ("float32", "bfloat16"):
        draft.put("model.dtype", dtype)
    elif dtype is not None:
        draft.note(f"no equivalent: dtype {dtype}; float32 is the default")
    if draft.settings.flag("bf16") and dtype != "bfloat16":
        draft.put("model.compute_dtype", "bfloat16")


def _engine(draft: Draft, version: Version) -> None:
    settings = draft.settings
    if not settings.flag("use_vllm"):
        draft.put("rollout.engine", "local")
        return
    draft.put("rollout.engine", "vllm")
    default = "colocate" if version >= (1, 0) else "server"
    if settings.text("vllm_mode", default) == "colocate" and version >= (0, 18):
        draft.put("hardware.rollout_gpus", "shared")
        draft.copy(
            {
                "rollout.tensor_parallel": ("vllm_tensor_parallel_size", "whole"),
                "rollout.gpu_memory_utilization": ("vllm_gpu_memory_utilization", "number"),
            }
        )
    else:
        draft.note("a server samples there; here the run starts its own on GPUs of this machine, or set rollout.urls")
