"""How the per-token losses of a step are summed, against numbers worked out by hand."""

import numpy as np
import pytest

from cohort.algorithms import loss_weights
from cohort.algorithms.loss_weights import constant, sequence_mean, sequence_sum, token_mean
from cohort.config import ALGORITHMS, COMPONENTS


def test_loss_weights():
    lengths, all_in = np.array([2, 4]), np.array([True, True])
    assert sequence_mean(lengths, all_in).tolist() == [1 / 4, 1 / 8]
    assert token_mean(lengths, all_in).tolist() == [1 / 6, 1 / 6]
    assert sequence_sum(lengths, all_in).tolist() == [1 / 2, 1 / 2]
    assert constant(lengths, all_in, max_completion_tokens=10).tolist() == [1 / 20, 1 / 20]


def test_loss_weights_of_completions_left_out():
    lengths, first_out = np.array([2, 4]), np.array([False, True])
    assert sequence_mean(lengths, first_out).tolist() == [0, 1 / 4]
    assert token_mean(lengths, first_out).tolist() == [0, 1 / 4]
    assert sequence_sum(lengths, first_out).tolist() == [0, 1]
    assert constant(lengths, first_out, max_completion_tokens=10).tolist() == [0, 1 / 20]


@pytest.mark.parametrize("name", COMPONENTS["loss_weight"])
@pytest.mark.parametrize("lengths", [[2, 4], [0, 4], [0, 0]])
def test_no_completion_or_no_token_is_no_division_by_zero(name: str, lengths: list[int]):
    keys = {"max_completion_tokens": 10} if name == "constant" else {}
    with np.errstate(all="raise"):
        for included in ([False, False], [True, False], [True, True]):
            found = getattr(loss_weights, name)(np.array(lengths), np.array(included), **keys)
            assert np.isfinite(found).all()
            assert not found[~np.array(included)].any()


def test_bnpo_is_the_token_mean_of_the_step():
    """Token means of micro-batches, each weighed by its tokens, are that of the step; unweighed they are not."""
    lengths = np.array([1, 2, 3, 10])
    losses = [np.full(n, float(n)) for n in lengths]
    of_step = sum((w * loss).sum() for w, loss in zip(token_mean(lengths, lengths > 0), losses, strict=True))
    halves = [np.concatenate(losses[:2]), np.concatenate(losses[2:])]
    assert of_step == pytest.approx(sum(len(half) / 16 * half.mean() for half in halves))
    assert of_step != pytest.approx(sum(half.mean() / 2 for half in halves))
    assert ALGORITHMS["bnpo"].loss_weight == "token_mean"
