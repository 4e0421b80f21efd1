"""What a run says at its start about its configuration."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cohort.config import config_from_dict
from cohort.processes import openmp
from cohort.trainer.inputs import describe_lost_updates
from cohort.trainer.run import _start_notes
from configs import MINIMAL

SMALL = ["model.dtype=bfloat16", "train.learning_rate=1e-6"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (SMALL, "float32 (matrix products are bfloat16 on GPUs all the same), optim.stochastic_rounding: true, or a"),
        ([*SMALL, "optim.name=adafactor"], "float32 (matrix products are bfloat16 on GPUs all the same), or a"),
        ([*SMALL, "train.learning_rate=1e-5"], None),
        ([*SMALL, "optim.stochastic_rounding=true"], None),
        ([*SMALL, "model.adapter={rank: 4}"], None),  # whose weights are float32
        (["train.learning_rate=1e-6"], None),
    ],
)
def test_updates_that_bfloat16_rounds_away(overrides, expected):
    said = describe_lost_updates(config_from_dict(MINIMAL, overrides))
    if expected is None:
        assert said is None
    else:
        assert said == (
            "warning: model.dtype: bfloat16 rounds away most updates at train.learning_rate: 1e-06, so that little is "
            f"learned; use model.dtype: {expected} learning rate of at least 1e-05 (docs/memory.md)"
        )


@pytest.mark.parametrize(
    ("before", "policy", "after"),
    [
        ("", None, "False PASSIVE"),
        ("", "ACTIVE", "False ACTIVE"),
        ("sys.modules['torch'] = sys", None, "True PASSIVE"),  # too late for this process, but not for its children
        ("sys.modules['torch'] = sys", "PASSIVE", "False PASSIVE"),
    ],
)
def test_waiting_threads_sleep_unless_torch_came_first(before: str, policy: str | None, after: str):
    code = f"import os, sys\n{before}\nimport cohort\nprint(cohort.openmp.spins, os.environ['OMP_WAIT_POLICY'])"
    given = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment = {**given, "PYTHONPATH": os.pathsep.join(sys.path), **({"OMP_WAIT_POLICY": policy} if policy else {})}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert result.stdout.strip() == after


@pytest.mark.parametrize(("spin", "device", "threads"), [(True, "cpu", 2), (True, "cuda", 2), (False, "cpu", 2)])
def test_threads_that_spin_are_told_of(monkeypatch: pytest.MonkeyPatch, spin: bool, device: str, threads: int):
    monkeypatch.setattr(openmp, "spins", spin)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    inputs: Any = SimpleNamespace(notes=lambda max_prompt_tokens: [])
    notes = _start_notes(config_from_dict(MINIMAL), inputs, torch.device(device))
    assert any("import cohort first" in note for note in notes) == (spin and device == "cpu")
