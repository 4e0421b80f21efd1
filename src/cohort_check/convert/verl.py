"""verl to Cohort. Defaults that differ from Cohort's are verl's."""

from cohort.config.other_trainers import equivalents
from cohort_check.convert.data_sources import files_of, put_sources
from cohort_check.convert.draft import Draft, Rows
from cohort_check.rules.common import VERL, Start, Version

_ACTOR, _ROLLOUT, _MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
_FILTER = "algorithm.filter_groups"
_LARGEST_SHARE = 0.5  # of a GPU, for vLLM beside training
_TABLES: dict[str, Rows] = equivalents()["verl"]
_PLACES = _TABLES["places"]


def from_verl(draft: Draft, start: Start | None, version: Version) -> None:
    """Fill the draft with the settings of a run of this version of verl."""
    settings = draft.settings
    draft.per_node = settings.whole("trainer.n_gpus_per_node", 8)
    draft.processes = draft.per_node * settings.whole("trainer.nnodes", 1) if draft.processes else 0
    draft.model(settings.said(f"{_MODEL}.path"))
    put_sources(draft, files_of(settings.said("data.train_files")))
    put_sources(draft, files_of(settings.said("data.val_files")), section="eval")
    if settings.whole(f"{_MODEL}.lora_rank", 0, minimum=0):
        draft.adapter(_TABLES["adapter"])
    draft.copy(_TABLES["defaults"], defaults=True)
    draft.copy(_TABLES["said"])
    clip = "optim.clip_grad" if version >= (0, 8) else "grad_clip"
    draft.copy({"train.max_grad_norm": f"{_ACTOR}.{clip}"}, defaults=True)
    draft.warmup(f"{_ACTOR}.optim.lr_warmup_steps", f"{_ACTOR}.optim.lr_warmup_steps_ratio")
    draft.logs("trainer.logger")
    settings.used |= {"data.train_batch_size", f"{_ACTOR}.ppo_mini_batch_size"}  # of `start`
    draft.batch(start)
    for convert in (_data, _rewards, _kl, _algorithm, _sampling):
        convert(draft)
    mode = draft.launch.settings.get(f"{_ROLLOUT}.mode")
    if version >= (0, 7) or (mode and mode.value == "async"):  # whose evaluation does not look at do_sample
        draft.put("eval.temperature", settings.number(f"{_ROLLOUT}.val_kwargs.temperature", 0.0))
        draft.skip("its evaluation does not look at it", f"{_ROLLOUT}.val_kwargs.do_sample")
    if start and start.generation_batch_size and start.global_batch_size:
        draft.rescale(start.generation_batch_size, start.global_batch_size, "rollouts there")


def _data(draft: Draft) -> None:
    drops = draft.settings.flag("data.filter_overlong_prompts")
    truncation = "error" if drops else draft.settings.text("data.truncation", "error")
    draft.put("data.overlong_prompts", "error" if truncation == "error" and not drops else "drop")
    if truncation != "error":
        draft.differs(f"prompts that are too long are cut there (data.truncation: {truncation}), and dropped here")


def _rewards(draft: Draft) -> None:
    settings, custom = draft.settings, _PLACES["custom_rewards"]
    names, paths = ([settings.said(f"{section}.{key}") for section in custom] for key in ("name", "path"))
    draft.rewards(names[0] or names[1], None)
    draft.todo += [f"rewards.py: verl's reward is in {path}" for path in paths if path]
    manager = [name for name in map(settings.text, _PLACES["reward_managers"]) if name]
    draft.decide += [f"rewards: those of the reward manager {name}" for name in {*manager} - {"naive", "dapo"}]
    if "dapo" not in manager and (manager or draft.launch.program == VERL):
        draft.skip("the reward manager naive does not read it", "*.overlong_buffer.* *.overlong_buffer_cfg.*")
        return
    for section in _PLACES["overlong"]:
        size = settings.whole(f"{section}.len", None) if settings.flag(f"{section}.enable") else None
        if size:
            penalty = settings.number(f"{section}.penalty_factor", 1.0)
            draft.config["rewards"].append({"use": "overlong", "args": {"buffer_tokens": size, "penalty": penalty}})


def _sampling(draft: Draft) -> None:
    """The engine that samples, and its options."""
    settings, engine = draft.settings, draft.settings.text(f"{_ROLLOUT}.name", "vllm")
    if settings.flag(f"{_FILTER}.enable"):
        rounds = settings.whole(f"{_FILTER}.max_num_gen_batches", 0, minimum=0)
        metric = settings.text(f"{_FILTER}.metric", "reward")
        draft.put("rollout.resample", max(rounds - 1, 1) if rounds else 100)
        draft.differs(f"groups with the same {metric} are sampled again there; here those with the same rewards")
    if engine == "hf":
        draft.put("rollout.engine", "local")
        return
    if engine != "vllm":
        draft.differs(f"{engine} samples there, and vLLM here")
    draft.gpus(shared=True, tensor_parallel=settings.whole(f"{_ROLLOUT}.tensor_model_parallel_size", 2))
    share = settings.number(f"{_ROLLOUT}.gpu_memory_utilization", 0.5)
    if share <= _LARGEST_SHARE:
        draft.put("rollout.gpu_memory_utilization", share)
    else:
        draft.differs(f"vLLM takes {share:g} of a GPU there, which training leaves while it samples; here less")
    draft.copy(_TABLES["vllm"])
    prefix = f"{_ROLLOUT}.engine_kwargs.vllm."
    for key in [key for key in draft.launch.settings if key.startswith(prefix)]:
        draft.put(f"rollout.vllm_args.{key.removeprefix(prefix)}", settings.said(key))


def _kl(draft: Draft) -> None:
    """Where the KL term is, and how it is estimated and controlled."""
    settings, given = draft.settings, draft.config["algorithm"]
    in_loss, in_reward = settings.flag(f"{_ACTOR}.use_kl_loss"), settings.flag("algorithm.use_kl_in_reward")
    given["beta"] = 0.0
    if in_loss and in_reward:
        draft.decide.append("no equivalent: KL in the reward and in the loss at once; the one in the loss is kept")
    if in_loss:
        draft.copy(_TABLES["kl_in_loss"], defaults=True)
    elif in_reward:
        draft.copy(_TABLES["kl_in_reward"], defaults=True)
        given["kl_in"] = "reward"
        if settings.text("algorithm.kl_ctrl.type") == "adaptive":
            draft.copy(_TABLES["kl_target"])
    if not given["beta"]:
        draft.drop("there is no KL term", [f"algorithm.{key}" for key in given if key.startswith("kl_")])


def _algorithm(draft: Draft) -> None:
    given = draft.config["algorithm"]
    estimator = draft.settings.text("algorithm.adv_estimator", "gae")
    if given["advantage"] == "group_mean_std" and not draft.flag("algorithm.norm_adv_by_std_in_grpo"):
        given["advantage"] = "group_mean"
    if draft.get("rollout.num_generations") == 1 and given["advantage"] not in ("gae", "batch_mean_std"):
        given["advantage"] = "batch_mean_std"
        draft.differs("a group of one has its reward as its advantage there; here the batch's mean is its baseline")
    if given["advantage"] == "gae":
        draft.copy(_TABLES["gae"])
    else:
        draft.skip("there is no critic", " ".join(["critic.*", *_TABLES["gae"].values()]))
    if given["policy_loss"] in ("gspo_token", "gmpo", "sapo"):
        given["loss_weight"] = "sequence_mean"
        draft.skip("this policy loss sums in a way of its own", f"{_ACTOR}.loss_agg_mode")
    if given["policy_loss"] == "cispo":
        low = given.pop("clip_low")
        text = f"clip_ratio_low {low:g} with policy loss cispo, which has no lower bound here"
        draft.decide.append(f"no equivalent: {text}")
    if given["sampling_correction"] == "none":
        draft.drop("rollout_is is off", ["algorithm.sampling_correction_cap"])
    draft.algorithm(_TABLES["names"].get(estimator, given["policy_loss"]))
