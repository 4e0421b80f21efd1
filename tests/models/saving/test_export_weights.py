"""Exported weights are those of a saved model folder: names, shapes and values."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from cohort.models.saving import TensorSpec, stream_weights, weight_specs
from ranks import RanksOnDemand
from tiny import SIZES, VOCAB_SIZE, make_model, make_tokenizer, policy_of

MODELS = ["tied", "untied", "experts"]


def make(kind: str) -> Any:
    if kind != "experts":
        return make_model("qwen3", tie=kind == "tied", num_hidden_layers=11)  # layer 10 sorts before layer 2 as text
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **SIZES, vocab_size=VOCAB_SIZE, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize("kind", MODELS)
def test_names_shapes_and_values_are_those_of_a_saved_folder(kind: str, tmp_path: Path):
    model = make(kind)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    policy = policy_of(model)
    exported = list(stream_weights(policy, torch.float32))
    assert len(exported) == len(saved)  # no name comes twice
    assert {name: tuple(tensor.shape) for name, tensor in exported} == {n: tuple(t.shape) for n, t in saved.items()}
    assert all(torch.equal(tensor, saved[name]) for name, tensor in exported)
    assert ("lm_head.weight" in saved) == (kind != "tied")
    if kind == "experts":
        assert tuple(saved["model.layers.1.mlp.experts.2.gate_proj.weight"].shape) == (16, 32)
    stream = list(stream_weights(policy, torch.bfloat16))
    assert weight_specs(policy, torch.bfloat16) == [TensorSpec(n, tuple(t.shape), t.dtype) for n, t in stream]
    assert {tensor.dtype for _, tensor in stream} == {torch.bfloat16}
    assert not any(tensor.requires_grad for _, tensor in stream)


def test_every_rank_of_a_sharded_policy_streams_the_whole_weights(tmp_path: Path):
    paths = []
    for kind in ("tied", "experts"):
        path = tmp_path / kind
        make(kind).save_pretrained(path)
        make_tokenizer().save_pretrained(path)
        paths.append(str(path))
    result = RanksOnDemand(tmp_path)(2, "export", *paths)
    for path in paths:
        saved = load_file(Path(path) / "model.safetensors")
        specs = [TensorSpec(n, tuple(t.shape), t.dtype) for n, t in result[path]["weights"].items()]
        assert result[path]["specs"] == specs
        assert {name: tensor.shape for name, tensor in saved.items()} == {s.name: s.shape for s in specs}
        assert all(torch.equal(tensor, saved[name]) for name, tensor in result[path]["weights"].items())
        assert result[path]["same"] == [True, True]
