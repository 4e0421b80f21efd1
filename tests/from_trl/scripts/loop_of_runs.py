"""Several runs in one process, each in its folder."""

from trl import GRPOConfig, GRPOTrainer

results = {}
for learning_rate in (1e-5, 1e-4):
    args = GRPOConfig(
        f"out/{learning_rate}", max_steps=1, num_generations=2, max_completion_length=4, learning_rate=learning_rate
    )
    trainer = GRPOTrainer(
        "base", lambda completions, **_: [float(len(c)) for c in completions], args, [{"prompt": "hi"}]
    )
    trainer.train()
    results[learning_rate] = trainer.state.log_history
