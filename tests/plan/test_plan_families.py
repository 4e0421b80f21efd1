"""The plan's shapes of `bench/families.py`'s models: parameters, and those that one token is multiplied with."""

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
from transformers import AutoConfig

from cohort.config import AdapterConfig, Config, ModelConfig
from cohort.errors import UserError
from cohort.models.adapters.adapter_folder import adapter_spec
from cohort.packing.segments import NO_PARENT, build_attention_metadata
from cohort.plan.backward import window_bytes
from cohort.plan.hardware import Hardware
from cohort.plan.memory import plan_memory
from cohort.plan.mixed_layers import MIXED
from cohort.plan.schedule import plan_micro_batches
from cohort.plan.shape import _FAMILIES, PRESETS, adapter_shape, preset_shape, shape_from_config
from cohort.plan.timing import training_operations
from cohort.plan.workload import process_workload
from families import FAMILIES, make_model
from test_plan_memory import workload

KNOWN = [name for name, family in FAMILIES.items() if family.model_type in {**_FAMILIES, **MIXED}]
GPT_OSS = {  # of the published config.json, which says `experts_per_token` too
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 201_088,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
}


@pytest.mark.parametrize("name", KNOWN)
def test_parameters(name: str):
    model = make_model(FAMILIES[name])
    shape = shape_from_config(model.config.to_dict(), name=name)
    assert shape.num_parameters == model.num_parameters()
    of_experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    idle = of_experts * (1 - shape.experts_per_token / shape.experts)
    assert sum(k.layers * (k.layer_parameters - k.active_layer_parameters) for k in shape.kinds) == idle
    weights = [w for kind in shape.kinds for w in kind.layers * kind.layer_weights]
    assert sum(map(math.prod, [*weights, *shape.non_layer_weights])) == shape.num_parameters
    others = (
        "embed",
        "lm_head",
        "conv.conv",
        "conv1d",
        "shared_expert_gate",
        "_bias",
        "altup_",
        "per_layer_model",
        ".A_log",
    )
    matrices = [tuple(p.shape) for n, p in model.named_parameters() if p.ndim > 1 and not any(o in n for o in others)]

    def sides(shapes: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
        return sorted((*w[:-2], *sorted(w[-2:])) for w in shapes)  # some experts are transposed

    assert sides(w for w in weights if len(w) > 1) == sides(matrices)
    assert (of_experts > 0) == (shape.experts > 1)
    if shape.own_weights is not None:  # adapters of families whose layers differ
        wanted = AdapterConfig(rank=4)
        layers = dict(model.named_modules())
        targets = [layers[n] for n in adapter_spec(ModelConfig(path="m", adapter=wanted), model).modules]
        assert adapter_shape(wanted, shape).num_parameters == sum(4 * sum(m.weight.shape) for m in targets)


def test_every_family_is_compared():
    assert {FAMILIES[name].model_type for name in KNOWN} == {*_FAMILIES, *MIXED}


def test_published_models():
    """Literal: of gpt-oss-20b's model card, 20.91 and 3.61 billion, counting the head as active."""
    assert shape_from_config(GPT_OSS, name="gpt-oss-20b").num_parameters == 20_914_757_184
    assert shape_from_config(GPT_OSS, name="gpt-oss-20b").active_parameters == pytest.approx(3.61e9, rel=0.01)


@pytest.mark.parametrize(
    ("outer", "name"),
    [
        ("qwen3_5", "Qwen3.5 (text)"),
        ("qwen3_5_moe", "Qwen3.5-MoE (text)"),
        ("gemma4", "Gemma 4 (text) with shared keys"),
        ("llama4", "Llama 4 (text), short chunks"),
    ],
)
def test_multimodal_checkpoints_are_planned_as_their_language_model(outer: str, name: str):
    model = make_model(FAMILIES[name])
    config = AutoConfig.for_model(outer, text_config=model.config.to_dict()).to_dict()
    shape = shape_from_config(config, name=name)
    assert shape.num_parameters == model.num_parameters()
    tied = shape_from_config({**config, "tie_word_embeddings": True}, name=name)
    assert tied.num_parameters == model.num_parameters() - (not shape.tied) * shape.head_parameters


def test_keys_of_windows_are_in_the_memory_of_backward():
    """Of each completion's copy, with its gradients, in as many rows as attention gathers."""
    prompt, completion, group, window = 12, 5, 3, 8
    lengths, parents = [prompt, *[completion] * group], [NO_PARENT, *[0] * group]
    keys = build_attention_metadata(lengths, parents).limited(window, None).varlen.keys
    assert keys is not None
    gathered = sum(int(block.cu_seqlens[-1]) for block in keys) - sum(lengths)
    run = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "rewards": [{"use": "exact"}]}
    sizes = {"max_prompt_tokens": prompt, "max_completion_tokens": completion, "num_generations": group}
    config, shape = Config(**run, rollout=sizes), preset_shape("mistral-7b")
    some, all_seen = (
        process_workload(
            *(config, replace(shape, window=tokens)),
            Hardware(gpu_name="", gpu_memory_bytes=1, gpus_per_node=1, nodes=1),
            plan_micro_batches(config, 1, prompt + group * completion),
            shared=False,
        )
        for tokens in (window, prompt + completion)
    )
    assert some.window_tokens == gathered == group * (window - 1)
    assert all_seen.window_tokens == 0
    assert window_bytes(some, backward=True) == 4 * some.compute_bytes * 1024 * gathered
    assert window_bytes(replace(some, on_gpu=False), backward=True) == 0
    many = replace(some, window_tokens=10**7)
    assert (
        plan_memory(many).total("backward")
        > plan_memory(some).total("backward") + 4 * some.compute_bytes * 1024 * 9 * 10**6
    )


@pytest.mark.parametrize(("name", "window"), [("Mistral", 512), ("Llama 4 (text), short chunks", 8), ("Qwen3", None)])
def test_windows(name: str, window: int | None):
    config = make_model(FAMILIES[name]).config.to_dict()
    if name == "Qwen3":
        config["sliding_window"] = 4096  # unused without use_sliding_window
    assert shape_from_config(config, name=name).window == window


def test_recurrent_states_are_in_the_memory_of_sampling():
    """Literal: 3 rows of a layer that keeps 4 inputs of 64 channels and 4 matrices of 8 x 8."""
    shape = shape_from_config(make_model(FAMILIES["Qwen3.5 (text)"]).config.to_dict(), name="delta")
    some = workload(shape, sampled_sequences=3, sampled_tokens=10)
    assert plan_memory(some).phases["sampling"]["recurrent states"] == 4 * 3 * (4 * 64 + 4 * 8 * 8)
    other = workload(preset_shape("0.5b"), sampled_sequences=3, sampled_tokens=10)
    assert "recurrent states" not in plan_memory(other).phases["sampling"]


def test_a_loss_of_routers_takes_a_forward_pass():
    run = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "rewards": [{"use": "exact"}]}
    shape = shape_from_config(make_model(FAMILIES["Qwen3-MoE"]).config.to_dict(), name="moe")
    plain, balanced = (
        training_operations(Config(**run, train={"updates_per_rollout": 2, "router_aux_loss_coef": c}), shape)
        for c in (0.0, 0.01)
    )
    assert balanced["router statistics"] == 2 * 2 * shape.active_parameters
    assert balanced["attention"] == pytest.approx(plain["attention"] * 8 / 6)
    assert balanced.keys() - plain.keys() == {"router statistics"}


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_a_bad_number_is_refused_by_its_name(key: str) -> None:
    for config in (GPT_OSS, PRESETS["qwen3-0.6b"]):
        for bad in ({key: 0}, {key: "8"}):
            with pytest.raises(UserError, match=f"config.json: '{key}' is missing or not a positive integer"):
                shape_from_config({**config, **bad}, name="x")
    with pytest.raises(UserError, match="'num_experts' is missing or not"):
        shape_from_config({**PRESETS["qwen3-0.6b"], "num_experts": "8"}, name="x")
