"""Tiny models of many architectures: the config of each, as a user's `config.json` would say it.

Two layers at least, one of each kind that the architecture has, more query heads than key heads where it allows that,
and attention windows that are longer than the sequences that `bench/models.py` computes, unless the name
says otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

VOCABULARY = 128
_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # wide enough for distributions that are not uniform
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
_OLD_HEADS: Mapping[str, Any] = {"num_key_value_heads": None}
_LATENT: Mapping[str, Any] = {  # attention of DeepSeek-V2 and later
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_SPARSE: Mapping[str, Any] = {**_LATENT, "index_n_heads": 8, "index_head_dim": 16, "index_topk": 8}  # DeepSeek-V3.2
_ROUTED: Mapping[str, Any] = {  # experts of DeepSeek-V3 and later
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
_EXPERTS: Mapping[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LOCAL: Mapping[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GEMMA: Mapping[str, Any] = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 512}
_PER_LAYER: Mapping[str, Any] = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY}
_GEMMA_4: Mapping[str, Any] = {
    **_GEMMA,
    "global_head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
_MIXED: Mapping[str, Any] = {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"]}
_DELTA: Mapping[str, Any] = {  # linear attention of Qwen3-Next and later
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}

_MAMBA_2: Mapping[str, Any] = {"mamba_n_heads": 4, "mamba_d_state": 16, "mamba_n_groups": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture, or one way to configure it."""

    model_type: str
    settings: Mapping[str, Any] = field(default_factory=dict)


def _family(model_type: str, **settings: Any) -> Family:
    return Family(model_type=model_type, settings=settings)


FAMILIES: Mapping[str, Family] = {
    "Llama": _family("llama"),
    "Llama 4 (text)": _family(
        "llama4_text", intermediate_size_mlp=48, head_dim=8, attention_chunk_size=512, **_LOCAL, moe_layers=[1]
    ),
    "Llama 4 (text), short chunks": _family(
        "llama4_text",
        intermediate_size_mlp=48,
        head_dim=8,
        attention_chunk_size=8,
        no_rope_layers=[1, 0],  # chunks, and queries that are scaled by their position
        floor_scale=4,
        attn_scale=0.5,
        moe_layers=[1],
        **_LOCAL,
    ),
    "Qwen2": _family("qwen2", tie_word_embeddings=True),
    "Qwen2-MoE": _family("qwen2_moe", shared_expert_intermediate_size=24, **_EXPERTS),
    "Qwen3": _family("qwen3", head_dim=8),
    "Qwen3-MoE": _family("qwen3_moe", head_dim=8, **_EXPERTS),
    "Qwen3-Next": _family("qwen3_next", shared_expert_intermediate_size=24, **_DELTA, **_EXPERTS),
    "Qwen3.5 (text)": _family("qwen3_5_text", **_DELTA),
    "Qwen3.5-MoE (text)": _family("qwen3_5_moe_text", shared_expert_intermediate_size=24, **_DELTA, **_EXPERTS),
    "Gemma": _family("gemma", head_dim=8),
    "Gemma 2": _family("gemma2", **_GEMMA),
    "Gemma 2 without softcap": _family("gemma2", attn_logit_softcapping=None, **_GEMMA),
    "Gemma 2, short window": _family("gemma2", **{**_GEMMA, "sliding_window": 8}),
    "Gemma 3 (text)": _family("gemma3_text", **_GEMMA),
    "Gemma 3 (text), short window": _family("gemma3_text", **{**_GEMMA, "sliding_window": 8}),
    "Gemma 3n (text)": _family(
        "gemma3n_text",
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        laurel_rank=4,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
        **_GEMMA,
        **_PER_LAYER,
    ),
    "Gemma 4 (text)": _family("gemma4_text", num_kv_shared_layers=0, **_GEMMA_4, **_PER_LAYER),
    "Gemma 4 (text) with shared keys": _family(
        "gemma4_text",
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        **{**_GEMMA_4, "layer_types": ["sliding_attention", "full_attention"] * 2},
        **_PER_LAYER,
    ),
    "Gemma 4-MoE (text)": _family(
        "gemma4_text",
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        use_bidirectional_attention="vision",
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=24,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        **_GEMMA_4,
    ),
    "Gemma 4 Unified (text)": _family("gemma4_unified_text", num_kv_shared_layers=0, **_GEMMA_4),
    "Mistral": _family("mistral", sliding_window=512),
    "Mistral, short window": _family("mistral", sliding_window=8),
    "Ministral": _family("ministral", head_dim=8, **_MIXED),
    "Ministral 3": _family("ministral3", head_dim=8),
    "Mixtral": _family("mixtral", **_LOCAL),
    "Phi": _family("phi"),
    "Phi-3, Phi-4": _family("phi3"),
    "Phi-3.5-MoE": _family("phimoe", **_LOCAL),
    "OLMo": _family("olmo"),
    "OLMo 2": _family("olmo2"),
    "OLMo 3": _family("olmo3", sliding_window=512),
    "FlexOlmo": _family("flex_olmo", num_experts=4, num_experts_per_tok=2),
    "OLMoE": _family("olmoe", num_experts=4, num_experts_per_tok=2),
    "SmolLM 3": _family("smollm3"),
    "Granite": _family("granite", attention_multiplier=0.3, logits_scaling=0.5, residual_multiplier=0.7),
    "Granite-MoE": _family("granitemoe", attention_multiplier=0.3, **_LOCAL),
    "Granite 4 without state-space layers": _family(
        "granitemoehybrid",
        layer_types=["attention", "attention"],
        shared_intermediate_size=48,
        num_local_experts=0,
        mamba_n_heads=4,
        mamba_d_state=16,
    ),
    "DeepSeek-V2": _family("deepseek_v2", **{**_LATENT, "topk_method": "greedy"}),
    "DeepSeek-V3, Kimi-K2": _family("deepseek_v3", **_LATENT),
    "DeepSeek-V3.2": _family("deepseek_v32", **_SPARSE),
    "DeepSeek-V4": _family(
        "deepseek_v4",
        num_hidden_layers=3,
        num_key_value_heads=1,
        head_dim=16,
        partial_rotary_factor=0.5,
        q_lora_rank=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        o_groups=2,
        o_lora_rank=8,
        index_n_heads=8,  # with few heads, scores are often equal, and the library's choice is arbitrary
        index_head_dim=16,
        index_topk=8,
        sliding_window=512,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        hc_mult=2,
    ),
    "DiffLlama": _family("diffllama"),
    "GLM 4": _family("glm4", head_dim=8),
    "GLM 4.5": _family("glm4_moe", head_dim=8, **_ROUTED),
    "GLM 4.7 Flash": _family("glm4_moe_lite", **_LATENT),
    "GLM 5": _family("glm_moe_dsa", **_SPARSE),
    "GPT-OSS": _family("gpt_oss", head_dim=8, sliding_window=512, **_LOCAL),
    "GPT-OSS, short window": _family("gpt_oss", head_dim=8, sliding_window=8, **_LOCAL),
    "Falcon": _family("falcon", new_decoder_architecture=True, num_kv_heads=2),
    "Falcon with ALiBi": _family("falcon", alibi=True, **_OLD_HEADS),
    "GPT-2": _family("gpt2", n_embd=32, n_head=4, n_layer=2, n_positions=512),
    "GPT-NeoX": _family("gpt_neox"),
    "OPT": _family("opt", ffn_dim=48, word_embed_proj_dim=32),
    "BLOOM": _family("bloom", n_head=4, n_layer=2),
    "MPT": _family("mpt", d_model=32, n_heads=4, n_layers=2, max_seq_len=512),
    "StableLM": _family("stablelm"),
    "Cohere": _family("cohere"),
    "Cohere 2": _family("cohere2", head_dim=8, **_MIXED),
    "Cohere 2-MoE": _family("cohere2_moe", head_dim=8, **_MIXED, **_EXPERTS),
    "StarCoder 2": _family("starcoder2", sliding_window=512),
    "Nemotron": _family("nemotron"),
    "ERNIE 4.5": _family("ernie4_5", head_dim=8),
    "ERNIE 4.5 MoE": _family(
        "ernie4_5_moe",
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=24,
        moe_layer_start_index=1,
    ),
    "Hunyuan": _family("hunyuan_v1_dense", head_dim=8),
    "Hunyuan with alpha": _family(
        "hunyuan_v1_dense",
        head_dim=8,
        rope_parameters={"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 1e4},
    ),
    "Hunyuan-MoE": _family("hunyuan_v1_moe", head_dim=8, num_experts=4, moe_topk=2, num_experts_per_tok=2),
    "EXAONE 4": _family("exaone4", sliding_window=512, sliding_window_pattern=2),
    "EXAONE-MoE": _family(
        "exaone_moe",
        head_dim=8,
        sliding_window=512,
        sliding_window_pattern=2,
        num_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        **_EXPERTS,
    ),
    "Seed-OSS": _family("seed_oss", head_dim=8),
    "MiniMax-M2": _family("minimax_m2", head_dim=8, **_LOCAL),
    "MiniMax-M3 (text)": _family(
        "minimax_m3_vl_text",
        head_dim=8,
        rotary_dim=4,
        dense_intermediate_size=48,
        shared_intermediate_size=24,
        index_n_heads=2,
        index_head_dim=8,
        index_block_size=4,
        index_topk_blocks=2,
        layer_types=["full_attention", "minimax_m3_sparse"],
        mlp_layer_types=["dense", "sparse"],
        **_LOCAL,
    ),
    "dots.llm1": _family("dots1", head_dim=8, **_ROUTED),
    "Solar Open": _family("solar_open", head_dim=8, **_ROUTED),
    "MiMo-V2-Flash": _family("mimo_v2_flash", head_dim=8, sliding_window=512, **_ROUTED),
    "Trinity": _family("afmoe", head_dim=8, num_shared_experts=1, num_dense_layers=1, **_MIXED, **_EXPERTS),
    "Hunyuan 3": _family("hy_v3", head_dim=8, **_EXPERTS),
    "Apertus": _family("apertus"),
    "Arcee": _family("arcee"),
    "OLMo Hybrid": _family("olmo_hybrid", **_DELTA),
    "Kimi Linear": _family(
        "kimi_linear",
        linear_head_dim=8,
        linear_num_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        **_EXPERTS,
    ),
    "LFM2": _family("lfm2", layer_types=["conv", "full_attention"], block_multiple_of=8),
    "LFM3": _family("lfm3", **_EXPERTS),
    "LFM2-MoE": _family("lfm2_moe", layer_types=["conv", "full_attention"], num_dense_layers=1, **_EXPERTS),
    "Granite 4": _family(
        "granitemoehybrid", layer_types=["mamba", "attention"], shared_intermediate_size=48, **_MAMBA_2, **_LOCAL
    ),
    "Bamba": _family("bamba", attn_layer_indices=[1], mamba_d_head=16, **_MAMBA_2),
    "Falcon-H1": _family("falcon_h1", mamba_d_head=16, mamba_d_ssm=64, **_MAMBA_2),
    "Nemotron-H": _family(
        "nemotron_h",
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "moe"],
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=1,
        head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=24,
    ),
    "Ling 2.5": _family(
        "bailing_hybrid",
        layer_types=["linear_attention", "full_attention"],
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        **_EXPERTS,
    ),
    "Jamba": _family(
        "jamba", num_experts=2, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, mamba_dt_rank=8
    ),
    "Mamba": _family("mamba", state_size=8),
    "Mamba 2": _family("mamba2", state_size=8, num_heads=4, head_dim=16, expand=2, n_groups=1),
    "RWKV": _family("rwkv", attention_hidden_size=32, context_length=512),
}


def make_model(family: Family, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A model of random weights. Norms are not ones and biases not zeros, which would hide mistakes."""
    settings = {**_COMMON, **family.settings}
    if settings["num_key_value_heads"] is None:
        del settings["num_key_value_heads"]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family.model_type, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per number; none of them means anything."""
    tokenizer = Tokenizer(models.WordLevel({f"<{n}>": n for n in range(VOCABULARY)}, unk_token="<0>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<0>", eos_token="<1>")


def save_folder(family: Family, folder: Path) -> Path:
    """A model folder as a user has it."""
    make_model(family).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
