"""Layouts and decoders are chosen by results: what a model computes otherwise is found before anything is trained."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import models
from cohort.config import ModelConfig
from cohort.errors import UserError
from cohort.models import batch_layout
from cohort.models import kv_cache as cached_decoding
from cohort.models.attention import interface
from cohort.models.dropout import dropout_rates
from cohort.models.forward import forward
from cohort.models.model_limits import check_dropout
from cohort.models.routers import find_routers
from cohort.models.saving import save_policy
from cohort.rollout import Sampler
from families import FAMILIES, Family, make_model, save_folder
from models import load, naive, random_sequences, sampler, trained
from selection import mostly_slow, slow
from test_law_two import make_law_policy

SPARSE = ["DeepSeek-V4", "MiniMax-M3 (text)"]


def errors(name: str, folder: Path) -> tuple[Any, float, float]:
    """The policy, and the largest errors of logprobs: in training with groups that are split, and of the sampler."""
    save_folder(FAMILIES[name], folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected, _ = naive(theirs, random_sequences())
    policy = load(folder)
    logprobs, _ = trained(policy)
    in_training = max((logprobs[n] - e).abs().max().item() for n, e in enumerate(expected))
    return policy, in_training, sampler(policy, theirs, folder)


def test_two_attention_calls_in_a_layer_share_no_prompt(tmp_path: Path):
    """DiffLlama: the same keys with other values. A whole row would be right, a kept prompt is not."""
    policy, in_training, in_sampling = errors("DiffLlama", tmp_path)
    assert policy.layout == "packed" and policy.traits.decoding == "padded"
    assert policy.traits.reason.startswith("a group that is split over micro-batches gives outputs that differ")
    assert in_training < 1e-5 and in_sampling < 1e-5


@slow("that the probe finds it")
def test_without_the_probe_kept_prompts_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(batch_layout, "_split_problem", lambda *_: None)
    policy, in_training, in_sampling = errors("DiffLlama", tmp_path)
    assert policy.layout == "shared" and in_training > 0.1 and in_sampling > 0.1


def test_decoding_is_probed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_folder(FAMILIES["Llama"], tmp_path)
    assert load(tmp_path).layout == "shared"
    attend = batch_layout.DecodeBatch.attend
    monkeypatch.setattr(batch_layout.DecodeBatch, "attend", lambda *args: 1.01 * attend(*args))
    policy = load(tmp_path)
    assert policy.layout == "packed" and policy.traits.reason.startswith("decoding with a shared prompt gives outputs")


@pytest.mark.parametrize("name", mostly_slow(SPARSE, "MiniMax-M3 (text)", reason="one sparse attention"))
def test_prompts_are_not_padded_for_attention_that_counts_places(name: str, tmp_path: Path):
    policy, in_training, in_sampling = errors(name, tmp_path)
    assert policy.layout == "padded" and policy.traits.decoding == "unpadded"
    (note,) = [note for note in policy.notes() if "sampler" in note]
    assert note.startswith("the local sampler decodes prompts of one length at a time, because padding would move")
    assert in_training < 1e-5 and in_sampling < 1e-5
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    policy.traits = replace(policy.traits, decoding="padded")
    assert sampler(policy, theirs, tmp_path) > 0.1


@pytest.mark.parametrize("name", mostly_slow(SPARSE, "MiniMax-M3 (text)", reason="one sparse attention"))
def test_padding_that_is_wrong_is_found_without_names(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Architectures that no list knows."""
    types = FAMILIES[name].settings["layer_types"]
    monkeypatch.setattr(cached_decoding, "_PADDABLE", frozenset(types))
    save_folder(FAMILIES[name], tmp_path)
    traits = load(tmp_path).traits
    assert traits.decoding == "unpadded"
    assert traits.decoding_reason.startswith("decoding padded prompts gives outputs that differ")


def test_routers_choose_the_same_experts_while_layouts_are_compared_in_16_bits(monkeypatch: pytest.MonkeyPatch):
    """Rounding would decide between experts that are almost equally likely, and outputs differ by a fifth."""
    choices: list[set[tuple[int, ...]]] = []
    monkeypatch.setattr(batch_layout, "forward", lambda module, *args, **kwargs: recorded(module, args, kwargs))

    def recorded(module: Any, args: Any, kwargs: Any) -> torch.Tensor:
        logits: list[torch.Tensor] = []
        hooks = [
            router.module.register_forward_hook(lambda m, i, outputs, n=router.output: logits.append(outputs[n]))
            for router in find_routers(module)
        ]
        out = forward(module, *args, **kwargs)
        for hook in hooks:
            hook.remove()
        choices.extend({tuple(row.topk(2).indices.tolist()) for row in x.flatten(0, -2)} for x in logits)
        return out

    for seed in (1, 7):
        model = make_model(FAMILIES["Granite-MoE"], dtype=torch.bfloat16, seed=seed)
        if not find_routers(model):
            pytest.skip("routers of Granite-MoE in this version of transformers are not known")
        policy = make_law_policy(model)
        assert (policy.layout, policy.traits.reason) == ("shared", None)
    assert len(choices) == 16 and all(len(rows) == 1 for rows in choices)


@slow("that no router sees rounding")
def test_rounding_of_routers_pads_some_models(monkeypatch: pytest.MonkeyPatch):
    def layouts() -> set[str]:
        tiny = (make_model(FAMILIES["Granite-MoE"], dtype=torch.bfloat16, seed=seed) for seed in range(20))
        return {make_law_policy(model).layout for model in tiny}

    assert layouts() == {"shared"}
    monkeypatch.setattr("cohort.models.policy.constant_routing", lambda _: nullcontext())
    assert "padded" in layouts()


def test_a_model_that_no_cache_decodes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_folder(FAMILIES["Jamba"], tmp_path)
    step = cached_decoding.CacheDecoder.step
    monkeypatch.setattr(cached_decoding.CacheDecoder, "step", lambda *args: step(*args) + 1)
    policy = load(tmp_path)
    problem = "'local' cannot sample JambaForCausalLM: decoding unpadded prompts gives outputs that differ"
    with pytest.raises(UserError, match=problem):
        Sampler(policy, end_token_ids=frozenset({1}), max_num_seqs=8).sample([])


def test_layers_that_take_the_keys_of_others_share_prompts(tmp_path: Path):
    policy, in_training, in_sampling = errors("Gemma 4 (text) with shared keys", tmp_path)
    assert (policy.layout, policy.traits.reason) == ("shared", None)
    assert in_training < 1e-5 and in_sampling < 1e-5


@pytest.mark.parametrize("name", ["Granite 4 without state-space layers", "Hunyuan with alpha", "Gemma 4-MoE (text)"])
def test_nothing_is_padded_for_what_only_the_config_names(name: str, tmp_path: Path):
    save_folder(FAMILIES[name], tmp_path)
    policy = models.load_policy(
        models.LoadRequest(
            ModelConfig(path=str(tmp_path)), device=models.CPU, tokenizer=AutoTokenizer.from_pretrained(tmp_path)
        )
    )
    assert (policy.layout, policy.traits.reason) == ("shared", None)


DROPOUT = {
    "starcoder2": {"sliding_window": 512, "residual_dropout": 0.1, "embedding_dropout": 0.1},
    "phi": {"resid_pdrop": 0.1},
    "granite": {"attention_dropout": 0.1},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "layerdrop": 0.1},
}


@pytest.mark.parametrize("model_type", mostly_slow(DROPOUT, "starcoder2", "granite", reason="two kinds of dropout"))
def test_published_dropout_is_off(model_type: str, tmp_path: Path):
    """Logprobs and gradients in training are those of the policy that sampled, and prompts are shared."""
    save_folder(Family(model_type=model_type, settings=DROPOUT[model_type]), tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected, gradient = naive(theirs, random_sequences())
    policy = load(tmp_path)
    policy.model.train()
    logprobs, mine = trained(policy)
    assert policy.layout == "shared"
    assert max((logprobs[n] - e).abs().max().item() for n, e in enumerate(expected)) < 1e-5
    assert models.error(mine, gradient) < 5e-5
    assert "the model's dropout (0.1) is off in training as in sampling; model.dropout: true keeps it" in policy.notes()


def test_dropout_can_be_kept(tmp_path: Path):
    save_folder(Family(model_type="granite", settings=DROPOUT["granite"]), tmp_path)
    policy = load(tmp_path, dropout=True)
    assert policy.layout == "padded" and "it has dropout" in policy.traits.reason
    assert not any("is off" in note for note in policy.notes()) and dropout_rates(policy.model)
    expected, _ = naive(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), random_sequences())
    policy.model.train()
    logprobs, _ = trained(policy)
    assert max((logprobs[n] - e).abs().max().item() for n, e in enumerate(expected)) > 0.01  # it draws


def test_what_is_saved_has_the_published_dropout(tmp_path: Path):
    save_folder(Family(model_type="granite", settings=DROPOUT["granite"]), tmp_path / "base")
    policy = load(tmp_path / "base")
    assert policy.model.config.attention_dropout == 0
    save_policy(policy, AutoTokenizer.from_pretrained(tmp_path / "base"), tmp_path / "saved")
    assert models.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").config.attention_dropout == 0.1
    assert policy.model.config.attention_dropout == 0


def test_dropout_that_is_not_there_cannot_be_kept(tmp_path: Path):
    save_folder(FAMILIES["Llama"], tmp_path)
    with pytest.raises(UserError, match=r"model\.dropout: true has no effect: the model's config\.json has no"):
        check_dropout(ModelConfig(path=str(tmp_path), dropout=True))


@pytest.mark.parametrize("name", mostly_slow(["Mixtral", "GPT-OSS"], "Mixtral", reason="another layout"))
def test_experts_in_float64(name: str, tmp_path: Path):
    """The library's grouped products have no float64."""
    save_folder(FAMILIES[name], tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, experts_implementation="eager")
    expected, gradient = naive(theirs, random_sequences())
    policy = load(tmp_path, dtype="float64")
    logprobs, mine = trained(policy)
    assert policy.layout == "shared"
    assert max((logprobs[n] - e).abs().max().item() for n, e in enumerate(expected)) < 1e-5
    assert models.error(mine, gradient) < 1e-5


def test_queries_are_scaled_by_their_position_and_not_by_their_place_in_the_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Llama 4 scales them before attention sees them."""
    save_folder(FAMILIES["Llama 4 (text), short chunks"], tmp_path)
    assert load(tmp_path).layout == "shared"
    monkeypatch.setattr(interface, "_temperature_ratio", lambda module, position_ids: torch.ones(()))
    assert load(tmp_path).layout == "padded"
