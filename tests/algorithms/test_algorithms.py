"""What an algorithm is made of, put together: advantages and weights of a step, corrections, the KL term."""

import math
from dataclasses import replace

import pytest
import torch

from assigned import assign_advantages
from cohort.algorithms import build_algorithm
from cohort.algorithms.rollout_correction import importance_weights
from cohort.config import AlgorithmConfig
from cohort.packing.batch import LossInputs
from samples import NAN, scored


@pytest.mark.parametrize(
    ("config", "advantages", "weights"),
    [
        (AlgorithmConfig(std_epsilon=0.0), [-0.7071, 0.7071], [1 / 4, 1 / 12]),
        (AlgorithmConfig(name="dr_grpo"), [-1.0, 1.0], [1 / 40, 1 / 40]),
        (AlgorithmConfig(name="dapo", std_epsilon=0.0), [-0.7071, 0.7071], [1 / 8, 1 / 8]),
    ],
    ids=["grpo", "dr_grpo", "dapo"],
)
def test_named_algorithms(config, advantages, weights):
    algorithm = build_algorithm(config, max_completion_tokens=20)
    sequences = assign_advantages([scored([0.0, 2.0], [2, 6])], algorithm)
    assert [s.advantages[0] for s in sequences] == pytest.approx(advantages, abs=1e-4)
    assert [s.loss_weights.tolist() for s in sequences] == [[weights[0]] * 2, [weights[1]] * 6]
    assert [s.shared_prefix_tokens for s in sequences] == [2, 2]
    assert sequences[0].token_ids.tolist() == [7, 8, 0, 1]


def test_truncated_completions_can_be_masked():
    groups = [scored([0.0, 2.0], [2, 6], ["stop", "length"])]
    kept = assign_advantages(groups, build_algorithm(AlgorithmConfig(), max_completion_tokens=20))
    assert kept[1].loss_weights[0] > 0
    masked = assign_advantages(
        groups, build_algorithm(AlgorithmConfig(mask_truncated_completions=True), max_completion_tokens=20)
    )
    assert masked[0].loss_weights.tolist() == [1 / 2, 1 / 2]  # alone in the mean
    assert masked[1].loss_weights.tolist() == [0] * 6
    assert not masked[1].advantages.any()


def test_unscored_completions_weigh_nothing():
    sequences = assign_advantages(
        [scored([1.0, NAN], [2, 6])], build_algorithm(AlgorithmConfig(name="dapo"), max_completion_tokens=9)
    )
    assert sequences[1].loss_weights.tolist() == [0] * 6
    assert [s.advantages[0] for s in sequences] == [0, 0]


def off_policy(differences: list[float], ids: list[int], dtype: torch.dtype = torch.float64) -> LossInputs:
    """Tokens of advantage 1 whose old logprobs are that far above the sampler's; the current policy is the old one."""
    sampling = torch.full((len(differences),), -1.0, dtype=dtype)
    old = sampling + torch.tensor(differences, dtype=dtype)
    return LossInputs(
        logprobs=old.clone().requires_grad_(),
        old_logprobs=old,
        sampling_logprobs=sampling,
        reference_logprobs=torch.zeros_like(old),
        entropy=torch.zeros(1),
        advantages=torch.ones_like(old),
        trajectory_ids=torch.tensor(ids),
    )


LN2 = math.log(2)


@pytest.mark.parametrize(
    ("correction", "weights", "clipped"),
    [
        ("token_truncate", [0.5, 1.5, 1.5, 1.0], [0, 1, 1, 0]),
        ("token_mask", [0.5, 0.0, 0.0, 1.0], [0, 1, 1, 0]),
        # completion 7: 1/2 * 2 = 1 for both of its tokens; completion 3: 4 * 1
        ("sequence_truncate", [1.0, 1.0, 1.5, 1.5], [0, 0, 1, 1]),
        ("sequence_mask", [1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1]),
    ],
)
def test_importance_weights_multiply_the_policy_loss(correction, weights, clipped):
    config = AlgorithmConfig(sampling_correction=correction, sampling_correction_cap=1.5)
    x = off_policy([-LN2, LN2, 2 * LN2, 0.0], [7, 7, 3, 3])
    out = build_algorithm(config, max_completion_tokens=8).policy_loss(x)
    assert out.per_token_loss.tolist() == pytest.approx([-w for w in weights])  # ratio 1, advantage 1
    assert out.token_metrics["sampling/importance_weight/mean"].tolist() == pytest.approx(weights)
    assert out.token_metrics["sampling/importance_weight/clipped_ratio"].tolist() == clipped
    out.per_token_loss.sum().backward()
    assert x.logprobs.grad is not None
    assert x.logprobs.grad.tolist() == pytest.approx([-w for w in weights])  # the weights themselves have no gradient


def test_importance_weights_are_of_the_old_policy_and_not_of_the_current_one():
    config = AlgorithmConfig(sampling_correction="token_truncate", clip_low=0.5, clip_high=9.0)
    x = off_policy([math.log(1.5)], [0])
    moved = replace(x, logprobs=(x.old_logprobs + math.log(3)).requires_grad_())
    out = build_algorithm(config, max_completion_tokens=8).policy_loss(moved)
    assert out.per_token_loss.item() == pytest.approx(-1.5 * 3)
    out.per_token_loss.backward()
    assert moved.logprobs.grad is not None and moved.logprobs.grad.item() == pytest.approx(-1.5 * 3)


def test_the_kl_term_is_not_corrected():
    config = AlgorithmConfig(sampling_correction="token_mask", sampling_correction_cap=1.5, beta=0.5)
    x = off_policy([LN2], [0])
    out = build_algorithm(config, max_completion_tokens=8).policy_loss(x)
    # the token is masked, and the reference's logprob is 0: d = 1 - ln 2, k3 = exp(d) - d - 1
    d = 1 - LN2
    assert out.per_token_loss.item() == pytest.approx(0.5 * (math.exp(d) - d - 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_differences_whose_exponential_overflows(level: str, dtype: torch.dtype):
    """The old policy is sure of each token; the sampler thought them impossible, or what cannot be."""
    old = torch.zeros(4, dtype=dtype, requires_grad=True)
    x = LossInputs(
        logprobs=old,
        old_logprobs=old.detach(),
        sampling_logprobs=torch.tensor([-1e4, 1e4, -math.inf, -89.0], dtype=dtype),
        reference_logprobs=None,
        entropy=torch.zeros(1),
        advantages=torch.ones(4, dtype=dtype),
        trajectory_ids=torch.arange(4),
    )
    for kind, expected in (("truncate", [3.0, 0.0, 3.0, 3.0]), ("mask", [0.0] * 4)):
        config = AlgorithmConfig.model_validate(
            {"sampling_correction": f"{level}_{kind}", "sampling_correction_cap": 3.0}
        )
        out = build_algorithm(config, max_completion_tokens=8).policy_loss(x)
        (gradient,) = torch.autograd.grad(out.per_token_loss.sum(), old)
        assert out.per_token_loss.tolist() == gradient.tolist() == [-w for w in expected]
        assert out.token_metrics["sampling/importance_weight/clipped_ratio"].tolist() == [1, 0, 1, 1]


def test_a_completion_whose_tokens_overflow_one_by_one_and_cancel_out():
    ids = torch.zeros(2, dtype=torch.int64)
    old, sampling = torch.tensor([0.0, -200.0]), torch.tensor([-200.0, 0.0])
    options = {"cap": 2.0, "masks": True}
    assert importance_weights(old, sampling, ids, per_sequence=True, **options)[0].tolist() == [1, 1]
    assert importance_weights(old, sampling, ids, per_sequence=False, **options)[0].tolist() == [0, 0]


def test_auto_is_what_it_is_said_to_be():
    x = off_policy([2 * LN2], [0])
    losses = [
        build_algorithm(AlgorithmConfig(sampling_correction=wanted), max_completion_tokens=8, auto_correction=auto)
        .policy_loss(x)
        .per_token_loss.item()
        for wanted, auto in (("auto", "none"), ("auto", "token_truncate"), ("none", "token_truncate"))
    ]
    assert losses == [-1, -2, -1]


@pytest.mark.parametrize("correction", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_on_policy_the_correction_changes_no_bit(correction):
    generator = torch.Generator().manual_seed(0)
    old = -4 * torch.rand(50, generator=generator)
    x = LossInputs(
        logprobs=old + 0.3 * torch.randn(50, generator=generator),
        old_logprobs=old,
        sampling_logprobs=old.clone(),
        reference_logprobs=None,
        entropy=torch.zeros(1),
        advantages=torch.randn(50, generator=generator),
        trajectory_ids=torch.arange(5).repeat_interleave(10),
    )
    plain, corrected = (
        build_algorithm(AlgorithmConfig(sampling_correction=c), max_completion_tokens=8).policy_loss(x)
        for c in ("none", correction)
    )
    assert torch.equal(plain.per_token_loss, corrected.per_token_loss)
    assert corrected.token_metrics["sampling/importance_weight/mean"].tolist() == [1] * 50
