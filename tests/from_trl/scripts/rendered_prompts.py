"""Prompts that the script renders itself, a dict filtered by the config's signature, arguments of `generate`."""

import inspect
import json

import pandas as pd
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

CONFIG = {
    "model_name": "base",
    "output_dir": "out",
    "max_steps": 1,
    "per_device_train_batch_size": 4,
    "num_generations": 2,
    "generation_kwargs": {"do_sample": True, "max_new_tokens": 5, "top_k": 20},
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "report_to": None,
    "wandb_project": "mine",
}


class Judge:
    def __init__(self):
        self.calls = 0

    def score(self, prompts, completions, answer, **kwargs):
        self.calls += 1
        return [float(any(x in c for x in a)) for c, a in zip(completions, answer)]


tokenizer = AutoTokenizer.from_pretrained(CONFIG["model_name"], padding_side="left")
frame = pd.DataFrame({"question": ["say 1", "say 2"], "answer": [["1"], ["2", "two"]]})
dataset = Dataset.from_pandas(frame).map(
    lambda row: {
        "prompt": tokenizer.apply_chat_template(
            [{"role": "user", "content": row["question"]}], tokenize=False, add_generation_prompt=True
        )
    }
)
valid = inspect.signature(GRPOConfig.__init__).parameters
args = GRPOConfig(**{name: value for name, value in CONFIG.items() if name in valid})
judge = Judge()
trainer = GRPOTrainer(CONFIG["model_name"], judge.score, args, dataset, processing_class=tokenizer)
trainer.train()
with open("log.json", "w") as file:
    json.dump(trainer.state.log_history, file)
