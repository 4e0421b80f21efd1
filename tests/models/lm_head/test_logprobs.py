"""Law 2 for the logprobs: the fast path equals one unpadded forward per completion with full logits."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GraniteConfig
from transformers.masking_utils import AttentionMaskInterface

from cohort.models import Policy, attention
from cohort.models.attention import cascade
from cohort.models.batch_layout import Layout
from cohort.models.kv_cache import cache_argument
from cohort.packing import collate
from test_law_two import differences, fast, naive
from tiny import (
    SIZES,
    VOCAB_SIZE,
    make_model,
    make_policy,
    policy_of,
    random_sequences,
)

LENGTHS = [(5, [7, 1, 3]), (1, [1]), (9, [3, 12]), (4, [1, 1]), (7, [8, 2, 5]), (1, [4, 1, 2])]


def worst(policy: Policy) -> float:
    """Largest difference from the naive computation: of a logprob or entropy, or relative of a gradient."""
    sequences = random_sequences(LENGTHS)
    return max(differences(fast(policy, sequences, policy.layout), naive(policy.model, sequences)))


def test_a_scaled_head():
    torch.manual_seed(0)
    config = GraniteConfig(**SIZES, vocab_size=VOCAB_SIZE, pad_token_id=0, logits_scaling=4.0, attention_multiplier=0.3)
    policy = policy_of(AutoModelForCausalLM.from_config(config, dtype=torch.float64))
    assert policy.has_plain_head
    assert policy.layout == "shared"
    assert worst(policy) < 1e-6


def test_a_model_that_does_not_listen_is_computed_in_padded_rows(monkeypatch: pytest.MonkeyPatch):
    """Whatever keeps the segments from a layer's attention is found when the policy is made."""
    model = make_model(dtype=torch.float64)
    forward = model.model.forward

    def deaf(*args, attention_mask=None, **kwargs):
        return forward(*args, attention_mask=None if attention_mask is None else attention_mask.clone(), **kwargs)

    monkeypatch.setattr(model.model, "forward", deaf)
    policy = policy_of(model)
    assert policy.layout == "padded"
    assert policy.traits.reason.startswith("a packed row gives outputs that differ from the model's (relative error ")
    assert model.config._attn_implementation == "sdpa"
    assert worst(policy) < 1e-6


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
        name = cache_argument(own)
        first, second = (
            m(input_ids=ids[:, :1], **{name: out[name]}, **kwargs) for m, out in ((own, first), (model, second))
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
    assert worst(policy) < 1e-6


def test_a_backward_that_is_wrong_is_found_when_the_policy_is_made(monkeypatch: pytest.MonkeyPatch):
    """Outputs alone would not tell: a prompt gets no gradient from its completions."""
    backward = cascade._DenseKernel.backward

    def detached(*args):
        grads = backward(*args)
        return grads if args[-1].causal else (grads[0], *(torch.zeros_like(g) for g in grads[1:]))

    monkeypatch.setattr(cascade._DenseKernel, "backward", detached)
    policy = make_policy(dtype=torch.float64)
    assert policy.layout == "packed"
    assert policy.traits.reason.startswith("a row with shared prompts gives gradients that differ from the model's")
