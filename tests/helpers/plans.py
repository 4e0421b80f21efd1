"""Configurations for plans, and the hardware they are for."""

from cohort.config import Config, config_from_dict
from cohort.plan.hardware import hardware


def config(*overrides: str) -> Config:
    return config_from_dict(
        {
            "model": {"path": "somewhere"},
            "data": {"path": "data.jsonl"},
            "rewards": [{"use": "math"}],
            "rollout": {"max_prompt_tokens": 512, "max_completion_tokens": 4097},
            "hardware": {"processes": "auto"},
        },
        overrides,
    )


EIGHT = hardware(gpu="h100", gpus=8, nodes=1, gpu_memory="80GB")
