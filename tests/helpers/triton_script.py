"""The Triton kernels, interpreted on a CPU, against the plain form (TRITON_INTERPRET=1 before they are imported)."""

import itertools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from cohort.models import Operands, linear_logprobs, linear_loss
from cohort.models.lm_head import tiled_softmax, triton_kernels
from cohort.models.lm_head.softmax import LogitTransform, OnlineSoftmax, RowGradients

QWEN = 151_936  # token ids, which no block of columns divides
VOCABULARY = 7000  # a tile has two blocks of columns, the second one partly filled


def compare(bias: bool, softcap: float | None, entropy: bool) -> None:
    torch.manual_seed(0)
    raw, bias_V = torch.randn(6, VOCABULARY) * 3, torch.randn(VOCABULARY) if bias else None
    transform = LogitTransform(temperature=0.7, scale=1.3, softcap=softcap)
    targets = torch.tensor([0, 4999, 5000, 6999, 4096, 17])
    tiles = [(raw[:, ids].contiguous(), targets - ids.start, ids) for ids in (slice(0, 5000), slice(5000, VOCABULARY))]
    results = []
    for form in (tiled_softmax._update_softmax, triton_kernels.update_softmax):
        running = OnlineSoftmax.start(targets, dtype=torch.float32, entropy=entropy)
        for tile, columns, ids in tiles:
            before = tile.clone()
            form(tile, running, columns, None if bias_V is None else bias_V[ids], transform)
            assert torch.equal(tile, before)
        results.append(running.result())
    assert not results[0][0].isnan().any()
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
    entropies, logsumexp = results[0][1:]
    rows = RowGradients(logsumexp, torch.randn(6), entropies, torch.randn(12)[::2] if entropy else None)
    for tile, columns, ids in tiles:
        gradients = [tile.clone(), tile.clone()]
        for gradient, form in zip(
            gradients, (tiled_softmax._logits_to_grad_, triton_kernels.logits_to_grad_), strict=True
        ):
            form(gradient, rows, columns, None if bias_V is None else bias_V[ids], transform)
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-5)


def whole(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies from whole logits."""
    log_p = torch.log_softmax(hidden.double() @ weight.double().T, dim=-1)
    return log_p.gather(1, targets.unsqueeze(1)).squeeze(1), -(log_p.exp() * log_p).sum(dim=-1)


def compare_heads(num_tokens: int, hidden_size: int, vocabulary: int, tile_elements: int) -> None:
    """Values and gradients of the head, of which no size is a multiple of anything, both ways."""
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, hidden_size, requires_grad=True)
    weight = torch.randn(vocabulary, hidden_size, requires_grad=True)
    targets = torch.randint(0, vocabulary, (num_tokens,))
    targets[:2] = torch.tensor([vocabulary - 1, 0])
    factors = torch.randn(2, num_tokens)
    logprobs, entropy = whole(hidden, weight, targets)
    expected = torch.autograd.grad((logprobs * factors[0] + entropy * factors[1]).sum(), (hidden, weight))

    def check(mine: Tensor, loss: Tensor) -> None:
        torch.testing.assert_close(mine.double(), logprobs, rtol=1e-5, atol=1e-5)
        actual = torch.autograd.grad(loss, (hidden, weight))
        # a hidden state's gradient is a sum over the vocabulary, and not of numbers of one sign
        for a, e, limit in zip(actual, expected, (1e-3, 1e-6), strict=True):
            assert (a - e).norm() < limit * e.norm()

    def token_loss(logprobs: Tensor, my_entropy: Tensor, tokens: slice) -> Tensor:
        torch.testing.assert_close(my_entropy.double(), entropy[tokens], rtol=1e-5, atol=1e-5)
        return logprobs * factors[0, tokens] + my_entropy * factors[1, tokens]

    operands = Operands(hidden, weight)
    mine, my_entropy = linear_logprobs(operands, targets, entropy=True, tile_elements=tile_elements)
    assert my_entropy is not None
    check(mine, token_loss(mine, my_entropy, slice(None)).sum())
    loss, mine = linear_loss(operands, targets, token_loss, tile_elements=tile_elements)
    check(mine, loss)


def at_vocabularies() -> None:
    calls = []

    def counted(name: str) -> Callable[..., None]:
        def kernel(*args: Any) -> None:
            calls.append(name)
            getattr(triton_kernels, name)(*args)

        return kernel

    kernels = SimpleNamespace(TritonError=(), **{name: counted(name) for name in ("update_softmax", "logits_to_grad_")})
    with (
        patch.object(tiled_softmax, "_suits_triton", lambda _: True),
        patch.object(tiled_softmax, "_triton", lambda: kernels),
    ):
        tiled_softmax.check_triton(torch.device("cpu"), bias=False, softcap=False)
        compare_heads(5, 7, QWEN, 5 * 60_000)  # the last tile is a part of the others
        compare_heads(3, 9, QWEN + 1, 4 * QWEN)  # one tile, with one column in its last block
        compare_heads(7, 5, 8191, 2 * 8191)
    assert tiled_softmax.use_triton
    assert calls.count("update_softmax") > 10 and calls.count("logits_to_grad_") > 10


if __name__ == "__main__":
    if sys.argv[1] == "variants":
        for arguments in itertools.product((False, True), (None, 3.0), (False, True)):
            compare(*arguments)
    else:
        at_vocabularies()
