"""Two held-out sets, the best model at the end, and an evaluation of other rows."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

dataset = load_dataset("json", data_files="rows.jsonl", split="train").rename_column("question", "prompt")
split = dataset.train_test_split(test_size=4, seed=0)


def correct(completions, answer, **kwargs):
    return [float(a in c) for c, a in zip(completions, answer)]


trainer = GRPOTrainer(
    model="base",
    reward_funcs=[correct],
    args=GRPOConfig(
        "out",
        num_train_epochs=1,
        num_generations=2,
        max_completion_length=4,
        per_device_eval_batch_size=2,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        eval_on_start=True,
        load_best_model_at_end=True,
        metric_for_best_model="eval_hard_reward",
        greater_is_better=True,
    ),
    train_dataset=split["train"],
    eval_dataset={"easy": split["test"].select([0]), "hard": split["test"].select([1, 2, 3])},
)
trainer.train()
metrics = trainer.evaluate(eval_dataset=split["test"], metric_key_prefix="test")
