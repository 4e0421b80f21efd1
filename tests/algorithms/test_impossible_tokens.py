"""Tokens whose probability is 0: without an advantage they change no loss and no gradient."""

import math
from dataclasses import replace

import pytest
import torch

from cohort.algorithms import build_algorithm
from cohort.config import COMPONENTS, AlgorithmConfig
from cohort.packing.batch import LossInputs


def step(logprobs: list[float], *, old: float) -> LossInputs:
    """A token without an advantage, alone in its completion, and two of another."""
    logprobs_T = torch.tensor(logprobs)
    old_T = torch.tensor([old, *logprobs[1:]])
    return LossInputs(
        logprobs=logprobs_T.requires_grad_(),
        old_logprobs=old_T,
        sampling_logprobs=old_T,
        reference_logprobs=None,
        entropy=torch.zeros(3),
        advantages=torch.tensor([0.0, 1.0, 0.5]),
        trajectory_ids=torch.tensor([0, 1, 1]),
    )


@pytest.mark.parametrize("old", [-1.0, -math.inf])  # -inf: on policy
@pytest.mark.parametrize("name", COMPONENTS["policy_loss"])
def test_an_impossible_token_without_advantage_does_nothing(name: str, old: float):
    loss = build_algorithm(AlgorithmConfig(policy_loss=name), max_completion_tokens=8).policy_loss
    x = step([-math.inf, -1.0, -2.0], old=old)
    out = loss(x)
    (gradient,) = torch.autograd.grad(out.per_token_loss.sum(), x.logprobs)
    assert out.per_token_loss[0] == 0 and gradient[0] == 0
    assert all(values.isfinite().all() for values in out.token_metrics.values())
    usual = step([-1.0, -1.0, -2.0], old=-1.0)
    expected = loss(usual).per_token_loss
    torch.testing.assert_close(out.per_token_loss[1:], expected[1:])
    torch.testing.assert_close(gradient[1:], torch.autograd.grad(expected.sum(), usual.logprobs)[0][1:])
    assert gradient[1:].any()


def test_a_nan_logprob_is_not_hidden():
    """Negative control: what is broken shows."""
    for name in ("clipped", "gspo_token"):
        x = step([math.nan, -1.0, -2.0], old=-1.0)
        loss = build_algorithm(AlgorithmConfig(policy_loss=name), max_completion_tokens=8).policy_loss
        assert loss(replace(x, advantages=torch.ones(3))).per_token_loss[0].isnan()
