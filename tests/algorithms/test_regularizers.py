"""KL, entropy and masks around the policy loss, against numbers worked out by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from assigned import assign_advantages
from cohort.algorithms import (
    CoefficientState,
    build_algorithm,
    drop_zero_gradient,
    mean_reference_kl,
)
from cohort.algorithms.adaptive_coefficients import adapted_entropy, adapted_kl
from cohort.algorithms.assign import advantage_inputs, high_entropy
from cohort.algorithms.regularizers import k1, k2, k3, with_off_policy_mask
from cohort.config import AlgorithmConfig
from cohort.packing.batch import LossInputs, LossOutput
from cohort.records import ForwardOnlyOutputs
from samples import loss_inputs, scored

LN2 = math.log(2)


def build(**keys):
    return build_algorithm(AlgorithmConfig(**keys), max_completion_tokens=8)


def test_kl_estimators():
    # reference = 2 x policy, and equal: d = log policy - log reference = -ln 2, 0
    logprobs, reference = torch.tensor([-1.0, -1.0]), torch.tensor([-1.0 + LN2, -1.0])
    torch.testing.assert_close(k1(logprobs, reference), torch.tensor([-LN2, 0.0]))
    torch.testing.assert_close(k2(logprobs, reference), torch.tensor([LN2 * LN2 / 2, 0.0]))
    torch.testing.assert_close(k3(logprobs, reference), torch.tensor([1 - LN2, 0.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("unbiased", [False, True])
def test_the_divergence_overflows_nowhere(unbiased: bool, dtype: torch.dtype):
    """A token that the current policy deems impossible, or the reference or the old policy did."""
    algorithm = build(beta=0.5, kl_unbiased=unbiased)
    old = torch.tensor([0.0, 0.0, -2000.0], dtype=dtype)
    x = replace(
        loss_inputs([1.0] * 3, [0.0] * 3, reference=[0.0, -1000.0, 0.0], dtype=dtype),
        logprobs=torch.tensor([-1000.0, 0.0, 0.0], dtype=dtype, requires_grad=True),
        old_logprobs=old,
    )
    losses = algorithm.policy_loss(x).per_token_loss
    (gradient,) = torch.autograd.grad((0 * losses).sum(), x.logprobs)
    assert losses.isfinite().all() and gradient.tolist() == [0, 0, 0]


def test_kl_enters_the_loss_with_beta():
    algorithm = build(beta=0.5)
    assert algorithm.needs_reference
    out = algorithm.policy_loss(loss_inputs([1.0], [1.0], reference=[LN2]))
    assert out.per_token_loss.item() == pytest.approx(-1 + 0.5 * (1 - LN2))
    assert out.token_metrics["kl"].item() == pytest.approx(1 - LN2)
    assert not build().needs_reference


def expected_gradient(logits: Tensor, reference: Tensor, loss_of_token) -> Tensor:
    """The gradient to the logits of a loss over all tokens of a vocabulary, each as often as the policy samples it."""
    logits = logits.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    (logprobs.detach().exp() * loss_of_token(logprobs, reference)).sum().backward()
    assert logits.grad is not None
    return logits.grad


def divergence_gradient(logits: Tensor, reference: Tensor, *, forward: bool) -> Tensor:
    """Of KL(policy || reference), or of KL(reference || policy), itself."""
    logits = logits.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    first, second = (reference, logprobs) if forward else (logprobs, reference)
    (first.exp() * (first - second)).sum().backward()
    assert logits.grad is not None
    return logits.grad


def test_which_estimators_have_the_gradient_of_the_divergence_on_policy():
    """docs/algorithm-terms.md's table, by summing over a whole vocabulary in place of sampling."""
    logits, reference = torch.randn(2, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    reference = reference.log_softmax(-1)
    reverse = divergence_gradient(logits, reference, forward=False)
    forward = divergence_gradient(logits, reference, forward=True)

    def term(name: str, *, unbiased: bool):
        def loss(logprobs: Tensor, reference: Tensor) -> Tensor:
            x = LossInputs(
                logprobs=logprobs,
                old_logprobs=logprobs.detach(),
                sampling_logprobs=logprobs.detach(),
                reference_logprobs=reference,
                entropy=torch.zeros_like(logprobs),
                advantages=torch.zeros_like(logprobs),
                trajectory_ids=torch.arange(len(logprobs)),
            )
            return build(beta=1.0, kl_estimator=name, kl_unbiased=unbiased).policy_loss(x).per_token_loss

        return expected_gradient(logits, reference, loss)

    torch.testing.assert_close(term("k2", unbiased=False), reverse)
    torch.testing.assert_close(term("k3", unbiased=False), forward)
    torch.testing.assert_close(term("k1", unbiased=True), reverse)
    torch.testing.assert_close(term("k3", unbiased=True), reverse)
    assert (reverse - forward).abs().max() > 0.01
    torch.testing.assert_close(expected_gradient(logits, reference, k1), torch.zeros(7, dtype=torch.float64))


def test_terms_pass_gradcheck():
    algorithm = build(beta=0.5, kl_unbiased=True, entropy_coef=0.25)
    x = loss_inputs([1.1, 0.7, 1.3], [1.0, -2.0, 0.0], reference=[0.3, -0.2, 0.1])

    def loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
        return algorithm.policy_loss(replace(x, logprobs=logprobs, entropy=entropy)).per_token_loss

    logprobs = x.logprobs.clone().requires_grad_()
    assert torch.autograd.gradcheck(loss, (logprobs, torch.rand(3, dtype=torch.float64, requires_grad=True)))


def test_the_entropy_bonus_is_taken_from_the_loss():
    algorithm = build(entropy_coef=0.5)
    assert algorithm.learns_without_advantage
    x = replace(loss_inputs([1.0, 1.0], [1.0, 0.0]), entropy=torch.tensor([2.0, 3.0], dtype=torch.float64))
    assert algorithm.policy_loss(x).per_token_loss.tolist() == [-2.0, -1.5]
    sequences = assign_advantages([scored([1.0, 1.0], [2, 2])], algorithm)
    assert len(drop_zero_gradient(sequences, algorithm)) == 2


def test_the_off_policy_mask():
    """Completions of 2, 1, 2 and 2 tokens, of mean log sampling - log current 0.5, 2, 2 and 2."""

    def plain(x: LossInputs) -> LossOutput:
        return LossOutput(per_token_loss=-x.advantages)

    x = LossInputs(
        logprobs=torch.tensor([-1.0, -2.0, -3.0, -3.0, -3.0, -1.0, -5.0]),
        old_logprobs=torch.zeros(7),
        sampling_logprobs=torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0]),
        reference_logprobs=None,
        entropy=torch.zeros(7),
        advantages=torch.tensor([-1.0, -1.0, -1.0, 1.0, 1.0, -1.0, 0.0]),
        trajectory_ids=torch.tensor([0, 0, 1, 2, 2, 3, 3]),
    )
    out = with_off_policy_mask(plain, threshold=1.0)(x)
    assert out.per_token_loss.tolist() == [1.0, 1.0, 0.0, -1.0, -1.0, 0.0, 0.0]
    assert out.token_metrics["sampling/off_policy_masked_ratio"].tolist() == [0, 0, 1, 0, 0, 1, 0]
    kept = with_off_policy_mask(plain, threshold=2.0)(x)  # not above it
    assert kept.per_token_loss.tolist() == [1.0, 1.0, 1.0, -1.0, -1.0, 1.0, 0.0]
    assert AlgorithmConfig(off_policy_mask_threshold=1.0).sequence_level_key == "off_policy_mask_threshold: 1.0"


TWELVE = [[0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [0.7, 0.8, 0.9, 1.0, 1.1, 1.2]]
TEN_COUNT = [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]


@pytest.mark.parametrize(
    ("entropies", "counted", "share", "expected"),
    [
        (TWELVE, TEN_COUNT, 0.2, [[0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0]]),
        (
            [[0.1, 0.2, 0.3, 1.4, 0.5, 0.14], [0.5, 0.6, 0.7, 0.8, 0.9, 1.0]],
            [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0]],
            0.2,
            [[0, 0, 0, 1, 0, 0], [0, 0, 0, 1, 0, 0]],
        ),
        (TWELVE, TEN_COUNT, 0.5, [[0, 0, 0, 0, 0, 1], [1, 1, 1, 1, 0, 0]]),
        (TWELVE, TEN_COUNT, 1.0, TEN_COUNT),
        (TWELVE, TEN_COUNT, 1e-9, [[0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0]]),
        (TWELVE, [[0] * 6] * 2, 0.5, [[0] * 6] * 2),
    ],
)
def test_the_tokens_of_highest_entropy(entropies, counted, share, expected):
    actual = high_entropy(np.array(entropies), np.array(counted, dtype=bool), share=share)
    assert actual.astype(int).tolist() == expected


def test_only_tokens_of_high_entropy_have_an_advantage():
    """Over the whole step, without completions that are left out; the denominators stay those of all tokens."""
    algorithm = build(name="dapo", top_entropy_quantile=0.5, mask_truncated_completions=True)
    assert algorithm.forward_only_outputs == {"entropies"}
    groups = [scored([0.0, 2.0], [2, 3]), scored([0.0, 2.0], [1, 4], finish=["stop", "length"])]
    entropies = {0: [0.1, 0.9], 1: [0.8, 0.2, 0.3], 2: [0.7], 3: [5.0, 5.0, 5.0, 5.0]}
    outputs = ForwardOnlyOutputs(entropies={i: np.array(e) for i, e in entropies.items()})
    sequences = assign_advantages(groups, algorithm, outputs)
    signs = [np.sign(s.advantages).tolist() for s in sequences]
    assert signs == [[0, -1], [1, 0, 0], [-1], [0, 0, 0, 0]]
    assert [s.loss_weights.tolist() for s in sequences] == [[1 / 6] * 2, [1 / 6] * 3, [1 / 6], [0.0] * 4]


def test_kl_in_the_reward():
    """Taken from each token's reward before the advantage; the sum of a completion's is its reward."""
    algorithm = build(name="dr_grpo", beta=0.5, kl_in="reward", kl_estimator="k1")
    assert algorithm.forward_only_outputs == {"logprobs", "reference_logprobs"}
    assert not algorithm.needs_reference
    assert not algorithm.learns_without_advantage
    outputs = ForwardOnlyOutputs(
        logprobs={0: np.array([-1.0, -1.0]), 1: np.array([-1.0]), 2: np.array([-1.0])},
        reference_logprobs={0: np.array([-2.0, -4.0]), 1: np.array([-1.0]), 2: np.array([-9.0])},
    )
    groups = [scored([3.0, 0.0, math.nan], [2, 1, 1])]
    sequences = assign_advantages(groups, algorithm, outputs)
    # rewards 3 - 0.5 * (1 + 3) = 1 and 0: advantages 0.5 and -0.5
    assert [s.advantages.tolist() for s in sequences] == [[0.5, 0.5], [-0.5], [0]]
    assert mean_reference_kl(algorithm, outputs) == {"kl": (1 + 3 + 0 + 8) / 4}
    penalties = {i: 0.5 * (outputs.logprobs[i] - outputs.reference_logprobs[i]) for i in range(3)}
    x = advantage_inputs(groups, sequences, outputs, {}, penalties)
    assert x.token_rewards.tolist() == [[[-0.5, 1.5], [0.0, 0.0], [0.0, 0.0]]]
    later = algorithm.coefficients(CoefficientState(kl=0.25, entropy=0.0))
    first = assign_advantages(groups, algorithm, outputs, coefficients=later)[0]
    assert first.advantages.tolist() == [1.0, 1.0]


def test_the_coefficient_of_kl_adapts():
    assert adapted_kl(0.1, 0.22, target=0.2, horizon=1000, num_completions=100) == pytest.approx(0.1 * 1.01)
    assert adapted_kl(0.1, 9.0, target=0.2, horizon=1000, num_completions=100) == pytest.approx(0.1 * 1.02)
    assert adapted_kl(0.1, 0.0, target=0.2, horizon=1000, num_completions=100) == pytest.approx(0.1 * 0.98)
    algorithm = build(beta=0.1, kl_target=0.2, kl_horizon=1000)
    state = algorithm.update_coefficients(algorithm.initial_coefficients, {"kl": 0.22, "entropy": 1.0}, 100)
    assert state == CoefficientState(kl=pytest.approx(0.101), entropy=0.0)
    assert algorithm.coefficient_metrics(algorithm.coefficients(state)) == {"kl_coef": pytest.approx(0.101)}
    assert algorithm.update_coefficients(state, {}, 100) == state  # a step in which nothing was computed
    fixed = build(beta=0.1)
    assert fixed.update_coefficients(fixed.initial_coefficients, {"kl": 9.0}, 100) == fixed.initial_coefficients


def test_the_coefficient_of_entropy_adapts():
    keys = {"target": 0.5, "delta": 0.25, "largest": 0.6}
    assert adapted_entropy(0.25, 0.5, **keys) == 0.5
    assert adapted_entropy(0.5, 0.1, **keys) == 0.6
    assert adapted_entropy(0.5, 0.6, **keys) == 0.25
    assert adapted_entropy(0.1, 0.6, **keys) == 0.0
    algorithm = build(entropy_coef=0.5, entropy_target=0.5, entropy_coef_delta=0.25)
    in_force = []
    state = algorithm.initial_coefficients
    for entropy in (0.4, 0.6, 0.6, 0.6, 0.5):
        in_force.append(algorithm.coefficients(state).entropy)
        state = algorithm.update_coefficients(state, {"entropy": entropy}, 1)
    assert in_force == [0.0, 0.75, 0.0, 0.0, 0.0]  # not before it was measured, and not above the target
    assert algorithm.coefficients(state).entropy == 0.25  # it was 0.75, 0.5, 0.25, 0
    assert algorithm.coefficient_metrics(algorithm.coefficients(state)) == {"entropy_coef": 0.25}


def test_the_loss_has_the_coefficients_of_the_moment():
    algorithm = build(beta=0.5, kl_target=1.0)
    x = loss_inputs([1.0], [1.0], reference=[LN2])
    later = algorithm.coefficients(CoefficientState(kl=2.0, entropy=0.0))
    assert algorithm.loss_with(later)(x).per_token_loss.item() == pytest.approx(-1 + 2 * (1 - LN2))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"kl_estimator": "k3"}, "kl_estimator: k3 has no effect with beta: 0; remove it, or set beta above 0"),
        ({"kl_target": 0.1}, "kl_target: 0.1 has no effect with beta: 0"),
        (
            {"beta": 0.1, "kl_horizon": 10},
            "kl_horizon: 10 has no effect with a fixed beta; remove it, or set kl_target",
        ),
        ({"beta": 0.1, "kl_in": "reward", "kl_unbiased": True}, "kl_unbiased: True has no effect with kl_in: reward"),
        ({"beta": 0.1, "kl_estimator": "k1"}, "kl_estimator: k1 in the loss has a gradient of 0 in expectation"),
        ({"beta": 0.1, "kl_estimator": "k2", "kl_unbiased": True}, "kl_unbiased: true with kl_estimator: k2"),
        ({"entropy_coef_delta": 0.1}, "entropy_coef_delta: 0.1 has no effect with a fixed entropy_coef; remove it, or"),
        ({"entropy_coef": 2.0, "entropy_target": 1.0}, "entropy_coef: 2.0 is above entropy_coef_max: 1.0"),
        (
            {"name": "gdpo", "beta": 0.1, "kl_in": "reward"},
            "kl_in: reward does not go with advantage: per_reward_mean_std: it whitens each reward separately",
        ),
        (
            {"name": "maxrl", "beta": 0.1, "kl_in": "reward"},
            "kl_in: reward does not go with advantage: max_likelihood: it needs rewards of at least 0",
        ),
        (
            {"name": "luspo", "top_entropy_quantile": 0.2},
            "policy_loss: gspo has one ratio per completion and needs one advantage for all its tokens, but with "
            "top_entropy_quantile: 0.2 they differ; use policy_loss: gspo_token",
        ),
        ({"name": "ppo", "policy_loss": "gmpo"}, "but with advantage: gae they differ; use policy_loss: gspo_token"),
        (
            {"name": "reinforce_pp_baseline", "policy_loss": "gspo", "beta": 0.1, "kl_in": "reward"},
            "but with advantage: group_mean_whitened and kl_in: reward they differ; use policy_loss: gspo_token",
        ),
    ],
)
def test_terms_without_an_effect_are_refused(keys, message):
    with pytest.raises(ValueError) as caught:
        AlgorithmConfig(**keys)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "keys",
    [
        {"name": "gdpo", "beta": 0.1},
        {"name": "maxrl", "beta": 0.1},
        {"name": "gspo_token", "top_entropy_quantile": 0.2},
        {"name": "ppo", "policy_loss": "gspo_token"},
        {"name": "reinforce_pp", "policy_loss": "gspo", "beta": 0.1},  # the same return for all tokens of a completion
        {"name": "gspo", "beta": 0.1, "kl_in": "reward"},
    ],
)
def test_terms_with_an_effect_are_not(keys):
    AlgorithmConfig(**keys)


def test_the_estimator_that_suits_where_the_divergence_is():
    assert AlgorithmConfig(beta=0.1).kl_estimator == "k3"
    assert AlgorithmConfig(beta=0.1, kl_in="reward").kl_estimator == "k1"
