"""Multimodal checkpoints: the language model is trained, and the rest of the files stays as it is."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from cohort.config import AdapterConfig, ModelConfig, config_from_dict
from cohort.errors import UserError
from cohort.launch.given_model import GivenModel
from cohort.launch.given_optimizer import GivenOptimizer
from cohort.models import (
    Critic,
    LoadRequest,
    Policy,
    load_critic,
    load_policy,
    load_tokenizer,
    save_policy,
    weight_specs,
)
from cohort.models.adapters.merge_adapter import merge
from cohort.models.loading.load_weights import load_with_transformers
from cohort.models.loading.safetensors_files import StoredTensor, stored_weights
from cohort.models.model_limits import trained_weights
from cohort.packing import collate
from tiny import SIZES, VOCAB_SIZE, make_tokenizer, random_sequences
from weight_servers import load_worker

TEXT: dict[str, Any] = {
    **SIZES,
    "vocab_size": VOCAB_SIZE,
    "head_dim": 8,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {**TEXT, "query_pre_attn_scalar": 8, "sliding_window": 8},
        "vision_config": VISION,
        "mm_tokens_per_image": 4,
    },
    "qwen3_5": {
        "text_config": {
            **TEXT,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
        },
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 32,
            "patch_size": 4,
            "num_position_embeddings": 16,
        },
        "tie_word_embeddings": True,  # as in some files, which do not say so in text_config
    },
    "mistral3": {
        "text_config": {**TEXT, "model_type": "mistral", "max_position_embeddings": 512},
        "vision_config": {"model_type": "pixtral", **VISION},
        "tie_word_embeddings": False,
    },
}
PROCESSOR = '{"image_seq_length": 4}'


def save_multimodal_folder(path: Path, kind: str) -> Path:
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **CONFIGS[kind]), dtype=torch.bfloat16)
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    (path / "preprocessor_config.json").write_text(PROCESSOR)
    (path / "generation_config.json").unlink()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"eos_token_id": [1, 7]}))  # as in files of Gemma 3
    return path


@pytest.fixture(scope="module", params=list(CONFIGS))
def folder(request, tmp_path_factory) -> Path:
    return save_multimodal_folder(tmp_path_factory.mktemp("models") / request.param, request.param)


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory) -> Path:
    return save_multimodal_folder(tmp_path_factory.mktemp("models") / "gemma3", "gemma3")


def request_for(path: Path, *, multimodal_path: str | None = None, **keys: Any) -> LoadRequest:
    config = ModelConfig(path=str(path), **keys)
    cpu = torch.device("cpu")
    return LoadRequest(config, device=cpu, tokenizer=load_tokenizer(config), multimodal_path=multimodal_path)


def save(policy: Policy, folder: Path) -> Path:
    save_policy(policy, make_tokenizer(), folder)
    return folder


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model.eval()(input_ids=ids).logits


def changed_bytes(before: dict[str, StoredTensor], after: dict[str, StoredTensor]) -> set[str]:
    return {name for name in before if not torch.equal(before[name].read_bytes(), after[name].read_bytes())}


IDS = torch.arange(2, 42).unsqueeze(0)


def test_its_language_model_is_trained_and_saved_with_the_rest(folder: Path, tmp_path: Path):
    policy = load_policy(request_for(folder, freeze=("model.embed_tokens.*",)))
    assert policy.shares_prompts
    batch = collate(random_sequences([(9, [5, 7, 1])]), share_prompts=True)
    policy.logprobs(batch, temperature=1.0)[0].sum().backward()
    whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    for sequence in random_sequences([(9, [5, 7, 1])]):
        ids = torch.from_numpy(sequence.token_ids).long().unsqueeze(0)
        logprobs = logits(whole, ids)[0, 8:-1].log_softmax(-1)
        logprobs.gather(-1, ids[0, 9:, None]).sum().backward()
    expected = dict(whole.named_parameters())
    for name, parameter in policy.model.named_parameters():
        if parameter.requires_grad:
            theirs = expected[policy.multimodal.name_of(name)].grad
            torch.testing.assert_close(parameter.grad, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())
            with torch.no_grad():
                parameter.sub_(0.01 * parameter.grad)
        else:
            assert name == "model.embed_tokens.weight" and parameter.grad is None

    saved = save(policy, tmp_path / "saved")
    before, after = stored_weights(folder), stored_weights(saved)
    assert after.keys() == before.keys()
    beside = [name for name in before if "language_model" not in name and "lm_head" not in name]
    assert beside and changed_bytes(before, after).isdisjoint(beside)
    again = AutoModelForImageTextToText.from_pretrained(saved, dtype=torch.float32)
    assert torch.equal(logits(again, IDS), logits(policy.model, IDS))
    assert not torch.equal(logits(again, IDS), logits(whole, IDS))
    architectures = [json.loads((path / "config.json").read_text())["architectures"] for path in (folder, saved)]
    assert architectures[0] == architectures[1]
    assert (saved / "preprocessor_config.json").read_text() == PROCESSOR


def test_transformers_loads_the_same_language_model(folder: Path):
    """For files that cannot be read tensor by tensor, and to quantize."""
    expected = load_policy(request_for(folder)).model
    model = load_with_transformers(Policy, ModelConfig(path=str(folder)))
    assert type(model) is type(expected)
    assert torch.equal(logits(model, IDS), logits(expected, IDS))


def test_the_rest_comes_from_the_model_that_a_run_started_from(gemma3: Path, tmp_path: Path):
    """A run that goes on loads a checkpoint, which may be deleted before the run ends."""
    checkpoint = save(load_policy(request_for(gemma3)), tmp_path / "checkpoint")
    policy = load_policy(request_for(checkpoint, multimodal_path=str(gemma3)))
    shutil.rmtree(checkpoint)
    saved = save(policy, tmp_path / "saved")
    assert stored_weights(saved).keys() == stored_weights(gemma3).keys()


def test_adapters_fit_the_multimodal_model(gemma3: Path, tmp_path: Path):
    """Its vision tower has layers of the same names, which get none."""
    policy = load_policy(request_for(gemma3, adapter=AdapterConfig(rank=2)))
    for tensor in policy.adapter.tensors().values():
        torch.nn.init.normal_(tensor, std=0.1)
    saved = save(policy, tmp_path / "adapter")
    whole = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(gemma3, dtype=torch.float32), saved)
    assert torch.equal(logits(whole, IDS), logits(policy.model, IDS))
    adapted = {name for name, _ in whole.named_parameters() if "lora_" in name}
    assert len(adapted) == len(policy.adapter.tensors())
    again = load_policy(request_for(gemma3, adapter=AdapterConfig(path=str(saved))))
    assert torch.equal(logits(again.model, IDS), logits(policy.model, IDS))

    (tmp_path / "merged").mkdir()
    merge(saved, tmp_path / "merged")
    before, after = stored_weights(gemma3), stored_weights(tmp_path / "merged")
    assert after.keys() == before.keys()
    assert len(changed_bytes(before, after)) == len(policy.adapter.spec.modules)
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["model_type"] == "gemma3"
    assert (tmp_path / "merged" / "preprocessor_config.json").exists()


def test_a_critic_is_saved_alone(gemma3: Path, tmp_path: Path):
    saved = save(load_critic(request_for(gemma3)), tmp_path / "critic")
    assert "value_head.weight" in stored_weights(saved)
    assert not any("vision" in name for name in stored_weights(saved))
    assert isinstance(load_critic(request_for(saved)), Critic)


def test_a_model_of_text_alone_is_as_before(gemma3: Path, tmp_path: Path):
    """Also one that was taken out of a multimodal model."""
    text = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(gemma3).get_text_config())
    text.save_pretrained(tmp_path / "text")
    make_tokenizer().save_pretrained(tmp_path / "text")
    policy = load_policy(request_for(tmp_path / "text"))
    assert policy.multimodal is None
    assert stored_weights(save(policy, tmp_path / "saved")).keys() == stored_weights(tmp_path / "text").keys()


def test_servers_expect_the_weights_of_the_language_model(folder: Path, monkeypatch: pytest.MonkeyPatch):
    worker = load_worker(monkeypatch)
    expected = worker.expected_tensors(folder, AutoConfig.from_pretrained(folder).get_text_config())
    specs = weight_specs(load_policy(request_for(folder)), torch.bfloat16)
    sent = [{"name": s.name, "shape": s.shape, "dtype": "bfloat16"} for s in specs]
    worker.check_specs(sent, expected)
    with pytest.raises(ValueError, match="is missing"):
        worker.check_specs(sent[1:], expected)


def test_a_model_object_with_a_frozen_vision_tower_and_its_optimizer(folder: Path, tmp_path: Path):
    model = AutoModelForImageTextToText.from_pretrained(folder)
    for name, p in model.named_parameters():
        p.requires_grad_("vision" not in name and "visual" not in name and not name.endswith("norm.weight"))
    keys: dict[str, Any] = {"data": {"path": "d"}, "rewards": [{"use": "math"}], "run": {"dir": str(tmp_path)}}
    given = GivenModel(model, make_tokenizer())
    config = given.with_paths(config_from_dict({**keys, "model": {"path": "given"}}))
    given.save(config)
    trained: Any = trained_weights(config.model)
    assert len(trained) > 10 and not any(name.endswith("norm.weight") for name in trained)
    optimizer = torch.optim.AdamW(model.parameters())  # projector and vision tower included
    GivenOptimizer(optimizer, None, model)(trained)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in trained.values()]

    lost = trained.popitem()[0]
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(UserError, match=rf"of which the run does not train 1 \({lost}\)"):
        GivenOptimizer(optimizer, None, model)(trained)
