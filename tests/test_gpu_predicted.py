"""The GPU benchmark's cases that compare a plan's memory with a GPU's: what is predicted for them."""

import pytest
import torch

import gpu_steps
from gpu_predicted import predicted_bytes

GIGABYTE = 10**9


def predicted(case: gpu_steps.Case, *, updates: bool = True) -> int:
    return predicted_bytes(
        case.shape.config(),
        case.prompt_tokens,
        case.completion_tokens,
        dtype=case.dtype,
        compute=torch.bfloat16,
        checkpointing=case.checkpointing,
        rank=case.rank,
        updates=updates,
        on_gpu=True,
    )


def test_seven_billion_weights_under_lora_fit_24_gigabytes() -> None:
    """15.2 GB of frozen bfloat16 weights, 0.6 GB for 40 million numbers of an adapter, and activations."""
    (lora,) = [case for case in gpu_steps.CASES if case.rank]
    assert lora.most_bytes == 24 * GIGABYTE
    assert 15.2 + 0.6 < predicted(lora) / GIGABYTE < 24


def test_seven_billion_trained_weights_fit_141_gigabytes_and_their_gradients_80() -> None:
    """16 bytes for each of 7,615,616,512 weights are 121.8 GB; without moments, 60.9 GB."""
    (full,) = [case for case in gpu_steps.CASES if "7B, float32" in case.name]
    assert 121.8 < predicted(full) / GIGABYTE < 141
    assert predicted(full) - predicted(full, updates=False) == pytest.approx(8 * 7_615_616_512, rel=1e-6)
    assert predicted(full, updates=False) < 78 * 2**30


def test_a_case_tells_what_was_predicted() -> None:
    for case in gpu_steps.TINY_CASES:
        found = gpu_steps.run_case(case, torch.device("cpu"))
        assert found["checks"] == [] and found["step"]["peak_bytes"] is None  # on a CPU
        assert found["step"]["planned_bytes"] == predicted_bytes(
            case.shape.config(),
            case.prompt_tokens,
            case.completion_tokens,
            dtype=torch.float32,
            compute=torch.float32,
            checkpointing=True,
            rank=case.rank,
            updates=True,
            on_gpu=False,
        )
