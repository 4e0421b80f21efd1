"""Configurations for plans, and the hardware they are for."""

import json
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

from typer.testing import CliRunner

from cohort.cli.app import app
from cohort.config import Config, config_from_dict
from cohort.plan.hardware import Hardware, hardware
from cohort.plan.predict import Plan, predict_run
from cohort.plan.shape import preset_shape


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


def on_gpus(gpus: int = 1, gpu: str = "h100", memory: str | None = None, *, nodes: int = 1) -> Hardware:
    """GPUs of a kind, by default one H100."""
    return hardware(gpu=gpu, gpus=gpus, nodes=nodes, gpu_memory=memory)


EIGHT = on_gpus(8, memory="80GB")


def plan_of(shape: str, *overrides: str, on: Hardware = EIGHT, num_prompts: int | None = None) -> Plan:
    """The plan of a preset, by default on eight GPUs."""
    return predict_run(config(*overrides), preset_shape(shape), on, num_prompts=num_prompts)


def without_advice() -> AbstractContextManager[Any]:
    """Plans that look for no changes, which takes nine tenths of their time, for tests of all else."""
    return mock.patch("cohort.cli.plan.advise", return_value=[])


def planned(*arguments: str, advised: bool = False) -> dict[str, Any]:
    """What `cohort plan --json` prints, with or without changes that it finds."""
    with nullcontext() if advised else without_advice():
        found: dict[str, Any] = json.loads(CliRunner().invoke(app, ["plan", *arguments, "--json"]).stdout)
    return found
