"""ms-swift to Cohort."""

import re
from typing import Any

from cohort.check.convert.trl_draft import LOSSES, SCALES, TrlDraft, same_keys
from cohort.check.lora import swift_lora
from cohort.check.quantization import swift_bits
from cohort.check.rules.keys import Version
from cohort.check.rules.start import Start
from cohort.check.rules.swift import sampling_mode

# losses that TRL has and ms-swift has not are left to what is said of an unknown one
_LOSSES = {name: parts for name, parts in LOSSES.items() if name not in ("luspo", "vespo")}
_SCALES = {**SCALES, "gdpo": "per_reward_mean_std"}
_EVALUATION = ["eval_strategy", "eval_steps", "eval_on_start", "num_generations_eval", "val_dataset"]
_EVALUATION += ["split_dataset_ratio"]
_COLOCATED = ["vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "tensor_parallel_size"]
_ADVANTAGES = {("rloo", "none"): "leave_one_out", ("reinforce_plus_plus", "batch"): "group_mean_whitened"}


def from_swift(draft: TrlDraft, start: Start | None, version: Version) -> None:
    """Fill the draft with the settings of a run of this version of ms-swift."""
    settings, known = draft.settings, draft.known
    draft.path("model.path", named=settings.said("model") or settings.said("ckpt_dir"), missing="MODEL")
    draft.path("data.path", named=_names(draft, "dataset"), missing="train.jsonl")
    draft.put("data.prompt", "messages")
    draft.system_prompt(settings.text("system"))
    thinking = {"enable_thinking": settings.flag("enable_thinking")}
    draft.put("data.chat_template_kwargs", thinking if "enable_thinking" in settings else None)
    if settings.text("truncation_strategy", "left") != "delete":
        draft.differs("max_length cuts longer prompts from the left there; here they are dropped")
    _evaluation(draft)
    draft.rewards(settings.said("reward_funcs"), settings.said("reward_weights"))
    if settings.said("external_plugins"):
        draft.todo.append(f"rewards.py: rewards that {settings.said('external_plugins')} defines become functions")
    generations = settings.whole("num_generations", 8)
    if generations == 1:
        draft.differs("no equivalent: one completion per prompt, with a teacher; 2 are compared here")
    draft.batch(start, max(generations, 2))
    draft.put("rollout.max_completion_tokens", settings.whole("max_completion_length", 512, maximum=10**9))
    tuner = settings.text("tuner_type", settings.text("train_type", "lora"))
    adam = settings.text("optim", "adamw").startswith("adamw")
    for ours, theirs in same_keys("transformers").items():
        if adam or not ours.startswith("optim."):
            draft.put(ours, known.get(theirs, {}).get("default"))
    draft.put("train.learning_rate", 1e-5 if tuner == "full" else 1e-4)
    draft.transformers_keys(epochs=3.0, schedule="cosine")
    draft.copy(same_keys("ms-swift"))
    top_k = settings.number("top_k", known["top_k"]["default"])
    draft.put("rollout.top_k", int(top_k) if top_k > 0 else None)
    _algorithm(draft)
    dtype = settings.text("torch_dtype")
    if dtype in ("float32", "bfloat16"):
        draft.put("model.dtype", dtype)
    elif dtype:
        draft.differs(f"no equivalent: torch_dtype {dtype}; float32 is the default")
    draft.adapter(swift_lora(settings))
    if tuner not in ("lora", "full"):
        draft.differs(f"no equivalent: tuner {tuner}; all weights are trained here")
    _engine(draft, sampling_mode(settings, draft.launch, version))
    draft.quantized(swift_bits(settings))
    if settings.flag("dynamic_sample"):
        draft.put("rollout.resample", settings.whole("max_resample_times", 3))
    draft.skip_defaults()


def _names(draft: TrlDraft, key: str) -> list[Any]:
    """Data sets by name. `name#1000` is a sample of so many rows there."""
    said = draft.settings.said(key)
    names = []
    for name in said if isinstance(said, list) else [said] if said else []:
        match = re.fullmatch(r"(.+)#(\d+)", name) if isinstance(name, str) else None
        if match:
            draft.differs(f"no equivalent: {name} is a sample of {match[2]} rows there; all of {match[1]} are taken")
        names.append(match[1] if match else name)
    return names


def _evaluation(draft: TrlDraft) -> None:
    settings = draft.settings
    strategy = settings.text("eval_strategy", settings.text("save_strategy", "steps"))
    data, ratio = _names(draft, "val_dataset"), settings.number("split_dataset_ratio", 0.0)
    if strategy == "no" or (not data and ratio <= 0):
        draft.skip("nothing is evaluated there", *_EVALUATION)
        return
    every = settings.whole("eval_steps", settings.said("save_steps"))
    draft.evaluation(data, every)
    if data:
        draft.copy({"eval.num_samples": "num_generations_eval"})
    else:
        draft.todo.append(f"eval: hold out {ratio:g} of the data, and evaluate every {every} steps")
    if strategy != "steps":
        draft.todo.append(f"eval.every: the steps of eval_strategy {strategy}")


def _engine(draft: TrlDraft, mode: str) -> None:
    settings, launch = draft.settings, draft.launch
    if mode == "none":
        draft.put("rollout.engine", "local")
        draft.skip("use_vllm is false", *(key for key in launch.settings if key.startswith("vllm_")))
        return
    if mode == "colocate":
        parallel = settings.whole("vllm_tensor_parallel_size", settings.whole("tensor_parallel_size", 1))
        draft.gpus(shared=True, tensor_parallel=parallel)
        draft.copy({"rollout.gpu_memory_utilization": "vllm_gpu_memory_utilization"})
        return
    draft.skip("Cohort starts, watches and restarts its own vLLM servers", "vllm_server_host num_infer_workers")
    if mode == "server":
        draft.skip("no effect there: the server has options of its own", *_COLOCATED)
    else:
        draft.copy({"rollout.gpu_memory_utilization": "vllm_gpu_memory_utilization"})
    said = launch.server.get("vllm_tensor_parallel_size")
    parallel = str(said.value) if said else ""
    draft.gpus(shared=False, tensor_parallel=int(parallel) if parallel.isdecimal() else 1)
    draft.put("rollout.max_staleness", 1 if settings.flag("async_generate") else None)
    draft.put("hardware.rollout_gpus", len(launch.server_gpus) if launch.server_gpus else None)
    draft.differs(f"vllm_mode {mode}: servers beside the run sample there; here the run starts its own")


def _algorithm(draft: TrlDraft) -> None:
    settings = draft.settings
    loss = settings.text("loss_type", "grpo")
    if loss not in _LOSSES:
        draft.differs(f"no equivalent: loss {loss}; grpo stands in its place")
    policy_loss, loss_weight = _LOSSES.get(loss, _LOSSES["grpo"])
    policy_loss = draft.ratio_level(loss, policy_loss)
    beta = settings.number("beta", 0.04)
    in_reward = beta > 0 and settings.flag("kl_in_reward", settings.text("advantage_estimator", "grpo") != "grpo")
    if policy_loss == "gspo" and (in_reward or settings.number("top_entropy_quantile", 1.0) < 1):
        draft.differs("gspo_token stands in the place of gspo, as tokens have weights of their own")
        policy_loss = "gspo_token"
    draft.algorithm(
        loss,
        {"advantage": _advantage(draft), "policy_loss": policy_loss, "loss_weight": loss_weight},
        beta=beta,
        kl_in="reward" if in_reward else None,
        kl_estimator="k1" if in_reward else None,
        **draft.bounds(loss, policy_loss),
    )
    if policy_loss == "sapo":
        draft.copy(same_keys("ms-swift_sapo"))
    draft.reference(beta)


def _advantage(draft: TrlDraft) -> str:
    """Of an estimator and what it divides by, whose default depends on it."""
    estimator = draft.settings.text("advantage_estimator", "grpo")
    scale = draft.reward_scale({"rloo": "none", "reinforce_plus_plus": "batch"}.get(estimator, "group"))
    if estimator != "grpo" and scale != "gdpo" and (estimator, scale) not in _ADVANTAGES:
        draft.differs(f"no equivalent: advantage_estimator {estimator} with scale_rewards {scale}")
    return _ADVANTAGES.get((estimator, scale)) or _SCALES.get(scale, "group_mean_std")
