"""Laws 1, 2 and 4 for any loss mask and any history: several stretches, none, all; other ones in every member."""

import copy
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from assigned import assign_advantages
from cohort.algorithms import build_algorithm, build_sequences, drop_zero_gradient
from cohort.config import ALGORITHMS, AdamwConfig, AlgorithmConfig
from cohort.models import Policy
from cohort.models.batch_layout import Layout
from cohort.packing import collate, pack
from cohort.records import ForwardOnlyOutputs, ModelCall, Prompt, ScoredGroup, TrainSequence, Trajectory
from samples import answer, random_calls
from selection import examples, slow
from test_algorithm_laws import shallow_policy
from test_law_two import Scores, compute_in_float64, differences, fast, make_law_model, make_law_policy, naive, streamed
from test_laws import dense_metrics, make_engine, old_logprobs_of
from tiny import VOCAB_SIZE, gradients, make_policy, random_sequences, relative_error

G = 3
# of each sequence of a trajectory: whether it begins with the prompt, and lengths of context and sampled tokens in turn
STRETCHES = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), min_size=1, max_size=3)
HISTORIES = st.lists(st.tuples(st.booleans(), STRETCHES), min_size=1, max_size=3)
MEMBERS = st.one_of(HISTORIES, st.just([]))
GROUPS = st.lists(st.lists(MEMBERS, min_size=G, max_size=G), min_size=1, max_size=2)
NO_KL_IN_REWARD = [("gdpo", "reward"), ("maxrl", "reward")]
LAYOUTS: list[Layout] = ["shared", "packed", "padded"]
TERMS: dict[str, dict[str, Any]] = {
    "sequence correction": {"sampling_correction": "sequence_truncate", "sampling_correction_cap": 1.5},
    "off-policy mask": {"off_policy_mask_threshold": 0.05},
    "top entropy": {"top_entropy_quantile": 0.4},
    "entropy bonus": {"entropy_coef": 0.05},
}


def random_trajectories(groups: list[Any], seed: int) -> list[ScoredGroup]:
    """Groups of trajectories with these histories; one without any has only called another model."""
    rng = np.random.default_rng(seed)

    def tokens(count: int) -> np.ndarray:
        return rng.integers(2, VOCAB_SIZE, count)

    def calls(prompt: np.ndarray, member: Any) -> tuple[ModelCall, ...]:
        (other,) = random_calls(prompt, [(True, [(0, 2)])], rng)
        return random_calls(prompt, member, rng) or (replace(other, trained=False),)

    scored = []
    for p, members in enumerate(groups):
        prompt = Prompt(id=p, epoch=0, content="", token_ids=tokens(rng.integers(1, 9)), columns={})
        trajectories = tuple(
            Trajectory(
                calls=calls(prompt.token_ids, member),
                messages=(),
                text="",
                end="length" if rng.random() < 0.3 else "answer",
            )
            for member in members
        )
        rewards = np.where(rng.random(G) < 1 / 8, np.nan, rng.random(G))
        scored.append(ScoredGroup(prompt=prompt, trajectories=trajectories, rewards=rewards, reward_parts={}))
    return scored


def random_estimates(sequences: list[TrainSequence]) -> ForwardOnlyOutputs:
    """Numbers for every loss token, the same for the same sampled tokens."""

    def drawn(offset: int) -> dict[int, np.ndarray]:
        found, before = {}, defaultdict(int)
        for s in sequences:
            rng = np.random.default_rng((offset, s.trajectory))
            found[s.index] = rng.normal(size=before[s.trajectory] + s.num_loss_tokens)[before[s.trajectory] :]
            before[s.trajectory] += s.num_loss_tokens
        return found

    return ForwardOnlyOutputs(logprobs=drawn(0), entropies=drawn(1), reference_logprobs=drawn(2), values=drawn(3))


def assert_any_split_has_the_dense_gradient(config: AlgorithmConfig, groups: list[Any], budget: int, seed: int) -> None:
    algorithm, policy = build_algorithm(config, max_completion_tokens=16), shallow_policy()
    scored = random_trajectories(groups, seed)
    sequences = build_sequences(scored)
    assume(sequences)
    sequences = assign_advantages(scored, algorithm, random_estimates(sequences))
    expected_metrics, expected = dense_metrics(policy, policy, sequences, algorithm)
    engine, old = make_engine(policy), {s.index: old_logprobs_of(s) for s in sequences}
    shuffled = [sequences[n] for n in np.random.default_rng(seed).permutation(len(sequences))]
    for order in (shuffled, drop_zero_gradient(shuffled, algorithm)):
        for layout in LAYOUTS:
            policy.traits = replace(policy.traits, layout=layout)
            (batch,) = pack(
                order,
                micro_batch_tokens=budget,
                share_prompts=policy.shares_prompts,
                padded=layout == "padded",
                sequence_level=algorithm.sequence_level,
            )
            metrics = engine.forward_backward(batch, algorithm.policy_loss, old_logprobs=old).metrics
            for name, value in expected_metrics.items() if order is shuffled else ():
                assert metrics[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name
            actual = gradients(policy.model)
            for key, gradient in expected.items():
                if gradient.norm() > 1e-12:
                    assert relative_error(actual[key], gradient) < 1e-6, key
                else:
                    assert key not in actual or actual[key].norm() < 1e-9, key  # nothing may be left to compute


@pytest.mark.parametrize("name", ALGORITHMS)
@examples(20, quick=1)
@given(groups=GROUPS, budget=st.integers(1, 120), seed=st.integers(0, 1000))
def test_the_gradient_of_every_algorithm_depends_on_no_split(name: str, groups: list[Any], budget: int, seed: int):
    assert_any_split_has_the_dense_gradient(AlgorithmConfig(name=name), groups, budget, seed)


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
@examples(20, quick=2)
@given(groups=GROUPS, budget=st.integers(1, 120), seed=st.integers(0, 1000))
def test_the_gradient_with_terms_depends_on_no_split(terms: dict[str, Any], groups: list[Any], budget: int, seed: int):
    assert_any_split_has_the_dense_gradient(AlgorithmConfig(**terms), groups, budget, seed)


def test_sequences_of_a_trajectory_in_two_micro_batches_would_have_another_gradient():
    """Negative control of `sequence_level`, for a loss that sums over a trajectory."""
    algorithm, policy = build_algorithm(AlgorithmConfig(name="gspo"), max_completion_tokens=16), shallow_policy()
    scored = random_trajectories([[[(True, [(1, 3)]), (True, [(2, 4)])]] * G], seed=1)
    sequences = assign_advantages(scored, algorithm)
    _, expected = dense_metrics(policy, policy, sequences, algorithm)
    policy.traits = replace(policy.traits, layout="shared")
    engine, old = make_engine(policy), {s.index: old_logprobs_of(s) for s in sequences}
    errors = []
    for whole in (True, False):
        (batch,) = pack(sequences, micro_batch_tokens=8, share_prompts=True, padded=False, sequence_level=whole)
        engine.forward_backward(batch, algorithm.policy_loss, old_logprobs=old)
        actual = gradients(policy.model)
        errors.append(max(relative_error(actual[key], expected[key]) for key in expected))
    assert errors[0] < 1e-6 and errors[1] > 1e-3


@pytest.mark.parametrize(
    ("name", "kl_in"),
    # these two take no penalty in the reward
    [(name, kl_in) for name in ALGORITHMS for kl_in in ("loss", "reward") if (name, kl_in) not in NO_KL_IN_REWARD],
)
@examples(20, quick=2)
@given(groups=st.lists(st.lists(HISTORIES, min_size=G, max_size=G), min_size=1, max_size=2), seed=st.integers(0, 1000))
def test_tokens_that_are_not_trained_take_part_in_nothing(name: str, kl_in: str, groups: list[Any], seed: int):
    """Advantages, weights and returns are those of single turns with the same sampled tokens, to the last bit."""
    config = AlgorithmConfig(name=name, beta=0.1, kl_in=kl_in, mask_truncated_completions=bool(seed % 2))
    algorithm = build_algorithm(config, max_completion_tokens=16)
    scored = random_trajectories(groups, seed)
    one_turn = [
        replace(
            group,
            trajectories=tuple(
                replace(answer(group.prompt, t.sampled_token_ids, logprobs=t.sampling_logprobs), end=t.end)
                for t in group.trajectories
            ),
        )
        for group in scored
    ]
    found = []
    for each in (scored, one_turn):
        fields = defaultdict(list)
        for s in assign_advantages(each, algorithm, random_estimates(build_sequences(each))):
            for field in ("sampling_logprobs", "advantages", "loss_weights", "returns"):
                fields[s.trajectory, field] += getattr(s, field).tolist()
        found.append(fields)
    assert found[0] == found[1]


def test_a_trajectory_without_trained_tokens_is_compared_and_teaches_nothing():
    """Its reward counts in the group's mean; it is in no denominator of the loss."""
    scored = random_trajectories([[[], [(True, [(0, 2)])], [(True, [(0, 4)])]]], seed=0)
    groups = [replace(scored[0], rewards=np.array([3.0, 0.0, 0.0]))]
    algorithm = build_algorithm(AlgorithmConfig(name="dr_grpo", loss_weight="sequence_mean"), max_completion_tokens=16)
    first, second = assign_advantages(groups, algorithm)
    assert (first.trajectory, second.trajectory) == (1, 2)
    assert first.advantages.tolist() == [-1, -1]
    assert (first.loss_weights.sum(), second.loss_weights.sum()) == (0.5, 0.5)


@examples(20, quick=3)
@given(
    masks=st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=2, max_size=6),
    num_shared=st.integers(1, 6),
    shares=st.booleans(),
    seed=st.integers(0, 9),
)
def test_logprobs_and_gradients_of_any_mask_are_the_naive_ones(masks, num_shared: int, shares: bool, seed: int):
    """Law 2, in every layout and in a stream, also for sequences without any trained token."""
    assume(any(map(any, masks)))
    sequences = []
    for s, mask in zip(random_sequences([(num_shared, list(map(len, masks)))], seed=seed), masks, strict=True):
        loss_mask = np.array([False] * num_shared + mask)
        trained = {name: getattr(s, name)[mask] for name in ("sampling_logprobs", "advantages", "loss_weights")}
        sequences.append(replace(s, loss_mask=loss_mask, shared_prefix_tokens=num_shared if shares else 0, **trained))
    with pytest.MonkeyPatch.context() as monkeypatch:
        model = make_law_model("qwen3")
        compute_in_float64(model, monkeypatch)
        expected, policy = naive(model, sequences), make_law_policy(model)
        for layout in LAYOUTS:
            assert_same(fast(policy, sequences, layout), expected)
            row = collate(sequences, share_prompts=policy.shares_prompts)
            assert len(row.labels) == len(row.logit_positions) == sum(map(sum, masks))  # the head computes no more
        if shares:
            assert_same(streamed(policy, sequences), expected)


def assert_same(actual: Scores, expected: Scores) -> None:
    value, gradient = differences(actual, expected)
    assert value < 1e-10 and gradient < 1e-10


@pytest.mark.parametrize(
    "in_forward", [False, pytest.param(True, marks=slow("the gradient in forward has laws of its own"))]
)
@examples(10, quick=2)
@given(groups=st.tuples(GROUPS, GROUPS), budget=st.integers(1, 120), seed=st.integers(0, 1000))
def test_resuming_continues_the_uninterrupted_run(in_forward: bool, groups, budget: int, seed: int):
    """Law 4: two updates, and the same with everything loaded from a state in between."""
    algorithm = build_algorithm(AlgorithmConfig(), max_completion_tokens=16)
    steps = [assign_advantages(random_trajectories(each, seed + n), algorithm) for n, each in enumerate(groups)]

    def update(engine: Any, sequences: list[TrainSequence]) -> None:
        (batch,) = pack(sequences, micro_batch_tokens=budget, share_prompts=True, padded=False)
        engine.forward_backward(batch, algorithm.policy_loss)
        engine.optim_step()

    def new_engine(policy: Policy) -> Any:
        return make_engine(policy, optim=AdamwConfig(), learning_rate=0.01, gradients_in_forward=in_forward)

    engine = new_engine(make_policy(num_hidden_layers=1))
    update(engine, steps[0])
    weights, state = copy.deepcopy(engine.policy.model.state_dict()), copy.deepcopy(engine.state_dict())
    update(engine, steps[1])
    resumed = new_engine(make_policy(num_hidden_layers=1, seed=3))
    resumed.policy.model.load_state_dict(weights)
    resumed.load_state_dict(state)
    update(resumed, steps[1])
    after = resumed.policy.model.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in engine.policy.model.state_dict().items())
