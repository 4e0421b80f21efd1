"""Law 3 and the local engine: streams that belong to completions, and logprobs that a plain forward pass confirms."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from cohort.policy import Policy, end_token_ids
from cohort.records import Prompt, RolloutGroup
from cohort.rollout import LocalEngine, Sampler, SamplingParams, StreamKey
from cohort.rollout.sampling import sample_tokens, uniform_stream
from tiny import CONFIGS, VOCAB_SIZE, make_gemma2, make_policy, make_tokenizer, policy_of

KEY = StreamKey(purpose="train", seed=3, step=5)


def prompts(lengths: Sequence[int], *, epoch: int = 0) -> list[Prompt]:
    rng = np.random.default_rng(0)
    rows = [rng.integers(2, VOCAB_SIZE, 20) for _ in lengths]
    return [
        Prompt(id=i, epoch=epoch, content="", token_ids=row[:n], columns={})
        for i, (row, n) in enumerate(zip(rows, lengths, strict=True))
    ]


def make_engine(policy: Policy, *, max_num_seqs: int = 64, ends: tuple[int, ...] = (1, 5, 9)) -> LocalEngine:
    sampler = Sampler(policy, end_token_ids=frozenset(ends), max_num_seqs=max_num_seqs)
    return LocalEngine(sampler.sample, make_tokenizer())


def sampling(**changes) -> SamplingParams:
    return SamplingParams(**{"num_generations": 4, "max_completion_tokens": 24, "temperature": 1.0, **changes})


def tokens_of(groups: Sequence[RolloutGroup]) -> list[list[list[int]]]:
    return [[c.token_ids.tolist() for c in g.completions] for g in groups]


def naive_log_p(policy: Policy, prompt: Prompt, completion_ids: np.ndarray, temperature: float) -> torch.Tensor:
    """Full log-probabilities [C, V] by a plain forward pass over the unpadded sequence."""
    ids = torch.from_numpy(np.concatenate([prompt.token_ids, completion_ids])).unsqueeze(0)
    with torch.no_grad():
        logits = policy.model.eval()(input_ids=ids, use_cache=False).logits[0, len(prompt.token_ids) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampling_logprobs_equal_a_plain_forward_pass(kind: str, temperature: float):
    policy = make_policy(kind)
    groups = make_engine(policy).generate(prompts([3, 20, 1, 11]), sampling(temperature=temperature), KEY)
    lengths = set()
    for group in groups:
        for completion in group.completions:
            log_p = naive_log_p(policy, group.prompt, completion.token_ids, temperature)
            expected = log_p.gather(-1, torch.from_numpy(completion.token_ids).unsqueeze(-1)).squeeze(-1)
            np.testing.assert_allclose(completion.sampling_logprobs, expected.numpy(), atol=1e-5)
            lengths.add(len(completion.token_ids))
    assert len(lengths) > 3  # rows did leave the batch at different times


def test_a_model_with_a_sliding_window():
    policy = policy_of(make_gemma2())
    for group in make_engine(policy).generate(prompts([3, 17, 1]), sampling(), KEY):
        for completion in group.completions:
            log_p = naive_log_p(policy, group.prompt, completion.token_ids, 1.0)
            expected = log_p.gather(-1, torch.from_numpy(completion.token_ids).unsqueeze(-1)).squeeze(-1)
            np.testing.assert_allclose(completion.sampling_logprobs, expected.numpy(), atol=1e-5)


def test_greedy_takes_the_likeliest_token():
    policy = make_policy()
    for group in make_engine(policy).generate(prompts([3, 9]), sampling(temperature=0.0, num_generations=1), KEY):
        ids = group.completions[0].token_ids
        assert naive_log_p(policy, group.prompt, ids, 1.0).argmax(-1).tolist() == ids.tolist()


def test_top_k_and_top_p_are_the_distribution_sampled_from():
    policy = make_policy()
    engine = make_engine(policy)
    for settings_, keeps in (({"top_k": 3}, None), ({"top_p": 0.5}, 0.5)):
        for group in engine.generate(prompts([4, 6]), sampling(**settings_), KEY):
            for completion in group.completions:
                p = naive_log_p(policy, group.prompt, completion.token_ids, 1.0).exp()
                for t, token in enumerate(completion.token_ids):
                    order = p[t].argsort(descending=True)
                    size = 3 if keeps is None else int((p[t][order].cumsum(0) < keeps).sum()) + 1
                    kept = order[:size].tolist()
                    assert int(token) in kept
                    expected = (p[t][int(token)] / p[t][kept].sum()).log().item()
                    assert completion.sampling_logprobs[t] == pytest.approx(expected, abs=1e-4)


@settings(max_examples=10, deadline=None)
@given(order=st.permutations(range(5)), max_num_seqs=st.integers(1, 40), subset=st.integers(1, 5))
def test_a_completion_depends_on_seed_step_prompt_and_index_alone(order, max_num_seqs: int, subset: int):
    policy = make_policy(dtype=torch.float64)
    everything = prompts([3, 9, 1, 14, 6])
    expected = tokens_of(make_engine(policy).generate(everything, sampling(), KEY))
    chosen = order[:subset]
    actual = make_engine(policy, max_num_seqs=max_num_seqs).generate([everything[i] for i in chosen], sampling(), KEY)
    assert tokens_of(actual) == [expected[i] for i in chosen]
    fewer = make_engine(policy).generate(everything, sampling(num_generations=2), KEY)
    assert tokens_of(fewer) == [group[:2] for group in expected]


def test_streams_differ_by_each_part_of_their_name():
    (prompt, other) = prompts([3, 3])
    (next_epoch,) = prompts([3], epoch=1)
    base = uniform_stream(KEY, prompt, 0, 4).tolist()
    assert base == uniform_stream(KEY, prompt, 0, 9)[:4].tolist()
    names = [
        (StreamKey(purpose="eval", seed=3, step=5), prompt, 0),
        (StreamKey(purpose="train", seed=4, step=5), prompt, 0),
        (StreamKey(purpose="train", seed=3, step=6), prompt, 0),
        (KEY, other, 0),
        (KEY, next_epoch, 0),
        (KEY, prompt, 1),
    ]
    assert all(uniform_stream(*name, 4).tolist() != base for name in names)


def test_every_end_token_ends_a_completion():
    policy = make_policy()
    (group,) = make_engine(policy, ends=(1, 5, 9, 20, 30)).generate(prompts([4]), sampling(num_generations=64), KEY)
    ended_by = {int(c.token_ids[-1]) for c in group.completions if c.finish_reason == "stop"}
    assert len(ended_by) >= 3
    for completion in group.completions:
        assert not set(completion.token_ids[:-1].tolist()) & {1, 5, 9, 20, 30}
        if completion.finish_reason == "length":
            assert len(completion.token_ids) == 24 and int(completion.token_ids[-1]) not in {1, 5, 9, 20, 30}


def test_end_tokens_come_from_tokenizer_config_and_generation_config():
    policy = make_policy(eos_token_id=[7, 8])
    policy.model.generation_config.eos_token_id = 9
    assert end_token_ids(policy, make_tokenizer()) == {1, 7, 8, 9}


def test_the_token_frequencies_are_the_probabilities():
    torch.manual_seed(0)
    logits = torch.randn(1, 12).double()
    uniforms = torch.from_numpy(np.random.default_rng(0).random(20_000))
    tokens, logprobs = sample_tokens(logits.expand(20_000, -1), uniforms, temperature=0.8)
    p = torch.softmax(logits[0] / 0.8, -1)
    assert stats.chisquare(np.bincount(tokens.numpy(), minlength=12), p.numpy() * 20_000).pvalue > 1e-3
    torch.testing.assert_close(logprobs, p.log()[tokens])


def test_the_ends_of_the_unit_interval():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    for u, expected in ((0.0, 1), (0.4999, 1), (0.5, 3), (1 - 2**-53, 3)):
        assert sample_tokens(logits, torch.tensor([u], dtype=torch.float64), temperature=1.0)[0].item() == expected


def test_training_mode_is_restored_and_versions_are_recorded():
    policy = make_policy()
    policy.model.train()
    engine = make_engine(policy)
    engine.load_weights(policy_version=17)
    (group,) = engine.generate(prompts([4]), sampling(), KEY)
    assert policy.model.training
    assert {c.policy_version for c in group.completions} == {17}
