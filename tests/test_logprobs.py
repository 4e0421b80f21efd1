"""Law 2 for the logprobs: the fast path equals one unpadded forward per completion with full logits."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GraniteConfig, MistralConfig
from transformers.masking_utils import AttentionMaskInterface

from cohort.packing import collate
from cohort.policy import Policy, attention, linear_logprobs
from cohort.policy.forward import Layout
from cohort.policy.load import enable_gradient_checkpointing
from cohort.segments import ROOT, SegmentBlock, Segments, lay_out
from tiny import (
    CONFIGS,
    SIZES,
    VOCAB_SIZE,
    gradients,
    make_gemma2,
    make_model,
    make_policy,
    naive_logprobs,
    pack_for,
    policy_of,
    random_sequences,
    relative_error,
)

LENGTHS = [(5, [7, 1, 3]), (1, [1]), (9, [3, 12]), (4, [1, 1]), (7, [8, 2, 5]), (1, [4, 1, 2])]


def compare_with_naive(
    policy: Policy, *, temperature: float = 1.0, budget: int = 40, lengths=LENGTHS
) -> tuple[float, float, float]:
    """Largest difference of logprobs and entropies, and largest relative error of a gradient."""
    sequences = random_sequences(lengths)
    (batch,) = pack_for(policy, sequences, budget)
    naive = [naive_logprobs(policy.model, s, temperature) for s in sequences]
    torch.cat([logprobs for logprobs, _ in naive]).sum().backward()
    expected = gradients(policy.model)
    worst_logprob = worst_entropy = 0.0
    for mine in batch.micro_batches:
        micro_batch = collate(mine, share_prompts=policy.shares_prompts)
        logprobs, entropy = policy.logprobs(micro_batch, temperature=temperature)
        logprobs.sum().backward()
        for i, sequence in enumerate(mine):
            tokens = micro_batch.sequence_ids == i
            naive_logprob, naive_entropy = naive[sequence.index]
            worst_logprob = max(worst_logprob, (logprobs[tokens] - naive_logprob).abs().max().item())
            worst_entropy = max(worst_entropy, (entropy[tokens] - naive_entropy).abs().max().item())
    actual = gradients(policy.model)
    assert actual.keys() == expected.keys()
    return worst_logprob, worst_entropy, max(relative_error(actual[k], expected[k]) for k in expected)


@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("kind", CONFIGS)
def test_logprobs_equal_naive_ones_in_every_layout(kind: str, tie: bool, layout: Layout):
    policy = make_policy(kind, tie=tie, dtype=torch.float64)
    assert policy.layout == "shared"
    policy.traits = replace(policy.traits, layout=layout)
    logprob, entropy, gradient = compare_with_naive(policy, temperature=0.7)
    assert logprob < 1e-6 and entropy < 1e-6  # the library's RMSNorm computes in float32
    assert gradient < 1e-6


@pytest.mark.parametrize("layout", ["shared", "packed"])
def test_segments_of_very_different_lengths(layout: Layout):
    """Attention takes them in several blocks; the row is one."""
    policy = make_policy(dtype=torch.float64)
    policy.traits = replace(policy.traits, layout=layout)
    lengths = [(150, [3, 90, 70, 1]), (70, [200, 2]), (3, [100, 180]), (2, [5])]
    assert max(compare_with_naive(policy, budget=100_000, lengths=lengths)) < 1e-6


def test_logprobs_equal_naive_ones_in_float32():
    logprob, entropy, gradient = compare_with_naive(make_policy())
    assert logprob < 1e-5 and entropy < 1e-5 and gradient < 1e-5


@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
def test_gradient_checkpointing_changes_nothing(layout: Layout):
    model = make_model(dtype=torch.float64)
    model.train()
    enable_gradient_checkpointing(model)
    policy = policy_of(model)
    assert policy.shares_prompts
    policy.traits = replace(policy.traits, layout=layout)
    assert max(compare_with_naive(policy)) < 1e-6


@pytest.mark.parametrize("window", [8, 64])
def test_a_softcapped_head_and_windows(window: int):
    """A model whose window could cut a prompt off is computed in whole rows; the head is known either way."""
    types = ["sliding_attention" if window == 8 else "full_attention", "full_attention"]
    policy = policy_of(make_gemma2(dtype=torch.float64, sliding_window=window, layer_types=types))
    assert policy.has_plain_head
    assert policy.layout == ("shared" if window == 64 else "padded")
    assert max(compare_with_naive(policy)) < 1e-6


def test_attention_with_a_softcap_is_left_to_the_library():
    model = make_gemma2(
        dtype=torch.float64, layer_types=["full_attention"] * 2, attn_logit_softcapping=2.0, attn_implementation="eager"
    )
    policy = policy_of(model)
    assert policy.layout == "padded"
    assert max(compare_with_naive(policy)) < 1e-6


def test_a_window_that_no_layer_type_tells():
    policy = policy_of(
        AutoModelForCausalLM.from_config(MistralConfig(**SIZES, vocab_size=VOCAB_SIZE, sliding_window=4))
    )
    assert policy.layout == "padded"
    assert max(compare_with_naive(policy)) < 1e-5


def test_a_scaled_head():
    torch.manual_seed(0)
    config = GraniteConfig(**SIZES, vocab_size=VOCAB_SIZE, pad_token_id=0, logits_scaling=4.0, attention_multiplier=0.3)
    policy = policy_of(AutoModelForCausalLM.from_config(config, dtype=torch.float64))
    assert policy.has_plain_head
    assert policy.layout == "shared"
    assert max(compare_with_naive(policy)) < 1e-6


def test_completions_that_share_a_prompt_would_share_its_dropout():
    assert make_policy(attention_dropout=0.1).layout == "packed"


def test_attention_dropout_drops():
    model = make_model(attention_dropout=0.5)
    policy = policy_of(model)
    micro_batch = collate(random_sequences(LENGTHS), share_prompts=False)

    def logprobs(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return policy.logprobs(micro_batch, temperature=1.0)[0].detach()

    model.train()
    first, again, other = logprobs(0), logprobs(0), logprobs(1)
    assert torch.equal(first, again) and not torch.allclose(first, other)
    model.eval()
    assert torch.equal(logprobs(0), logprobs(1))


def test_grouped_heads_as_further_queries():
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, heads, n, 8) for heads, n in ((6, 5), (2, 9), (2, 9)))
    mask = torch.cat([torch.rand(3, 1, 5, 4) < 0.5, torch.ones(3, 1, 5, 5, dtype=torch.bool).tril()], dim=-1)
    torch.testing.assert_close(attention._folded(q, k, v, mask, 0.3, 0.0), attention._plain(q, k, v, mask, 0.3, 0.0))


def test_a_prompt_whose_gradient_is_cut_would_be_noticed(monkeypatch: pytest.MonkeyPatch):
    """Negative control: the comparison fails when branches do not send their gradient back into the prompt."""
    block_attention = attention._block

    def detached(query, key, value, block, *rest):
        in_root = torch.zeros(len(key), 1, 1, dtype=torch.bool)
        in_root[block.keys[:, : block.keys.shape[1] - block.queries.shape[1]]] = True
        key, value = (torch.where(in_root, x.detach(), x) for x in (key, value))
        return block_attention(query, key, value, block, *rest)

    monkeypatch.setattr(attention, "_block", detached)
    policy = make_policy(dtype=torch.float64)
    assert policy.shares_prompts
    logprob, _, gradient = compare_with_naive(policy)
    assert logprob < 1e-6 and gradient > 0.01


def test_a_completion_that_sees_another_would_be_noticed(monkeypatch: pytest.MonkeyPatch):
    """Negative control: the comparison fails when the branches of a root are laid out as if they were one."""

    def joined(lengths: list[int], roots: list[int]) -> Segments:
        segments: list[tuple[int, int]] = []
        for length, root in zip(lengths, roots, strict=True):
            if root != ROOT and segments[-1][1] == root:
                length += segments.pop()[0]
            segments.append((length, root))
        assert [root for _, root in segments] == roots[: len(segments)]  # roots are still where branches point
        return lay_out(*zip(*segments, strict=True))

    monkeypatch.setattr("cohort.packing.row.lay_out", joined)
    policy = make_policy(dtype=torch.float64)
    assert policy.shares_prompts
    logprob, _, gradient = compare_with_naive(policy, lengths=[(5, [7, 4, 3])])
    assert logprob > 0.01 and gradient > 0.01


def test_the_padding_of_a_prompt_would_be_noticed(monkeypatch: pytest.MonkeyPatch):
    """Negative control: the comparison fails when the mask does not hide what fills a shorter root."""
    policy = make_policy(dtype=torch.float64)
    right_mask = SegmentBlock.mask.func

    def mask_of_full_roots(block: SegmentBlock) -> torch.Tensor | None:
        num_root_keys = block.keys.shape[1] - block.queries.shape[1]
        return right_mask(replace(block, root_lengths=torch.tensor([num_root_keys])))

    monkeypatch.setattr(SegmentBlock, "mask", property(mask_of_full_roots))
    logprob, _, gradient = compare_with_naive(policy, budget=1000)
    assert logprob > 0.01 and gradient > 0.01


def test_a_model_that_does_not_listen_is_computed_in_padded_rows(monkeypatch: pytest.MonkeyPatch):
    """Whatever keeps the segments from a layer's attention is found when the policy is made."""
    model = make_model(dtype=torch.float64)
    forward = model.model.forward
    monkeypatch.setattr(model.model, "forward", lambda *args, segments=None, **kwargs: forward(*args, **kwargs))
    policy = policy_of(model)
    assert policy.layout == "padded"
    assert model.config._attn_implementation == "sdpa"
    assert max(compare_with_naive(policy)) < 1e-6


def test_calls_without_segments_are_the_librarys_own():
    own, model = make_model(), make_model()
    policy_of(model)
    assert (own.config._attn_implementation, model.config._attn_implementation) == ("sdpa", attention.NAME)
    ids = torch.from_numpy(np.random.default_rng(0).integers(2, VOCAB_SIZE, (3, 9)))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    for kwargs in ({}, {"attention_mask": mask}):
        first, second = (m(input_ids=ids, use_cache=True, **kwargs) for m in (own, model))
        assert torch.equal(first.logits, second.logits)
        mask = torch.cat([mask, mask.new_ones(3, 1)], dim=1)
        kwargs = {"attention_mask": mask} if kwargs else {}
        first, second = (
            m(input_ids=ids[:, :1], past_key_values=out.past_key_values, **kwargs)
            for m, out in ((own, first), (model, second))
        )
        assert torch.equal(first.logits, second.logits)


def test_no_mask_of_the_whole_row_is_made(monkeypatch: pytest.MonkeyPatch):
    policy = make_policy()
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, attention.NAME, None)
    policy.logprobs(collate(random_sequences(LENGTHS), share_prompts=True), temperature=1.0)


def test_the_saved_model_does_not_know_of_packed_rows(tmp_path):
    policy = make_policy()
    policy.model.save_pretrained(tmp_path)
    assert attention.NAME not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
@pytest.mark.parametrize("tie", [True, False])
def test_an_empty_micro_batch_has_a_gradient_of_zero(tie: bool, layout: Layout):
    policy = make_policy(tie=tie)
    policy.traits = replace(policy.traits, layout=layout)
    logprobs, entropy = policy.logprobs(collate([], share_prompts=True), temperature=1.0)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    for name, parameter in policy.model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


def test_an_unknown_head_falls_back_to_the_models_own_logits():
    model = make_model(dtype=torch.float64)
    model.lm_head.register_forward_hook(lambda module, inputs, output: output * 1.5)
    policy = policy_of(model)
    assert not policy.has_plain_head
    assert policy.shares_prompts
    assert max(compare_with_naive(policy)) < 1e-6


@settings(max_examples=30, deadline=None)
@given(
    num_tokens=st.integers(1, 17),
    tile_rows=st.integers(1, 20),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    softcap=st.sampled_from([None, 2.0]),
    bias=st.booleans(),
)
def test_tiles_do_not_change_values_or_gradients(num_tokens, tile_rows, temperature, softcap, bias):
    torch.manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    bias_V = torch.randn(11, dtype=torch.float64, requires_grad=True) if bias else None
    targets = torch.randint(0, 11, (num_tokens,))
    inputs = [x for x in (hidden, weight, bias_V) if x is not None]
    logits = hidden @ weight.T + (bias_V if bias_V is not None else 0)
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    expected = torch.log_softmax(logits / temperature, -1)
    upstream = torch.randn(num_tokens, dtype=torch.float64)
    expected_grads = torch.autograd.grad((expected[torch.arange(num_tokens), targets] * upstream).sum(), inputs)
    actual, entropy = linear_logprobs(
        hidden,
        weight,
        targets,
        bias=bias_V,
        temperature=temperature,
        softcap=softcap,
        tile_elements=11 * tile_rows,
    )
    actual_grads = torch.autograd.grad((actual * upstream).sum(), inputs)
    torch.testing.assert_close(actual, expected[torch.arange(num_tokens), targets])
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1).detach())
    torch.testing.assert_close(actual_grads, expected_grads)
    assert not entropy.requires_grad


def test_bfloat16_inputs_get_float32_logits():
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 256).bfloat16(), (torch.randn(1000, 256) * 0.2).bfloat16()
    targets = torch.randint(0, 1000, (64,))
    exact = torch.log_softmax(hidden.double() @ weight.double().T, -1)[torch.arange(64), targets]
    logprobs, _ = linear_logprobs(hidden, weight, targets)
    assert logprobs.dtype == torch.float32
    assert (logprobs - exact).abs().max() < 1e-5  # logits rounded to bfloat16 would be off by 1e-2
