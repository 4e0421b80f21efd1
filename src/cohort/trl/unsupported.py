"""Parts of TRL's trainer that have no equivalent, and their replacements."""

from typing import Any

from cohort.errors import UserError

_LOSS = "algorithm={'policy_loss': function} of cohort.Trainer"
_ADVANTAGE = "algorithm={'advantage': function} of cohort.Trainer"
_ROLLOUT = "environment_factory, or agent= of cohort.Trainer"
_ROWS = "rows in the order that they should have, with shuffle_dataset=False"
_OPTIMIZER = "optimizers=(optimizer, scheduler), or args.optim and args.lr_scheduler_type"
_CHECKPOINT = "a callback's on_save, which is called when checkpoint-N has been written"
_OVERRIDES = {
    **dict.fromkeys(
        ("_generate_and_score_completions", "_generate", "_generate_single_turn", "_tool_call_loop"), _ROLLOUT
    ),
    "_tokenize_prompts": "processing_class, whose chat template makes the prompts",
    **dict.fromkeys(("_compute_loss", "compute_loss", "training_step", "_get_per_token_logps_and_entropies"), _LOSS),
    "_compute_advantages": _ADVANTAGE,
    **dict.fromkeys(("get_train_dataloader", "get_eval_dataloader", "_get_train_sampler", "_prepare_inputs"), _ROWS),
    **dict.fromkeys(("create_optimizer", "create_scheduler", "create_optimizer_and_scheduler"), _OPTIMIZER),
    **dict.fromkeys(("_save", "_save_checkpoint", "_load_from_checkpoint", "_load_best_model"), _CHECKPOINT),
    **dict.fromkeys(("prediction_step", "evaluation_loop"), "evaluate, which is called for each evaluation"),
}


def check_rollout_func(rollout_func: Any) -> None:
    """Refuse an argument that has no equivalent.

    Raises:
        UserError: names what to use instead.
    """
    if rollout_func is not None:
        raise UserError(f"rollout_func is not supported; use {_ROLLOUT}")


def check_overrides(trainer: type) -> None:
    """Refuse methods of a subclass that would never be called.

    Raises:
        UserError: names what to use instead.
    """
    for name, instead in _OVERRIDES.items():
        if hasattr(trainer, name):
            raise UserError(f"{trainer.__name__}.{name}: is not called by Cohort; use {instead}")
