"""The head's tiles: what a plan counts of them is what the policy takes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cohort.models import Operands, linear_loss
from cohort.models.lm_head import tiled_softmax
from cohort.plan.backward import CPU_BLOCK, _loss_head_bytes
from live_bytes import LiveBytes

QWEN = 151_936


def planned(num_tokens: int, vocabulary: int, hidden: int, **settings: Any) -> int:
    shape = SimpleNamespace(vocabulary=vocabulary, hidden=hidden)
    workload: Any = SimpleNamespace(shape=shape, loss_tokens=num_tokens, autocasts=False, **settings)
    return _loss_head_bytes(workload)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_of_a_loss_differentiated_in_forward_is_what_the_plan_says(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    """Beside the sum of the weight's gradients; and but for the hidden states, which are there before."""
    monkeypatch.setitem(tiled_softmax.BLOCK_ELEMENTS, "cpu", CPU_BLOCK)
    num_tokens, vocabulary, width = 500, 50_000, 64
    hidden, weight = (torch.randn(n, width, dtype=dtype, requires_grad=True) for n in (num_tokens, vocabulary))

    def token_loss(logprobs: Tensor, *_: Any) -> Tensor:
        return logprobs

    with LiveBytes() as live:
        linear_loss(Operands(hidden, weight), torch.arange(num_tokens), token_loss)
    expected = planned(num_tokens, vocabulary, width, compute_bytes=dtype.itemsize, on_gpu=False)
    assert live.most - 4 * weight.numel() == pytest.approx(expected, rel=0.02)


def test_on_a_gpu_a_tile_is_of_1024_tokens_and_the_whole_vocabulary():
    on_gpu = planned(16_384, QWEN, 2560, compute_bytes=2, on_gpu=True)
    of_part = (1 << 24) // 2560  # token ids whose gradients are made at a time
    products = 4 * (of_part + 1024) * 2560 + 2 * 1024 * of_part
    assert on_gpu == 4 * 1024 * QWEN + products + (4 + 2 * 2) * 16_384 * 2560
