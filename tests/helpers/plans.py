"""Configurations for plans, and the hardware they are for."""

from dataclasses import replace

from cohort.config import Config, config_from_dict
from cohort.plan.calibration import Calibration
from cohort.plan.hardware import GPUS, hardware


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
MEASURED = Calibration(
    device=GPUS["h100"][0],
    on_gpu=True,
    machine="elsewhere",
    date="2026-11-01T00:00:00+00:00",
    torch_version="2.13.0",
    flops={"float32": 50e12, "bfloat16": 600e12},
    memory_bandwidth=2.5e12,
    host_bandwidth=50e9,
    collective_bandwidth=300e9,
    memory_bytes=84_000_000_000,
    framework_bytes=700_000_000,
)
MEASURED_CPU = replace(
    MEASURED,
    device="a CPU",
    on_gpu=False,
    flops={"float32": 1e11, "bfloat16": 1e11},
    memory_bandwidth=1e10,
    host_bandwidth=None,
    collective_bandwidth=None,
    memory_bytes=16_000_000_000,
)
