"""The Triton kernels, interpreted on a CPU, against the plain form (TRITON_INTERPRET=1 before they are imported)."""

import itertools

import torch

from cohort.policy import logit_tiles, triton_tiles
from cohort.policy.logit_tiles import LogitTransform, RowGradients, RunningSoftmax

VOCABULARY = 7000  # a tile has two blocks of columns, the second one partly filled


def compare(bias: bool, softcap: float | None, entropy: bool) -> None:
    torch.manual_seed(0)
    raw, bias_V = torch.randn(6, VOCABULARY) * 3, torch.randn(VOCABULARY) if bias else None
    transform = LogitTransform(temperature=0.7, scale=1.3, softcap=softcap)
    targets = torch.tensor([0, 4999, 5000, 6999, 4096, 17])
    tiles = [(raw[:, ids].contiguous(), targets - ids.start, ids) for ids in (slice(0, 5000), slice(5000, VOCABULARY))]
    results = []
    for form in (logit_tiles._fold, triton_tiles.fold):
        running = RunningSoftmax.start(targets, dtype=torch.float32, entropy=entropy)
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
        for gradient, form in zip(gradients, (logit_tiles._differentiate_, triton_tiles.differentiate_), strict=True):
            form(gradient, rows, columns, None if bias_V is None else bias_V[ids], transform)
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    for arguments in itertools.product((False, True), (None, 3.0), (False, True)):
        compare(*arguments)
