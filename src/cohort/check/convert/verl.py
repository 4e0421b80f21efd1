"""verl to Cohort."""

from cohort.check.convert.draft import Draft
from cohort.check.rules.start import Start

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
# how per-token losses are summed decides which of ours it is
_AGGREGATIONS = {
    "token-mean": "dapo",
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum-norm": "dr_grpo",
}


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
    if settings.text(f"{_ROLLOUT}.name", "vllm") == "vllm":
        draft.put("rollout.engine", "vllm")
        draft.put("hardware.rollout_gpus", "shared")
        draft.put("rollout.tensor_parallel", settings.whole(f"{_ROLLOUT}.tensor_model_parallel_size", 2))
        draft.put("rollout.gpu_memory_utilization", settings.number(f"{_ROLLOUT}.gpu_memory_utilization", 0.5))
    else:
        draft.note(f"no equivalent: rollout engine {settings.text(f'{_ROLLOUT}.name')}")


def _algorithm(draft: Draft) -> None:
    settings = draft.settings
    estimator = settings.text("algorithm.adv_estimator", "gae")
    if estimator != "grpo":
        draft.note(f"no equivalent: algorithm.adv_estimator {estimator}; advantages are those of groups")
    clip = settings.number(f"{_ACTOR}.clip_ratio", 0.2)
    beta = settings.number(f"{_ACTOR}.kl_loss_coef", 0.001) if settings.flag(f"{_ACTOR}.use_kl_loss") else 0.0
    if settings.flag("algorithm.use_kl_in_reward"):
        draft.note("no equivalent: algorithm.use_kl_in_reward; algorithm.beta is a term of the loss")
    draft.algorithm(
        settings.text(f"{_ACTOR}.loss_agg_mode", "token-mean"),
        names=_AGGREGATIONS,
        beta=beta,
        low=settings.number(f"{_ACTOR}.clip_ratio_low", clip),
        high=settings.number(f"{_ACTOR}.clip_ratio_high", clip),
    )
