"""Law 3 and the local engine: streams that belong to completions, and logprobs that a plain forward pass confirms."""

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, DeepseekV3Config, GraniteConfig, PreTrainedModel, Starcoder2Config

import families
from cohort.models import Policy, end_token_ids, mixers, packed_weights
from cohort.models.attention import decoding
from cohort.models.attention.cascade import AttentionSpec
from cohort.models.kv_cache import CacheDecoder
from cohort.packing.segments import group_by_length
from cohort.plan import defaults
from cohort.records import Prompt, RolloutGroup
from cohort.rollout import LocalEngine, Sampler, SamplingParams, StepKey
from cohort.rollout.engines.local import decoders, sampler
from cohort.rollout.engines.local.decoders import SharedPromptDecoder
from cohort.rollout.engines.local.sampler import sample_tokens, uniform_stream
from engines import PACKS_BFLOAT16, generate
from selection import examples, mostly_slow, slow
from tiny import CONFIGS, SIZES, VOCAB_SIZE, make_gemma2, make_model, make_policy, make_tokenizer, policy_of

KEY = StepKey(purpose="train", seed=3, step=5)


def prompts(lengths: Sequence[int], *, epoch: int = 0) -> list[Prompt]:
    rng = np.random.default_rng(0)
    rows = [rng.integers(2, VOCAB_SIZE, max(20, n)) for n in lengths]
    return [
        Prompt(id=i, epoch=epoch, content="", token_ids=row[:n], columns={})
        for i, (row, n) in enumerate(zip(rows, lengths, strict=True))
    ]


def make_engine(policy: Policy, *, max_num_seqs: int = 64, ends: tuple[int, ...] = (1, 5, 9)) -> LocalEngine:
    sampler = Sampler(policy, end_token_ids=frozenset(ends), max_num_seqs=max_num_seqs)
    return LocalEngine(sampler.sample)


def sampling(**changes) -> SamplingParams:
    return SamplingParams(**{"num_generations": 4, "max_completion_tokens": 24, "temperature": 1.0, **changes})


def tokens_of(groups: Sequence[RolloutGroup]) -> list[list[list[int]]]:
    return [[c.sampled_token_ids.tolist() for c in g.trajectories] for g in groups]


def naive_log_p(policy: Policy, prompt: Prompt, completion_ids: np.ndarray, temperature: float) -> torch.Tensor:
    """Full log-probabilities [C, V] by a plain forward pass over the unpadded sequence."""
    ids = torch.from_numpy(np.concatenate([prompt.token_ids, completion_ids])).unsqueeze(0)
    with torch.no_grad():
        logits = policy.model.eval()(input_ids=ids, use_cache=False).logits[0, len(prompt.token_ids) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1)


def naive_completion(policy: Policy, prompt: Prompt, index: int, limit: int) -> tuple[list[int], list[float]]:
    """Tokens and logprobs of one completion by a whole forward pass for every token: the ground truth."""
    ids, logprobs = prompt.token_ids.tolist(), []
    for u in uniform_stream(KEY.call(prompt, index), limit):
        with torch.no_grad(), policy.autocast():
            logits = policy.model.eval()(input_ids=torch.tensor([ids]), use_cache=False).logits[:, -1]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        token, logprob = sample_tokens(logits, torch.tensor([u], dtype=torch.float64), temperature=1.0)
        ids.append(token.item())
        logprobs.append(logprob.item())
        if ids[-1] in (1, 5, 9):
            break
    return ids[len(prompt.token_ids) :], logprobs


def make_starcoder2(dtype: torch.dtype) -> PreTrainedModel:
    """A model whose norms stay in float64."""
    torch.manual_seed(0)
    config = Starcoder2Config(
        **SIZES, vocab_size=VOCAB_SIZE, initializer_range=0.15, sliding_window=None, pad_token_id=0, eos_token_id=1
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def make_granite() -> PreTrainedModel:
    """A model with a scale of its own in attention and in the head."""
    torch.manual_seed(0)
    config = GraniteConfig(
        **SIZES, vocab_size=VOCAB_SIZE, initializer_range=0.15, attention_multiplier=0.3, logits_scaling=0.5
    )
    return AutoModelForCausalLM.from_config(config)


def make_deepseek() -> PreTrainedModel:
    """A model whose values have another dimension than its keys."""
    torch.manual_seed(0)
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    sizes = {**SIZES, "num_key_value_heads": SIZES["num_attention_heads"]}
    config = DeepseekV3Config(
        **sizes, **latent, vocab_size=VOCAB_SIZE, initializer_range=0.15, first_k_dense_replace=2, pad_token_id=0
    )
    return AutoModelForCausalLM.from_config(config)


ONE_DTYPE = "the same in float64"


def make_twisted_head() -> PreTrainedModel:
    """A model whose logits come from itself alone."""
    model = make_model()
    model.lm_head.register_forward_hook(lambda module, inputs, output: output * 1.5)
    return model


@pytest.mark.parametrize(
    ("model", "tolerance"),
    [
        *(pytest.param(lambda kind=kind: make_model(kind), 1e-5, marks=slow(ONE_DTYPE)) for kind in CONFIGS),
        (lambda: make_model(dtype=torch.float64), 1e-6),  # the library's RMSNorm computes in float32
        pytest.param(lambda: make_starcoder2(torch.float32), 1e-5, marks=slow(ONE_DTYPE)),
        (lambda: make_starcoder2(torch.float64), 1e-9),
        pytest.param(make_granite, 1e-5, marks=slow("attention's scale is in the layouts' tests")),
        (make_deepseek, 1e-5),
        (make_twisted_head, 1e-5),
    ],
)
def test_completions_equal_those_of_a_naive_loop(model, tolerance: float):
    policy = policy_of(model())
    assert policy.layout != "padded"
    chosen = sampling(num_generations=3, max_completion_tokens=12)
    longest = 0
    # prompts of three blocks, some of them begun when others are under way
    for group in generate(make_engine(policy, max_num_seqs=9), prompts([70, 3, 20, 1, 100, 90, 11]), chosen, KEY):
        for index, completion in enumerate(group.trajectories):
            token_ids, logprobs = naive_completion(policy, group.prompt, index, 12)
            assert completion.sampled_token_ids.tolist() == token_ids
            np.testing.assert_allclose(completion.sampling_logprobs, logprobs, atol=tolerance, rtol=0)
            longest = max(longest, len(token_ids))
    assert longest > 6


def test_completions_in_autocast_equal_those_of_a_naive_loop():
    policy = Policy(make_model(), device=torch.device("cpu"), compute_dtype=torch.bfloat16, pad_token_id=0)
    assert policy.layout == "shared"
    worst = []
    for group in generate(make_engine(policy), prompts([3, 20]), sampling(), KEY):
        for completion in group.trajectories:
            with policy.autocast():
                log_p = naive_log_p(policy, group.prompt, completion.sampled_token_ids, 1.0)
            expected = log_p.gather(-1, torch.from_numpy(completion.sampled_token_ids).unsqueeze(-1)).squeeze(-1)
            worst.append(np.abs(completion.sampling_logprobs - expected.float().numpy()).max())
    assert max(worst) < policy.logprob_tolerance


def test_requests_begin_as_soon_as_enough_rows_are_free(monkeypatch: pytest.MonkeyPatch):
    in_flight = []
    step = SharedPromptDecoder.step

    def counted(decoder: SharedPromptDecoder, tokens: torch.Tensor) -> torch.Tensor:
        in_flight.append([len(wave) for wave in decoder.waves])
        return step(decoder, tokens)

    monkeypatch.setattr(SharedPromptDecoder, "step", counted)
    groups = generate(make_engine(make_policy(), max_num_seqs=16), prompts([4] * 16), sampling(), KEY)
    assert max(map(sum, in_flight)) == 16  # never more than it may
    assert max(map(len, in_flight)) > 1
    longest = [
        max(len(c.sampled_token_ids) for g in groups[n : n + 4] for c in g.trajectories) for n in range(0, 16, 4)
    ]
    assert len(in_flight) < sum(longest)  # in fewer steps than four at a time would take


def test_a_prompt_is_held_once_and_never_repeated():
    policy = make_policy()
    per_token = 2 * 2 * 2 * 8 * 4  # keys and values, layers, key heads, dimension, float32
    decoder = SharedPromptDecoder(policy, limit=100)
    decoder.start([p.token_ids for p in prompts([400, 400, 60, 30])], [8, 2, 4, 4])
    (wave,) = decoder.waves
    assert wave.num_bytes == (per_token * (2 * 400 + 2 * 60), 0)
    decoder.step(torch.full((18,), 7))
    assert wave.num_bytes == (per_token * (2 * 400 + 2 * 60), per_token * 18 * 64)
    decoder.keep(torch.tensor([0, 3, 8, 9, 17]))
    assert wave.num_bytes == (per_token * (2 * 400 + 60), per_token * 5 * 64)
    decoder.keep(torch.tensor([0, 1, 2, 3]))
    assert wave.num_bytes == (per_token * 2 * 400, per_token * 4 * 64)
    decoder.keep(torch.tensor([2]))
    assert wave.num_bytes == (per_token * 400, per_token * 64)


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and not tensor._is_view():
                self.numel = max(self.numel, tensor.numel())
        return out


def test_no_copy_of_a_prompt_is_made_in_decoding():
    policy = make_policy()
    prompt_numel = 400 * 2 * 8
    made = {}
    for decoder in (SharedPromptDecoder(policy, limit=8), policy.cache_decoder()):
        with torch.no_grad():
            decoder.start([prompts([400])[0].token_ids], [8])
            with Largest() as largest:
                decoder.step(torch.full((8,), 7))
                decoder.keep(torch.tensor([0, 1, 2, 5]))
        made[type(decoder)] = largest.numel
    assert made[SharedPromptDecoder] < prompt_numel
    assert made[CacheDecoder] >= 4 * prompt_numel  # so it would be seen


def test_models_take_their_cache_without_a_warning():
    """It is called `cache` from transformers 5.24 on, where the old name still works, with a warning."""
    decoder = make_policy().cache_decoder()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        decoder.start([prompts([5])[0].token_ids], [2])
        decoder.step(torch.full((2,), 7))


def test_prompts_are_computed_in_rows_under_the_budget(monkeypatch: pytest.MonkeyPatch):
    policy = make_policy()
    everything = prompts([3, 20, 1, 11, 20, 17])
    expected = generate(make_engine(policy), everything, sampling(), KEY)
    rows = []
    packed_logits = Policy.packed_logits

    def counted(policy: Policy, input_ids: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        if args[-1].attn_metadata is not None:
            rows.append(len(input_ids))
        return packed_logits(policy, input_ids, *args, **kwargs)

    monkeypatch.setattr(Policy, "packed_logits", counted)
    monkeypatch.setattr(decoders, "_PREFILL_TOKENS", 32)
    assert tokens_of(generate(make_engine(policy), everything, sampling(), KEY)) == tokens_of(expected)
    assert rows == [20, 20, 17 + 11 + 3 + 1]


def test_padding_between_prompts_would_be_seen(monkeypatch: pytest.MonkeyPatch):
    policy = make_policy()
    attend = decoding._attention
    monkeypatch.setattr(decoding, "_attention", lambda q, k, v, bias, spec: attend(q, k, v, None, spec))
    group, _ = generate(make_engine(policy), prompts([3, 20]), sampling(), KEY)
    worst = 0.0
    for completion in group.trajectories:
        log_p = naive_log_p(policy, group.prompt, completion.sampled_token_ids, 1.0)
        expected = log_p.gather(-1, torch.from_numpy(completion.sampled_token_ids).unsqueeze(-1)).squeeze(-1)
        worst = max(worst, np.abs(completion.sampling_logprobs - expected.numpy()).max())
    assert worst > 1e-2


def test_blocks_of_prompts_of_similar_length():
    assert group_by_length([100, 20, 70, 80, 64, 3]) == [[0, 3], [2, 4], [1, 5]]
    assert group_by_length([64, 1, 40]) == [[0, 2, 1]]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
def test_attention_by_products_equals_the_fused_one(dtype: torch.dtype, tolerance: float):
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 2, n, 8, dtype=dtype) for n in (4, 30, 30))
    bias = torch.zeros(3, 1, 1, 30, dtype=dtype).masked_fill(
        torch.arange(30) >= torch.tensor([[[[30]]], [[[7]]], [[[1]]]]), -torch.inf
    )
    for spec in (AttentionSpec(scale=8**-0.5), AttentionSpec(scale=0.5)):
        out, lse = decoding.products(q, k, v, bias, spec)
        fused, fused_lse = decoding._attention(q, k, v, bias, spec)
        torch.testing.assert_close(out, fused, atol=tolerance, rtol=0)
        torch.testing.assert_close(lse.to(fused_lse.dtype), fused_lse, atol=tolerance, rtol=0)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampling_logprobs_equal_a_plain_forward_pass(kind: str, temperature: float):
    policy = make_policy(kind)
    groups = generate(make_engine(policy), prompts([3, 20, 1, 11]), sampling(temperature=temperature), KEY)
    lengths = set()
    for group in groups:
        for completion in group.trajectories:
            log_p = naive_log_p(policy, group.prompt, completion.sampled_token_ids, temperature)
            expected = log_p.gather(-1, torch.from_numpy(completion.sampled_token_ids).unsqueeze(-1)).squeeze(-1)
            np.testing.assert_allclose(completion.sampling_logprobs, expected.numpy(), atol=1e-5)
            lengths.add(len(completion.sampled_token_ids))
    assert len(lengths) > 3  # rows did leave the batch at different times


def test_a_model_with_a_sliding_window():
    policy = policy_of(make_gemma2())
    for group in generate(make_engine(policy), prompts([3, 17, 1]), sampling(), KEY):
        for completion in group.trajectories:
            log_p = naive_log_p(policy, group.prompt, completion.sampled_token_ids, 1.0)
            expected = log_p.gather(-1, torch.from_numpy(completion.sampled_token_ids).unsqueeze(-1)).squeeze(-1)
            np.testing.assert_allclose(completion.sampling_logprobs, expected.numpy(), atol=1e-5)


def test_a_share_without_requests():
    for policy in (make_policy(), policy_of(make_gemma2())):
        assert Sampler(policy, end_token_ids=frozenset({1}), max_num_seqs=4).sample([]) == []


def test_greedy_takes_the_likeliest_token():
    policy = make_policy()
    for group in generate(make_engine(policy), prompts([3, 9]), sampling(temperature=0.0, num_generations=1), KEY):
        ids = group.trajectories[0].sampled_token_ids
        assert naive_log_p(policy, group.prompt, ids, 1.0).argmax(-1).tolist() == ids.tolist()


@examples(10)
@given(order=st.permutations(range(5)), max_num_seqs=st.integers(1, 40), subset=st.integers(1, 5))
def test_a_completion_depends_on_seed_step_prompt_and_index_alone(order, max_num_seqs: int, subset: int):
    policy = make_policy(dtype=torch.float64)
    everything = prompts([3, 9, 1, 14, 6])
    expected = tokens_of(generate(make_engine(policy), everything, sampling(), KEY))
    chosen = order[:subset]
    actual = generate(make_engine(policy, max_num_seqs=max_num_seqs), [everything[i] for i in chosen], sampling(), KEY)
    assert tokens_of(actual) == [expected[i] for i in chosen]
    fewer = generate(make_engine(policy), everything, sampling(num_generations=2), KEY)
    assert tokens_of(fewer) == [group[:2] for group in expected]


def test_streams_differ_by_each_part_of_their_name():
    (prompt, other) = prompts([3, 3])
    (next_epoch,) = prompts([3], epoch=1)
    base = uniform_stream(KEY.call(prompt, 0), 4).tolist()
    assert base == uniform_stream(KEY.call(prompt, 0), 9)[:4].tolist()
    keys = [
        StepKey(purpose="eval", seed=3, step=5).call(prompt, 0),
        StepKey(purpose="train", seed=4, step=5).call(prompt, 0),
        StepKey(purpose="train", seed=3, step=6).call(prompt, 0),
        KEY.call(other, 0),
        KEY.call(next_epoch, 0),
        KEY.call(prompt, 1),
        KEY.call(prompt, 0, turn=1),
        KEY.call(prompt, 0, turn=2),
        KEY.call(prompt, 1, turn=1),
    ]
    streams = {tuple(uniform_stream(key, 4)) for key in keys}
    assert len(streams) == len(keys) and tuple(base) not in streams


def test_streams_of_a_first_turn_stay_as_they_are():
    """A run that goes on with another version samples the same completions."""
    (prompt,) = prompts([3], epoch=2)
    stream = uniform_stream(KEY.call(replace(prompt, id=41), 6), 3)
    assert stream.tolist() == [0.3690576791237342, 0.8788213584399942, 0.28884455522892205]


def test_every_end_token_ends_a_completion():
    policy = make_policy()
    (group,) = generate(make_engine(policy, ends=(1, 5, 9, 20, 30)), prompts([4]), sampling(num_generations=64), KEY)
    ended_by = {int(c.sampled_token_ids[-1]) for c in group.trajectories if c.finish_reason == "stop"}
    assert len(ended_by) >= 3
    for completion in group.trajectories:
        assert not set(completion.sampled_token_ids[:-1].tolist()) & {1, 5, 9, 20, 30}
        if completion.finish_reason == "length":
            assert len(completion.sampled_token_ids) == 24 and int(completion.sampled_token_ids[-1]) not in {
                1,
                5,
                9,
                20,
                30,
            }


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
    engine.update_weights(policy_version=17)
    (group,) = generate(engine, prompts([4]), sampling(), KEY)
    assert policy.model.training
    assert {c.policy_version for c in group.trajectories} == {17}


@pytest.mark.parametrize("name", ["GPT-OSS, short window", "Gemma 2, short window", "Llama 4 (text), short chunks"])
def test_windows_chunks_sinks_and_softcaps_are_decoded(name: str, monkeypatch: pytest.MonkeyPatch):
    """Prompts that are longer than the window, and completions that leave the prompt behind."""
    policy = policy_of(families.make_model(families.FAMILIES[name]))
    assert policy.shares_prompts
    everything = prompts([3, 20, 1, 11, 8])

    def worst() -> float:
        groups = generate(make_engine(policy), everything, sampling(), KEY)
        errors = [
            np.abs(c.sampling_logprobs - naive_logprobs_of(policy, group.prompt, c.sampled_token_ids)).max()
            for group in groups
            for c in group.trajectories
        ]
        return max(errors)

    assert worst() < 1e-5
    first_seen = decoding._first_seen
    monkeypatch.setattr(decoding, "_first_seen", lambda *args: np.maximum(0, first_seen(*args) - 1))
    assert worst() > 1e-3  # a window of one token more is seen


def naive_logprobs_of(policy: Policy, prompt: Prompt, ids: np.ndarray) -> np.ndarray:
    log_p = naive_log_p(policy, prompt, ids, 1.0)
    return log_p.gather(-1, torch.from_numpy(ids).unsqueeze(-1)).squeeze(-1).numpy()


RECURRENT = (
    *("Qwen3-Next", "Qwen3.5 (text)", "Qwen3.5-MoE (text)", "OLMo Hybrid", "Kimi Linear", "LFM2", "LFM2-MoE"),
    *("Granite 4", "Bamba", "Falcon-H1", "Nemotron-H"),
)


def test_time_steps_of_single_tokens_are_limited(monkeypatch: pytest.MonkeyPatch):
    """Nemotron-H has a least time step, which transformers forgets in decoding."""
    model = families.make_model(families.FAMILIES["Nemotron-H"])
    (mixer,) = mixers.find_mixers(model)
    assert mixer.time_step_limit[0] > 0
    mixer.time_step_limit = (0.3, 0.4)  # often reached
    policy = policy_of(model)

    def worst() -> float:
        (group,) = generate(make_engine(policy), prompts([11]), sampling(), KEY)
        return max(
            np.abs(c.sampling_logprobs - naive_logprobs_of(policy, group.prompt, c.sampled_token_ids)).max()
            for c in group.trajectories
        )

    assert worst() < 2e-5
    monkeypatch.setattr(mixers, "_limited_time_steps", lambda mixer: nullcontext())
    assert worst() > 1e-2


@pytest.mark.parametrize(
    "name", mostly_slow(RECURRENT, "Qwen3.5 (text)", "LFM2", "Nemotron-H", reason="one of each kind of state")
)
def test_recurrent_states_are_decoded(name: str, monkeypatch: pytest.MonkeyPatch):
    """Completions start from the state of their prompt, which is computed once, and carry their own from there."""
    policy = policy_of(families.make_model(families.FAMILIES[name]))
    assert policy.shares_prompts
    everything = prompts([3, 20, 1, 70, 8])
    prefilled = []
    packed_logits = Policy.packed_logits

    def counted(policy: Policy, input_ids: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        if args[-1].attn_metadata is not None:
            prefilled.append(len(input_ids))
        return packed_logits(policy, input_ids, *args, **kwargs)

    monkeypatch.setattr(Policy, "packed_logits", counted)

    def worst() -> float:
        # begun when others are under way, and each leaves at its own end
        groups = generate(make_engine(policy, max_num_seqs=9), everything, sampling(), KEY)
        errors = [
            np.abs(c.sampling_logprobs - naive_logprobs_of(policy, group.prompt, c.sampled_token_ids)).max()
            for group in groups
            for c in group.trajectories
        ]
        return max(errors)

    assert worst() < 2e-5
    assert sum(prefilled) == sum(len(p.token_ids) for p in everything)
    keep = decoding.DecodeBatch.keep

    def keeps_states(batch: decoding.DecodeBatch, rows: np.ndarray) -> None:
        states = {key: tuple(x[: len(rows)].clone() for x in parts) for key, parts in batch.states.items()}
        keep(batch, rows)
        batch.states = states

    monkeypatch.setattr(decoding.DecodeBatch, "keep", keeps_states)
    assert worst() > 1e-3  # a state of another completion is seen


@pytest.mark.parametrize("compute_dtype", [None, pytest.param(torch.bfloat16, marks=PACKS_BFLOAT16)])
@pytest.mark.parametrize("tie", [True, False])
def test_packed_weights_compute_the_same(tie: bool, compute_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch):
    model = make_model(tie=tie)
    policy = Policy(model, device=torch.device("cpu"), compute_dtype=compute_dtype, pad_token_id=0)
    everything = prompts([3, 20])
    assert policy.has_plain_head

    def sample() -> list[RolloutGroup]:
        return generate(make_engine(policy), everything, sampling(), KEY)

    products = []
    call = packed_weights.PackedWeight.__call__
    monkeypatch.setattr(
        packed_weights.PackedWeight, "__call__", lambda self, rows: products.append(self) or call(self, rows)
    )
    expected = sample()
    assert not products  # too small to be worth it
    monkeypatch.setattr(sampler, "_PACK_AFTER", 2)
    monkeypatch.setattr(defaults, "PACKED_WEIGHTS_BYTES", 0)
    monkeypatch.setattr(packed_weights, "_LEAST_NUMEL", 0)
    monkeypatch.setattr(packed_weights.PackedLayers, "are_faster", lambda self: True)
    policy._packs = None
    actual = sample()
    assert len(set(products)) == 15  # the layers and the head
    for group, other in zip(actual, expected, strict=True):
        for c, same in zip(group.trajectories, other.trajectories, strict=True):
            if compute_dtype is None:
                assert c.sampled_token_ids.tolist() == same.sampled_token_ids.tolist()
            with policy.autocast():
                log_p = naive_log_p(policy, group.prompt, c.sampled_token_ids, 1.0)
            expected_logprobs = log_p.gather(-1, torch.from_numpy(c.sampled_token_ids).unsqueeze(-1)).squeeze(-1)
            worst = np.abs(c.sampling_logprobs - expected_logprobs.float().numpy()).max()
            assert worst < (1e-5 if compute_dtype is None else policy.logprob_tolerance)
    products.clear()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)  # an update: copies are of the current weights
    (group, _) = sample()
    assert products
    for c in group.trajectories[:1] if compute_dtype is None else ():
        np.testing.assert_allclose(
            c.sampling_logprobs, naive_logprobs_of(policy, group.prompt, c.sampled_token_ids), atol=1e-5
        )
    assert not any("forward" in vars(module) for module in model.modules())


def test_packing_that_is_slower_is_not_used(monkeypatch: pytest.MonkeyPatch):
    policy = make_policy()
    monkeypatch.setattr(defaults, "PACKED_WEIGHTS_BYTES", 0)
    monkeypatch.setattr(packed_weights, "_LEAST_NUMEL", 0)
    clock = iter(range(1000))  # each look takes a second
    monkeypatch.setattr(packed_weights.time, "perf_counter", lambda: next(clock))
    for margin, expected in ((1.1, True), (0.9, False)):
        monkeypatch.setattr(packed_weights, "_MARGIN", margin)
        policy._packs = None
        with policy.sampling():
            policy.pack_weights()
            assert policy._packs is expected
            assert any("forward" in vars(module) for module in policy.model.modules()) is expected


def test_an_interrupt_while_packing_is_measured_leaves_the_layers_alone(monkeypatch: pytest.MonkeyPatch):
    policy = make_policy()
    monkeypatch.setattr(defaults, "PACKED_WEIGHTS_BYTES", 0)
    monkeypatch.setattr(packed_weights, "_LEAST_NUMEL", 0)
    monkeypatch.setattr(
        packed_weights.PackedLayers, "are_faster", mock.Mock(side_effect=KeyboardInterrupt("measuring"))
    )
    with pytest.raises(KeyboardInterrupt, match="measuring"), policy.sampling():
        policy.pack_weights()
    assert not any("forward" in vars(module) for module in policy.model.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_top_p_needs_no_sort_of_the_vocabulary(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    peaked, flat = 4 * torch.randn(20, 300, dtype=dtype), 0.1 * torch.randn(20, 300, dtype=dtype)
    logits = torch.stack([peaked, flat, peaked.round()]).flatten(0, 1)  # with ties
    for top_p in (0.01, 0.5, 0.9, 0.999):
        monkeypatch.setattr(sampler, "_SHORT_TOP_P", 300)
        expected = sampler._last_of_top_p(logits, top_p)
        monkeypatch.setattr(sampler, "_SHORT_TOP_P", 20)
        assert torch.equal(sampler._last_of_top_p(logits, top_p), expected)
