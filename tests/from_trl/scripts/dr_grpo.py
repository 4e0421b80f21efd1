"""Settings of losses, a reference model that moves, and several updates per rollout."""

from trl import GRPOConfig, GRPOTrainer

args = GRPOConfig(
    "out",
    max_steps=4,
    num_generations=4,
    max_completion_length=4,
    num_iterations=2,
    loss_type="dr_grpo",
    scale_rewards="none",
    epsilon=0.2,
    epsilon_high=0.28,
    beta=0.04,
    sync_ref_model=True,
    ref_model_sync_steps=2,
    ref_model_mixup_alpha=0.5,
    mask_truncated_completions=True,
    temperature=0.9,
    top_p=0.95,
    top_k=50,
    steps_per_generation=4,
    disable_dropout=True,
    logging_steps=1,
    seed=7,
)
rows = [{"prompt": f"say {n}"} for n in range(6)]
trainer = GRPOTrainer("base", lambda completions, **kwargs: [float(len(c)) for c in completions], args, rows)
trainer.train()
