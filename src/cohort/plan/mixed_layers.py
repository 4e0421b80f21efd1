"""Sizes of models whose layers differ: linear and full attention, experts in some layers, keys shared by layers.

The plan knows one layer, so it counts the mean of them. Every weight matrix of these models has the hidden size on one
side: the mean of the other sides is that of the parameters too.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_PER_LAYER_FEATURES = 256  # Gemma 4's default of hidden_size_per_layer_input


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer."""

    query: int = 0  # query heads x head size
    key: int = 0  # key heads x head size, if the layer has keys of its own
    mlp: int = 0  # width of the MLP, and of experts that all tokens go through
    expert: int = 0  # width of one of the experts that tokens choose
    linears: Mapping[str, int] = field(default_factory=dict)  # the side of each `nn.Linear` that is not the hidden size
    vectors: int = 0  # parameters in norms, biases, convolutions
    expert_vectors: int = 0  # biases of one expert
    features: int = 0  # per token, saved for backward besides those of attention and MLP
    eager_features: int = 0  # the same in float32 by PyTorch code instead of a GPU's kernels
    state: int = 0  # elements of the recurrent state of one sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """All layers of a model, and what it has besides layers, embedding, head and last norm."""

    layers: tuple[Layer, ...]
    experts: int = 1
    chosen: int = 1  # experts per token
    outer_parameters: int = 0

    def mean(self, name: str) -> int:
        """Mean of a number over the layers, rounded down."""
        return int(sum(getattr(layer, name) for layer in self.layers)) // len(self.layers)

    @property
    def linears(self) -> Mapping[str, int]:
        """Mean sides of the `nn.Linear` modules, rounded down, in the order of the layers."""
        total: Counter[str] = Counter()
        for layer in self.layers:
            total.update(layer.linears)
        return {name: side // len(self.layers) for name, side in total.items() if side >= len(self.layers)}

    def parameters(self, hidden: int, num_experts: int) -> int:
        """Number of parameters in all layers, with so many of the experts."""
        return sum(
            hidden * (sum(layer.linears.values()) + self.experts * (layer.expert > 0))
            + num_experts * (3 * hidden * layer.expert + layer.expert_vectors)
            + layer.vectors
            for layer in self.layers
        )


def _types(config: Mapping[str, Any], default: Callable[[int], str]) -> list[str]:
    return config.get("layer_types") or [default(i) for i in range(config["num_hidden_layers"])]


def _attention(query: int, key: int, *, values: bool = True) -> dict[str, int]:
    return {"q_proj": query, "k_proj": key, "v_proj": key * values, "o_proj": query}


def _mlp(width: int) -> dict[str, int]:
    return dict.fromkeys(("gate_proj", "up_proj", "down_proj"), width)


def _qwen(config: Mapping[str, Any]) -> Layers:
    """Qwen3-Next and Qwen3.5: the gated delta rule, attention with a gate, and a shared expert."""
    head, hidden = config.get("head_dim", 256), config["hidden_size"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    heads, size = config.get("linear_num_value_heads", 32), config.get("linear_value_head_dim", 128)
    key_size = config.get("linear_key_head_dim", 128)
    keys = config.get("linear_num_key_heads", 16) * key_size
    values, kernel = heads * size, config.get("linear_conv_kernel_dim", 4)
    experts = config.get("num_experts") or 0
    shared = config.get("shared_expert_intermediate_size", 512) if experts else config["intermediate_size"]
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ValueError("mlp_only_layers")
    common: dict[str, Any] = {"mlp": shared, "expert": config["moe_intermediate_size"] if experts else 0}
    norms = hidden * (3 if experts else 2)  # the gate of the shared expert has their size
    bias = (2 * query + 2 * key + hidden) if config.get("attention_bias") else 0
    full = Layer(
        query=query,
        key=key,
        linears={**_attention(query, key), "q_proj": 2 * query, **_mlp(shared)},
        vectors=norms + 2 * head + bias,
        features=2 * query,  # the gate and its product with the outputs
        **common,
    )
    mixed = 2 * keys + values
    linear = Layer(
        linears={"in_proj": mixed + values + 2 * heads, "out_proj": values, **_mlp(shared)},
        vectors=norms + mixed * kernel + 2 * heads + size,
        # convolution's inputs and outputs, outputs before and after the norm, gates, and products within chunks of 64
        features=2 * mixed + 3 * values + (64 + 4) * heads,
        # queries, keys, values and products with them; in chunks of 64, decays, scores and states
        eager_features=heads * (8 * key_size + 4 * size + 5 * 64 + key_size * size // 32),
        state=mixed * kernel + heads * size * key_size,
        **common,
    )
    types = _types(config, lambda i: "linear_attention" if (i + 1) % 4 else "full_attention")
    layers = tuple(full if kind == "full_attention" else linear for kind in types)
    return Layers(layers=layers, experts=experts or 1, chosen=config.get("num_experts_per_tok", 8) if experts else 1)


def _gemma(config: Mapping[str, Any]) -> Layers:
    """Gemma 4: larger heads in full attention, keys shared by the last layers, inputs of their own for layers."""
    hidden, heads, number = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    unified = config["model_type"] == "gemma4_unified_text"
    own = 0 if unified else config.get("hidden_size_per_layer_input", _PER_LAYER_FEATURES) or 0
    experts = (config.get("num_experts") or 0) if config.get("enable_moe_block") else 0
    norms = hidden * (4 + (own > 0) + 4 * (experts > 0)) + experts
    overrides: Mapping[Any, Any] | None = config.get("per_layer_config")
    borrowing = number - (config.get("num_kv_shared_layers") or 0)

    def layer(index: int, kind: str) -> Layer:
        full, borrows = kind == "full_attention", index >= borrowing
        same = full and bool(config.get("attention_k_eq_v"))  # values are the keys
        special = {"head_dim": config.get("global_head_dim", 512)} if full else {}
        if same and config.get("num_global_key_value_heads"):
            special["num_key_value_heads"] = config["num_global_key_value_heads"]
        if overrides is not None:  # since transformers 5.24
            special = overrides.get(str(index)) or overrides.get(index) or {}
        head = special.get("head_dim") or config.get("head_dim", 256)
        key = 0 if borrows else head * (special.get("num_key_value_heads") or config["num_key_value_heads"])
        query, mlp = heads * head, config["intermediate_size"]
        mlp *= 2 if borrows and config.get("use_double_wide_mlp") else 1
        bias = (query + key * (2 - same) + hidden) if config.get("attention_bias") else 0
        return Layer(
            query=query,
            key=key,
            mlp=mlp,
            expert=config["moe_intermediate_size"] if experts else 0,
            linears={
                **_attention(query, key, values=not same),
                **_mlp(mlp),
                **({"per_layer_input_gate": own, "per_layer_projection": own} if own else {}),
            },
            vectors=norms + head * (1 if borrows else 2) + bias,
            # the gated input and its norm; norms save float32
            features=(4 * own + 5 * hidden) * (own > 0) + 2 * key,
        )

    types = _types(config, lambda i: "sliding_attention" if (i + 1) % 6 and i + 1 < number else "full_attention")
    table = config.get("vocab_size_per_layer_input", 262_144)
    return Layers(
        layers=tuple(layer(i, kind) for i, kind in enumerate(types)),
        experts=experts or 1,
        chosen=config["top_k_experts"] if experts else 1,
        outer_parameters=own * number * (table + hidden) + own,
    )


def _llama(config: Mapping[str, Any]) -> Layers:
    """Llama 4: a dense MLP, or experts beside one that all tokens go through."""
    head, hidden = config.get("head_dim") or 128, config["hidden_size"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    expert, dense = config.get("intermediate_size", 8192), config.get("intermediate_size_mlp", 16384)
    bias = (query + 2 * key + hidden) if config.get("attention_bias") else 0
    step, number = config.get("interleave_moe_layer_step") or 1, config["num_hidden_layers"]
    routed = config.get("moe_layers")
    routed = set(range(step - 1, number, step) if routed is None else routed)

    def layers() -> Iterator[Layer]:
        for index in range(number):
            mlp = expert if index in routed else dense
            yield Layer(
                query=query,
                key=key,
                mlp=mlp,
                expert=expert if index in routed else 0,
                linears={**_attention(query, key), **_mlp(mlp)},
                vectors=2 * hidden + bias,
            )

    experts = config.get("num_local_experts") or 16
    chosen = config.get("num_experts_per_tok") or 1
    return Layers(layers=tuple(layers()), experts=experts, chosen=chosen)


def _gpt_oss(config: Mapping[str, Any]) -> Layers:
    """gpt-oss: sinks, and biases everywhere."""
    head, hidden, heads = config.get("head_dim", 64), config["hidden_size"], config["num_attention_heads"]
    query, key, experts = heads * head, config["num_key_value_heads"] * head, config["num_local_experts"]
    bias = (query + 2 * key + hidden) if config.get("attention_bias", True) else 0
    mlp = config["intermediate_size"]
    chosen = config.get("num_experts_per_tok") or config.get("experts_per_token") or 4
    layer = Layer(
        query=query,
        key=key,
        expert=mlp,
        features=4 * mlp * chosen,  # clamped and scaled gates
        linears=_attention(query, key),
        vectors=2 * hidden + bias + heads + experts,
        expert_vectors=2 * mlp + hidden,
    )
    return Layers(layers=(layer,) * config["num_hidden_layers"], experts=experts, chosen=chosen)


# `model_type`: its layers, and whether head and embedding share a weight unless the config says otherwise
MIXED: Mapping[str, tuple[Callable[[Mapping[str, Any]], Layers], bool]] = {
    "qwen3_next": (_qwen, False),
    "qwen3_5_text": (_qwen, False),
    "qwen3_5_moe_text": (_qwen, False),
    "gemma4_text": (_gemma, True),
    "gemma4_unified_text": (_gemma, True),
    "llama4_text": (_llama, False),
    "gpt_oss": (_gpt_oss, False),
}
