"""The closed form of a training step's operations against those that torch counts, and numbers worked out by hand."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from cohort.config import AdapterConfig, ModelConfig
from cohort.metrics.resources import flops_of
from cohort.models.adapters.adapter_folder import adapter_spec
from cohort.models.adapters.lora import Adapter, AdapterInit
from cohort.plan.hardware import memory_bandwidth, peak_flops
from cohort.plan.timing import ModelFlops, model_flops
from selection import examples
from tiny import VOCAB_SIZE, make_model


def make_moe(**overrides: Any) -> Any:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
        **overrides,
    )
    return AutoModelForCausalLM.from_config(config)


def counted(model: Any, tokens: int) -> tuple[int, int]:
    """Operations that torch counts: of a forward, and of a forward and backward.

    Eager attention is two products over all tokens x tokens pairs, and four in backward: nothing is computed twice.
    """
    model.set_attn_implementation("eager")
    ids = torch.arange(tokens).unsqueeze(0) % VOCAB_SIZE
    with FlopCounterMode(display=False) as both:
        with FlopCounterMode(display=False) as forward:
            loss = model(input_ids=ids, use_cache=False).logits.sum()
        loss.backward()
    return forward.get_total_flops(), both.get_total_flops()


def close(costs: ModelFlops, model: Any, tokens: int) -> None:
    forward, both = counted(model, tokens)
    sizes = {"tokens": tokens, "loss_tokens": tokens, "pairs": tokens**2}
    # rotary embeddings have a product of their own, of dim / 2 operations per token, once in a model
    assert costs.forward(**sizes) == pytest.approx(forward, rel=0.01)
    assert costs.forward_backward(**sizes) == pytest.approx(both, rel=0.01)


@examples(15)
@given(
    kind=st.sampled_from(["llama", "qwen2", "qwen3"]),
    tie=st.booleans(),
    layers=st.integers(1, 3),
    heads=st.sampled_from([(4, 4), (4, 2), (2, 1)]),
    dim=st.sampled_from([8, 16]),
    hidden=st.sampled_from([32, 48]),
    inner=st.sampled_from([40, 96]),
    tokens=st.integers(2, 60),
)
def test_dense_models(kind: str, tie: bool, layers: int, heads, dim: int, hidden: int, inner: int, tokens: int):
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner, "head_dim": dim}
    model = make_model(kind, tie=tie, num_attention_heads=heads[0], num_key_value_heads=heads[1], **sizes)
    close(flops_of(model), model, tokens)


def test_of_experts_those_that_a_token_is_sent_to():
    model = make_moe(experts_implementation="eager")
    close(flops_of(model), model, 48)
    everything = sum(2 * p.numel() for n, p in model.named_parameters() if p.ndim >= 2 and "embed" not in n)
    costs = flops_of(model)
    assert costs.body_forward + costs.head_forward < 0.7 * everything  # the negative control: all experts


def test_frozen_parts_have_no_gradient_of_their_own():
    model = make_model("llama", tie=False)
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "layers.1.mlp" in name  # what comes before needs no backward at all
    costs, whole = flops_of(model), flops_of(make_model("llama", tie=False))
    assert costs.forward(tokens=9, loss_tokens=9, pairs=81) == whole.forward(tokens=9, loss_tokens=9, pairs=81)
    mlp, head = 3 * 2 * 32 * 64, 2 * 32 * VOCAB_SIZE
    assert costs.body_backward == 2 * mlp - 2 * 32 * 64  # gradients of three weights, and of two of their inputs
    assert costs.head_backward == head
    model.requires_grad_(False)
    costs = flops_of(model)
    assert costs.body_backward == costs.head_backward == costs.pair_backward == 0


@pytest.mark.parametrize("targets", ["all-linear", ("down_proj", "lm_head"), ("embed_tokens",), ("lm_head",)])
@pytest.mark.parametrize("tie", [True, False])
def test_adapters(targets: Any, tie: bool):
    """Against torch's count. What the first layer computes before its adapter, and attention there, has no backward."""
    model = make_model("llama", tie=tie, num_hidden_layers=6)
    settings = ModelConfig(path="m", adapter=AdapterConfig(rank=2, targets=targets))
    start = AdapterInit(spec=adapter_spec(settings, model), seed=0, weights=None, reference=None)
    Adapter(model, start, trainable=True).initialize()
    forward, both = counted(model, 40)
    costs, sizes = flops_of(model), {"tokens": 40, "loss_tokens": 40, "pairs": 1600}
    assert costs.forward(**sizes) == pytest.approx(forward, rel=0.01)
    assert costs.forward_backward(**sizes) == pytest.approx(both, rel=0.04)


def test_an_adapter_takes_4_operations_per_frozen_weight():
    """Literal: a layer of 6 x 4 after a trained one, an adapter of rank 2 on it, a head of 10 x 4 with another."""
    layer, head = "model.layers.1.mlp.up_proj", "lm_head"
    parameters = [
        ("model.layers.0.norm_matrix.lora_A.default.weight", (1, 4), True),
        (f"{layer}.base_layer.weight", (6, 4), False),
        (f"{layer}.lora_A.default.weight", (2, 4), True),
        (f"{layer}.lora_A.start.weight", (2, 4), False),
        (f"{layer}.lora_B.default.weight", (6, 2), True),
        (f"{head}.base_layer.weight", (10, 4), False),
        (f"{head}.lora_A.default.weight", (2, 4), True),
        (f"{head}.lora_B.default.weight", (10, 2), True),
    ]
    costs = model_flops(parameters, {"num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 1})
    assert costs.body_forward == 2 * (4 + 24 + 8 + 12)
    assert costs.body_backward == 2 * (4 + 24 + 2 * (8 + 12))  # the first has nothing trained before it
    assert (costs.head_forward, costs.head_backward) == (2 * (40 + 8 + 20), 2 * (40 + 2 * (8 + 20)))


def test_numbers_by_hand():
    parameters = [
        ("model.embed_tokens.weight", (10, 4), True),
        ("model.layers.0.self_attn.q_proj.weight", (6, 4), True),
        ("model.layers.0.input_layernorm.weight", (4,), True),
    ]
    costs = model_flops(parameters, {"num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 3})
    assert (costs.body_forward, costs.body_backward) == (48, 96)
    assert (costs.head_forward, costs.head_backward) == (80, 160)  # tied: the embedding's table
    assert (costs.pair_forward, costs.pair_backward) == (4 * 2 * 3, 8 * 2 * 3)
    assert costs.forward_backward(tokens=5, loss_tokens=2, pairs=15) == 5 * 144 + 2 * 240 + 15 * 72


def test_layers_without_full_attention_have_no_pairs():
    config = {"num_hidden_layers": 3, "num_attention_heads": 2, "head_dim": 3}
    types = ["linear_attention", "full_attention", "sliding_attention"]
    assert model_flops([], config | {"layer_types": types}).pair_forward == 24
    blocks = ["linear_attention", "moe", "full_attention"]  # Nemotron-H
    assert model_flops([], config | {"layers_block_type": blocks}).pair_forward == 24
    assert model_flops([], config | {"attn_layer_indices": [1]}).pair_forward == 24  # Bamba


def test_queries_of_latent_attention_are_longer_than_values():
    config = {"num_hidden_layers": 1, "num_attention_heads": 2, "kv_lora_rank": 4}
    dims = {"qk_nope_head_dim": 5, "qk_rope_head_dim": 3, "v_head_dim": 7}
    assert model_flops([], config | dims).pair_forward == 2 * 2 * (8 + 7)


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 PCIe", "bfloat16", 756.5),
        ("NVIDIA H200", "float16", 989.4),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312.0),
        ("NVIDIA L4", "bfloat16", 121.0),
        ("NVIDIA L40S", "bfloat16", 362.0),
        ("NVIDIA GeForce RTX 4090", "float32", 82.6),
        ("NVIDIA A100-SXM4-80GB", "float32", 19.5),
    ],
)
def test_peaks_of_gpus(name: str, dtype: str, tera: float):
    assert peak_flops(name, dtype) == tera * 1e12


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 3.35),
        ("NVIDIA H200", 4.8),
        ("NVIDIA A100 80GB PCIe", 1.935),
        ("NVIDIA A100-SXM4-40GB", 1.555),
        ("NVIDIA L4", 0.3),
    ],
)
def test_bandwidths_of_gpus(name: str, tera: float):
    assert memory_bandwidth(name) == tera * 1e12


def test_what_has_no_known_peak():
    assert peak_flops("NVIDIA A10G", "bfloat16") is memory_bandwidth("NVIDIA A10G") is None  # not an A10
    assert peak_flops("AMD Instinct MI250", "bfloat16") is None
    assert peak_flops("NVIDIA H100 80GB HBM3", "float64") is None
    assert peak_flops("NVIDIA A100-SXM4-80GB", "float32", tf32=True) == 156e12
