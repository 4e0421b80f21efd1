"""Weights that the files hold in another form: what comes of them is what the library makes, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from cohort.config import ModelConfig
from cohort.errors import UserError
from cohort.models import SaveOptions, save_policy
from cohort.models.loading.load_weights import load_model_weights
from cohort.models.loading.meta_device import match_weights, meta_model
from cohort.models.loading.safetensors_files import stored_weights
from live_bytes import LiveBytes
from test_loading import assert_same, load, save_family, without_the_library  # noqa: F401
from tiny import SIZES, VOCAB_SIZE, make_tokenizer

EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "mixtral": (MixtralConfig, {"num_local_experts": 5}),  # a router of another name too
    "qwen2 moe": (Qwen2MoeConfig, {**EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3 moe": (Qwen3MoeConfig, {**EXPERTS, "head_dim": 8, "mlp_only_layers": [0]}),
    "qwen3 moe tied": (Qwen3MoeConfig, {**EXPERTS, "head_dim": 8, "tie_word_embeddings": True}),
    "olmoe": (OlmoeConfig, {"num_experts": 5, "num_experts_per_tok": 2}),
    "deepseek v3": (
        DeepseekV3Config,
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
        },
    ),
}


def save(path: Path, family: str, **saving: Any) -> Path:
    return save_family(path, *FAMILIES[family], **saving)


@pytest.mark.usefixtures("without_the_library")
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_become_what_the_library_makes_of_them(tmp_path, family):
    path = save(tmp_path / "model", family, max_shard_size="20KB")
    assert any("experts.3." in name for name in stored_weights(path))
    for dtype in ("float32",) if family == "deepseek v3" else ("float32", "bfloat16"):  # it keeps some float32
        assert_same(load(path, dtype).model, AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)))


@pytest.mark.usefixtures("without_the_library")
def test_a_conversion_holds_one_expert_besides_the_model(tmp_path):
    path = save(tmp_path / "model", "qwen3 moe")
    config = ModelConfig(path=str(path), dtype="bfloat16")
    model = meta_model(config)
    places = match_weights(model, stored_weights(path))
    assert places is not None
    own = sum(2 * p.numel() for p in model.parameters())
    plain = 4 * VOCAB_SIZE * SIZES["hidden_size"]  # the embedding as it is stored, the largest that is not converted
    with LiveBytes() as live:
        load_model_weights(model, places, torch.device("cpu"))
    fused = 2 * model.model.layers[1].mlp.experts.gate_up_proj.numel()
    assert own < live.most <= own + plain < own + plain + fused


def test_what_the_files_lack_is_left_to_the_library_which_refuses(tmp_path):
    path = save(tmp_path / "model", "mixtral")
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.block_sparse_moe.experts.4.w3.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    assert match_weights(meta_model(ModelConfig(path=str(path))), stored_weights(path)) is None
    with pytest.raises(UserError, match=r"model\.path: .*cannot load the model|weights are missing"):
        load(path)


def test_experts_of_another_size_than_config_json_says(tmp_path):
    path = save(tmp_path / "model", "qwen3 moe")
    config = AutoConfig.from_pretrained(path)
    config.moe_intermediate_size = 24
    config.save_pretrained(path)
    with pytest.raises(UserError, match=r"gate_up_proj has rows of shape \[32, 32\], but config.json says"):
        load(path)


@pytest.mark.parametrize("family", ["mixtral", "qwen3 moe tied"])
def test_experts_are_saved_as_they_were_stored(tmp_path, family):
    """One tensor of all experts at a time is taken apart."""
    path = save(tmp_path / "model", family)
    policy, expected = load(path), load_file(path / "model.safetensors")
    with LiveBytes() as live:
        save_policy(policy, make_tokenizer(), tmp_path / "saved", save_options=SaveOptions(max_shard_bytes=10_000))
    files = [load_file(file) for file in (tmp_path / "saved").glob("*.safetensors")]
    saved = {name: tensor for file in files for name, tensor in file.items()}
    assert saved.keys() == expected.keys() and len(files) > 10
    assert all(torch.equal(saved[name], tensor) for name, tensor in expected.items())
    largest = max(p.nbytes for name, p in policy.model.named_parameters() if "experts" in name)
    assert 0 < live.most < 1.5 * largest < 0.5 * sum(p.nbytes for p in policy.model.parameters())
