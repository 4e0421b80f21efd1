"""Weights from files: the library's own loader is the reference, bit for bit; ranks read their part; broken files."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from cohort.config import ModelConfig
from cohort.models import LoadRequest, Policy, check_model_folder, load_policy
from cohort.models.loading.load_weights import load_model_weights
from cohort.models.loading.meta_device import keep_first_layers, match_weights, meta_model
from cohort.models.loading.safetensors_files import stored_weights
from live_bytes import LiveBytes
from ranks import RanksOnDemand
from selection import slow
from tiny import SIZES, VOCAB_SIZE, make_model, make_tokenizer, save_model_folder

CPU = torch.device("cpu")
HALF = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8, "num_hidden_layers": 4}
ROPE = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {**ROPE, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"tie_word_embeddings": True, "head_dim": 8}),
    "qwen3 yarn": (Qwen3Config, {"head_dim": 8, "rope_parameters": {**ROPE, "rope_type": "yarn"}}),
    "llama": (LlamaConfig, {}),
    "llama3": (LlamaConfig, {"rope_parameters": LLAMA3}),
    "linear": (LlamaConfig, {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "mistral": (MistralConfig, {"head_dim": 8}),
    "gemma2": (Gemma2Config, {"head_dim": 8, **HALF}),
    "gemma3": (Gemma3TextConfig, {"head_dim": 8, **HALF}),
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}


def save_family(path: Path, config_class: type[PreTrainedConfig], overrides: dict[str, Any], **saving: Any) -> Path:
    torch.manual_seed(0)
    config = config_class(**{**SIZES, "vocab_size": VOCAB_SIZE, "eos_token_id": 1, "pad_token_id": 0, **overrides})
    AutoModelForCausalLM.from_config(config).save_pretrained(path, **saving)
    make_tokenizer().save_pretrained(path)
    return path


def load(path: Path, dtype: str = "float32") -> Policy:
    return load_policy(LoadRequest(ModelConfig(path=str(path), dtype=dtype), device=CPU, tokenizer=make_tokenizer()))


def assert_same(actual: PreTrainedModel, expected: PreTrainedModel) -> None:
    """All weights and buffers, their dtypes, what is tied, the configs, and logits."""
    for tensors in ("state_dict", "named_buffers"):
        a, e = (dict(getattr(model, tensors)()) for model in (actual, expected))
        assert a.keys() == e.keys()
        for name in e:
            assert a[name].dtype == e[name].dtype and torch.equal(a[name], e[name]), name
    assert [n for n, _ in actual.named_parameters()] == [n for n, _ in expected.named_parameters()]  # tied ones once
    assert actual.config.to_dict() == expected.config.to_dict()
    assert actual.generation_config.to_dict() == expected.generation_config.to_dict()
    expected.set_attn_implementation(actual.config._attn_implementation)
    with torch.no_grad():
        logits = [m.eval()(torch.arange(2, 40).unsqueeze(0), use_cache=False).logits for m in (actual, expected)]
    assert torch.equal(*logits)


@pytest.fixture
def without_the_library(monkeypatch) -> None:
    """Makes it an error to have the library load the model."""
    monkeypatch.setattr("cohort.models.loading.load_model.load_with_transformers", None)


# One process


@pytest.mark.usefixtures("without_the_library")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_what_the_library_loads(tmp_path, family, dtype):
    path = save_family(tmp_path / "model", *FAMILIES[family])
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    assert_same(load(path, dtype).model, expected)


def test_scaled_frequencies_are_not_the_plain_ones(tmp_path):
    """So that the comparison above has something to see."""
    plain, *scaled = (
        meta_model(ModelConfig(path=str(save_family(tmp_path / name, *FAMILIES[name])))).model.rotary_emb.inv_freq
        for name in ("llama", "llama3", "linear", "qwen3 yarn")
    )
    assert not plain.is_meta and plain[0] == 1.0
    assert all(not torch.equal(plain, other) for other in scaled)


@pytest.mark.usefixtures("without_the_library")
def test_several_files_and_a_checkpoint_in_bfloat16(tmp_path):
    path = tmp_path / "model"
    make_model("qwen3", dtype=torch.bfloat16).save_pretrained(path, max_shard_size="20KB")
    assert len(list(path.glob("*.safetensors"))) > 3
    assert_same(load(path).model, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))


@pytest.mark.usefixtures("without_the_library")
def test_files_of_the_body_alone(tmp_path):
    """Saved without the head, names lack the prefix; a tied head needs no weights of its own."""
    path = save_model_folder(tmp_path / "model")
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    weights = {name.removeprefix("model."): weight for name, weight in load_file(path / "model.safetensors").items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    assert_same(load(path).model, expected)


def test_a_head_that_is_stored_and_tied_is_left_to_the_library(tmp_path):
    """It unties what differs."""
    path = save_model_folder(tmp_path / "model", tie=True)
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    model = load(path).model
    assert_same(model, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
    assert model.lm_head.weight is not model.model.embed_tokens.weight


def test_bin_files_are_left_to_the_library(tmp_path):
    path = save_model_folder(tmp_path / "model")
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    check_model_folder(str(path))
    assert_same(load(path).model, expected)


@pytest.mark.usefixtures("without_the_library")
def test_a_loaded_model_does_not_depend_on_its_file(tmp_path):
    path = save_model_folder(tmp_path / "model")
    model = load(path).model
    expected = {name: weight.clone() for name, weight in model.state_dict().items()}
    size = os.path.getsize(path / "model.safetensors")
    (path / "model.safetensors").write_bytes(b"\xff" * size)
    assert all(torch.equal(weight, expected[name]) for name, weight in model.state_dict().items())


def test_memory_besides_the_model_is_one_tensor(tmp_path):
    """Reading float32 files into a bfloat16 model; into a float32 model nothing is added."""
    path = save_model_folder(tmp_path / "model", hidden_size=64, num_hidden_layers=4)
    largest = max(t.nbytes for t in load_file(path / "model.safetensors").values())
    for dtype, more in (("float32", 0), ("bfloat16", largest)):
        model = meta_model(ModelConfig(path=str(path), dtype=dtype))
        sources = match_weights(model, stored_weights(path))
        assert sources is not None
        own = sum(p.nbytes for p in model.parameters())
        with LiveBytes() as live:
            load_model_weights(model, sources, CPU)
        assert own <= live.most <= own + more


def test_the_first_layers_have_one_of_each_kind(tmp_path):
    def num_kept(config_class: type[PreTrainedConfig], overrides: dict[str, Any]) -> int:
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        model = meta_model(ModelConfig(path=str(save_family(tmp_path / "model", config_class, overrides))))
        keep_first_layers(model)
        return len(model.model.layers)

    types = ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 2
    assert num_kept(LlamaConfig, {"num_hidden_layers": 6}) == 2
    assert num_kept(Gemma3TextConfig, {**HALF, "layer_types": types, "num_hidden_layers": 8}) == 6
    assert num_kept(Qwen3MoeConfig, {**MOE, "num_hidden_layers": 6, "mlp_only_layers": [0, 1, 2]}) == 4


# Several ranks


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "tied": save_family(folder / "tied", Qwen2Config, {"tie_word_embeddings": True}, max_shard_size="20KB"),
        "few rows": save_family(  # key and value heads of 2 rows: with 3 ranks one has none
            folder / "few-rows", Qwen3Config, {"head_dim": 2, "num_key_value_heads": 1, "num_hidden_layers": 4}
        ),
        "gemma3": save_family(folder / "gemma3", *FAMILIES["gemma3"]),
    }


@pytest.fixture(scope="module", params=[pytest.param(2, marks=slow("three ranks show it")), 3])
def ranks(request, tmp_path_factory, models) -> dict[str, Any]:
    """What came of each job with a number of ranks: one start of the processes for all of them."""
    folder = tmp_path_factory.mktemp("ranks")
    path, copies = models["few rows"], [shutil.copytree(models["few rows"], folder / name) for name in ("a", "b", "c")]
    (copies[2] / "model.safetensors").unlink()
    jobs: dict[str, tuple[Any, ...]] = {
        "float32": ("loading", "float32", *map(str, models.values())),
        "bfloat16": ("loading", "bfloat16", str(models["tied"])),
        "shrinks 0": ("loading_fails", str(path), str(copies[0]), 0),
        "shrinks 1": ("loading_fails", str(path), str(copies[1]), 1),
        "elsewhere": ("loading_elsewhere", str(path), str(copies[2])),
    }
    on = RanksOnDemand(folder)
    return {name: on(request.param, *job) for name, job in jobs.items()} | {"world_size": request.param}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shards_are_those_of_a_model_that_rank_0_broadcasts(ranks, models, dtype: str):
    """Shards, buffers and traits, on every rank; and put together they are what the library loads."""
    assert ranks["float32"].keys() == {str(path) for path in models.values()}
    for path, result in ranks[dtype].items():
        assert result["differ"] == [[]] * ranks["world_size"]
        assert result["same"]
        expected = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
        assert len(result["weights"]) == len(list(expected.parameters()))
        for name, weight in result["weights"].items():
            assert torch.equal(weight, expected.state_dict()[name]), name


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_file_that_shrinks_while_it_is_read_ends_all_ranks(ranks, bad_rank: int):
    first, *others = ranks[f"shrinks {bad_rank}"]["said"]
    assert first.startswith("UserError: model.path: ")
    assert "model.safetensors: cannot read it" in first and first.endswith(f"(on rank {bad_rank})")
    assert others == ["Rank0Failed: "] * (ranks["world_size"] - 1)


def test_a_rank_without_the_files_gets_its_shards_from_rank_0(ranks, models):
    """As on another machine, whose cache has the model's config alone."""
    expected = AutoModelForCausalLM.from_pretrained(models["few rows"], dtype=torch.float32)
    result = ranks["elsewhere"]
    assert all(torch.equal(result["weights"][name], weight) for name, weight in expected.named_parameters())
