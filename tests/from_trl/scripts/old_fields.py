"""Fields that TRL and transformers have dropped."""

from trl import GRPOConfig, GRPOTrainer

args = GRPOConfig(
    output_dir="out",
    overwrite_output_dir=True,
    evaluation_strategy="steps",
    eval_steps=1,
    logging_dir="logs",
    max_prompt_length=64,
    warmup_ratio=0.5,
    no_cuda=True,
    save_safetensors=True,
    use_liger_loss=False,
    group_by_length=True,
    scale_rewards=True,
    vllm_dtype="auto",
    max_steps=2,
    num_generations=2,
    max_completion_length=4,
)
rows = [{"prompt": "hello"}, {"prompt": "hello " * 40}]
trainer = GRPOTrainer("base", lambda completions, **kwargs: [float(len(c)) for c in completions], args, rows, rows[:1])
trainer.train()
