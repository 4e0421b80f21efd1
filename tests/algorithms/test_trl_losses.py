"""The same losses, gradients and advantages as TRL's own code gives, where its value does not depend on the split.

Ours are held to a table of what TRL gave, and the table to TRL by `make test-extras`.
"""

import json
from pathlib import Path

import pytest
import torch

from cohort.algorithms import build_algorithm
from cohort.config import AlgorithmConfig
from samples import NAN
from trl_advantages import ADVANTAGES, as_row, inputs, their_advantages
from trl_losses import CASES, MAX_TOKENS, SEEDS, SPREADS, Step, default_cispo, theirs

TABLE = json.loads(Path(__file__).with_name("trl_losses.json").read_text())


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_that_trl_gave(case: str, spread: float):
    for seed, recorded in zip(SEEDS, TABLE["losses"][case][str(spread)], strict=True):
        our_loss, ours = Step(seed, spread).ours(CASES[case][1])
        assert our_loss == pytest.approx(recorded["loss"], rel=1e-6, abs=1e-12)  # TRL rounds SAPO's tau to float32
        expected = torch.tensor(recorded["gradient"], dtype=torch.float64).view_as(ours)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-9)


@pytest.mark.extras
@pytest.mark.parametrize("case", CASES)
def test_the_table_is_what_trl_gives(case: str):
    for spread in SPREADS:
        for seed, recorded in zip(SEEDS, TABLE["losses"][case][str(spread)], strict=True):
            loss, gradient = theirs(case, seed, spread)
            assert loss == pytest.approx(recorded["loss"], rel=1e-9, abs=1e-15)
            assert gradient.flatten().tolist() == pytest.approx(recorded["gradient"], rel=1e-7, abs=1e-12)


def test_the_comparison_notices_another_bound():
    """Negative control."""
    recorded = TABLE["losses"]["grpo"]["0.5"][0]
    our_loss, ours = Step(0, 0.5).ours(AlgorithmConfig(clip_high=0.28))
    assert abs(our_loss - recorded["loss"]) > 1e-4
    assert (ours.flatten() - torch.tensor(recorded["gradient"], dtype=torch.float64)).norm() > 1e-3


def test_trls_default_cispo_scales_what_is_on_policy():
    """Its cap is epsilon_high itself, 0.2 by default; here the weight of an on-policy token is 1."""
    ours = Step(0, 0.0).ours(AlgorithmConfig(name="cispo"))[1]
    default = torch.tensor(TABLE["default_cispo"], dtype=torch.float64).view_as(ours)
    torch.testing.assert_close(default, 0.2 * ours, rtol=1e-9, atol=1e-10)
    policy_gradient = torch.tensor(TABLE["losses"]["dapo"]["0.0"][0]["gradient"], dtype=torch.float64)
    torch.testing.assert_close(ours, policy_gradient.view_as(ours), rtol=1e-9, atol=1e-10)


@pytest.mark.extras
def test_the_row_of_the_default_cispo_is_what_trl_gives():
    assert default_cispo() == pytest.approx(TABLE["default_cispo"], rel=1e-9, abs=1e-12)


def test_luspo_with_kl_counts_no_padding():
    """As TRL since its pull request 6654; before, it divided by the padded length and counted padding."""
    step, beta = Step(0, 0.5), 0.1
    config = AlgorithmConfig(name="luspo", clip_low=0.2, clip_high=0.2, beta=beta)
    loss, gradient = step.ours(config)
    of_token = step.logprobs() - step.old
    lengths = step.mask.sum(1)
    ratio = ((of_token * step.mask).sum(1) / lengths).exp()
    policy = -torch.minimum(ratio * step.advantages, ratio.clamp(0.8, 1.2) * step.advantages)
    away = step.reference - step.logprobs()
    per_token = policy.unsqueeze(1) + beta * (away.exp() - away - 1)
    expected = (per_token * step.mask).sum(1).mean()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, step.head, retain_graph=True)[0])
    padded = (per_token * lengths.unsqueeze(1)).mean()
    assert abs(loss - padded.item()) > 1e-3


def test_gspo_token_is_its_formula():
    """sg(s) * p / sg(p) of each token, as TRL's form for tokens had it; of equal advantages it is GSPO."""
    step, bounds = Step(0, 0.5), {"clip_low": 0.2, "clip_high": 0.2}
    loss, gradient = step.ours(AlgorithmConfig(name="gspo_token", **bounds))
    logprobs = step.logprobs()
    means = ((logprobs - step.old) * step.mask).sum(1, keepdim=True) / step.mask.sum(1, keepdim=True)
    ratio = (means.detach() + logprobs - logprobs.detach()).exp()
    advantages = step.advantages.unsqueeze(1)
    per_token = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    expected = ((per_token * step.mask).sum(1) / step.mask.sum(1)).mean()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, step.head)[0])


def test_a_delta_within_the_clip_is_where_the_two_papers_differ():
    """So it is refused: the dual clip of arXiv:1912.09729 and TRL's bound are the same only beyond the clip."""
    ratio, advantage = 1.5, -1.0
    dual = max(min(ratio * advantage, 1.2 * advantage), 1.1 * advantage)
    trl = min(min(ratio, 1.1) * advantage, 1.2 * advantage)
    assert (dual, trl) == (-1.1, -1.2)
    with pytest.raises(ValueError, match="must be above 1"):
        AlgorithmConfig(delta=1.1)


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_advantages_are_those_that_trl_gave(advantage: str):
    ours = build_algorithm(AlgorithmConfig(advantage=advantage), max_completion_tokens=MAX_TOKENS).advantage(inputs())
    recorded = torch.tensor([NAN if a is None else a for a in TABLE["advantages"][advantage]], dtype=torch.float64)
    torch.testing.assert_close(ours, recorded.view_as(ours), equal_nan=True, rtol=1e-6, atol=1e-9)


def test_the_comparison_notices_another_advantage():
    """Negative control."""
    recorded = TABLE["advantages"]
    assert all(recorded[a] != recorded[b] for a in recorded for b in recorded if a != b)


@pytest.mark.extras
@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_the_table_of_advantages_is_what_trl_gives(advantage: str):
    theirs, recorded = as_row(their_advantages(advantage)), TABLE["advantages"][advantage]
    assert [a is None for a in theirs] == [a is None for a in recorded]
    assert [a or 0.0 for a in theirs] == pytest.approx([a or 0.0 for a in recorded], rel=1e-9)
