from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

dataset = Dataset.from_dict({"prompt": [f"Count to {n}." for n in range(12)]})


def reward_num_unique_chars(completions, **kwargs):
    return [len(set(c)) for c in completions]


trainer = GRPOTrainer(
    model="base",
    reward_funcs=reward_num_unique_chars,
    args=GRPOConfig(output_dir="out", max_steps=2, per_device_train_batch_size=8, max_completion_length=6),
    train_dataset=dataset,
)
trainer.train()
