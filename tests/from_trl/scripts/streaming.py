"""Streamed rows for training and evaluation."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

stream = load_dataset("json", data_files="rows.jsonl", split="train", streaming=True)
stream = stream.map(lambda x: {"prompt": "Q: " + x["question"]}, remove_columns=["question"])
trainer = GRPOTrainer(
    model="base",
    reward_funcs=lambda completions, level, **kwargs: [len(c) + n / 10 for c, n in zip(completions, level)],
    args=GRPOConfig(
        "out", max_steps=2, num_generations=2, max_completion_length=4, eval_strategy="steps", eval_steps=1
    ),
    train_dataset=stream.skip(2),
    eval_dataset=stream.take(2),
)
trainer.train()
