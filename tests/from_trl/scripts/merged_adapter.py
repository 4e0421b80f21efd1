"""An adapter by get_peft_model, saved and merged by the model's own methods."""

import torch
from datasets import Dataset
from peft import LoraConfig, TaskType, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

model = AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32, attn_implementation="sdpa")
tokenizer = AutoTokenizer.from_pretrained("base")
model.enable_input_require_grads()
lora = LoraConfig(task_type=TaskType.CAUSAL_LM, r=4, lora_alpha=16, bias="none", target_modules=["q_proj", "up_proj"])
model = get_peft_model(model, lora)
model.print_trainable_parameters()
data = Dataset.from_dict(
    {
        "prompt": [[{"role": "user", "content": f"say {i}"}] for i in range(4)],
        "target": [str(i) for i in range(4)],
    }
)


def reward(completions, target, **kwargs):
    return [float(t in c[0]["content"]) + len(c[0]["content"]) / 100 for c, t in zip(completions, target)]


args = GRPOConfig(
    "out", max_steps=1, per_device_train_batch_size=4, num_generations=2, max_completion_length=6, learning_rate=1e-2
)
trainer = GRPOTrainer(model, [reward], args, data, processing_class=tokenizer)
trainer.train()
trainer.model.save_pretrained("adapter")
merged = trainer.model.merge_and_unload()
merged.save_pretrained("merged")
