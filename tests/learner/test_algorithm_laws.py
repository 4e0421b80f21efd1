"""Laws 1 and 2 for every algorithm, policy loss, loss weight and mask; and steps that have nothing to teach."""

import copy
import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from assigned import assign_advantages
from cohort.algorithms import Algorithm, build_algorithm, build_sequences, drop_zero_gradient
from cohort.config import ALGORITHMS, COMPONENTS, AlgorithmConfig
from cohort.models import Policy
from cohort.models.batch_layout import Layout
from cohort.records import ForwardOnlyOutputs, ScoredGroup, TrainSequence
from selection import mostly_slow
from test_laws import dense_gradient, make_engine, packed_gradient, random_groups
from tiny import make_policy, pack_for, relative_error

WEIGHTS = {"brief": 0.5, "right": 2.0}
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "truncated": {"mask_truncated_completions": True},
    "off-policy": {"off_policy_mask_threshold": 0.05},
    "top-entropy": {"top_entropy_quantile": 0.4},
}
GRID = [
    (policy_loss, loss_weight, mask)
    for policy_loss, loss_weight, mask in itertools.product(COMPONENTS["policy_loss"], COMPONENTS["loss_weight"], MASKS)
    # one ratio for a completion cannot tell its tokens apart: refused
    if not (mask == "top-entropy" and COMPONENTS["policy_loss"][policy_loss].needs_uniform_advantage)
]
# Each policy loss with each loss weight, and each of both with each mask
OF_PAIRS = [list(masks) for _, masks in itertools.groupby(GRID, key=lambda key: key[:2])]
PAIRS = [keys[(n + n // len(COMPONENTS["loss_weight"])) % len(keys)] for n, keys in enumerate(OF_PAIRS)]
LENGTHS = [[3, 14, 9, 1], [1, 6, 2, 5]]
SEED = 10  # of a step in which every mask takes something away, and no loss all of it
LAYOUTS: list[Layout] = ["shared", "packed", "padded"]


def sequences_of(algorithm: Algorithm, seed: int) -> list[TrainSequence]:
    """A step of two groups with two rewards each, one completion not scored, some truncated."""
    rng = np.random.default_rng(seed)
    groups = []
    for group in random_groups(LENGTHS, seed):
        parts = {name: rng.random(4).round(2) for name in WEIGHTS}
        rewards = sum(weight * parts[name] for name, weight in WEIGHTS.items())
        groups.append(replace(group, rewards=rewards, reward_parts=parts))
    groups[1] = replace(
        groups[1],
        rewards=np.where(np.arange(4) == 2, np.nan, groups[1].rewards),
        reward_parts={k: np.where(np.arange(4) == 2, np.nan, v) for k, v in groups[1].reward_parts.items()},
    )
    return assign_advantages(groups, algorithm, expected_returns(groups), reward_weights=WEIGHTS)


def expected_returns(groups: Sequence[ScoredGroup]) -> ForwardOnlyOutputs:
    """What a critic might say of each token, and how unsure the policy might be of it."""
    sequences = build_sequences(groups)
    return ForwardOnlyOutputs(
        values={s.index: np.random.default_rng(s.index).normal(size=s.num_loss_tokens) for s in sequences},
        entropies={s.index: np.random.default_rng(s.index).random(s.num_loss_tokens) for s in sequences},
    )


@cache
def shallow_policy() -> Policy:
    """One layer, whose weights nobody changes."""
    return make_policy(dtype=torch.float64, num_hidden_layers=1)


def assert_any_split_has_the_dense_gradient(config: AlgorithmConfig, seed: int, layout: Layout) -> None:
    policy = shallow_policy()
    algorithm = build_algorithm(config, max_completion_tokens=16)
    sequences = sequences_of(algorithm, seed)
    expected_loss, expected = dense_gradient(policy, policy, sequences, algorithm)
    assert max(gradient.norm() for gradient in expected.values()) > 1e-6
    engine = make_engine(policy)
    shuffled = [sequences[n] for n in np.random.default_rng(seed).permutation(len(sequences))]
    splits = [(sequences, 10_000, "shared"), (drop_zero_gradient(shuffled, algorithm), 25, layout)]
    for order, budget, computed in splits:
        loss, actual = packed_gradient(engine, order, algorithm, budget, computed)
        assert loss == pytest.approx(expected_loss, rel=1e-6, abs=1e-9)
        for key, gradient in expected.items():
            assert relative_error(actual[key], gradient) < 1e-6, key


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_gradient_of_every_algorithm_depends_on_no_split(name: str):
    assert_any_split_has_the_dense_gradient(AlgorithmConfig(name=name), len(name), LAYOUTS[len(name) % 3])


@pytest.mark.parametrize(("policy_loss", "loss_weight", "mask"), mostly_slow(GRID, *PAIRS, reason="each two of them"))
def test_the_gradient_of_every_combination_depends_on_no_split(policy_loss: str, loss_weight: str, mask: str):
    config = AlgorithmConfig(policy_loss=policy_loss, loss_weight=loss_weight, **MASKS[mask])
    layout = LAYOUTS[GRID.index((policy_loss, loss_weight, mask)) % 3]
    assert_any_split_has_the_dense_gradient(config, seed=SEED, layout=layout)


def test_each_two_of_them_are_among_the_quick_ones():
    for two in itertools.combinations(range(3), 2):
        assert {tuple(key[n] for n in two) for key in PAIRS} == {tuple(key[n] for n in two) for key in GRID}


@pytest.mark.parametrize("mask", ["truncated", "off-policy", "top-entropy"])
def test_every_mask_takes_something_away(mask: str):
    """Negative control: else the grid would compare the same gradient again."""
    policy = shallow_policy()
    gradients = []
    for keys in ({}, MASKS[mask]):
        algorithm = build_algorithm(AlgorithmConfig(**keys), max_completion_tokens=16)
        gradients.append(dense_gradient(policy, policy, sequences_of(algorithm, SEED), algorithm)[1])
    assert max(relative_error(gradients[1][key], gradient) for key, gradient in gradients[0].items()) > 1e-3


def test_a_completion_in_two_micro_batches_would_have_another_gradient():
    """Negative control: what GSPO computes if a completion is torn in two."""
    policy = shallow_policy()
    algorithm = build_algorithm(AlgorithmConfig(name="gspo", clip_low=0.9, clip_high=9.0), max_completion_tokens=16)
    sequences = sequences_of(algorithm, seed=0)
    _, expected = dense_gradient(policy, policy, sequences, algorithm)

    def torn(x):
        return algorithm.policy_loss(replace(x, trajectory_ids=torch.arange(len(x.trajectory_ids)) // 2))

    _, actual = packed_gradient(make_engine(policy), sequences, replace(algorithm, loss_with=lambda _: torn), 10_000)
    assert max(relative_error(actual[key], expected[key]) for key in expected) > 1e-3


@pytest.mark.parametrize("name", ["grpo", "gspo", "vespo", "gmpo", "reinforce_pp"])
def test_float32_gradients_agree_to_1e_5(name: str):
    policy = make_policy()
    algorithm = build_algorithm(AlgorithmConfig(name=name), max_completion_tokens=16)
    sequences = sequences_of(algorithm, seed=3)
    engine = make_engine(policy)
    _, whole = packed_gradient(engine, sequences, algorithm, budget=10_000)
    for budget in (1, 30):
        _, split = packed_gradient(engine, sequences, algorithm, budget)
        assert max(relative_error(split[key], whole[key]) for key in whole) < 1e-5


@pytest.mark.parametrize("reason", ["equal rewards", "all truncated and masked", "nobody scored"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_step_that_teaches_nothing_changes_no_bit(name: str, reason: str):
    policy = make_policy(num_hidden_layers=1)
    algorithm = build_algorithm(
        AlgorithmConfig(name=name, mask_truncated_completions=reason.startswith("all")), max_completion_tokens=16
    )
    groups = random_groups(LENGTHS, seed=0)
    outputs = expected_returns(groups)
    if reason == "equal rewards":  # and a critic that foresees them
        groups = [replace(group, rewards=np.full(4, 0.7)) for group in groups]
        outputs = ForwardOnlyOutputs(values={n: np.full_like(values, 0.7) for n, values in outputs.values.items()})
    elif reason == "nobody scored":
        groups = [replace(group, rewards=np.full(4, np.nan)) for group in groups]
    else:
        groups = [
            replace(
                group,
                rewards=np.arange(4.0),
                trajectories=tuple(replace(t, end="length") for t in group.trajectories),
            )
            for group in groups
        ]
    sequences = assign_advantages(groups, algorithm, outputs)
    assert drop_zero_gradient(sequences, algorithm) == []
    before = copy.deepcopy(policy.model.state_dict())
    engine = make_engine(policy, learning_rate=0.1)
    for computed in (sequences, []):
        (batch,) = pack_for(policy, computed, 50)
        engine.forward_backward(batch, algorithm.policy_loss)
        assert engine.optim_step().grad_norm == 0
    assert all(torch.equal(value, before[key]) for key, value in policy.model.state_dict().items())
