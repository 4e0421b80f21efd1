"""A config with fields of its own, read from the command line."""

import sys
from dataclasses import dataclass, field

from transformers import HfArgumentParser
from trl import GRPOConfig, GRPOTrainer


@dataclass
class MyConfig(GRPOConfig):
    target_length: int = field(default=4, metadata={"help": "Wanted length."})
    learning_rate: float = 1e-4


sys.argv = ["train.py", "--output_dir=out", "--target_length=3", "--max_steps=1", "--max_completion_length=4"]
(config,) = HfArgumentParser(MyConfig).parse_args_into_dataclasses()


def length(completions, **kwargs):
    return [-abs(len(c) - config.target_length) for c in completions]


trainer = GRPOTrainer("base", length, config, [{"prompt": "hello"}])
trainer.train()
