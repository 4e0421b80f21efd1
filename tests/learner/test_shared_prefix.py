"""Streams: a group larger than the budget computes its prompt once, and the gradient is that of the whole group."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from assigned import assign_advantages
from cohort.algorithms import build_algorithm
from cohort.config import AlgorithmConfig
from cohort.errors import DoesNotFitError
from cohort.learner import TrainEngine
from cohort.models import SharedPrefix
from cohort.models.activation_checkpointing import enable_gradient_checkpointing
from selection import examples, mostly_slow
from test_laws import ALGORITHMS, dense_gradient, make_engine, old_logprobs_of, packed_gradient, random_groups
from tiny import gradients, make_model, make_policy, pack_for, policy_of, relative_error

LONG = (290, 310)
LENGTHS = [[3, 14, 9, 1, 1, 8], [20, 1, 6, 2, 11, 4], [5, 5, 1, 5, 5, 5]]


def step(name: str = "grpo", lengths_PG=LENGTHS, prompt_tokens=LONG):
    algorithm = build_algorithm(ALGORITHMS[name], max_completion_tokens=32)
    return algorithm, assign_advantages(random_groups(lengths_PG, 0, prompt_tokens), algorithm)


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-6):
    assert actual.keys() == expected.keys()
    for key in expected:
        assert relative_error(actual[key], expected[key]) < tolerance, key


@pytest.mark.parametrize("name", mostly_slow(ALGORITHMS, "grpo_all_terms", reason="test_laws has them in rows"))
def test_the_gradient_of_streams_is_that_of_every_completion_by_itself(name: str):
    policy, reference = make_policy(dtype=torch.float64), make_policy(dtype=torch.float64, seed=1)
    algorithm, sequences = step(name)
    expected_loss, expected = dense_gradient(policy, reference, sequences, algorithm)
    engine = make_engine(policy, reference)
    for budget in (1, 305, 320, 330, 100_000):
        loss, actual = packed_gradient(engine, sequences, algorithm, budget)
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        assert_equal(actual, expected)


@examples(15)
@given(
    lengths=st.lists(st.lists(st.integers(1, 12), min_size=3, max_size=7), min_size=1, max_size=3),
    budget=st.integers(290, 400),
)
def test_any_lengths(lengths: list[list[int]], budget: int):
    policy = make_policy(dtype=torch.float64)
    size = min(map(len, lengths))
    algorithm, sequences = step(lengths_PG=[group[:size] for group in lengths])
    engine = make_engine(policy)
    _, expected = packed_gradient(engine, sequences, algorithm, 100_000)
    _, actual = packed_gradient(engine, sequences, algorithm, budget)
    norm = max(gradient.norm() for gradient in expected.values())
    assert all((actual[key] - expected[key]).norm() <= 1e-6 * norm for key in expected)


def test_a_prompt_is_computed_once():
    engine = make_engine(make_policy(dtype=torch.float64))
    algorithm, sequences = step()
    (whole,) = pack_for(engine.policy, sequences, 100_000)
    (split,) = pack_for(engine.policy, sequences, 310)
    assert not whole.split_groups and len(whole.micro_batches) == 1
    assert len(split.split_groups) == 3 and not split.micro_batches
    results = [engine.forward_backward(batch, algorithm.policy_loss) for batch in (whole, split)]
    assert results[0].num_computed_tokens == results[1].num_computed_tokens < 3 * 310 + sum(map(sum, LENGTHS))
    assert results[1].num_micro_batches > 6


def test_checkpointed_layers():
    model = make_model(dtype=torch.float64)
    model.train()
    plain = make_engine(policy_of(model))
    algorithm, sequences = step()
    _, expected = packed_gradient(plain, sequences, algorithm, 310)
    enable_gradient_checkpointing(model)
    checkpointed = make_engine(policy_of(model))
    _, actual = packed_gradient(checkpointed, sequences, algorithm, 310)
    assert_equal(actual, expected, 1e-10)


def test_further_passes_use_the_first_ones_logprobs():
    engine = make_engine(make_policy(dtype=torch.float64), learning_rate=0.01)
    algorithm, sequences = step()
    results = []
    for budget in (310, 100_000):
        (batch,) = pack_for(engine.policy, sequences, budget)
        weights = {k: v.clone() for k, v in engine.policy.model.state_dict().items()}
        engine.forward_backward(batch, algorithm.policy_loss)
        engine.optim_step()
        engine.forward_backward(None, algorithm.policy_loss)
        results.append((dict(engine.old_outputs), gradients(engine.policy.model)))
        engine.policy.model.load_state_dict(weights)
        engine = make_engine(engine.policy, learning_rate=0.01)
    (old, actual), (expected_old, expected) = results
    assert old.keys() == expected_old.keys() == {s.index for s in sequences}
    for index in old:
        torch.testing.assert_close(old[index], expected_old[index], atol=1e-7, rtol=0)
    assert_equal(actual, expected, 1e-4)  # the first update's AdamW turns rounding into steps of the learning rate


def test_a_prompt_whose_gradient_is_lost_would_be_noticed(monkeypatch: pytest.MonkeyPatch):
    """Negative control."""
    engine = make_engine(make_policy(dtype=torch.float64))
    algorithm, sequences = step()
    _, expected = packed_gradient(engine, sequences, algorithm, 100_000)
    monkeypatch.setattr(SharedPrefix, "add", lambda self, branch: None)
    _, actual = packed_gradient(engine, sequences, algorithm, 310)
    assert max(relative_error(actual[key], expected[key]) for key in expected) > 0.1


@contextmanager
def memory_runs_out_once(engine: TrainEngine, layer: int, within: range, way: str) -> Iterator[list[int]]:
    """At a layer's pass over a row of so many tokens; the first such pass only."""
    failed: list[int] = []
    module = engine.policy.model.model.layers[layer].mlp

    def check(tokens: int) -> None:
        if tokens in within and not failed:
            failed.append(tokens)
            raise torch.OutOfMemoryError(f"injected: {tokens} tokens")

    def forward(module, inputs, output) -> None:
        check(output.shape[1])

    def backward(module, grad_input, grad_output) -> None:
        check(grad_output[0].shape[1])

    hook = module.register_forward_hook(forward) if way == "forward" else module.register_full_backward_hook(backward)
    try:
        yield failed
    finally:
        hook.remove()


SHORT = {  # budget in tokens, lengths, and what is computed when memory runs out
    "part": (340, [[30, 14, 25, 1, 31, 8], [20, 1, 6, 2, 11, 4]], range(31, 200)),  # not the prompt's own row
    "group": (1000, [[3, 14, 9, 1, 1, 8]], range(311, 1000)),  # a whole one, which becomes a stream
}
RUNS_OUT = [*itertools.product(SHORT, (0, 1), ("forward", "backward"))]
EACH_TWO = [("part", 0, "forward"), ("part", 1, "backward"), ("group", 0, "backward"), ("group", 1, "forward")]


@pytest.mark.parametrize(("where", "layer", "way"), mostly_slow(RUNS_OUT, *EACH_TWO, reason="each two of them"))
def test_memory_that_runs_out(where: str, layer: int, way: str):
    """What did not fit is computed again in smaller parts; nothing is added twice, to the prompt neither."""
    budget, lengths, within = SHORT[where]
    policy, reference = make_policy(dtype=torch.float64), make_policy(dtype=torch.float64, seed=1)
    algorithm, sequences = step("grpo_kl", lengths)
    _, expected = dense_gradient(policy, reference, sequences, algorithm)
    engine = make_engine(policy, reference)
    (batch,) = pack_for(engine.policy, sequences, budget)
    assert [len(parts) >= 3 for parts in batch.split_groups] == [True] * (budget == 340)
    old = {s.index: old_logprobs_of(s) for s in sequences}
    with memory_runs_out_once(engine, layer, within, way) as failed:
        result = engine.forward_backward(batch, algorithm.policy_loss, old_logprobs=old)
    assert len(failed) == 1 and result.num_out_of_memory == 1 and engine.budget.tokens < 200
    assert_equal(gradients(policy.model), expected)


def test_a_prompt_that_does_not_fit_ends_the_run():
    engine = make_engine(make_policy())
    algorithm, sequences = step()
    (batch,) = pack_for(engine.policy, sequences, 310)

    def fail(*args):
        raise torch.OutOfMemoryError("injected")

    hook = engine.policy.model.model.layers[0].mlp.register_forward_hook(fail)
    with pytest.raises(DoesNotFitError, match=r"out of memory on a prompt of (29|30)\d tokens"):
        engine.forward_backward(batch, algorithm.policy_loss)
    hook.remove()


def test_memory_is_bounded_by_the_prompt_and_one_part():
    """Bytes that autograd keeps at a time, counted."""
    engine = make_engine(make_policy())
    algorithm = build_algorithm(AlgorithmConfig(), max_completion_tokens=100)
    sequences = assign_advantages(random_groups([[60] * 8], 0, LONG), algorithm)
    weights = {p.untyped_storage().data_ptr() for p in engine.policy.model.parameters()}

    def most_kept(budget: int) -> int:
        """The largest number of bytes kept for backward at any time."""
        live: dict[int, int] = {}
        most = 0

        class Kept:
            def __init__(self, tensor: torch.Tensor):
                nonlocal most
                self.tensor, self.key = tensor, tensor.untyped_storage().data_ptr()
                if self.key not in weights:
                    live[self.key] = tensor.untyped_storage().nbytes()
                most = max(most, sum(live.values()))

            def __del__(self):
                live.pop(self.key, None)

        (batch,) = pack_for(engine.policy, sequences, budget)
        with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
            engine.forward_backward(batch, algorithm.policy_loss)
        gradients(engine.policy.model)
        return most

    whole, streamed = most_kept(10_000), most_kept(370)
    tokens = 300 + 8 * 60
    assert streamed < 1.15 * whole * 370 / tokens
