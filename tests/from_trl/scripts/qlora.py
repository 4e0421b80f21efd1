"""Four bits and LoRA on all linear layers."""

import torch
from peft import LoraConfig
from transformers import BitsAndBytesConfig
from trl import GRPOConfig, GRPOTrainer

trainer = GRPOTrainer(
    model="base",
    reward_funcs=lambda completions, **kwargs: [float(len(c)) for c in completions],
    args=GRPOConfig("out", max_steps=1, num_generations=2, per_device_train_batch_size=2, max_completion_length=4),
    train_dataset=[{"prompt": "hello"}],
    quantization_config=BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    ),
    peft_config=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", bias="none"),
)
trainer.train()
