"""Sequence classifiers as rewards: an object with its tokenizer, and an id."""

from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

reward_model = AutoModelForSequenceClassification.from_pretrained("judge", num_labels=1)
reward_tokenizer = AutoTokenizer.from_pretrained("judge")
trainer = GRPOTrainer(
    model="base",
    reward_funcs=[reward_model, "judge"],
    reward_processing_classes=[reward_tokenizer, None],
    args=GRPOConfig("out", max_steps=1, num_generations=4, max_completion_length=4, logging_steps=1),
    train_dataset=[{"prompt": [{"role": "user", "content": "hello"}]}],
)
trainer.train()
