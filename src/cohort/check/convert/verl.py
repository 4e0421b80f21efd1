"""verl to Cohort. Defaults that differ from Cohort's are verl's."""

from dataclasses import replace
from typing import Any

from cohort.check.convert.draft import Draft
from cohort.check.lora import verl_lora
from cohort.check.rules.keys import Version
from cohort.check.rules.start import Start
from cohort.check.tables import load_table

_ACTOR, _ROLLOUT, _MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
_CORRECTION, _FILTER = "algorithm.rollout_correction.rollout_is", "algorithm.filter_groups"
_CUSTOM = "custom_reward_function", "reward.custom_reward_function"
_KWARGS = "reward_kwargs.overlong_buffer_cfg"
_OVERLONG = "reward_model.overlong_buffer", f"reward_model.{_KWARGS}", f"reward.{_KWARGS}"
_CLIP_KEYS = f"{_ACTOR}.grad_clip", f"{_ACTOR}.optim.clip_grad"  # before 0.8, and from then on
_LARGEST_SHARE = 0.5  # of a GPU, for vLLM beside training
_TABLES: dict[str, dict[str, str]] = load_table("convert/equivalents/verl.yaml")
_OFF = ("none", "null", "false", "0", "0.0", "-1")


def from_verl(draft: Draft, start: Start | None, version: Version) -> None:
    """Fill the draft with the settings of a run of this version of verl."""
    settings, tables, launch = draft.settings, _TABLES, draft.launch
    per_node, nodes = settings.whole("trainer.n_gpus_per_node", 8), settings.whole("trainer.nnodes", 1)
    processes = replace(launch.processes, value=per_node * nodes) if launch.processes else None
    draft.launch = replace(launch, processes=processes, processes_per_node=per_node)
    draft.path("model.path", named=settings.said(f"{_MODEL}.path"), missing="MODEL")
    draft.path("data.path", named=settings.said("data.train_files"), missing="train.jsonl")
    draft.path("eval.path", named=settings.said("data.val_files"), missing="eval.jsonl")
    settings.used |= {"data.train_batch_size", f"{_ACTOR}.ppo_mini_batch_size"}  # of `start`
    draft.batch(start, settings.whole(f"{_ROLLOUT}.n", 1))
    draft.copy(tables["keys"], defaults=True)
    draft.copy(tables["counts"], defaults=True, minimum=0)
    draft.copy(tables["said"])
    clip, unused = _CLIP_KEYS[:: -1 if version >= (0, 8) else 1]
    draft.put("train.max_grad_norm", settings.number(clip, 1.0))
    draft.skip(f"this version of verl reads {clip}", unused)
    if not settings.flag(f"{_ROLLOUT}.val_kwargs.do_sample"):
        draft.put("eval.temperature", 0.0)
    limit = settings.whole("data.val_max_samples", -1, minimum=-1)
    draft.put("eval.max_prompts", limit if limit > 0 else None)
    for convert in (_data, _rewards, _training, _algorithm, _sampling):
        convert(draft)
    for flag, keys in tables["switches"].items():
        draft.skip(f"{flag} is off", *(keys.split() if not settings.flag(flag) else ()))
    for key, said in launch.settings.items():
        is_default = launch.form == "yaml" and said.value == draft.known.get(key, {}).get(
            "default"
        )  # Hydra has written it
        if is_default:
            settings.used.add(key)
            draft.unneeded.pop(key, None)
        elif key not in settings.used and _is_off(key, str(said.value).lower()):
            draft.skip("off there", key)


def _is_off(key: str, value: str) -> bool:
    return value in _OFF or (value == "1" and key.endswith("parallel_size"))


def _data(draft: Draft) -> None:
    truncation = draft.settings.text("data.truncation", "error")
    cuts = truncation != "error"
    drops = draft.settings.flag("data.filter_overlong_prompts")
    draft.put("data.overlong_prompts", "drop" if drops or cuts else "error")
    if drops:
        draft.skip("prompts that are too long are dropped before", "data.truncation")
    elif cuts:
        draft.differs(f"prompts that are too long are cut there (data.truncation: {truncation}), and dropped here")
    draft.logs("trainer.logger")


def _rewards(draft: Draft) -> None:
    settings = draft.settings
    names, paths = ([settings.said(f"{section}.{key}") for section in _CUSTOM] for key in ("name", "path"))
    draft.rewards(names[0] or names[1], None)
    draft.todo += [f"rewards.py: verl's reward is in {path}" for path in paths if path]
    for section in _OVERLONG:
        size, penalty = settings.whole(f"{section}.len", None), settings.number(f"{section}.penalty_factor", 1.0)
        if settings.flag(f"{section}.enable") and size:
            draft.config["rewards"].append({"use": "overlong", "args": {"buffer_tokens": size, "penalty": penalty}})


def _training(draft: Draft) -> None:
    settings, tables, optim, sharding = draft.settings, _TABLES, f"{_ACTOR}.optim", f"{_ACTOR}.fsdp_config"
    steps, epochs = settings.whole("trainer.total_training_steps", None), settings.number("trainer.total_epochs", 30)
    draft.put("train.steps" if steps else "train.epochs", steps or epochs)
    if steps:
        draft.skip("train.steps is set", "trainer.total_epochs")
    schedule = settings.text(f"{optim}.lr_scheduler_type", settings.text(f"{optim}.warmup_style"))
    draft.put("train.lr_schedule", draft.named(tables["lr_schedule"], "lr_scheduler_type", schedule))
    draft.put("optim.name", draft.named(tables["optimizer"], "optimizer", settings.text(f"{optim}.optimizer")))
    draft.put("model.dtype", draft.named(tables["dtype"], "model_dtype", settings.text(f"{sharding}.model_dtype")))
    ratio = settings.number(f"{optim}.lr_warmup_steps_ratio", 0.0)
    if draft.config["train"]["warmup_steps"]:
        draft.skip("train.warmup_steps is set", f"{optim}.lr_warmup_steps_ratio")
    elif ratio:
        draft.put("train.warmup_steps", int(ratio * (steps or 0)))
        draft.todo += [] if steps else [f"train.warmup_steps: {ratio:g} of all steps"]
    for beta, value in zip(("beta1", "beta2"), settings.said(f"{optim}.betas") or (), strict=False):
        draft.put(f"optim.{beta}", value)
    tokens = settings.whole(f"{_ACTOR}.ppo_max_token_len_per_gpu", 16_384, maximum=10**9)
    draft.put("train.micro_batch_tokens", tokens if settings.flag(f"{_ACTOR}.use_dynamic_bsz") else None)
    adapter, offloads = verl_lora(settings), settings.flag(f"{sharding}.optimizer_offload")
    draft.adapter(adapter)
    if adapter:
        path = settings.said(f"{_MODEL}.lora_adapter_path")
        adapter[0].update({"path": path} if path else {})
    elif offloads and not draft.config["model"].get("parameter_offload"):
        draft.put("optim.offload", True)


def _sampling(draft: Draft) -> None:
    """The engine that samples, and its options."""
    settings, engine = draft.settings, draft.settings.text(f"{_ROLLOUT}.name", "vllm")
    rounds = settings.whole(f"{_FILTER}.max_num_gen_batches", 0, minimum=0)
    metric = settings.text(f"{_FILTER}.metric", "reward")
    if settings.flag(f"{_FILTER}.enable"):
        draft.put("rollout.resample", max(rounds - 1, 1) if rounds else 100)
        draft.differs(f"groups with the same {metric} are sampled again there; here those with the same rewards")
    if engine == "hf":
        draft.put("rollout.engine", "local")
        return
    if engine != "vllm":
        draft.differs(f"{engine} samples there, and vLLM here")
    draft.gpus(shared=True, tensor_parallel=settings.whole(f"{_ROLLOUT}.tensor_model_parallel_size", 2))
    share = settings.number(f"{_ROLLOUT}.gpu_memory_utilization", 0.5)
    draft.put("rollout.gpu_memory_utilization", share if share <= _LARGEST_SHARE else None)
    if share > _LARGEST_SHARE:
        draft.differs(
            f"vLLM takes {share:g} of a GPU there, which training leaves while it samples; here it takes less"
        )
    prefix = f"{_ROLLOUT}.engine_kwargs.vllm."
    given = {key.removeprefix(prefix): key for key in draft.launch.settings if key.startswith(prefix)}
    options = {name: settings.said(key) for name, key in {**_TABLES["engine_options"], **given}.items()}
    draft.put("rollout.vllm_args", {name: value for name, value in options.items() if value is not None} or None)


def _kl(draft: Draft) -> dict[str, Any]:
    """Where the KL term is, and how it is estimated and controlled."""
    settings, estimators, control = draft.settings, _TABLES["kl_estimator"], "algorithm.kl_ctrl"
    in_loss, in_reward = settings.flag(f"{_ACTOR}.use_kl_loss"), settings.flag("algorithm.use_kl_in_reward")
    if in_loss and in_reward:
        draft.differs("no equivalent: KL in the reward and in the loss at once; the one in the loss is kept")
    if in_loss:
        form, beta = settings.text(f"{_ACTOR}.kl_loss_type", "k3"), settings.number(f"{_ACTOR}.kl_loss_coef", 0.001)
        estimator = estimators.get(form, "k1")
        if estimator == "k1":
            draft.differs(f"no equivalent: kl_loss_type {form} as a loss has no gradient in expectation; k3 is")
        return {"beta": beta, "kl_estimator": ("k2" if estimator == "k2" else "k3") if beta else None}
    beta = settings.number(f"{control}.kl_coef", 0.001) if in_reward else 0.0
    if not beta:
        return {"beta": 0.0}
    estimator = draft.named(estimators, "kl_penalty", settings.text("algorithm.kl_penalty", "kl"))
    keys = {"beta": beta, "kl_in": "reward", "kl_estimator": estimator}
    if settings.text(f"{control}.type") != "adaptive":
        draft.skip("kl_ctrl.type is fixed", f"{control}.target_kl", f"{control}.horizon")
        return keys
    keys["kl_target"] = settings.number(f"{control}.target_kl", 0.1)
    return {**keys, "kl_horizon": settings.whole(f"{control}.horizon", 10_000, maximum=10**9)}


def _algorithm(draft: Draft) -> None:
    settings, tables = draft.settings, _TABLES
    estimator = settings.text("algorithm.adv_estimator", "gae")
    advantage = draft.named(tables["adv_estimator"], "adv_estimator", estimator)
    by_std = settings.flag("algorithm.norm_adv_by_std_in_grpo", True)
    advantage = "group_mean" if advantage == "group_mean_std" and not by_std else advantage
    if draft.config["rollout"]["num_generations"] == 1 and advantage not in ("gae", "batch_mean_std"):
        advantage = "batch_mean_std"
        draft.differs("a group of one has its reward as its advantage there; here the batch's mean is its baseline")
    policy_loss = draft.named(tables["loss_mode"], "loss_mode", settings.text(f"{_ACTOR}.policy_loss.loss_mode"))
    summed = draft.named(tables["loss_agg_mode"], "loss_agg_mode", settings.text(f"{_ACTOR}.loss_agg_mode"))
    if policy_loss in ("gspo_token", "gmpo", "sapo"):
        summed = "sequence_mean"
        draft.skip("this policy loss sums in a way of its own", f"{_ACTOR}.loss_agg_mode")
    if advantage == "gae":
        draft.copy(tables["gae"])
    else:
        draft.skip("there is no critic", *(key for key in draft.launch.settings if key.startswith("critic.")))
        draft.skip("there is no critic", *tables["gae"].values())
    draft.skip("clip_ratio_low and clip_ratio_high decide", f"{_ACTOR}.clip_ratio")
    keys = {ours: f"{_ACTOR}.{name}" for ours, name in tables["bounds"].items()}
    values = {ours: settings.number(key, None) for ours, key in keys.items()}
    low, high, dual = (values[ours] or usual for ours, usual in (("clip_low", 0.2), ("clip_high", 0.2), ("delta", 3.0)))
    if dual <= 1 + high:
        draft.differs(f"no equivalent: clip_ratio_c {dual:g}, which is not above 1 + clip_high")
    if low >= 1:
        draft.differs(f"clip_ratio_low {low:g} is no bound; 0.999 is the nearest here")
    if policy_loss == "cispo":
        draft.differs("no equivalent: clip_ratio_low with policy loss cispo; its weights have no lower bound here")
    weights = draft.named(tables["rollout_is"], "rollout_is", settings.text(_CORRECTION, "none"))
    cap = settings.number(f"{_CORRECTION}_threshold", 2.0)
    values |= {"clip_low": min(low, 0.999), "clip_high": high, "delta": dual if dual > 1 + high else None}
    values |= {"sampling_correction": weights, "sampling_correction_cap": None if weights == "none" else cap}
    parts = {"advantage": advantage, "policy_loss": policy_loss, "loss_weight": summed}
    draft.algorithm(tables["names"].get(estimator, policy_loss), parts, **_kl(draft), **values)
    keys["sampling_correction_cap"] = f"{_CORRECTION}_threshold"
    unused = [key for ours, key in keys.items() if ours not in draft.config["algorithm"]]
    draft.skip("no effect with this policy loss and correction", *unused)
