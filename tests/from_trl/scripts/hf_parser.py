"""Arguments of the script and of training in one JSON file."""

import json
from dataclasses import dataclass

from datasets import load_dataset
from transformers import HfArgumentParser
from trl import GRPOConfig, GRPOTrainer


@dataclass
class ScriptArguments:
    model_id: str = "base"
    data_file: str = "rows.jsonl"


with open("args.json", "w") as file:
    json.dump(
        {
            "model_id": "base",
            "output_dir": "out",
            "max_steps": 2,
            "num_generations": 2,
            "max_completion_length": 4,
            "per_device_train_batch_size": 4,
            "lr_scheduler_type": "constant_with_warmup",
            "warmup_steps": 1,
            "save_strategy": "no",
        },
        file,
    )
script_args, training_args = HfArgumentParser((ScriptArguments, GRPOConfig)).parse_json_file("args.json")
dataset = load_dataset("json", data_files=script_args.data_file, split="train").rename_column("question", "prompt")
trainer = GRPOTrainer(
    model=script_args.model_id,
    reward_funcs=lambda completions, answer, **kwargs: [float(a in c) for c, a in zip(completions, answer)],
    args=training_args,
    train_dataset=dataset.shuffle(seed=42).select(range(6)),
)
trainer.train()
