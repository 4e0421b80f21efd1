"""TRL and Open-R1 to Cohort."""

from cohort.check.convert.trl_draft import BATCH, LOSSES, SCALES, TrlDraft, same_keys
from cohort.check.lora import trl_lora
from cohort.check.quantization import trl_bits
from cohort.check.rules.keys import Version
from cohort.check.rules.start import Start
from cohort.check.rules.trl_run import sampling_mode, trl_default
from cohort.config import COMPONENTS

_SERVER = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port")
_COLOCATED = ("vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_enable_sleep_mode", "vllm_device")
_EVALUATION = ["eval_steps", "dataset_test_split", "per_device_eval_batch_size", "num_generations_eval", "eval_delay"]
_EVALUATION += ["eval_on_start"]
_MODEL_KEYS = {"attn_implementation", "dtype", "torch_dtype", "use_cache", "device_map"}  # of model_init_kwargs


def from_trl(draft: TrlDraft, start: Start | None, version: Version) -> None:
    """Fill the draft with the settings of a run of this version of TRL."""
    settings = draft.settings
    model = settings.text("model_name_or_path") or settings.said("trainer.model")
    draft.path("model.path", named=model, missing="MODEL")
    if not draft.dataset("data", "trainer.train_dataset"):
        draft.path("data.path", named=_data(draft), missing="train.jsonl")
    _evaluation(draft)
    draft.copy(same_keys("trl"))
    rewards = settings.said("reward_funcs") or settings.said("trainer.reward_funcs")
    draft.rewards(rewards, settings.said("reward_weights"))
    draft.skip("this version of TRL drops it", *(key for key in BATCH if start is not None and key not in draft.known))
    draft.batch(start, settings.whole("num_generations", 8))
    completion = settings.whole("max_completion_length", trl_default("max_completion_length", version), maximum=10**9)
    draft.put("rollout.max_completion_tokens", completion)
    if "max_prompt_length" not in settings and version >= (0, 26):
        draft.differs("prompts have no limit there; here rollout.max_prompt_tokens drops longer ones")
    draft.put("rollout.temperature", trl_default("temperature", version))
    draft.put("train.learning_rate", 1e-6)
    draft.transformers_keys(epochs=3.0)
    top_k = settings.number("top_k", None)
    draft.put("rollout.top_k", int(top_k) if top_k and top_k > 0 else None)
    _algorithm(draft, version)
    draft.adapter(trl_lora(settings))
    _precision(draft)
    _engine(draft, version)
    draft.quantized(trl_bits(settings))
    draft.skip_defaults()


def _data(draft: TrlDraft) -> object:
    """The name of the training data, or the names of those that are mixed."""
    settings = draft.settings
    mixture = settings.said("dataset_mixture")
    mixed = mixture.get("datasets") if isinstance(mixture, dict) else settings.said("datasets")
    if not isinstance(mixed, list) or not mixed:
        return settings.text("dataset_name")
    draft.todo.append(f"data: mix them into one file, as dataset_mixture and datasets do there: {mixed!r:.200}")
    return mixed[0].get("path", mixed[0].get("id")) if isinstance(mixed[0], dict) else mixed[0]


def _evaluation(draft: TrlDraft) -> None:
    settings = draft.settings
    strategy = settings.text("eval_strategy", settings.text("evaluation_strategy", "no"))
    found = draft.dataset("eval", "trainer.eval_dataset")
    if strategy == "no":
        draft.skip("eval_strategy is no", *_EVALUATION)
        if found:
            draft.put("eval.every", 0)
        return
    draft.skip("Cohort evaluates in micro-batches of its own", "per_device_eval_batch_size")
    draft.evaluation(settings.text("dataset_name"), settings.whole("eval_steps", None))
    if "eval" in draft.config:
        draft.copy({"eval.split": "dataset_test_split", "eval.num_samples": "num_generations_eval"})
    if strategy != "steps":
        draft.todo.append(f"eval.every: the steps of eval_strategy {strategy}")


def _algorithm(draft: TrlDraft, version: Version) -> None:
    settings = draft.settings
    loss = settings.text("loss_type", trl_default("loss_type", version) or "grpo")
    if loss not in LOSSES:
        draft.differs(f"no equivalent: loss {loss}; grpo stands in its place")
    policy_loss, loss_weight = LOSSES.get(loss, LOSSES["grpo"])
    policy_loss = draft.ratio_level(loss, policy_loss)
    advantage = SCALES.get(draft.reward_scale("group"), "group_mean_std")
    if settings.text("multi_objective_aggregation") == "normalize_then_sum":
        advantage = "per_reward_mean_std"
    beta = settings.number("beta", trl_default("beta", version))
    draft.algorithm(
        loss,
        {"advantage": advantage, "policy_loss": policy_loss, "loss_weight": loss_weight},
        beta=beta,
        **draft.bounds(loss, policy_loss),
        kl_unbiased=True if settings.flag("use_bias_correction_kl") and beta else None,
    )
    for ours, theirs in same_keys("trl_policy_loss").items():
        if ours.removeprefix("algorithm.") in COMPONENTS["policy_loss"][policy_loss].parameters:
            draft.copy({ours: theirs})
        else:
            draft.skip(f"no effect with loss_type {loss}", theirs)
    if settings.flag("use_adaptive_entropy"):
        draft.put("algorithm.entropy_target", settings.number("entropy_target", 0.2))
        draft.copy(same_keys("trl_adaptive_entropy"))
    draft.reference(beta)


def _precision(draft: TrlDraft) -> None:
    settings = draft.settings
    given = settings.said("model_init_kwargs")
    kwargs = given if isinstance(given, dict) else {}
    named = [kwargs.get("dtype"), kwargs.get("torch_dtype")]
    named += [settings.text(key) for key in ("torch_dtype", "dtype", "trainer.dtype")]
    dtype = next((str(name).removeprefix("torch.") for name in named if name is not None), None)
    if dtype in ("float32", "bfloat16"):
        draft.put("model.dtype", dtype)
    elif dtype not in (None, "auto"):
        draft.differs(f"no equivalent: dtype {dtype}; float32 is the default")
    if settings.flag("bf16") and dtype != "bfloat16":
        draft.put("model.compute_dtype", "bfloat16")
    rest = {key: value for key, value in kwargs.items() if key not in _MODEL_KEYS}
    if rest or (given is not None and given is not kwargs):
        draft.todo.append(f"model_init_kwargs: {rest or given} has no equivalent")


def _engine(draft: TrlDraft, version: Version) -> None:
    settings = draft.settings
    mode = sampling_mode(settings, version)
    if mode == "none":
        draft.put("rollout.engine", "local")
        draft.skip("use_vllm is false", *(key for key in draft.launch.settings if key.startswith("vllm_")))
        return
    shared = mode == "colocate"
    draft.gpus(shared=shared, tensor_parallel=settings.whole("vllm_tensor_parallel_size", 1) if shared else 1)
    if mode == "server":
        named = settings.text("vllm_mode", "server")
        draft.differs(f"vllm_mode {named}: you start what samples there; here the run does, or set rollout.urls")
        draft.skip("no effect there: the server has options of its own", *_COLOCATED)
    else:
        draft.copy({"rollout.gpu_memory_utilization": "vllm_gpu_memory_utilization"})
    draft.skip("Cohort starts, watches and restarts its own vLLM servers", *_SERVER)
    if settings.flag("vllm_importance_sampling_correction", True):
        draft.copy(same_keys("trl_sampling_correction" if version >= (1, 6) else "trl_sampling_correction_to_1_5"))
    else:
        draft.put("algorithm.sampling_correction", "none")
