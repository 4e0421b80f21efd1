"""A small run of `cohort.trl`: rows, a reward and arguments."""

from pathlib import Path
from typing import Any

from datasets import Dataset

from cohort.trl import GRPOConfig
from tiny import copy_task_rows


def digits(completions: list[str], **kwargs: Any) -> list[float]:
    return [sum(c.isdigit() for c in completion) / 12 for completion in completions]


def rows(count: int = 12) -> Dataset:
    return Dataset.from_list(copy_task_rows(count)).rename_column("question", "prompt")


def settings(output_dir: Path, **given: Any) -> GRPOConfig:
    """Four steps of two prompts."""
    usual = {
        "output_dir": str(output_dir),
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 8,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "report_to": "none",
    }
    return GRPOConfig(**{**usual, **given})
