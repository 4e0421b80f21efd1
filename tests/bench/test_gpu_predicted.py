"""The GPU benchmark's cases that compare a plan's memory with a GPU's: what is predicted for them."""

import pytest
import torch

import gpu_steps
from gpu_predicted import predicted_bytes
from harness import SkippedError

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


def test_the_plan_counts_what_is_quantized_and_offloaded() -> None:
    """6.5 billion weights in 4 bits and a little, 1.1 billion in 16; of 4 billion, 12 bytes each leave the GPU."""
    case = gpu_steps.QLORA_CASE
    nf4 = gpu_steps._planned(case, torch.bfloat16, updates=True, on_gpu=True) / GIGABYTE
    assert case.most_bytes == 24 * GIGABYTE and 6.5 / 2 + 2.2 < nf4 < 12
    plain, activations, optimizer, parameters = (
        gpu_steps._planned(case, torch.bfloat16, updates=True, on_gpu=True) / GIGABYTE
        for case in gpu_steps.OFFLOAD_CASES
    )
    assert 78 * 2**30 / GIGABYTE > plain > activations > optimizer + 4 * 8 > parameters


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


@pytest.mark.parametrize(("share", "passed"), [(0.95, True), (1.05, True), (0.8, False), (1.2, False)])
def test_a_peak_further_than_a_tenth_from_the_plan_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, share: float, passed: bool
) -> None:
    case = gpu_steps.TINY_CASES[0]
    planned = gpu_steps.run_case(case, torch.device("cpu"))["step"]["planned_bytes"]
    monkeypatch.setattr(gpu_steps, "_measure", lambda *_: (2.0, int(share * planned), (100, 10, 1000)))
    found = gpu_steps.run_case(case, torch.device("cpu"))
    (check,) = found["checks"]
    assert check["passed"] is passed
    assert check["error"] == pytest.approx(abs(share - 1), abs=1e-3)
    assert found["step"]["tokens_per_s"] == (2 * 16 + 8 + 6) / 2.0


@pytest.mark.parametrize(("free_gigabytes", "updates"), [(150, True), (84, False), (47, None)])
def test_a_case_goes_without_the_optimizer_or_is_left_out_where_the_plan_has_no_room(
    monkeypatch: pytest.MonkeyPatch, free_gigabytes: int, updates: bool | None
) -> None:
    free = free_gigabytes * GIGABYTE
    shares: list[float] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 2 * free))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    (full,) = [case for case in gpu_steps.CASES if "7B, float32" in case.name]
    room = (full, torch.device("cuda"), torch.bfloat16)
    if updates is None:
        with pytest.raises(SkippedError, match=r"the plan says \d+\.\d GiB, and there are 43\.8"):
            gpu_steps._fits_with_updates(*room)
    else:
        assert gpu_steps._fits_with_updates(*room) is updates
    assert shares == [0.5]
