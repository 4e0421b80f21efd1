"""Parameters in closed form: those of published models, of the library's, of PEFT's adapters, of saved ones."""

import math
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from cohort.config import AdapterConfig
from cohort.errors import UserError
from cohort.plan.adapter import adapter_shape
from cohort.plan.shape import PRESETS, preset_shape, read_shape, shape_from_config

# Of the models' own cards and weight files.
PARAMETERS = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "llama3-1b": 1_235_814_400,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "mistral-7b": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "gemma2-2b": 2_614_341_888,
    "gemma3-1b": 999_885_952,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_of_the_published_models(name: str) -> None:
    assert preset_shape(name).num_parameters == PARAMETERS[name]


def test_active_parameters_of_experts() -> None:
    assert preset_shape("qwen3-30b-a3b").active_parameters == pytest.approx(3.0e9, rel=0.05)
    dense = preset_shape("qwen3-8b")
    assert dense.active_parameters == dense.num_parameters - dense.head_parameters - dense.hidden


def test_what_is_not_known_is_refused(tmp_path: Any) -> None:
    with pytest.raises(UserError, match=r"not a local folder with a config\.json"):
        read_shape(str(tmp_path))
    for text, match in (("{", "cannot read"), ("[]", "JSON object"), ('{"model_type": "mamba"}', "'mamba'")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=match):
            read_shape(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": -1}')
    with pytest.raises(UserError, match="hidden_size"):
        read_shape(str(tmp_path))
    with pytest.raises(UserError, match="--model: '9t' is neither a preset"):
        preset_shape("9t")


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen3-0.6b", "llama3-1b", "gemma2-2b", "mixtral-8x7b"])
@pytest.mark.parametrize(
    "adapter",
    [
        {"rank": 8},
        {"rank": 4, "targets": ["q_proj", "v_proj", "lm_head"]},
        {"rank": 4, "targets": ["o_proj", "k_proj", "embed_tokens"]},
        {"rank": 2, "dora": True},
    ],
)
def test_parameters_of_adapters_are_those_that_peft_adds(name: str, adapter: dict[str, Any]) -> None:
    import torch
    from peft import LoraConfig, inject_adapter_in_model

    wanted = AdapterConfig(**adapter)
    config = {**PRESETS[name], "num_hidden_layers": 2, "vocab_size": 64, "tie_word_embeddings": False}
    with torch.device("meta"):
        plain = {key: value for key, value in config.items() if key != "model_type"}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **plain))
        linear = {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)} - {
            "lm_head"
        }
        targets = sorted(linear) if wanted.targets == "all-linear" else list(wanted.targets)
        lora = LoraConfig(r=wanted.rank, target_modules=targets, use_dora=wanted.dora, task_type="CAUSAL_LM")
        inject_adapter_in_model(lora, model, low_cpu_mem_usage=True)
    counted = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    assert adapter_shape(wanted, shape_from_config(config, name=name)).num_parameters == counted


@pytest.mark.parametrize("name", sorted({c["model_type"]: n for n, c in PRESETS.items()}.values()))
@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_those_that_the_library_builds(name: str, tied: bool) -> None:
    """All parameters are counted; the matrices decide what optimizers keep of them."""
    import torch

    config: dict[str, Any] = {**PRESETS[name], "num_hidden_layers": 2, "vocab_size": 64, "tie_word_embeddings": tied}
    kind = config.pop("model_type")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config))
    shape = shape_from_config({"model_type": kind, **config}, name=name)
    weights = [*2 * shape.layer_weights, *shape.non_layer_weights]
    assert sum(map(math.prod, weights)) == shape.num_parameters == sum(p.numel() for p in model.parameters())
    built = sorted(tuple(p.shape) for p in model.parameters() if p.ndim >= 2)
    assert sorted(w for w in weights if len(w) >= 2) == built


def test_an_adapter_that_was_saved_has_the_shape_of_its_file(tmp_path: Any) -> None:
    shape = preset_shape("7b")
    asked = AdapterConfig(rank=16, path=str(tmp_path))
    assert adapter_shape(asked, shape).rank == 16  # nothing is there yet
    (tmp_path / "adapter_config.json").write_text('{"r": 4, "target_modules": ["q_proj", "v_proj"]}')
    found = adapter_shape(asked, shape)
    assert (found.rank, found.layer_parameters) == (4, 4 * (3584 + 3584) + 4 * (3584 + 512))
    (tmp_path / "adapter_config.json").write_text('{"r": "many"}')
    with pytest.raises(UserError, match=r"model\.adapter\.path"):
        adapter_shape(asked, shape)
    assert "nose" in str(adapter_shape(AdapterConfig(targets=("nose",)), shape).warning)
