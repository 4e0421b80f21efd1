"""Advantages against numbers worked out by hand from the papers, and the edges where elsewhere NaN appears."""

import inspect
import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from assigned import assign_advantages
from cohort.algorithms import AdvantageInputs, advantages, build_algorithm
from cohort.algorithms.advantages import (
    batch_mean_std,
    group_mean,
    group_mean_batch_std,
    group_mean_std,
    group_mean_whitened,
    leave_one_out,
    max_at_k,
    max_likelihood,
    per_reward_mean_std,
)
from cohort.config import COMPONENTS, AlgorithmConfig
from cohort.errors import TrainingError, UserError
from cohort.records import ForwardOnlyOutputs
from samples import NAN, advantage_inputs, scored
from selection import examples

ALL = COMPONENTS["advantage"]


def of(name: str, x: AdvantageInputs, **keys: float) -> torch.Tensor:
    """An advantage with the catalogue's defaults, as [P, G] where all tokens of a completion have the same."""
    function: Callable[..., torch.Tensor] = getattr(advantages, name)
    if ALL[name].needs_critic:  # one that expects nothing
        x = replace(x, values=torch.zeros_like(x.token_rewards))
    return function(
        x, **{**ALL[name].defaults, "at_k": 2, **keys} if name == "max_at_k" else {**ALL[name].defaults, **keys}
    )


def expecting_nothing(lengths: list[int]) -> ForwardOnlyOutputs:
    """Of a critic that expects a return of 0 everywhere."""
    return ForwardOnlyOutputs(values={n: np.zeros(length) for n, length in enumerate(lengths)})


def close(actual: torch.Tensor, expected: list) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=actual.dtype), equal_nan=True, rtol=1e-6, atol=1e-6)


def rewards(*groups: list[float]) -> torch.Tensor:
    return torch.tensor(groups, dtype=torch.float64)


@pytest.mark.parametrize("name", ALL)
def test_the_catalogue_names_the_keys_that_a_function_takes(name: str):
    assert set(inspect.signature(getattr(advantages, name)).parameters) == {"x", *ALL[name].defaults}


@pytest.mark.parametrize("name", [name for name, advantage in ALL.items() if not advantage.uses_token_rewards])
def test_the_rewards_of_tokens_are_made_only_for_those_that_read_them(name: str):
    x = advantage_inputs(rewards([0.0, NAN, 2.0], [1.0, 3.0, 5.0]), lengths=[[1, 3, 2], [2, 1, 1]])
    expected = of(name, x)
    torch.testing.assert_close(of(name, replace(x, token_rewards=None)), expected, equal_nan=True, rtol=0, atol=0)
    config = AlgorithmConfig.model_validate({"advantage": name, **({"at_k": 2} if name == "max_at_k" else {})})
    assert not build_algorithm(config, max_completion_tokens=9).reads_token_rewards


def test_group_mean_std():
    # mean 1, squares 1 + 1 + 1 + 1 over G - 1 = 3: std sqrt(4/3)
    close(
        group_mean_std(advantage_inputs(rewards([0.0, 2.0, 0.0, 2.0])), std_epsilon=0.0),
        [[-math.sqrt(3 / 4), math.sqrt(3 / 4)] * 2],
    )
    # the epsilon is added to the standard deviation: 1 / (sqrt(2) + 0.1)
    close(group_mean_std(advantage_inputs(rewards([0.0, 2.0])), std_epsilon=0.1), [[-0.660410, 0.660410]])


def test_group_mean():
    close(
        group_mean(advantage_inputs(rewards([0.0, 3.0, 0.0], [1.0, 1.0, 4.0]))), [[-1.0, 2.0, -1.0], [-1.0, -1.0, 2.0]]
    )


def test_leave_one_out():
    # 4 - (1 + 1) / 2 = 3, and 1 - (4 + 1) / 2 = -1.5
    close(leave_one_out(advantage_inputs(rewards([4.0, 1.0, 1.0]))), [[3.0, -1.5, -1.5]])
    close(leave_one_out(advantage_inputs(rewards([4.0, NAN, 1.0]))), [[3.0, NAN, -3.0]])


def test_group_mean_batch_std():
    # all rewards 0 0 0 4: mean 1, squares 1 + 1 + 1 + 9 over 3: std 2
    close(
        group_mean_batch_std(advantage_inputs(rewards([0.0, 0.0], [0.0, 4.0])), std_epsilon=0.0),
        [[0.0, 0.0], [-1.0, 1.0]],
    )


def test_batch_mean_std_of_single_completions():
    # of prompts with one completion: mean 1, std sqrt(2), every token its completion's
    x = advantage_inputs(rewards([0.0], [2.0]), lengths=[[2], [2]])
    close(batch_mean_std(x, std_epsilon=0.0), [[[-0.8660254] * 2], [[0.8660254] * 2]])  # 1 / sqrt(4 / 3)


def test_batch_mean_std_is_over_tokens():
    # tokens 0 0 0 4: mean 1, std 2
    x = advantage_inputs(rewards([0.0], [4.0]), lengths=[[3], [1]])
    close(batch_mean_std(x, std_epsilon=0.0), [[[-0.5, -0.5, -0.5]], [[1.5, 0.0, 0.0]]])


def test_batch_mean_std_sums_the_rewards_still_to_come():
    x = advantage_inputs(rewards([3.0], [1.0]), lengths=[[2], [1]])
    penalised = x.token_rewards - torch.tensor([[[1.0, 0.0]], [[0.0, 0.0]]])  # 1 off at the first token
    x = AdvantageInputs(
        rewards=penalised.sum(-1),
        reward_parts=x.reward_parts,
        reward_weights=x.reward_weights,
        token_rewards=penalised,
        lengths=x.lengths,
    )
    # returns 2 3 and 1: mean 2, std 1
    close(batch_mean_std(x, std_epsilon=0.0), [[[0.0, 1.0]], [[-1.0, 0.0]]])
    # less the group's own mean (2 and 1): 0 1 and 0, whose mean is 1/3 and whose std is sqrt(1/3)
    root = math.sqrt(3)
    close(group_mean_whitened(x, std_epsilon=0.0), [[[-root / 3, 2 * root / 3]], [[-root / 3, 0.0]]])


def test_group_mean_whitened():
    # differences -1 1 and -2 2, mean 0, squares 10 over 3
    x = advantage_inputs(rewards([0.0, 2.0], [0.0, 4.0]))
    scale = math.sqrt(3 / 10)
    close(
        group_mean_whitened(x, std_epsilon=0.0).squeeze(-1),
        [[-scale, scale], [-2 * scale, 2 * scale]],
    )


def two_rewards(first: torch.Tensor, second: torch.Tensor, weights: list[float]) -> AdvantageInputs:
    parts_PGK = torch.stack([first, second], dim=-1)
    weights_K = torch.tensor(weights, dtype=torch.float64)
    x = advantage_inputs((parts_PGK * weights_K).nansum(-1).where(~parts_PGK.isnan().all(-1), NAN))
    return AdvantageInputs(
        rewards=x.rewards,
        reward_parts=parts_PGK,
        reward_weights=weights_K,
        token_rewards=x.token_rewards,
        lengths=x.lengths,
    )


def test_rewards_are_whitened_one_by_one_and_then_their_sum():
    # each is -h h with h = 1/sqrt(2): 1 * (-h) + 3 * (-h) and so on; 100 times the scale changes nothing
    for scale in (1.0, 100.0):
        x = two_rewards(rewards([0.0, scale], [0.0, scale]), rewards([0.0, 1.0], [1.0, 0.0]), [1.0, 3.0])
        # sums h * (-4, 4), h * (2, -2): mean 0, squares 0.5 * 40 over 3
        unit = math.sqrt(1 / 2) / math.sqrt(20 / 3)
        close(per_reward_mean_std(x, std_epsilon=0.0), [[-4 * unit, 4 * unit], [2 * unit, -2 * unit]])


def test_a_reward_that_did_not_score_adds_nothing():
    x = two_rewards(rewards([0.0, 1.0, NAN]), rewards([NAN, NAN, NAN]), [1.0, 1.0])
    close(per_reward_mean_std(x, std_epsilon=0.0), [[-math.sqrt(1 / 2), math.sqrt(1 / 2), NAN]])
    shaped = replace(x, reward_parts=x.reward_parts.nan_to_num(5.0))  # by one that only shapes: not in the statistics
    close(per_reward_mean_std(shaped, std_epsilon=0.0), [[-math.sqrt(1 / 2), math.sqrt(1 / 2), NAN]])


def test_rewards_that_cancel_out_differ_under_gdpo_alone():
    x = two_rewards(rewards([0.0, 1.0, 0.0]), rewards([1.0, 0.0, 1.0]), [1.0, 1.0])
    assert not group_mean_std(x, std_epsilon=0.0).any()
    x = two_rewards(rewards([0.0, 1.0, 2.0]), rewards([2.0, 1.5, 0.0]), [1.0, 1.0])
    assert per_reward_mean_std(x, std_epsilon=0.0).all()


def test_max_likelihood():
    # one of four succeeds: (1 - 1/4) / (1/4) = 3
    close(max_likelihood(advantage_inputs(rewards([1.0, 0.0, 0.0, 0.0]))), [[3.0, -1.0, -1.0, -1.0]])
    close(max_likelihood(advantage_inputs(rewards([0.0, 0.0], [1.0, 1.0]))), [[0.0, 0.0], [0.0, 0.0]])
    close(max_likelihood(advantage_inputs(rewards([1.0, NAN, 0.0]))), [[1.0, NAN, -1.0]])
    with pytest.raises(UserError, match=r"max_likelihood needs rewards of at least 0, but one is -0\.5; use rewards"):
        max_likelihood(advantage_inputs(rewards([1.0, -0.5])))


def test_max_at_k_of_rewards_0_and_1():
    # n = 4, k = 2, one success: of the 6 pairs 3 have it, and it alone makes them succeed: 4 * 3/6
    close(max_at_k(advantage_inputs(rewards([0.0, 1.0, 0.0, 0.0])), at_k=2), [[0.0, 2.0, 0.0, 0.0]])
    # two successes: each is alone in 2 of the 6 pairs
    close(max_at_k(advantage_inputs(rewards([0.0, 1.0, 1.0, 0.0])), at_k=2), [[0.0, 4 / 3, 4 / 3, 0.0]])


@examples(40)
@given(
    values=st.lists(st.one_of(st.integers(-3, 3).map(float), st.just(NAN)), min_size=2, max_size=6),
    at_k=st.integers(2, 6),
)
def test_max_at_k_is_the_mean_over_all_sets(values: list[float], at_k: int):
    present = [i for i, value in enumerate(values) if not math.isnan(value)]
    expected = [0.0 if i in present else NAN for i in range(len(values))]
    sets = [*itertools.combinations(present, at_k)]
    for i, chosen in itertools.product(present, sets):
        if i in chosen:
            without = max(values[j] for j in chosen if j != i)
            expected[i] += len(present) * (max(values[j] for j in chosen) - without) / len(sets)
    close(max_at_k(advantage_inputs(rewards(values)), at_k=at_k), [expected])


def test_max_at_k_of_groups_whose_sets_are_more_than_a_float_can_count():
    # one of 1200 succeeds: it adds 1 to each of the sets with it, which are half of all
    actual = max_at_k(advantage_inputs(rewards([0.0] * 1199 + [1.0], [0.0] * 1199 + [NAN])), at_k=600)
    assert actual[0, -1].item() == pytest.approx(1200 * 600 / 1200)
    assert not actual[0, :-1].any() and not actual[1, :-1].any() and actual[1, -1].isnan()


def test_max_at_k_is_an_unbiased_gradient_of_the_best_of_k():
    """Over all outcomes of a policy with three answers: the estimate's expectation is the derivative of E[max]."""
    worth = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64)
    logits = torch.tensor([0.2, -0.1, 0.4], dtype=torch.float64, requires_grad=True)
    n, k = 3, 2

    def log_p() -> torch.Tensor:
        return logits.log_softmax(0)

    best = sum(log_p()[list(c)].sum().exp() * worth[list(c)].max() for c in itertools.product(range(3), repeat=k))
    (expected,) = torch.autograd.grad(best, logits)
    estimate = torch.zeros(3, dtype=torch.float64)
    for drawn in itertools.product(range(3), repeat=n):
        advantage = max_at_k(advantage_inputs(worth[list(drawn)].unsqueeze(0)), at_k=k)[0] / n
        (gradient,) = torch.autograd.grad((advantage * log_p()[list(drawn)]).sum(), logits)
        estimate += log_p()[list(drawn)].sum().exp().detach() * gradient
    torch.testing.assert_close(estimate, expected)


@pytest.mark.parametrize("name", ALL)
def test_equal_rewards_have_advantage_zero(name: str):
    for reward in (0.1, 0.7, 1.0, 1e6 / 3):  # the mean of three times 0.7 is not 0.7 to the last bit
        for dtype in (torch.float32, torch.float64):
            x = advantage_inputs(torch.full((50, 3), reward, dtype=dtype), lengths=[[1, 7, 3]] * 50)
            for epsilon in (0.0, 1e-4):
                keys = {"std_epsilon": epsilon} if "std_epsilon" in ALL[name].defaults else {}
                assert not of(name, x, **keys).any()


@pytest.mark.parametrize("name", ALL)
def test_unscored_completions_take_no_part(name: str):
    """As if they were not there; alone, or with nobody scored, there is nothing to learn."""
    x = advantage_inputs(rewards([0.0, NAN, 2.0], [1.0, NAN, 5.0]), lengths=[[1, 3, 2], [2, 1, 1]])
    without = advantage_inputs(rewards([0.0, 2.0], [1.0, 5.0]), lengths=[[1, 2], [2, 1]])
    actual, expected = of(name, x), of(name, without)
    torch.testing.assert_close(
        actual[:, ::2, ..., : expected.shape[2]] if actual.ndim == 3 else actual[:, ::2], expected
    )
    alone = of(name, advantage_inputs(rewards([5.0, NAN], [NAN, NAN])))
    assert not alone.nan_to_num(0.0).any()
    assert not alone[0, 0].any() and not alone[0, 0].isnan().any()


@pytest.mark.parametrize("name", ALL)
def test_a_step_in_which_nobody_was_scored_teaches_nothing(name: str):
    config = AlgorithmConfig.model_validate({"advantage": name, **({"at_k": 2} if name == "max_at_k" else {})})
    algorithm = build_algorithm(config, max_completion_tokens=9)
    for sequence in assign_advantages([scored([NAN, NAN], [2, 3])], algorithm, expecting_nothing([2, 3])):
        assert not sequence.advantages.any() and not sequence.loss_weights.any()


@pytest.mark.parametrize("name", ALL)
def test_infinite_rewards_are_refused(name: str):
    config = AlgorithmConfig.model_validate({"advantage": name, **({"at_k": 2} if name == "max_at_k" else {})})
    algorithm = build_algorithm(config, max_completion_tokens=9)
    with pytest.raises(TrainingError, match="advantage of a scored completion is NaN or infinite"):
        assign_advantages([scored([0.0, math.inf, 1.0], [2, 3, 1])], algorithm, expecting_nothing([2, 3, 1]))


def test_rewards_reach_gdpo_by_name_and_weight():
    algorithm = build_algorithm(AlgorithmConfig(name="gdpo", std_epsilon=0.0), max_completion_tokens=9)
    group = scored([0.0, 1.0, 3.0], [2, 3, 1], parts={"right": [0.0, 0.0, 1.0], "short": [0.0, 10.0, 20.0]})
    for weights, expected in (({"right": 1.0, "short": 0.0}, [-1, -1, 2]), ({"right": 0.0, "short": 5.0}, [-1, 0, 1])):
        found = [s.advantages[0] for s in assign_advantages([group], algorithm, reward_weights=weights)]
        scale = math.sqrt(sum(e * e for e in expected) / 2)
        assert found == pytest.approx([e / scale for e in expected])


def test_a_completion_without_tokens_is_refused():
    algorithm = build_algorithm(AlgorithmConfig(), max_completion_tokens=9)
    for lengths in ([2, 0], [0, 0]):
        with pytest.raises(TrainingError, match="a completion has no tokens"):
            assign_advantages([scored([0.0, 1.0], lengths)], algorithm)
