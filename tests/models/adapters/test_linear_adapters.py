"""Adapters on the head, which compute what the model's own logits are."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from tiny import gradients, make_gemma2, make_model, policy_of


def lora_model(make: Callable[..., Any] = make_model, **config: Any) -> Any:
    """A model whose head alone has an adapter; and peft's wrapper, which switches it."""
    adapted = {"r": 2, "lora_alpha": 3, "target_modules": ["lm_head"], "init_lora_weights": False, **config}
    torch.manual_seed(1)
    wrapper = get_peft_model(make(dtype=torch.float64), LoraConfig(**adapted))
    return wrapper, wrapper.get_base_model()


def head_logprobs(policy: Any, input_ids: Tensor, targets: Tensor) -> Tensor:
    hidden = policy.model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state[0]
    return policy._head.logprobs(hidden, targets, temperature=1.0, entropy=True)[0]


@pytest.mark.parametrize("make", [partial(make_model, tie=False), partial(make_gemma2, tie_word_embeddings=False)])
def test_an_adapter_on_the_head_equals_the_models_own_logits(make: Callable[..., Any]):
    wrapper, model = lora_model(make)
    policy = policy_of(model)
    assert policy.has_plain_head
    ids, targets = torch.arange(2, 9).unsqueeze(0), torch.arange(3, 10)

    def own_logprobs() -> Tensor:
        logits = model(input_ids=ids, use_cache=False).logits[0]
        return torch.log_softmax(logits, -1).gather(1, targets.unsqueeze(1)).squeeze(1)

    expected = own_logprobs()
    (expected * torch.arange(7)).sum().backward()
    expected_grads = gradients(model)
    assert {name.split(".")[-3] for name in expected_grads} == {"lora_A", "lora_B"}
    actual = head_logprobs(policy, ids, targets)
    (actual * torch.arange(7)).sum().backward()
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradients(model), expected_grads, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        policy.next_token_logits(input_ids=ids)[0], model(input_ids=ids).logits[0, -1], rtol=1e-10, atol=1e-10
    )
    with wrapper.disable_adapter():  # as for the reference's logprobs
        without = own_logprobs()
        torch.testing.assert_close(head_logprobs(policy, ids, targets), without, rtol=1e-10, atol=1e-10)
    assert (without - expected).abs().max() > 1e-3
    wrapper.merge_adapter()
    torch.testing.assert_close(head_logprobs(policy, ids, targets), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("config", [{"lora_dropout": 0.1}, {"use_dora": True}, {"lora_bias": True}])
def test_other_adapters_are_left_to_the_model(config: dict[str, Any]):
    assert not policy_of(lora_model(**config)[1]).has_plain_head
