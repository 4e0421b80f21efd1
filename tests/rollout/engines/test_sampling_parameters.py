"""The distribution sampled from is that of the parameters, and its logprobs are recorded."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cohort.records import Prompt
from cohort.rollout import LocalEngine, Sampler, SampleRequest, SamplingParams, StepKey
from cohort.rollout.engines.local.sampler import _RepetitionPenalty, penalize_repetition, sample_tokens
from engines import generate
from processed import completion_log_p, processed_log_p
from selection import examples
from tiny import DYNAMIC_ROPE, VOCAB_SIZE, make_policy

P = (0.5, 0.3, 0.15, 0.05)
EACH = torch.arange(0.5, 1000).double() / 1000  # uniform numbers


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, P),
        ({"min_p": 0.5}, (0.625, 0.375, 0, 0)),
        ({"min_p": 0.29}, (10 / 19, 6 / 19, 3 / 19, 0)),
        ({"min_p": 1.0}, (1, 0, 0, 0)),
        ({"min_p": 0.29, "top_k": 2}, (0.625, 0.375, 0, 0)),
        # min-p first: of 0.625 and 0.375, the first is 60%; the other way around, both would stay
        ({"min_p": 0.5, "top_p": 0.6}, (1, 0, 0, 0)),
        # top-k first, too: 0.625 of the two
        ({"top_k": 2, "top_p": 0.6}, (1, 0, 0, 0)),
        # temperature first: squares, of which the second is 0.36 of the first
        ({"temperature": 0.5, "min_p": 0.5}, (1, 0, 0, 0)),
        ({"temperature": 0.5, "min_p": 0.3}, (25 / 34, 9 / 34, 0, 0)),
        ({"temperature": 0.0}, (1, 0, 0, 0)),
    ],
)
def test_the_kept_tokens_and_their_probabilities(parameters: dict[str, float], expected: tuple[float, ...]):
    logits = torch.tensor([P], dtype=torch.float64).log().expand(len(EACH), -1)
    settings: Any = {"temperature": 1.0, **parameters}
    tokens, logprobs = sample_tokens(logits, EACH, **settings)
    counts = Counter(tokens.tolist())
    assert [counts[token] / len(EACH) for token in range(4)] == pytest.approx(expected, abs=1e-3)
    if settings["temperature"]:
        torch.testing.assert_close(logprobs.exp(), torch.tensor(expected, dtype=torch.float64)[tokens])


def test_equal_probabilities_are_kept_together():
    logits = torch.tensor([0.4, 0.4, 0.2]).double().log().expand(len(EACH), -1)
    for parameters in ({"min_p": 1.0}, {"top_k": 1}, {"top_p": 0.3}):
        tokens, logprobs = sample_tokens(logits, EACH, temperature=1.0, **parameters)
        assert set(tokens.tolist()) == {0, 1} and logprobs.exp().numpy() == pytest.approx(0.5)


def test_the_penalty_divides_positive_logits_and_multiplies_negative_ones():
    logits = torch.tensor([[2.0, -1.0, 0.0, 3.0], [2.0, -1.0, 0.0, 3.0]])
    seen = torch.tensor([[0, 2, 1], [3, 3, 3]])  # one of them several times, as in a text
    expected = torch.tensor([[1.6, -1.25, 0.0, 3.0], [2.0, -1.0, 0.0, 2.4]])
    torch.testing.assert_close(penalize_repetition(logits, seen, 1.25), expected)


@examples(50)
@given(
    seed=st.integers(0, 2**31),
    vocab_size=st.integers(2, 40),
    penalty=st.floats(0.5, 2.0),
    temperature=st.sampled_from((0.0, 0.3, 1.0, 1.7)),
    min_p=st.floats(0.0, 1.0),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.01, 1.0),
)
def test_the_distribution_is_that_of_the_processors_of_transformers(
    seed: int, vocab_size: int, penalty: float, temperature: float, min_p: float, top_k: int, top_p: float
):
    torch.manual_seed(seed)
    logits = 3 * torch.randn(1, vocab_size, dtype=torch.float64)
    ids = torch.randint(vocab_size, (1, 7))
    sampling = SamplingParams(
        num_generations=1,
        max_completion_tokens=1,
        repetition_penalty=penalty,
        temperature=temperature,
        min_p=min_p,
        top_k=top_k,
        top_p=top_p,
    )
    tokens, logprobs = sample_tokens(
        penalize_repetition(logits, ids, penalty).expand(len(EACH), -1),
        EACH,
        temperature=temperature,
        min_p=min_p,
        top_k=top_k,
        top_p=top_p,
    )
    expected = processed_log_p(ids, logits, sampling)[0]
    if temperature == 0:
        assert tokens.unique().tolist() == [expected.argmax().item()]
    torch.testing.assert_close(logprobs, expected[tokens])


@pytest.mark.parametrize(
    "parameters",
    [
        {"top_k": 3},
        {"top_p": 0.5},
        {"min_p": 0.3, "temperature": 0.8},
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 1.5, "temperature": 0.0},
        {"repetition_penalty": 0.7, "temperature": 1.3, "min_p": 0.02, "top_k": 15, "top_p": 0.9},
    ],
)
@pytest.mark.parametrize(("layout", "model"), [("shared", {}), ("padded", {"rope_parameters": DYNAMIC_ROPE})])
def test_recorded_logprobs_are_those_of_the_distribution(layout: str, model: Any, parameters: dict[str, Any]):
    """Also of completions that end, leave the batch and make room for others."""
    policy = make_policy(**model)
    assert policy.layout == layout
    sampler = Sampler(policy, end_token_ids=frozenset(range(1, 20)), max_num_seqs=3)
    sampling = SamplingParams(**{"num_generations": 2, "max_completion_tokens": 24, "temperature": 1.0, **parameters})
    rng, lengths = np.random.default_rng(0), set()
    prompts = [
        Prompt(id=i, epoch=0, content="", token_ids=rng.integers(2, VOCAB_SIZE, n), columns={})
        for i, n in enumerate([3, 9, 5, 60])
    ]
    key = StepKey(purpose="train", seed=3, step=5)
    for group in generate(LocalEngine(sampler.sample), prompts, sampling, key):
        for trajectory in group.trajectories:
            ids = trajectory.sampled_token_ids.tolist()
            expected = completion_log_p(policy.model, group.prompt.token_ids.tolist(), ids, sampling)
            assert trajectory.sampling_logprobs.tolist() == pytest.approx(expected, abs=1e-4)
            lengths.add(len(ids))
    assert len(lengths) > 1


def test_each_row_is_penalized_for_its_own_tokens():
    key = StepKey(purpose="train", seed=3, step=5)
    sampling = SamplingParams(num_generations=2, max_completion_tokens=9, temperature=1.0, repetition_penalty=2.0)

    def request(ids: list[int], count: int) -> SampleRequest:
        prompt = Prompt(id=0, epoch=0, content="", token_ids=np.array(ids), columns={})
        return SampleRequest(
            token_ids=prompt.token_ids, sampling=sampling, keys=tuple(key.call(prompt, i) for i in range(count))
        )

    penalty = _RepetitionPenalty(2.0, torch.device("cpu"))
    penalty.start([request([3], 2)])
    penalty.append(torch.tensor([4, 5]))
    penalty.start([request([1, 2, 1, 6, 7], 1)])  # wider than those in flight
    penalized = [[t for t, x in enumerate(row) if x == 0.5] for row in penalty.penalize(torch.ones(3, 8)).tolist()]
    assert penalized == [[3, 4], [3, 5], [1, 2, 6, 7]]
    penalty.keep(torch.tensor([0, 2]))
    penalty.start([request([0], 1)])
    penalty.append(torch.tensor([7, 7, 7]))
    penalized = [[t for t, x in enumerate(row) if x == 0.5] for row in penalty.penalize(torch.ones(3, 8)).tolist()]
    assert penalized == [[3, 4, 7], [1, 2, 6, 7], [0, 7]]


def test_the_policy_itself():
    sampling = SamplingParams(
        num_generations=3,
        max_completion_tokens=5,
        temperature=0.7,
        repetition_penalty=1.1,
        min_p=0.1,
        top_k=4,
        top_p=0.9,
    )
    assert sampling.unmodified() == SamplingParams(num_generations=3, max_completion_tokens=5, temperature=0.7)
