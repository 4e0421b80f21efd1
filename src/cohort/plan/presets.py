"""Shapes of common open models, with their Hugging Face ids and short names."""

from collections.abc import Mapping
from typing import Any


def _preset(
    model_type: str,
    hidden: int,
    mlp: int,
    layers: int,
    heads: int,
    key_heads: int,
    vocabulary: int,
    positions: int,
    **more: Any,
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        **more,
    }


_TIED: Mapping[str, Any] = {"tie_word_embeddings": True}

# From the config.json of each model.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "qwen2.5-0.5b": _preset("qwen2", 896, 4864, 24, 14, 2, 151936, 32768, **_TIED),
    "qwen2.5-1.5b": _preset("qwen2", 1536, 8960, 28, 12, 2, 151936, 32768, **_TIED),
    "qwen2.5-3b": _preset("qwen2", 2048, 11008, 36, 16, 2, 151936, 32768, **_TIED),
    "qwen2.5-7b": _preset("qwen2", 3584, 18944, 28, 28, 4, 152064, 32768),
    "qwen2.5-14b": _preset("qwen2", 5120, 13824, 48, 40, 8, 152064, 32768),
    "qwen2.5-32b": _preset("qwen2", 5120, 27648, 64, 40, 8, 152064, 32768),
    "qwen2.5-72b": _preset("qwen2", 8192, 29568, 80, 64, 8, 152064, 32768),
    "qwen2.5-math-1.5b": _preset("qwen2", 1536, 8960, 28, 12, 2, 151936, 4096, **_TIED),
    "qwen2.5-math-7b": _preset("qwen2", 3584, 18944, 28, 28, 4, 152064, 4096),
    "r1-qwen-1.5b": _preset("qwen2", 1536, 8960, 28, 12, 2, 151936, 131072),
    "r1-qwen-7b": _preset("qwen2", 3584, 18944, 28, 28, 4, 152064, 131072),
    "r1-qwen-14b": _preset("qwen2", 5120, 13824, 48, 40, 8, 152064, 131072),
    "r1-qwen-32b": _preset("qwen2", 5120, 27648, 64, 40, 8, 152064, 131072),
    "qwen3-0.6b": _preset("qwen3", 1024, 3072, 28, 16, 8, 151936, 40960, **_TIED),
    "qwen3-1.7b": _preset("qwen3", 2048, 6144, 28, 16, 8, 151936, 40960, **_TIED),
    "qwen3-4b": _preset("qwen3", 2560, 9728, 36, 32, 8, 151936, 40960, **_TIED),
    "qwen3-8b": _preset("qwen3", 4096, 12288, 36, 32, 8, 151936, 40960),
    "qwen3-14b": _preset("qwen3", 5120, 17408, 40, 40, 8, 151936, 40960),
    "qwen3-32b": _preset("qwen3", 5120, 25600, 64, 64, 8, 151936, 40960),
    "qwen3-30b-a3b": _preset(
        "qwen3_moe",
        2048,
        6144,
        48,
        32,
        4,
        151936,
        40960,
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
    ),
    "llama3-1b": _preset("llama", 2048, 8192, 16, 32, 8, 128256, 131072, **_TIED),
    "llama3-3b": _preset("llama", 3072, 8192, 28, 24, 8, 128256, 131072, **_TIED),
    "llama3-8b": _preset("llama", 4096, 14336, 32, 32, 8, 128256, 131072),
    "llama3-70b": _preset("llama", 8192, 28672, 80, 64, 8, 128256, 131072),
    "mistral-7b": _preset("mistral", 4096, 14336, 32, 32, 8, 32768, 32768),
    "mixtral-8x7b": _preset("mixtral", 4096, 14336, 32, 32, 8, 32000, 32768, num_local_experts=8),
    "gemma2-2b": _preset("gemma2", 2304, 9216, 26, 8, 4, 256000, 8192),
    "gemma2-9b": _preset("gemma2", 3584, 14336, 42, 16, 8, 256000, 8192),
    "gemma3-1b": _preset("gemma3_text", 1152, 6912, 26, 4, 1, 262144, 32768),
}

# Hugging Face ids with these shapes, fine-tuned models included.
IDS: tuple[tuple[str, str], ...] = (
    (r"qwen2\.5-(?:coder-)?([\d.]+b)(?:-instruct)?", "qwen2.5-{}"),
    (r"qwen2\.5-(math-[\d.]+b)(?:-instruct)?", "qwen2.5-{}"),
    (r"qwen2-(7b)(?:-instruct)?", "qwen2.5-{}"),
    (r"deepseek-r1-distill-qwen-([\d.]+b)", "r1-qwen-{}"),
    (r"qwen3-([\d.]+b(?:-a3b)?)(?:-base)?", "qwen3-{}"),
    (r"qwen3-(4b|30b-a3b)-(?:instruct|thinking)-2507", "qwen3-{}"),
    (r"(?:meta-)?llama-3\.1-(8b|70b)(?:-instruct)?", "llama3-{}"),
    (r"llama-3\.2-(1b|3b)(?:-instruct)?", "llama3-{}"),
    (r"llama-3\.3-(70b)-instruct", "llama3-{}"),
    (r"deepseek-r1-distill-llama-(8b|70b)", "llama3-{}"),
    (r"mistral-7b(?:-instruct)?-v0\.3", "mistral-7b"),
    (r"mixtral-8x7b(?:-instruct)?-v0\.1", "mixtral-8x7b"),
    (r"gemma-2-(2b|9b)(?:-it)?", "gemma2-{}"),
    (r"gemma-3-1b-(?:it|pt)", "gemma3-1b"),
)

ALIASES: Mapping[str, str] = {
    "0.5b": "qwen2.5-0.5b",
    "0.6b": "qwen3-0.6b",
    "1b": "llama3-1b",
    "1.5b": "qwen2.5-1.5b",
    "1.7b": "qwen3-1.7b",
    "3b": "qwen2.5-3b",
    "4b": "qwen3-4b",
    "7b": "qwen2.5-7b",
    "8b": "qwen3-8b",
    "14b": "qwen2.5-14b",
    "32b": "qwen2.5-32b",
    "70b": "llama3-70b",
    "72b": "qwen2.5-72b",
}
