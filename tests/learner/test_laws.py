"""Law 1: the gradient of a step depends on no shape. Law 6: what is frozen stays so, and master weights keep dtype."""

import copy
import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from assigned import assign_advantages
from cohort.algorithms import Algorithm, build_algorithm, drop_zero_gradient
from cohort.config import AdamwConfig, AlgorithmConfig, OptimConfig, TrainConfig
from cohort.learner import TokenBudget, TrainEngine
from cohort.models import Policy, linear_loss
from cohort.models.batch_layout import Layout
from cohort.packing.batch import LossInputs
from cohort.ranks.collectives import SINGLE_PROCESS, Ranks
from cohort.records import Prompt, ScoredGroup, TrainSequence, Trajectory
from samples import answer, random_calls
from selection import examples, mostly_slow
from tiny import VOCAB_SIZE, gradients, make_policy, naive_logprobs, pack_for, relative_error

ALGORITHMS: dict[str, AlgorithmConfig] = {
    "grpo": AlgorithmConfig(),
    "grpo_kl": AlgorithmConfig(beta=0.1),
    "grpo_masked": AlgorithmConfig(mask_truncated_completions=True),
    "dr_grpo": AlgorithmConfig(name="dr_grpo"),
    "dr_grpo_kl_masked": AlgorithmConfig(name="dr_grpo", beta=0.1, mask_truncated_completions=True),
    "dapo": AlgorithmConfig(name="dapo"),
    "dapo_kl_masked": AlgorithmConfig(name="dapo", beta=0.1, mask_truncated_completions=True),
    "grpo_kl_corrected": AlgorithmConfig(beta=0.1, sampling_correction="token_mask", sampling_correction_cap=1.2),
    "grpo_kl_unbiased": AlgorithmConfig(beta=0.1, kl_estimator="k1", kl_unbiased=True),
    "dapo_kl_entropy": AlgorithmConfig(name="dapo", beta=0.1, kl_estimator="k2", entropy_coef=0.05),
    "grpo_entropy_masked": AlgorithmConfig(entropy_coef=0.05, mask_truncated_completions=True),
    "dr_grpo_off_policy_mask": AlgorithmConfig(name="dr_grpo", off_policy_mask_threshold=0.05),
    "grpo_all_terms": AlgorithmConfig(
        beta=0.1,
        kl_unbiased=True,
        entropy_coef=0.05,
        off_policy_mask_threshold=0.05,
        sampling_correction="token_truncate",
        sampling_correction_cap=1.2,
    ),
    "dapo_corrected": AlgorithmConfig(
        name="dapo", sampling_correction="sequence_truncate", sampling_correction_cap=1.5
    ),
}
G = 3


def random_groups(lengths_PG: list[list[Any]], seed: int, prompt_tokens: tuple[int, int] = (1, 9)) -> list[ScoredGroup]:
    """Groups with random prompts, completions, rewards (one in eight not scored) and finish reasons.

    Lengths are those of completions; a `History` in place of a length is a trajectory of several turns.
    """
    rng = np.random.default_rng(seed)
    groups = []
    for p, lengths in enumerate(lengths_PG):
        single = [n if isinstance(n, int) else 0 for n in lengths]
        sampled = [(rng.integers(2, VOCAB_SIZE, n), -4 * rng.random(n), rng.random() < 0.3) for n in single]
        prompt = Prompt(
            id=p, epoch=0, content="", token_ids=rng.integers(2, VOCAB_SIZE, rng.integers(*prompt_tokens)), columns={}
        )
        trajectories = tuple(
            answer(prompt, ids, logprobs=logprobs, finish="length" if is_cut else "stop")
            if isinstance(n, int)
            else Trajectory(
                calls=random_calls(prompt.token_ids, n, rng), messages=(), text="", end="length" if is_cut else "answer"
            )
            for n, (ids, logprobs, is_cut) in zip(lengths, sampled, strict=True)
        )
        rewards = np.where(rng.random(len(lengths)) < 1 / 8, np.nan, rng.normal(size=len(lengths)))
        groups.append(ScoredGroup(prompt=prompt, trajectories=trajectories, rewards=rewards, reward_parts={}))
    return groups


def make_engine(
    policy: Policy,
    reference: Policy | None = None,
    *,
    optim: OptimConfig | None = None,
    reference_changes: bool = False,
    temperature: float = 0.9,
    ranks: Ranks = SINGLE_PROCESS,
    **train,
) -> TrainEngine:
    config = TrainConfig(**train)
    return TrainEngine(
        policy,
        config,
        optim,
        budget=TokenBudget(config.micro_batch_tokens),
        learning_rate=lambda _: config.learning_rate,
        temperature=temperature,
        reference=reference,
        reference_changes=reference_changes,
        ranks=ranks,
    )


def old_logprobs_of(sequence: TrainSequence) -> torch.Tensor:
    """Old logprobs far enough from the current ones that some ratios are clipped."""
    rng = np.random.default_rng(int(sequence.token_ids.sum()))
    sampled = sequence.sampling_logprobs
    return torch.from_numpy(sampled + 0.3 * rng.normal(size=len(sampled)))


def dense_gradient(policy: Policy, reference: Policy, sequences: list[TrainSequence], algorithm: Algorithm):
    """The reference: one unpadded forward per sequence, one loss per trajectory, one backward of the whole sum."""
    metrics, gradient = dense_metrics(policy, reference, sequences, algorithm)
    return metrics["loss"], gradient


def dense_metrics(
    policy: Policy, reference: Policy, sequences: list[TrainSequence], algorithm: Algorithm
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Metrics and gradient of `dense_gradient`."""
    total, entropies, moved = torch.zeros((), dtype=torch.float64), [], []
    for number, members in by_trajectory(sequences).items():
        scores = [naive_logprobs(policy.model, s, temperature=0.9) for s in members]
        logprobs, entropy = (torch.cat(parts) for parts in zip(*scores, strict=True))
        old = torch.cat([old_logprobs_of(s) for s in members])
        with torch.no_grad():
            reference_logprobs = [naive_logprobs(reference.model, s, temperature=0.9)[0] for s in members]
        out = algorithm.policy_loss(
            LossInputs(
                logprobs=logprobs,
                old_logprobs=old,
                sampling_logprobs=joined(members, "sampling_logprobs"),
                reference_logprobs=torch.cat(reference_logprobs),
                entropy=entropy,
                advantages=joined(members, "advantages"),
                trajectory_ids=torch.full(logprobs.shape, number),
            )
        )
        total = total + (joined(members, "loss_weights") * out.per_token_loss).sum()
        entropies.append(entropy.detach())
        moved.append((old - joined(members, "sampling_logprobs")).abs())
    total.backward()
    metrics = {
        "loss": total.item(),
        "entropy": torch.cat(entropies).mean().item(),
        "sampling/sampling_logp_difference/mean": torch.cat(moved).mean().item(),
    }
    return metrics, gradients(policy.model)


def by_trajectory(sequences: list[TrainSequence]) -> dict[int, list[TrainSequence]]:
    """The sequences of each trajectory."""
    found: dict[int, list[TrainSequence]] = {}
    for s in sequences:
        found.setdefault(s.trajectory, []).append(s)
    return found


def joined(members: list[TrainSequence], field: str) -> torch.Tensor:
    """A field of a trajectory's loss tokens."""
    return torch.from_numpy(np.concatenate([getattr(s, field) for s in members]))


def packed_gradient(
    engine: TrainEngine, sequences: list[TrainSequence], algorithm: Algorithm, budget: int, layout: Layout = "shared"
):
    engine.policy.traits = replace(engine.policy.traits, layout=layout)
    (batch,) = pack_for(engine.policy, sequences, budget)
    old = {s.index: old_logprobs_of(s) for s in sequences}
    result = engine.forward_backward(batch, algorithm.policy_loss, old_logprobs=old)
    return result.metrics["loss"], gradients(engine.policy.model)


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        ALGORITHMS, "grpo", "dapo_corrected", "grpo_all_terms", reason="test_algorithm_laws has all, on one layer"
    ),
)
@examples(8, quick=4)
@given(
    lengths_PG=st.lists(st.lists(st.integers(1, 14), min_size=G, max_size=G), min_size=1, max_size=4),
    budget=st.integers(1, 200),
    seed=st.integers(0, 1000),
)
def test_the_gradient_does_not_depend_on_budget_or_order(name: str, lengths_PG, budget: int, seed: int):
    policy, reference = make_policy(dtype=torch.float64), make_policy(dtype=torch.float64, seed=1)
    algorithm = build_algorithm(ALGORITHMS[name], max_completion_tokens=16)
    sequences = assign_advantages(random_groups(lengths_PG, seed), algorithm)
    expected_loss, expected = dense_gradient(policy, reference, sequences, algorithm)
    engine = make_engine(policy, reference)
    shuffled = [sequences[n] for n in np.random.default_rng(seed).permutation(len(sequences))]
    needed = drop_zero_gradient(sequences, algorithm)
    splits: list[tuple[list[TrainSequence], Layout]] = [
        (sequences, "shared"),
        (shuffled, "shared"),
        (shuffled, "packed"),
        (shuffled, "padded"),
        (needed, "shared"),
    ]
    for order, layout in splits:
        loss, actual = packed_gradient(engine, order, algorithm, budget, layout)
        assert loss == pytest.approx(expected_loss, rel=1e-6, abs=1e-9)
        for key, gradient in expected.items():
            if gradient.norm() > 1e-12:  # all masked, or all advantages 0: both are 0 to rounding
                assert relative_error(actual[key], gradient) < 1e-6, key


def test_groups_without_a_gradient_are_not_computed():
    algorithm = build_algorithm(AlgorithmConfig(), max_completion_tokens=16)
    rewards = ([0.0, 1.0, 2.0], [1.0, 1.0, 1.0], [0.0, np.nan, 1.0])
    groups = [
        replace(group, rewards=np.array(r))
        for group, r in zip(random_groups([[3, 4, 5]] * 3, seed=0), rewards, strict=True)
    ]
    sequences = assign_advantages(groups, algorithm)
    kept = [(s.group, s.num_loss_tokens) for s in drop_zero_gradient(sequences, algorithm)]
    assert kept == [(0, 3), (0, 5), (2, 3), (2, 5)]  # the middle one of group 0 has the group's mean
    with_kl = build_algorithm(AlgorithmConfig(beta=0.1), max_completion_tokens=16)
    assert (
        len(drop_zero_gradient(assign_advantages(groups, with_kl), with_kl)) == 8
    )  # a KL term pulls at all but the NaN


def test_a_step_without_any_gradient_moves_nothing():
    """Neither momentum nor weight decay, whether the sequences without a gradient are computed or left out."""
    engines = [make_engine(make_policy(), optim=AdamwConfig(weight_decay=0.1), learning_rate=0.01) for _ in range(2)]
    algorithm = build_algorithm(AlgorithmConfig(), max_completion_tokens=16)
    learned = assign_advantages(random_groups([[3, 14, 9]], seed=0), algorithm)
    idle = [replace(s, advantages=np.zeros_like(s.advantages)) for s in learned]
    for engine, second in zip(engines, (idle, drop_zero_gradient(idle, algorithm)), strict=True):
        for sequences in (learned, second):
            before = copy.deepcopy(engine.policy.model.state_dict())
            (batch,) = pack_for(engine.policy, sequences, 50)
            engine.forward_backward(batch, algorithm.policy_loss)
            engine.optim_step()
            after = engine.policy.model.state_dict()
            assert all(torch.equal(before[k], after[k]) for k in after) == (sequences is second)
    computed, left_out = (engine.policy.model.state_dict() for engine in engines)
    assert all(torch.equal(computed[k], left_out[k]) for k in computed)


def test_on_policy_old_logprobs_are_the_current_ones():
    policy = make_policy(dtype=torch.float64)
    algorithm = build_algorithm(AlgorithmConfig(), max_completion_tokens=16)
    sequences = assign_advantages(random_groups([[3, 14, 9]], seed=0), algorithm)
    engine = make_engine(policy, learning_rate=0.05)
    (batch,) = pack_for(policy, sequences, 30)
    first = engine.forward_backward(batch, algorithm.policy_loss)
    assert first.metrics["clip_ratio/region_mean"] == 0
    engine.optim_step()
    second = engine.forward_backward(None, algorithm.policy_loss)
    assert second.metrics["clip_ratio/region_mean"] > 0  # the policy has moved away from the old logprobs
    assert {n: len(logprobs) for n, logprobs in engine.old_outputs.items()} == {0: 3, 1: 14, 2: 9}
    (other_split,) = pack_for(policy, sequences, 60)
    third = engine.forward_backward(other_split, algorithm.policy_loss, old_logprobs=engine.old_outputs)
    assert third.metrics == pytest.approx(second.metrics)


@pytest.mark.parametrize("correction", ["token_truncate", "sequence_mask"])
def test_a_correction_of_what_the_policy_itself_sampled_changes_no_bit(correction):
    """The sampler's logprobs are those of the first pass: the step is the one without a correction."""
    groups = random_groups([[3, 14, 9], [1, 6, 2]], seed=0)
    after = []
    for wanted in ("none", correction):
        policy = make_policy()
        engine = make_engine(policy, learning_rate=0.01)
        algorithm = build_algorithm(AlgorithmConfig(sampling_correction=wanted), max_completion_tokens=16)
        sequences = assign_advantages(groups, algorithm)
        (batch,) = pack_for(policy, sequences, 30)
        engine.forward_backward(batch, algorithm.policy_loss)
        policy.model.zero_grad()
        sampled = {n: logprobs.double().numpy() for n, logprobs in engine.old_outputs.items()}
        own = [replace(s, sampling_logprobs=sampled[s.index]) for s in sequences]
        (batch,) = pack_for(policy, own, 30)
        for update in range(2):
            result = engine.forward_backward(None if update else batch, algorithm.policy_loss)
            engine.optim_step()
        after.append(copy.deepcopy(policy.model.state_dict()))
    assert result.metrics["sampling/importance_weight/mean"] == 1
    assert result.metrics["sampling/importance_weight/clipped_ratio"] == 0
    assert all(torch.equal(after[0][key], after[1][key]) for key in after[0])


def test_an_empty_micro_batch_adds_nothing():
    algorithm = build_algorithm(AlgorithmConfig(beta=0.1), max_completion_tokens=16)
    sequences = assign_advantages(random_groups([[3, 14, 9]], seed=0), algorithm)
    engine = make_engine(make_policy(), make_policy(seed=1))
    (batch,) = pack_for(engine.policy, sequences, 100)
    expected = engine.forward_backward(batch, algorithm.policy_loss)
    expected_logprobs = engine.old_outputs
    expected_gradient = gradients(engine.policy.model)
    with_empty = replace(batch, micro_batches=((), *batch.micro_batches, ()))
    for old_logprobs in (None, expected_logprobs):
        actual = engine.forward_backward(with_empty, algorithm.policy_loss, old_logprobs=old_logprobs)
        assert actual.metrics == expected.metrics
        assert engine.old_outputs.keys() == expected_logprobs.keys()
        actual_gradient = gradients(engine.policy.model)
        assert all(torch.equal(actual_gradient[k], expected_gradient[k]) for k in expected_gradient)
    idle = replace(batch, micro_batches=((),))
    engine.forward_backward(idle, algorithm.policy_loss)
    for parameter in engine.policy.model.parameters():
        assert parameter.grad is not None and not parameter.grad.any()


def test_frozen_weights_stay_bit_identical_and_master_weights_keep_their_dtype():
    policy, reference = make_policy(), make_policy()
    policy.model.get_input_embeddings().requires_grad_(False)  # tied: the head is frozen with it
    reference.model.requires_grad_(False)
    frozen_before = {k: v.clone() for k, v in reference.model.state_dict().items()}
    embedding_before = policy.model.get_input_embeddings().weight.clone()
    trained_before = copy.deepcopy(policy.model.state_dict())
    algorithm = build_algorithm(AlgorithmConfig(beta=0.1), max_completion_tokens=16)
    sequences = assign_advantages(random_groups([[3, 14, 9]], seed=0), algorithm)
    engine = make_engine(policy, reference, learning_rate=0.01, optim=AdamwConfig(weight_decay=0.1))
    for _ in range(3):
        (batch,) = pack_for(engine.policy, sequences, 50)
        engine.forward_backward(batch, algorithm.policy_loss)
        engine.optim_step()
    assert all(torch.equal(v, frozen_before[k]) for k, v in reference.model.state_dict().items())
    assert torch.equal(policy.model.get_input_embeddings().weight, embedding_before)
    moved = [k for k, v in policy.model.state_dict().items() if not torch.equal(v, trained_before[k])]
    assert len(moved) == sum(p.requires_grad for p in policy.model.parameters())
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}
    for state in engine.state_dict()["optimizer"]["state"].values():
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32


def test_a_gradient_that_is_not_finite_stops_the_run_and_changes_nothing():
    policy = make_policy()
    before = copy.deepcopy(policy.model.state_dict())
    engine = make_engine(policy)
    next(policy.model.parameters()).grad = torch.full_like(next(policy.model.parameters()), float("nan"))
    with pytest.raises(RuntimeError, match=r"norm is nan at optimizer step 1; weights are unchanged"):
        engine.optim_step()
    assert all(torch.equal(v, before[k]) for k, v in policy.model.state_dict().items())


IN_FORWARD = [*itertools.product(["grpo_kl", "dapo_kl_masked", "grpo_kl_corrected"], ["shared", "padded"])]


@pytest.mark.parametrize(
    ("name", "layout"), mostly_slow(IN_FORWARD, *IN_FORWARD[::2], IN_FORWARD[1], reason="one has the other layout")
)
def test_gradients_in_forward_are_the_same(name: str, layout: Layout, monkeypatch: pytest.MonkeyPatch):
    """With a loss per tile of a few tokens, streams among the micro-batches, and a second update."""
    monkeypatch.setattr("cohort.models.forward.linear_loss", partial(linear_loss, tile_elements=7 * VOCAB_SIZE))
    algorithm = build_algorithm(ALGORITHMS[name], max_completion_tokens=32)
    groups = [*random_groups([[3, 14, 9, 1, 1, 8]], 0, (290, 310)), *random_groups([[5, 9, 2, 30, 1, 1]], 1)]
    sequences = assign_advantages(groups, algorithm)
    results = []
    for in_forward in (False, True):
        policy, reference = make_policy(dtype=torch.float64), make_policy(dtype=torch.float64, seed=1)
        engine = make_engine(policy, reference, gradients_in_forward=in_forward)
        _, gradient = packed_gradient(engine, sequences, algorithm, 305, layout)
        (batch,) = pack_for(policy, sequences, 305)
        assert bool(batch.split_groups) == (layout == "shared")
        first = engine.forward_backward(batch, algorithm.policy_loss)
        results.append((gradient, first.metrics, dict(engine.old_outputs)))
    (expected, metrics, old), (actual, other_metrics, other_old) = results
    assert all(relative_error(actual[key], expected[key]) < 1e-10 for key in expected)
    assert other_metrics == pytest.approx(metrics, rel=1e-10)
    assert all(torch.allclose(old[n], other_old[n], rtol=0, atol=1e-12) for n in old) and old.keys() == other_old.keys()


@pytest.mark.parametrize("tie", [True, False])
def test_no_gradient_of_a_whole_embedding_is_made_besides_the_sum(tie: bool):
    """Numbers of tables that backward makes, of a tied head and of an embedding by itself; the sum is dense."""
    policy = make_policy(tie=tie, vocab_size=5000)
    algorithm = build_algorithm(AlgorithmConfig(), max_completion_tokens=32)
    sequences = assign_advantages(random_groups([[5, 9, 2]], 0), algorithm)
    engine = make_engine(policy)
    for _ in range(2):  # the second micro-batch finds a gradient
        (batch,) = pack_for(policy, sequences, 1000)
        with TablesMade(5000) as made:
            engine.forward_backward(batch, algorithm.policy_loss)
        assert made.by_embedding == 0 and made.others >= 1
    assert all(p.grad is not None and not p.grad.is_sparse for p in policy.model.parameters())
    policy.model.get_input_embeddings().sparse = False
    with TablesMade(5000) as made:
        engine.forward_backward(batch, algorithm.policy_loss)
    assert made.by_embedding == 1  # negative control


class TablesMade(TorchDispatchMode):
    """Counts operations that put out tensors of that many rows."""

    def __init__(self, rows: int):
        super().__init__()
        self.rows, self.by_embedding, self.others = rows, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.layout == torch.strided and out.ndim == 2 and len(out) == self.rows:
            if "embedding" in func.__name__:
                self.by_embedding += 1
            else:
                self.others += 1
        return out
