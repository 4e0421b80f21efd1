"""The plan's shapes of `bench/families.py`'s models: parameters, and those that one token is multiplied with."""

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cohort.config import AdapterConfig, Config, ModelConfig
from cohort.errors import UserError
from cohort.models.adapters.adapter_folder import adapter_spec
from cohort.packing.segments import NO_PARENT, build_attention_metadata
from cohort.plan.adapter import adapter_shape
from cohort.plan.backward import activation_bytes, window_bytes
from cohort.plan.hardware import Hardware
from cohort.plan.memory import plan_memory
from cohort.plan.mixed_layers import MIXED
from cohort.plan.schedule import plan_micro_batches
from cohort.plan.shape import _FAMILIES, PRESETS, preset_shape, shape_from_config
from cohort.plan.timing import training_operations
from cohort.plan.workload import process_workload
from families import FAMILIES, make_model
from selection import slow
from test_plan_memory import workload

RECURRENT = {"jamba", "mamba", "rwkv"}  # mixers that the plan does not know
KNOWN = [name for name, family in FAMILIES.items() if family.model_type not in RECURRENT]
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
    chosen = shape.experts_per_token
    if model.config.model_type == "llama4_text":  # transformers computes all, but they are not active
        chosen = model.config.num_experts_per_tok
    idle = of_experts * (1 - chosen / shape.experts)
    assert sum(k.layers * (k.layer_parameters - k.active_layer_parameters) for k in shape.kinds) == idle
    weights = [w for kind in shape.kinds for w in kind.layers * kind.layer_weights]
    assert sum(map(math.prod, [*weights, *shape.non_layer_weights])) == shape.num_parameters
    others = "embed|lm_head|wte|wpe|conv.conv|conv1d|shared_expert_gate|_bias|altup_|per_layer_model|hc_head|A_log"
    matrices = [tuple(p.shape) for n, p in model.named_parameters() if p.ndim > 1 and not re.search(others, n)]

    def sides(shapes: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
        return sorted((*w[:-2], *sorted(w[-2:])) for w in shapes)  # some experts are transposed

    assert sides(w for w in weights if len(w) > 1) == sides(matrices)
    assert (of_experts > 0) == (shape.experts > 1)
    if shape.own_weights is not None and name != "GPT-2":  # whose layers no adapter supports
        wanted = AdapterConfig(rank=4)
        layers = dict(model.named_modules())
        targets = [layers[n] for n in adapter_spec(ModelConfig(path="m", adapter=wanted), model).modules]
        assert adapter_shape(wanted, shape).num_parameters == sum(4 * sum(m.weight.shape) for m in targets)


def test_every_family_is_compared():
    assert {FAMILIES[name].model_type for name in KNOWN} >= {*_FAMILIES, *MIXED}


def test_published_models():
    """Literal: of gpt-oss-20b's model card, 20.91 and 3.61 billion, counting the head as active."""
    assert shape_from_config(GPT_OSS, name="gpt-oss-20b").num_parameters == 20_914_757_184
    assert shape_from_config(GPT_OSS, name="gpt-oss-20b").active_parameters == pytest.approx(3.61e9, rel=0.01)


NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
PUBLISHED: dict[str, tuple[dict[str, Any], float]] = {  # keys of published configs, and parameters by their cards
    "NVIDIA-Nemotron-3-Nano-30B-A3B": (
        {
            "model_type": "nemotron_h",
            "hybrid_override_pattern": NANO,
            "num_hidden_layers": 52,
            "hidden_size": 2688,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_num_heads": 64,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "n_routed_experts": 128,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712,
            "vocab_size": 131_072,
        },
        31.6e9,
    ),
    "LFM2-1.2B": (
        {
            "model_type": "lfm2",
            "block_ff_dim": 12_288,
            "intermediate_size": 12_288,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14],
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_hidden_layers": 16,
            "vocab_size": 65_536,
        },
        1.17e9,
    ),
    "granite-4.0-h-tiny": (
        {
            "model_type": "granitemoehybrid",
            "layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(40)],
            "hidden_size": 1536,
            "intermediate_size": 512,
            "shared_intermediate_size": 1024,
            "num_hidden_layers": 40,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "num_local_experts": 64,
            "num_experts_per_tok": 6,
            "mamba_n_heads": 48,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "vocab_size": 100_352,
            "tie_word_embeddings": True,
        },
        7e9,
    ),
    "Kimi-Linear-48B-A3B": (
        {
            "model_type": "kimi_linear",
            "linear_attn_config": {
                "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
                "kda_layers": [i for i in range(1, 28) if i not in (4, 8, 12, 16, 20, 24, 27)],
                "head_dim": 128,
                "num_heads": 32,
                "short_conv_kernel_size": 4,
            },
            "first_k_dense_replace": 1,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "kv_lora_rank": 512,
            "moe_intermediate_size": 1024,
            "num_attention_heads": 32,
            "num_experts": 256,
            "num_experts_per_token": 8,
            "num_hidden_layers": 27,
            "num_shared_experts": 1,
            "vocab_size": 163_840,
        },
        48e9,
    ),
}
IN_CODE = ("mamba2", "bamba", "falcon_h1", "olmo_hybrid", "bailing_hybrid", "lfm3", "gemma3n_text", "lfm2")


@pytest.mark.parametrize(
    ("config", "card"),
    [
        *(pytest.param(*case, id=name) for name, case in PUBLISHED.items()),
        # what config.json leaves out has the library's default
        *(
            pytest.param({"model_type": kind}, None, id=kind, marks=slow("sizes of tiny models"))
            for kind in (*IN_CODE, "granitemoehybrid", "kimi_linear", "nemotron_h")
        ),
    ],
)
def test_configs_as_published(config: dict[str, Any], card: float | None) -> None:
    given = {key: value for key, value in config.items() if key != "model_type"}
    built = AutoConfig.for_model(config["model_type"], **given)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(built)
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "moe_intermediate_size")
    sizes += ("num_attention_heads", "num_key_value_heads", "num_local_experts", "num_experts")
    needed = {key: value for key in sizes if (value := getattr(built, key, None)) is not None} if card is None else {}
    shape = shape_from_config({**needed, **config}, name="published")
    assert shape.num_parameters == model.num_parameters()
    assert card is None or shape.num_parameters == pytest.approx(card, rel=0.03)


DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "vocab_size": 129_280,
}


def test_published_models_without_a_reader() -> None:
    """Literal: 671 and 37 billion by DeepSeek-V3's card, 124,439,808 by GPT-2's; servers cache latents of 512 + 64."""
    deepseek = shape_from_config(DEEPSEEK_V3, name="DeepSeek-V3")
    assert deepseek.num_parameters == 671_026_404_352
    assert deepseek.active_parameters == pytest.approx(37e9, rel=0.02)
    assert [(kind.layers, kind.experts, kind.shared_mlp) for kind in deepseek.kinds] == [(3, 1, 0), (58, 256, 2048)]
    assert deepseek.kv_bytes(2, on_server=True) == 61 * 2 * (512 + 64)
    gpt_2 = {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "vocab_size": 50_257,
        "n_positions": 1024,
    }
    assert shape_from_config(gpt_2, name="gpt2").num_parameters == 124_439_808
    assert shape_from_config(gpt_2, name="gpt2").max_positions == 1024


def test_dense_layers_among_experts() -> None:
    """Literal: in two of four layers experts of 3 x 4 x 32 x 48 and a router of 4 x 32, else an MLP of 3 x 32 x 64."""
    small = make_model(FAMILIES["Qwen3-MoE"]).config.to_dict()
    sizes = {"num_hidden_layers": 4, "mlp_only_layers": [0, 2], "intermediate_size": 64, "moe_intermediate_size": 48}
    shape = shape_from_config({**small, **sizes, "num_experts": 4}, name="mixed")
    dense, sparse = sorted(shape.kinds, key=lambda kind: kind.experts)
    assert (dense.layer_numbers, sparse.layer_numbers) == ((0, 2), (1, 3))
    assert sparse.layer_parameters - dense.layer_parameters == 3 * 4 * 32 * 48 + 4 * 32 - 3 * 32 * 64


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "jamba"}, "some of its layers have a recurrent state"),
        ({"model_type": "rwkv"}, "attention of RwkvBlock has projections by other names"),
        ({"model_type": "minimax"}, "some of its layers have a recurrent state"),
        ({"model_type": "opt", "word_embed_proj_dim": 512, "hidden_size": 768}, "its embedding is not 50272 x 768"),
        ({"model_type": "nosuch"}, r"cannot build it \(ValueError: Unrecognized model identifier: nosuch"),
        ({}, "cannot build it"),
        ({"model_type": "phi3", "hidden_size": "8"}, "'hidden_size'"),
    ],
)
def test_models_whose_layers_are_unknown(config: dict[str, Any], why: str) -> None:
    with pytest.raises(
        UserError, match=f"is not supported by the plan: .*({why}).*; give the shape of a similar model"
    ):
        shape_from_config(config, name="other")


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


def test_servers_keep_constant_states_and_latents() -> None:
    """Literal: Nemotron 3 Nano has keys of 2 x 128 in 6 of 52 layers, and 23 states. Kimi Linear caches 512 + 64."""
    nano, kimi = (
        shape_from_config(PUBLISHED[name][0], name=name)
        for name in ("NVIDIA-Nemotron-3-Nano-30B-A3B", "Kimi-Linear-48B-A3B")
    )
    assert nano.kv_bytes(2) == nano.kv_bytes(2, on_server=True) == 6 * 2 * 2 * 256
    assert nano.state_bytes == 4 * 23 * (64 * 64 * 128 + 4 * (64 * 64 + 2 * 8 * 128))
    assert nano.attention_width == 6 * 32 * 128
    assert kimi.kv_bytes(2, on_server=True) == 7 * 2 * (512 + 64)
    assert kimi.kv_bytes(2) == 7 * 2 * 32 * (128 + 64 + 128)
    assert kimi.state_bytes == 4 * 20 * (32 * 128 * 128 + 4 * 3 * 32 * 128)


def test_states_of_a_group_are_kept_for_backward() -> None:
    """Literal: of 5 sequences without checkpointing what each starts from and ends with, else in one layer."""
    shape = shape_from_config(make_model(FAMILIES["Qwen3.5 (text)"]).config.to_dict(), name="delta")
    state = 4 * (4 * 64 + 4 * 8 * 8)
    for checkpointing in (False, True):
        some = workload(shape, checkpointing=checkpointing, trained_sequences=5)
        without = activation_bytes(replace(some, trained_sequences=0))
        assert activation_bytes(some) - without == 5 * 2 * state


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
