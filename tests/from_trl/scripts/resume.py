"""Goes on from the last checkpoint if there is one. It is run twice."""

import os

from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer

args = GRPOConfig(
    "out", max_steps=4, num_generations=2, max_completion_length=4, save_steps=1, save_total_limit=2, logging_steps=1
)
last_checkpoint = get_last_checkpoint(args.output_dir) if os.path.isdir(args.output_dir) else None
rows = [{"prompt": f"say {n}"} for n in range(6)]
trainer = GRPOTrainer("base", lambda completions, **kwargs: [float(len(c)) for c in completions], args, rows)
trainer.train(resume_from_checkpoint=last_checkpoint)
