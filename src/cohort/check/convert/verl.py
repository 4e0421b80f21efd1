"""verl to Cohort."""

from typing import Any

from cohort.check.convert.draft import Draft
from cohort.check.lora import VERL, read_lora
from cohort.check.rules.start import Start

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant",
}
_LOSSES = {
    "vanilla": "clipped",
    "gspo": "gspo_token",  # the form that it computes
    "sapo": "sapo",
    "cispo": "cispo",
    "geo_mean": "gmpo",
    "gpg": "reinforce",
}
_ADVANTAGES = {
    "grpo": "group_mean_std",
    "grpo_vectorized": "group_mean_std",
    "rloo": "leave_one_out",
    "rloo_vectorized": "leave_one_out",
    "reinforce_plus_plus": "batch_mean_std",
    "reinforce_plus_plus_baseline": "group_mean_whitened",
}
_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_NAMES = {"reinforce_plus_plus": "reinforce_pp", "reinforce_plus_plus_baseline": "reinforce_pp_baseline"}


def from_verl(draft: Draft, start: Start | None) -> None:
    """Fills the draft. Defaults that differ from Cohort's are verl's."""
    settings = draft.settings
    draft.path("model.path", named=settings.said("actor_rollout_ref.model.path"), missing="MODEL")
    draft.path("data.path", named=settings.said("data.train_files"), missing="train.jsonl")
    draft.copy({"data.prompt": ("data.prompt_key", "text"), "data.shuffle": ("data.shuffle", "flag")})
    draft.rewards(settings.said("custom_reward_function.name"), None)
    for key in ("data.train_batch_size", f"{_ACTOR}.ppo_mini_batch_size", "trainer.nnodes", "trainer.n_gpus_per_node"):
        settings.said(key)
    draft.batch(start, settings.whole(f"{_ROLLOUT}.n", 1))
    for ours, theirs in (("max_prompt_tokens", "max_prompt_length"), ("max_completion_tokens", "max_response_length")):
        draft.put(f"rollout.{ours}", settings.whole(f"data.{theirs}", 512, maximum=10**9))
    top_k = settings.number(f"{_ROLLOUT}.top_k", None)
    draft.put("rollout.top_k", int(top_k) if top_k and top_k > 0 else None)
    draft.copy(
        {
            "rollout.temperature": (f"{_ROLLOUT}.temperature", "number"),
            "rollout.top_p": (f"{_ROLLOUT}.top_p", "number"),
            "train.learning_rate": (f"{_ACTOR}.optim.lr", "number"),
            "optim.weight_decay": (f"{_ACTOR}.optim.weight_decay", "number"),
            "train.max_grad_norm": (f"{_ACTOR}.grad_clip", "number"),
            "train.updates_per_rollout": (f"{_ACTOR}.ppo_epochs", "whole"),
            "model.gradient_checkpointing": ("actor_rollout_ref.model.enable_gradient_checkpointing", "flag"),
            "run.dir": ("trainer.default_local_dir", "text"),
        }
    )
    steps = settings.whole("trainer.total_training_steps", None)
    draft.put("train.steps", steps)
    draft.put("train.epochs", None if steps else settings.number("trainer.total_epochs", 30))
    warmup = settings.whole(f"{_ACTOR}.optim.lr_warmup_steps", None, minimum=-1)
    draft.put("train.warmup_steps", warmup if warmup and warmup > 0 else None)
    saves = settings.whole("trainer.save_freq", None, minimum=-1)
    draft.put("run.checkpoint_every", None if saves is None else max(saves, 0))
    _algorithm(draft)
    if settings.whole(VERL.rank, 0, minimum=0):
        draft.adapter(read_lora(settings, VERL))
    sampler = settings.text(f"{_ROLLOUT}.name", "vllm")
    if sampler == "vllm":
        draft.put("rollout.engine", "vllm")
        draft.put("hardware.rollout_gpus", "shared")
        draft.put("rollout.tensor_parallel", settings.whole(f"{_ROLLOUT}.tensor_model_parallel_size", 2))
        draft.put("rollout.gpu_memory_utilization", settings.number(f"{_ROLLOUT}.gpu_memory_utilization", 0.5))
    elif sampler == "hf":
        draft.put("rollout.engine", "local")
    else:
        draft.note(f"no equivalent: rollout engine {sampler}")


def _kl(draft: Draft) -> dict[str, Any]:
    """Where the KL term is, and how it is estimated and controlled."""
    settings = draft.settings
    in_loss, in_reward = settings.flag(f"{_ACTOR}.use_kl_loss"), settings.flag("algorithm.use_kl_in_reward")
    if in_loss and in_reward:
        draft.note("no equivalent: KL in the reward and in the loss at once; the one in the loss is kept")
    if in_loss:
        form = settings.text(f"{_ACTOR}.kl_loss_type", "low_var_kl")
        if _ESTIMATORS.get(form, "k1") == "k1":
            draft.note(f"no equivalent: kl_loss_type {form} as a loss has no gradient in expectation; k3 is")
        coefficient = settings.number(f"{_ACTOR}.kl_loss_coef", 0.001)
        estimator = "k2" if _ESTIMATORS.get(form) == "k2" else "k3"
        return {"beta": coefficient, "kl_estimator": estimator if coefficient else None}
    coefficient = settings.number("algorithm.kl_ctrl.kl_coef", 0.001)
    if not in_reward or not coefficient:
        return {"beta": 0.0}
    adapts = settings.text("algorithm.kl_ctrl.type", "fixed") == "adaptive"
    return {
        "beta": coefficient,
        "kl_in": "reward",
        "kl_estimator": _ESTIMATORS.get(settings.text("algorithm.kl_penalty", "kl"), "k1"),
        "kl_target": settings.number("algorithm.kl_ctrl.target_kl", 0.1) if adapts else None,
        "kl_horizon": settings.whole("algorithm.kl_ctrl.horizon", 10_000, maximum=10**9) if adapts else None,
    }


def _algorithm(draft: Draft) -> None:
    settings = draft.settings
    estimator = settings.text("algorithm.adv_estimator", "gae")
    if estimator not in _ADVANTAGES:
        draft.note(f"no equivalent: algorithm.adv_estimator {estimator}; advantages are those of groups")
    advantage = _ADVANTAGES.get(estimator, "group_mean_std")
    if advantage == "group_mean_std" and not settings.flag("algorithm.norm_adv_by_std_in_grpo", True):
        advantage = "group_mean"
    loss = settings.text(f"{_ACTOR}.policy_loss.loss_mode", "vanilla")
    if loss not in _LOSSES:
        draft.note(f"no equivalent: policy loss {loss}; clipped stands in its place")
    policy_loss = _LOSSES.get(loss, "clipped")
    summed = settings.text(f"{_ACTOR}.loss_agg_mode", "token-mean")
    if summed not in _AGGREGATIONS:
        draft.note(f"no equivalent: loss_agg_mode {summed}; token-mean stands in its place")
    loss_weight = _AGGREGATIONS.get(summed, "token_mean")
    if policy_loss in ("gspo_token", "gmpo", "sapo"):  # which sum in a way of their own there, whatever is said
        loss_weight = "sequence_mean"
    clip = settings.number(f"{_ACTOR}.clip_ratio", 0.2)
    high = settings.number(f"{_ACTOR}.clip_ratio_high", clip)
    dual = settings.number(f"{_ACTOR}.clip_ratio_c", 3.0)
    if dual <= 1 + high:
        draft.note(f"no equivalent: clip_ratio_c {dual:g}, which is not above 1 + clip_high")
    if policy_loss == "cispo":
        draft.note("no equivalent: clip_ratio_low with policy loss cispo; its weights have no lower bound here")
    draft.algorithm(
        _NAMES.get(estimator, policy_loss),
        {"advantage": advantage, "policy_loss": policy_loss, "loss_weight": loss_weight},
        **_kl(draft),
        entropy_coef=settings.number(f"{_ACTOR}.entropy_coeff", None),
        clip_low=settings.number(f"{_ACTOR}.clip_ratio_low", clip),
        clip_high=high,
        delta=dual if dual > 1 + high else None,
        tau_positive=settings.number(f"{_ACTOR}.tau_pos", None),
        tau_negative=settings.number(f"{_ACTOR}.tau_neg", None),
    )
