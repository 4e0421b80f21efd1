"""Policy losses against numbers worked out by hand from the papers; gradients; what overflows elsewhere."""

import inspect
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from cohort.algorithms import losses
from cohort.algorithms.losses import MAX_LOG_RATIO, cispo, clipped, gmpo, gspo, gspo_token, reinforce, sapo
from cohort.config import COMPONENTS, AlgorithmConfig
from cohort.packing.batch import LossInputs, LossOutput
from samples import loss_inputs

ALL = COMPONENTS["policy_loss"]
E = math.e


def of(name: str, **keys: float | None) -> Callable[[LossInputs], LossOutput]:
    """A policy loss with the catalogue's defaults."""
    return lambda x: getattr(losses, name)(x, **{**ALL[name].defaults, **keys})


def gradient(out: LossOutput, x: LossInputs) -> list[float]:
    return torch.autograd.grad(out.per_token_loss.sum(), x.logprobs)[0].tolist()


@pytest.mark.parametrize("name", ALL)
def test_the_catalogue_names_the_keys_that_a_function_takes(name: str):
    assert set(inspect.signature(getattr(losses, name)).parameters) == {"x", *ALL[name].defaults}


def test_clip_caps_gain_but_not_loss():
    x = loss_inputs([1.5, 0.5, 1.5, 0.5], [1.0, 1.0, -1.0, -1.0])
    out = clipped(x, clip_low=0.2, clip_high=0.2)
    assert out.per_token_loss.tolist() == pytest.approx([-1.2, -0.5, 1.5, 0.8])
    assert gradient(out, x) == pytest.approx([0, -0.5, 1.5, 0])
    assert out.token_metrics["clip_ratio/high_mean"].tolist() == [1, 0, 0, 0]
    assert out.token_metrics["clip_ratio/low_mean"].tolist() == [0, 0, 0, 1]
    assert out.token_metrics["clip_ratio/region_mean"].tolist() == [1, 0, 0, 1]


def test_clip_bounds_are_separate():
    out = clipped(loss_inputs([1.25, 0.7], [1.0, -1.0]), clip_low=0.2, clip_high=0.28)
    assert out.per_token_loss.tolist() == pytest.approx([-1.25, 0.8])


def test_dual_clip_caps_the_loss_of_negative_advantages():
    x = loss_inputs([4.0, 2.0, 4.0, 0.1], [-1.0, -1.0, 1.0, -2.0])
    out = clipped(x, clip_low=0.2, clip_high=0.2, delta=3.0)
    # arXiv:1912.09729, for A < 0: max(min(ratio * A, clip(ratio) * A), delta * A)
    assert out.per_token_loss.tolist() == pytest.approx([3.0, 2.0, -1.2, 1.6])
    assert gradient(out, x) == pytest.approx([0, 2, 0, 0])


def test_delta_has_to_be_beyond_the_clip():
    for delta in (1.05, 1.2):
        with pytest.raises(ValueError, match=r"delta: 1\.\d+ must be above 1 \+ clip_high, which is 1\.2; 3 is usual"):
            AlgorithmConfig(delta=delta)


def test_gspo_is_the_geometric_mean_of_a_completion():
    # ratios 4 and 1 of one completion: s = 2; 1/2 and 1/8 of the other: 1/4
    x = loss_inputs([4.0, 1 / 2, 1.0, 1 / 8], [1.0, -1.0, 1.0, -1.0], ids=[5, 3, 5, 3])
    assert gspo(x, clip_low=0.9, clip_high=9.0).per_token_loss.tolist() == pytest.approx([-2, 0.25, -2, 0.25])
    clip = gspo(x, clip_low=0.2, clip_high=0.5)
    assert clip.per_token_loss.tolist() == pytest.approx([-1.5, 0.8, -1.5, 0.8])
    assert gradient(clip, x) == [0, 0, 0, 0]


def test_gspo_token_has_the_gradient_of_gspo():
    x = loss_inputs([4.0, 1 / 2, 1.0, 1 / 8], [1.0, -3.0, 1.0, -3.0], ids=[5, 3, 5, 3])
    of_sequence, of_token = (f(x, clip_low=0.9, clip_high=9.0) for f in (gspo, gspo_token))
    assert of_token.per_token_loss.tolist() == pytest.approx(of_sequence.per_token_loss.tolist())
    # s * A for each token: of two losses s * A, each token's logprob has half the share in s
    assert gradient(of_token, x) == pytest.approx([-2, 0.75, -2, 0.75])
    assert gradient(of_sequence, x) == pytest.approx([-2, 0.75, -2, 0.75])


def test_gspo_token_weighs_each_token_by_its_own_advantage():
    x = loss_inputs([4.0, 1.0], [1.0, 3.0], ids=[0, 0])
    assert gradient(gspo_token(x, clip_low=0.9, clip_high=9.0), x) == pytest.approx([-2, -6])


def test_cispo_caps_the_weight_and_keeps_the_gradient():
    x = loss_inputs([8.0, 0.5, 8.0], [1.0, 1.0, -2.0])
    out = cispo(x, clip_high=4.0)
    ln8, ln2 = math.log(8), math.log(2)
    assert out.per_token_loss.tolist() == pytest.approx([-5 * ln8, 0.5 * ln2, 10 * ln8])
    assert gradient(out, x) == pytest.approx([-5, -0.5, 10])
    assert out.token_metrics["clip_ratio/high_mean"].tolist() == [1, 0, 1]


def test_sapo():
    x = loss_inputs([2.0, 2.0], [1.0, -1.0])
    out = sapo(x, tau_positive=1.0, tau_negative=2.0)
    assert out.per_token_loss.tolist() == pytest.approx([-4 / (1 + 1 / E), 2 / (1 + 1 / E**2)])
    # slope of the gate times the ratio: 4 * sigmoid * (1 - sigmoid) * 2
    up, down = 1 / (1 + 1 / E), 1 / (1 + 1 / E**2)
    assert gradient(out, x) == pytest.approx([-8 * up * (1 - up), 8 * down * (1 - down)])


def test_vespo():
    # w = 2 * 1 for one completion, 1/2 for the other
    x = loss_inputs([2.0, 1.0, 0.5], [1.0, 1.0, -1.0], ids=[0, 0, 1])
    out = of("vespo")(x)
    positive, negative = 2**2 * math.exp(3 * (1 - 2)), 0.5**3 * math.exp(2 * (1 - 0.5))
    assert out.token_metrics["policy_weight/mean"].tolist() == pytest.approx([positive, positive, negative])
    assert gradient(out, x) == pytest.approx([-positive, -positive, negative])
    assert out.per_token_loss[2].item() == pytest.approx(negative * math.log(0.5))


def test_gmpo_clips_each_token_before_the_mean():
    # bounds e^-1/2 and e^1/2; advantage above 0: e^2 becomes e^1/2, e^-1 stays: s = e^-1/4
    x = loss_inputs([E**2, 1 / E, E**2, 1 / E], [2.0, 2.0, -2.0, -2.0], ids=[0, 0, 1, 1])
    out = gmpo(x, clip_low=0.5, clip_high=0.5)
    low, high = E**-0.25, E**0.75  # below 0: e^2 stays, e^-1 becomes e^-1/2
    assert out.per_token_loss.tolist() == pytest.approx([-2 * low, -2 * low, 2 * high, 2 * high])
    assert gradient(out, x) == pytest.approx([0, -2 * low, 2 * high, 0])
    assert out.token_metrics["clip_ratio/region_mean"].tolist() == [1, 0, 0, 1]


def test_reinforce():
    x = loss_inputs([E, 1 / E], [2.0, 3.0])
    assert reinforce(x).per_token_loss.tolist() == pytest.approx([-2, 3])
    assert gradient(reinforce(x), x) == [-2, -3]


@pytest.mark.parametrize("name", ALL)
def test_on_policy_the_gradient_is_the_policy_gradient(name: str):
    """Whatever the loss: the advantage, summed over a completion where its tokens share one."""
    old = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    x = replace(
        loss_inputs([1.0] * 3, [2.0, 2.0, -3.0], ids=[0, 0, 1]), logprobs=old.clone().requires_grad_(), old_logprobs=old
    )
    assert gradient(of(name)(x), x) == pytest.approx([-2, -2, 3])


def off_policy(name: str) -> LossInputs:
    """Tokens of completions of 1 to 4, off the edges at which a clip has a kink."""
    generator = torch.Generator().manual_seed(len(name))
    old = -3 * torch.rand(10, generator=generator, dtype=torch.float64)
    logprobs = old + 0.5 * torch.randn(10, generator=generator, dtype=torch.float64)
    return LossInputs(
        logprobs=logprobs.requires_grad_(),
        old_logprobs=old,
        sampling_logprobs=old,
        reference_logprobs=None,
        entropy=torch.zeros(1),
        advantages=torch.randn(10, generator=generator, dtype=torch.float64),
        trajectory_ids=torch.tensor([0, 1, 1, 2, 2, 2, 3, 3, 3, 3]),
    )


@pytest.mark.parametrize("name", ["clipped", "gspo", "sapo", "gmpo", "reinforce"])
def test_gradients_are_those_of_the_values(name: str):
    x = off_policy(name)
    keys = {"delta": 1.5} if name == "clipped" else {}
    torch.autograd.gradcheck(lambda p: of(name, **keys)(replace(x, logprobs=p)).per_token_loss, (x.logprobs,))


@pytest.mark.parametrize("name", ["cispo", "vespo", "gspo_token"])
def test_gradients_where_a_weight_is_held_fixed(name: str):
    """weight * log p has the weight as its slope; weight * p / sg(p), unclipped, its own value."""
    x = off_policy(name)
    out = of(name, **({"clip_low": 0.9, "clip_high": 9.0} if name == "gspo_token" else {}))(x)
    expected = out.per_token_loss if name == "gspo_token" else out.per_token_loss / x.logprobs
    assert gradient(out, x) == pytest.approx(expected.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ALL)
def test_ratios_that_overflow_stay_finite(name: str, dtype: torch.dtype):
    """Also where the advantage or the loss weight is 0, which times infinity would be NaN."""
    for far in (1e4, -1e4, 100.0, -100.0, MAX_LOG_RATIO):
        for advantage in (0.0, 1.0, -1.0):
            old = torch.zeros(3, dtype=dtype)
            x = LossInputs(
                logprobs=torch.tensor([far, far, -1.0], dtype=dtype).requires_grad_(),
                old_logprobs=old,
                sampling_logprobs=old,
                reference_logprobs=None,
                entropy=torch.zeros(1),
                advantages=torch.full((3,), advantage, dtype=dtype),
                trajectory_ids=torch.tensor([0, 0, 1]),
            )
            out = of(name)(x)
            assert out.per_token_loss.isfinite().all()
            weighted = out.per_token_loss * torch.tensor([0.0, 1.0, 1.0], dtype=dtype)
            (found,) = torch.autograd.grad(weighted.sum(), x.logprobs)
            assert found.isfinite().all()
            assert advantage or not (found.any() or out.per_token_loss.any())
            assert all(values.isfinite().all() for values in out.token_metrics.values())


@pytest.mark.parametrize("name", ALL)
def test_one_token_and_no_token(name: str):
    one = loss_inputs([1.0], [2.0])
    assert gradient(of(name)(one), one) == pytest.approx([-2])
    none = loss_inputs([], [], ids=[])
    none = replace(none, trajectory_ids=torch.zeros(0, dtype=torch.int64))
    out = of(name)(none)
    assert out.per_token_loss.shape == (0,)
    assert gradient(out, none) == []


@pytest.mark.parametrize("name", [name for name, component in ALL.items() if not component.sequence_level])
def test_losses_of_single_tokens_look_at_nothing_else(name: str):
    """What `train.gradients_in_forward` relies on."""
    x = off_policy(name)
    whole = of(name)(x).per_token_loss
    alone = [
        of(name)(
            replace(
                x, **{k: getattr(x, k)[i : i + 1] for k in ("logprobs", "old_logprobs", "advantages", "trajectory_ids")}
            )
        )
        for i in range(10)
    ]
    assert torch.equal(whole, torch.cat([out.per_token_loss for out in alone]))
