"""A tokenizer with another chat template and a token of its own as padding."""

from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

tokenizer = AutoTokenizer.from_pretrained("base", padding_side="left")
tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"
if tokenizer.pad_token is None:
    tokenizer.pad_token = tokenizer.eos_token


def starts_well(prompts, completions, **kwargs):
    return [float(c[0]["content"][:1].isalpha()) for c in completions]


dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": f"say {n}"}]} for n in range(4)])
trainer = GRPOTrainer(
    model="base",
    reward_funcs=starts_well,
    args=GRPOConfig("out", max_steps=1, num_generations=4, per_device_train_batch_size=4, max_completion_length=4),
    train_dataset=dataset,
    processing_class=tokenizer,
)
trainer.train()
trainer.save_model("final")
trainer.processing_class.save_pretrained("final")
