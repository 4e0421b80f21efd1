"""How the model is loaded, and what is read of the trainer."""

import torch
from trl import GRPOConfig, GRPOTrainer

args = GRPOConfig(
    "out",
    max_steps=1,
    num_generations=2,
    max_completion_length=4,
    model_init_kwargs={"torch_dtype": torch.float32, "attn_implementation": "sdpa", "use_cache": False},
    generation_kwargs={"stop_strings": ["<stop>"]},
    gradient_checkpointing=True,
    optim="adamw_torch_fused",
    bf16=False,
)
trainer = GRPOTrainer(
    "base",
    reward_funcs=[lambda completions, **kwargs: [float(len(c)) for c in completions]],
    args=args,
    train_dataset=[{"prompt": [{"role": "user", "content": "hello"}]}],
)
print(trainer.model.dtype, trainer.args.output_dir, trainer.accelerator.device, trainer.beta, trainer.ref_model)
trainer.train()
unwrapped = trainer.accelerator.unwrap_model(trainer.model)
unwrapped.save_pretrained("final", safe_serialization=True)
