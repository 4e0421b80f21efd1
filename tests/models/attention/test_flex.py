"""Flex attention: how often it is compiled, and what happens where it cannot be."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit

from cohort.attention_mask import CACHED_PREFIX, NO_PARENT, AttentionMetadata, build_attention_metadata
from cohort.models.attention import flex

LAYOUTS = ((4, 2, 16), (6, 6, 32))  # query heads, key heads, dim


@pytest.fixture
def num_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How often kernels were compiled, which on a CPU means traced: PyTorch has no backward of its own for it there."""
    count = [0]

    def counting(graph: Any, _: Any) -> Any:
        count[0] += 1
        return lambda *inputs: (next(x for x in inputs if isinstance(x, Tensor) and x.ndim == 4),)  # the query

    monkeypatch.setattr(flex.kernels, "_validate_device", lambda *_: None)  # which refuses tensors with a gradient
    monkeypatch.setattr(flex, "_kernel", cache(lambda case: flex.compiled(flex._attend(case), counting)))
    torch._dynamo.reset()
    yield count
    torch._dynamo.reset()


def row(number: int) -> AttentionMetadata:
    """The row of this number: of another length than the one before, and every other one after a prefix."""
    generator = np.random.default_rng(number)
    longest = (3, 40, 200, 500)[number % 4]
    prompt, *completions = (int(x) for x in generator.integers(1, longest, 4))
    after = [int(x) for x in generator.integers(1, longest, 2)] if number % 2 else []
    roots = [*[CACHED_PREFIX] * len(after), NO_PARENT, *[len(after)] * len(completions)]
    return build_attention_metadata(
        [*after, prompt, *completions], roots, prefix_tokens=int(generator.integers(1, 300)) * bool(after)
    )


def attend(attn_metadata: AttentionMetadata, query_heads: int, key_heads: int, dim: int, **options: Any) -> Tensor:
    def states(num_tokens: int, heads: int) -> Tensor:
        return torch.randn(num_tokens, heads, dim, **options)

    own = (states(attn_metadata.num_tokens, heads) for heads in (query_heads, key_heads, key_heads))
    before = states(attn_metadata.prefix_tokens, key_heads), states(attn_metadata.prefix_tokens, key_heads)
    return flex.flex(*own, attn_metadata, prefix=before if attn_metadata.prefix_tokens else None, scale=0.3)


def test_each_layout_of_heads_is_compiled_once_for_rows_of_any_length(num_compiled: list[int]):
    """And once more without a gradient."""
    lengths = set()
    for number in range(40):
        attn_metadata = row(number)
        lengths.add(attn_metadata.num_tokens)
        for layout in LAYOUTS:
            attend(attn_metadata, *layout, requires_grad=True)
            with torch.no_grad():
                attend(attn_metadata, *layout)
    assert len(lengths) > 30 and min(lengths) < 128
    assert num_compiled == [2 * len(LAYOUTS)]


def test_too_many_compilations_are_an_error(num_compiled: list[int]):
    """And never attention that holds all scores."""
    kernel = flex._kernel(flex._Spec(torch.device("cpu"), torch.float32, 2, 8, 2, 8, 0.3, False))
    mask = flex.mask_tensors(build_attention_metadata([256], [NO_PARENT]))
    with torch._dynamo.config.patch(recompile_limit=2):
        for dim in (16, 24, 32):  # each in a case of its own
            attend(row(1), 2, 2, dim)
        for dim in (16, 24):
            kernel(*torch.randn(3, 1, 2, 256, dim), *mask)
        with pytest.raises(FailOnRecompileLimitHit):
            kernel(*torch.randn(3, 1, 2, 256, 32), *mask)
    assert num_compiled == [5]
