"""Law 2 for the logprobs: the fast path equals one unpadded forward per completion with full logits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GraniteConfig

from cohort.packing import pack
from cohort.policy import Policy, linear_logprobs
from cohort.policy.load import enable_gradient_checkpointing
from tiny import (
    CONFIGS,
    SIZES,
    VOCAB_SIZE,
    gradients,
    make_gemma2,
    make_model,
    make_policy,
    naive_logprobs,
    policy_of,
    random_sequences,
    relative_error,
)

LENGTHS = [(5, [7, 1, 3]), (1, [1]), (9, [3, 12]), (4, [1, 1]), (7, [8, 2, 5])]


def compare_with_naive(
    policy: Policy, *, temperature: float = 1.0, budget: int = 40, share_prompts: bool | None = None
) -> tuple[float, float, float]:
    """Largest difference of logprobs and entropies, and largest relative error of a gradient."""
    sequences = random_sequences(LENGTHS)
    share = policy.shares_prompts if share_prompts is None else share_prompts
    batch = pack(sequences, micro_batch_tokens=budget, pad_token_id=0, share_prompts=share)
    naive = [naive_logprobs(policy.model, s, temperature) for s in sequences]
    torch.cat([logprobs for logprobs, _ in naive]).sum().backward()
    expected = gradients(policy.model)
    worst_logprob = worst_entropy = 0.0
    for micro_batch in batch.micro_batches:
        logprobs, entropy = policy.logprobs(micro_batch, temperature=temperature)
        logprobs.sum().backward()
        for n in micro_batch.sequence_ids.unique().tolist():
            mine = micro_batch.sequence_ids == n
            worst_logprob = max(worst_logprob, (logprobs[mine] - naive[n][0]).abs().max().item())
            worst_entropy = max(worst_entropy, (entropy[mine] - naive[n][1]).abs().max().item())
    actual = gradients(policy.model)
    assert actual.keys() == expected.keys()
    return worst_logprob, worst_entropy, max(relative_error(actual[k], expected[k]) for k in expected)


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("kind", CONFIGS)
def test_packed_logprobs_equal_naive_ones(kind: str, tie: bool, share_prompts: bool):
    policy = make_policy(kind, tie=tie, dtype=torch.float64)
    assert policy.shares_prompts
    logprob, entropy, gradient = compare_with_naive(policy, temperature=0.7, share_prompts=share_prompts)
    assert logprob < 1e-6 and entropy < 1e-6  # the library's RMSNorm computes in float32
    assert gradient < 1e-6


def test_packed_logprobs_equal_naive_ones_in_float32():
    logprob, entropy, gradient = compare_with_naive(make_policy())
    assert logprob < 1e-5 and entropy < 1e-5 and gradient < 1e-5


def test_gradient_checkpointing_changes_nothing():
    model = make_model(dtype=torch.float64)
    model.train()
    enable_gradient_checkpointing(model)
    policy = policy_of(model)
    assert not policy.shares_prompts
    assert max(compare_with_naive(policy)) < 1e-6


@pytest.mark.parametrize("window", [8, 64])
def test_a_softcapped_head_and_windows(window: int):
    """A model whose window could cut a prompt off is computed in whole rows; the head is known either way."""
    types = ["sliding_attention" if window == 8 else "full_attention", "full_attention"]
    policy = policy_of(make_gemma2(dtype=torch.float64, sliding_window=window, layer_types=types))
    assert policy.has_plain_head
    assert policy.shares_prompts == (window == 64)
    assert max(compare_with_naive(policy)) < 1e-6


def test_a_scaled_head():
    torch.manual_seed(0)
    config = GraniteConfig(**SIZES, vocab_size=VOCAB_SIZE, pad_token_id=0, logits_scaling=4.0)
    policy = policy_of(AutoModelForCausalLM.from_config(config, dtype=torch.float64))
    assert policy.has_plain_head
    assert max(compare_with_naive(policy)) < 1e-6


def test_a_prompt_whose_gradient_is_cut_would_be_noticed(monkeypatch: pytest.MonkeyPatch):
    """Negative control: the comparison fails when branches do not send their gradient back into the prompt."""
    from transformers.cache_utils import DynamicCache

    reorder = DynamicCache.reorder_cache

    def detached(self, beam_idx):
        reorder(self, beam_idx)
        for layer in self.layers:
            layer.keys, layer.values = layer.keys.detach(), layer.values.detach()

    monkeypatch.setattr(DynamicCache, "reorder_cache", detached)
    logprob, _, gradient = compare_with_naive(make_policy(dtype=torch.float64))
    assert logprob < 1e-6 and gradient > 0.01


def test_an_unknown_head_falls_back_to_the_models_own_logits():
    model = make_model(dtype=torch.float64)
    model.lm_head.register_forward_hook(lambda module, inputs, output: output * 1.5)
    policy = policy_of(model)
    assert not policy.has_plain_head
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
