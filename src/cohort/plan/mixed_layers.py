"""Layers of families beyond attention with a gated MLP, from config.json: one reader per family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cohort.plan import layer_parts as parts
from cohort.plan.layer_parts import Config, Layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """All layers of a model, and what it has besides layers, embedding, head and last norm."""

    layers: tuple[Layer, ...]
    outer_parameters: int = 0
    outer_linears: tuple[tuple[str, int, int], ...] = ()  # `nn.Linear` among them: name, in, out
    streams: int = 1  # hidden states per token between layers


def _first(config: Config, *keys: str, default: Any = None) -> Any:
    """Value of the first of these keys that is set; configs of different age have other names."""
    return next((config[key] for key in keys if config.get(key) is not None), default)


def _types(config: Config, default: Callable[[int], str]) -> list[str]:
    """Types of the layers, by their present names."""
    found = _first(config, "layer_types", "layers_block_type") or [
        default(i) for i in range(config["num_hidden_layers"])
    ]
    return [{"attention": "full_attention", "mamba": "linear_attention"}.get(kind, kind) for kind in found]


def _qwen(config: Config) -> Layers:
    """Qwen3-Next and Qwen3.5: the gated delta rule, attention with a gate, and a shared expert."""
    hidden, head, heads = config["hidden_size"], config.get("head_dim", 256), config.get("linear_num_value_heads", 32)
    size, key = config.get("linear_value_head_dim", 128), config.get("linear_key_head_dim", 128)
    keys, kernel = config.get("linear_num_key_heads", 16) * key, config.get("linear_conv_kernel_dim", 4)
    experts = config.get("num_experts") or 0
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ValueError("mlp_only_layers")
    if experts:
        shared = config.get("shared_expert_intermediate_size", 512)
        mlp = parts.mlp(hidden, shared, at="mlp.shared_expert") + Layer(vectors=hidden)  # its gate
        if config["model_type"] == "qwen3_next":  # peft takes it for fused experts, so adapters leave it out
            mlp = replace(mlp, linears={}, weights=tuple((b, a) for a, b in mlp.linears.values()))
        mlp += parts.experts(hidden, config["moe_intermediate_size"], experts, config.get("num_experts_per_tok", 8))
    else:
        mlp = parts.mlp(hidden, config["intermediate_size"])
    query = config["num_attention_heads"] * head
    full = parts.attention(
        *(hidden, config["num_attention_heads"], config["num_key_value_heads"], head),
        bias=bool(config.get("attention_bias")),
        norm=2 * head,
        gates=query,
    )
    values = heads * size
    if config["model_type"] == "qwen3_next":
        into = {"in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * heads}
    else:
        into = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
    projections = {f"linear_attn.{name}": (hidden, width) for name, width in into.items()}
    linear = parts.delta_rule(heads, key, size, kernel, keys=keys) + Layer(
        linears={**projections, "linear_attn.out_proj": (values, hidden)}
    )
    kinds = {
        "full_attention": parts.norms(hidden, 2) + full + mlp,
        "linear_attention": parts.norms(hidden, 2) + linear + mlp,
    }
    types = _types(config, lambda i: "linear_attention" if (i + 1) % 4 else "full_attention")
    return Layers(layers=tuple(kinds[kind] for kind in types))


def _olmo_hybrid(config: Config) -> Layers:
    """OLMo Hybrid: the gated delta rule with separate projections."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    key_heads, head = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads
    delta_heads = config.get("linear_num_value_heads") or heads
    key_number = config.get("linear_num_key_heads") or heads
    key = config.get("linear_key_head_dim") or int(0.75 * hidden / key_number)
    size = config.get("linear_value_head_dim") or 2 * key
    keys, values = key_number * key, delta_heads * size
    full = parts.attention(
        *(hidden, heads, key_heads, head),
        bias=bool(config.get("attention_bias")),
        norm=(heads + key_heads) * head,
    )
    widths = {"q": keys, "k": keys, "v": values, "a": delta_heads, "b": delta_heads, "g": values}
    linear = parts.delta_rule(delta_heads, key, size, config.get("linear_conv_kernel_dim") or 4, keys=keys) + Layer(
        linears={
            **{f"linear_attn.{name}_proj": (hidden, width) for name, width in widths.items()},
            "linear_attn.o_proj": (values, hidden),
        },
        eager_features=2 * values,
    )
    common = parts.norms(hidden, 2) + parts.mlp(hidden, config["intermediate_size"])
    types = _types(config, lambda i: "full_attention" if i % 4 == 3 else "linear_attention")
    if not config.get("layer_types") and "full_attention" not in types:
        types[-1] = "full_attention"
    return Layers(layers=tuple(common + (full if kind == "full_attention" else linear) for kind in types))


def _kimi(config: Config) -> Layers:
    """Kimi Linear and Ling 2.5: delta attention with a decay per channel, latent attention, experts."""
    hidden, number, own = config["hidden_size"], config["num_hidden_layers"], config.get("linear_attn_config") or {}
    ling = config["model_type"] == "bailing_hybrid"
    if ling:  # its own configs say the size of these heads as `head_dim`; saved ones, both
        heads = config.get("linear_num_heads") or config["num_attention_heads"]
        head = config.get("linear_head_dim") or config.get("head_dim") or 128
        kernel = _first(config, "linear_conv_kernel_dim", "short_conv_kernel_size", default=4)
        wide, group = heads * head, config.get("layer_group_size") or 6
        gates = {"forget_gate.f_proj": (hidden, wide), "g_proj": (hidden, wide)}
        types = _types(config, lambda i: "linear_attention" if (i + 1) % group else "full_attention")
    else:
        heads, head, kernel = (
            own.get(name) or config.get(f"linear_{key}") or default
            for name, key, default in (
                ("num_heads", "num_heads", 32),
                ("head_dim", "head_dim", 128),
                ("short_conv_kernel_size", "conv_kernel_dim", 4),
            )
        )
        wide, full_layers = heads * head, own.get("full_attn_layers")
        gates = {
            f"{name}_{part}_proj": sides
            for name in ("forget_gate.f", "g")
            for part, sides in (("a", (hidden, head)), ("b", (head, wide)))
        }
        types = _types(
            config,
            lambda i: (
                "full_attention" if (i + 1 in full_layers if full_layers else i and i % 4 == 0) else "linear_attention"
            ),
        )
    linear = parts.channel_delta_rule(hidden, heads, head, kernel, gates)
    full = parts.latent_attention(config, hidden)
    if ling:
        full += Layer(linears={"self_attn.g_proj": (hidden, config["num_attention_heads"])})
    width = config["moe_intermediate_size"]
    sparse = parts.experts(
        *(hidden, width, _first(config, "num_experts", "num_local_experts")),
        _first(config, "num_experts_per_token", "num_experts_per_tok", default=8),
    )
    shared = width * _first(config, "num_shared_experts", "n_shared_experts", default=1)
    sparse += parts.mlp(hidden, shared, at="mlp.shared_experts")
    dense, common = parts.mlp(hidden, config["intermediate_size"]), parts.norms(hidden, 2)
    first = _first(config, "first_k_dense_replace", default=2 if ling else 1)
    mlps = config.get("mlp_layer_types") or ["dense" if i < first else "sparse" for i in range(number)]
    return Layers(
        layers=tuple(
            common + (full if kind == "full_attention" else linear) + (dense if mlp == "dense" else sparse)
            for kind, mlp in zip(types, mlps, strict=True)
        )
    )


def _lfm(config: Config) -> Layers:
    """LFM2, LFM2-MoE and LFM3: short convolutions beside attention."""
    hidden, heads, kind = config["hidden_size"], config["num_attention_heads"], config["model_type"]
    newer = kind == "lfm3"
    head = 128 if newer else hidden // heads
    head = config.get("head_dim") or head
    bias = bool(config.get("attention_bias")) and newer
    attention = parts.attention(
        *(hidden, heads, config["num_key_value_heads"], head),
        out="o_proj" if newer else "out_proj",
        bias=bias,
        norm=2 * head,
    )
    if newer and config.get("use_attention_gate", True):
        attention += Layer(linears={"self_attn.g_proj": (hidden, heads)}, features=heads * head)
    convolution = parts.short_convolution(
        hidden, config.get("conv_L_cache") or (7 if newer else 3), bias=bool(config.get("conv_bias"))
    )
    common = parts.norms(hidden, 4 if newer and config.get("use_sandwich_norm", True) else 2)
    width = config["intermediate_size"]
    if kind == "lfm2":
        width = config.get("block_ff_dim") or width
        if config.get("block_auto_adjust_ff_dim", True):
            multiple = config.get("block_multiple_of") or 256
            width = int(config.get("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
            width = multiple * -(-width // multiple)
    dense = parts.mlp(hidden, width, at="feed_forward", names=("w1", "w3", "w2"))
    sparse = dense
    if kind == "lfm2_moe":
        sparse = parts.experts(
            *(hidden, config["moe_intermediate_size"], config["num_experts"]), config.get("num_experts_per_tok") or 4
        )
    first = config.get("num_dense_layers", 2)
    attentive = config.get("full_attn_idxs")

    def default(index: int) -> str:
        if newer:
            return "full_attention" if index % 4 == 2 else "sliding_attention" if index % 4 == 0 and index else "conv"
        return "full_attention" if attentive is None or index in attentive else "conv"

    return Layers(
        layers=tuple(
            common + (convolution if name == "conv" else attention) + (dense if i < first else sparse)
            for i, name in enumerate(_types(config, default))
        )
    )


def _mamba_part(config: Config, *, at: str = "mamba", inner: int | None = None, norm: bool = True) -> Layer:
    """Mamba 2 as in Bamba, Granite 4 and Falcon-H1."""
    hidden, heads = config["hidden_size"], config.get("mamba_n_heads") or 128
    head = config.get("mamba_d_head", "auto")
    if head == "auto":
        head = (inner or (config.get("mamba_expand") or 2) * hidden) // heads
    bias = bool(config.get("mamba_proj_bias"))
    return parts.state_space(
        hidden,
        at=at,
        heads=heads,
        head=head,
        state=config.get("mamba_d_state") or 256,
        groups=config.get("mamba_n_groups") or 1,
        kernel=config.get("mamba_d_conv") or 4,
        chunk=config.get("mamba_chunk_size") or 256,
        conv_bias=config.get("mamba_conv_bias", True),
        in_bias=bias,
        out_bias=bool(config.get("projectors_bias")) if config["model_type"] == "falcon_h1" else bias,
        norm=norm,
    )


def _mamba_hybrid(config: Config) -> Layers:
    """Bamba, Granite 4 and Falcon-H1: Mamba 2 and attention, in turn or beside each other."""
    hidden, heads, kind = config["hidden_size"], config["num_attention_heads"], config["model_type"]
    attention = parts.attention(
        *(hidden, heads, config.get("num_key_value_heads") or (heads if kind == "granitemoehybrid" else 8)),
        config.get("head_dim") or hidden // heads,
        bias=bool(config.get("attention_bias")),
    )
    common = parts.norms(hidden, 2)
    if kind == "granitemoehybrid":
        width = config.get("shared_intermediate_size") or 1024
        common += Layer(
            linears={"shared_mlp.input_linear": (hidden, 2 * width), "shared_mlp.output_linear": (width, hidden)},
            mlp=width,
        )
        if experts := config.get("num_local_experts", 8):
            chosen = config.get("num_experts_per_tok") or 2
            common += parts.experts(hidden, config["intermediate_size"], experts, chosen)
    else:
        common += parts.mlp(hidden, config["intermediate_size"], at="feed_forward", bias=bool(config.get("mlp_bias")))
    if kind == "falcon_h1":
        inner = config.get("mamba_d_ssm", 1024)
        both = attention + _mamba_part(config, inner=inner, norm=bool(config.get("mamba_rms_norm")))
        return Layers(layers=(common + both,) * config["num_hidden_layers"])
    attentive = config.get("attn_layer_indices") or ()
    types = _types(config, lambda i: "full_attention" if i in attentive else "linear_attention")
    mamba = _mamba_part(config)
    return Layers(layers=tuple(common + (attention if name == "full_attention" else mamba) for name in types))


def _mamba(config: Config) -> Layers:
    """Mamba 2 without attention."""
    hidden, bias = config["hidden_size"], bool(config.get("use_bias"))
    mixer = parts.state_space(
        hidden,
        at="mixer",
        heads=config.get("num_heads") or 128,
        head=config.get("head_dim") or 64,
        state=config.get("state_size") or 128,
        groups=config.get("n_groups") or 8,
        kernel=config.get("conv_kernel") or 4,
        chunk=config.get("chunk_size") or 256,
        conv_bias=config.get("use_conv_bias", True),
        in_bias=bias,
        out_bias=bias,
    )
    return Layers(layers=(parts.norms(hidden, 1) + mixer,) * config["num_hidden_layers"])


_NEMOTRON_LAYERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


def _nemotron(config: Config) -> Layers:
    """Nemotron-H: each layer is one of Mamba 2, attention, experts and an MLP without a gate."""
    hidden, use_bias = config["hidden_size"], bool(config.get("use_bias"))
    bias = bool(config.get("mlp_bias"))
    mamba = parts.state_space(
        hidden,
        at="mixer",
        heads=config.get("mamba_num_heads") or 128,
        head=config.get("mamba_head_dim") or 64,
        state=config.get("ssm_state_size") or 128,
        groups=_first(config, "n_groups", "mamba_n_groups", default=8),
        kernel=_first(config, "conv_kernel", "mamba_d_conv", default=4),
        chunk=_first(config, "chunk_size", "mamba_chunk_size", default=128),
        conv_bias=_first(config, "use_conv_bias", "mamba_conv_bias", default=True),
        in_bias=use_bias,
        out_bias=use_bias,
    )
    attention = parts.attention(
        *(hidden, config["num_attention_heads"], config.get("num_key_value_heads") or config["num_attention_heads"]),
        config.get("head_dim") or 128,
        at="mixer",
        bias=bool(config.get("attention_bias")),
    )
    two = ("up_proj", "down_proj")
    kinds = {
        "linear_attention": mamba,
        "full_attention": attention,
        "mlp": parts.mlp(hidden, config.get("intermediate_size") or 21504, at="mixer", names=two, bias=bias),
    }
    pattern = config.get("hybrid_override_pattern")
    types = (
        [_NEMOTRON_LAYERS[letter] for letter in pattern]
        if pattern and not _first(config, "layer_types", "layers_block_type")
        else _types(config, lambda i: list(_NEMOTRON_LAYERS.values())[i])
    )
    if "moe" in types:
        latent = config.get("moe_latent_size") or 0
        shared = config.get("moe_shared_expert_intermediate_size") or 7688
        moe = parts.experts(
            *(latent or hidden, config.get("moe_intermediate_size") or 7688, config.get("n_routed_experts") or 8),
            config.get("num_experts_per_tok") or 2,
            router=hidden,
            gated=False,
        )
        if latent:
            moe += Layer(
                linears={"mixer.fc1_latent_proj": (hidden, latent), "mixer.fc2_latent_proj": (latent, hidden)},
                vectors=(latent + hidden) * bias,
                features=2 * latent,
            )
        kinds["moe"] = moe + parts.mlp(hidden, shared, at="mixer.shared_experts", names=two, bias=bias)
    return Layers(layers=tuple(parts.norms(hidden, 1) + kinds[kind] for kind in types))


def _gemma_3n(config: Config) -> Layers:
    """Gemma 3n: four hidden states per token (AltUp), low-rank residuals (LAuReL), keys shared by the last layers."""
    hidden, number, head = config["hidden_size"], config["num_hidden_layers"], config.get("head_dim") or 256
    own, rank = config.get("hidden_size_per_layer_input") or 256, config.get("laurel_rank") or 64
    streams = config.get("altup_num_inputs") or 4
    widths = config["intermediate_size"]
    widths = widths if isinstance(widths, list) else [widths] * number
    sparsity = config.get("activation_sparsity_pattern")
    if not isinstance(sparsity, list):
        sparsity = [0.95] * (10 if number > 10 else 0) + [0.0] * number
    borrowing = number - config.get("num_kv_shared_layers", 15)
    common = parts.norms(hidden, 7) + Layer(
        linears={
            "altup.correction_coefs": (streams, streams),
            "altup.prediction_coefs": (streams, streams * streams),
            "altup.modality_router": (hidden, streams),
            "laurel.linear_left": (hidden, rank),
            "laurel.linear_right": (rank, hidden),
            "per_layer_input_gate": (hidden, own),
            "per_layer_projection": (own, hidden),
        },
        vectors=hidden,
        # predictions and corrections of all hidden states, and the gated input
        features=(2 * streams + 7) * hidden + 4 * own + 2 * rank,
    )

    def layer(index: int) -> Layer:
        borrows = index >= borrowing > 0
        attention = parts.attention(
            *(hidden, config["num_attention_heads"], 0 if borrows else config["num_key_value_heads"], head),
            bias=bool(config.get("attention_bias")),
            norm=head * (1 if borrows else 2),
        )
        width = widths[index]
        return common + attention + parts.mlp(hidden, width) + Layer(features=2 * width * (sparsity[index] > 0))

    table = config.get("vocab_size_per_layer_input") or 262_144
    linears = [
        (f"altup_{name}projections.{i}", hidden, hidden) for name in ("", "unembed_") for i in range(streams - 1)
    ]
    linears.append(("per_layer_model_projection", hidden, own * number))
    return Layers(
        layers=tuple(map(layer, range(number))),
        outer_parameters=own * number * table + own + sum(a * b for _, a, b in linears),
        outer_linears=tuple((f"model.{name}", a, b) for name, a, b in linears),
        streams=streams,
    )


def _gemma(config: Config) -> Layers:
    """Gemma 4: larger heads in full attention, keys shared by the last layers, inputs of their own for layers."""
    hidden, heads, number = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    unified = config["model_type"] == "gemma4_unified_text"
    own = 0 if unified else config.get("hidden_size_per_layer_input", 256) or 0
    experts = (config.get("num_experts") or 0) if config.get("enable_moe_block") else 0
    common = parts.norms(hidden, 4) + Layer(vectors=hidden * ((own > 0) + 4 * (experts > 0)) + experts)
    if own:
        common += Layer(
            linears={"per_layer_input_gate": (hidden, own), "per_layer_projection": (own, hidden)},
            features=4 * own + 5 * hidden,  # the gated input and its norm; norms save float32
        )
    if experts:
        numbers = experts, config["top_k_experts"]
        common += parts.experts(hidden, config["moe_intermediate_size"], *numbers)
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
        key_heads = 0 if borrows else special.get("num_key_value_heads") or config["num_key_value_heads"]
        attention = parts.attention(
            *(hidden, heads, key_heads, head),
            bias=bool(config.get("attention_bias")),
            norm=head * (1 if borrows else 2),
            values=not same,
        )
        mlp = config["intermediate_size"] * (2 if borrows and config.get("use_double_wide_mlp") else 1)
        return common + attention + parts.mlp(hidden, mlp) + Layer(features=2 * attention.key)

    types = _types(config, lambda i: "sliding_attention" if (i + 1) % 6 and i + 1 < number else "full_attention")
    table = config.get("vocab_size_per_layer_input", 262_144)
    return Layers(
        layers=tuple(layer(i, kind) for i, kind in enumerate(types)),
        outer_parameters=own * number * (table + hidden) + own,
        outer_linears=(("model.per_layer_model_projection", hidden, own * number),) if own else (),
    )


def _llama(config: Config) -> Layers:
    """Llama 4: a dense MLP, or experts beside one that all tokens go through."""
    hidden, number = config["hidden_size"], config["num_hidden_layers"]
    expert, dense = config.get("intermediate_size", 8192), config.get("intermediate_size_mlp", 16384)
    step, routed = config.get("interleave_moe_layer_step") or 1, config.get("moe_layers")
    routed = set(range(step - 1, number, step) if routed is None else routed)
    common = parts.norms(hidden, 2) + parts.attention(
        *(hidden, config["num_attention_heads"], config["num_key_value_heads"], config.get("head_dim") or 128),
        bias=bool(config.get("attention_bias")),
    )
    num_experts = config.get("num_local_experts") or 16
    experts = parts.experts(hidden, expert, num_experts, config.get("num_experts_per_tok") or 1)
    # transformers computes all experts with all tokens, and saves that; servers compute only those that are chosen
    experts = replace(experts, chosen=num_experts)
    sparse = parts.mlp(hidden, expert, at="feed_forward.shared_expert") + experts
    plain = parts.mlp(hidden, dense, at="feed_forward")
    return Layers(layers=tuple(common + (sparse if i in routed else plain) for i in range(number)))


def _gpt_oss(config: Config) -> Layers:
    """gpt-oss: sinks, and biases everywhere."""
    hidden, heads, mlp = config["hidden_size"], config["num_attention_heads"], config["intermediate_size"]
    experts = config["num_local_experts"]
    chosen = config.get("num_experts_per_tok") or config.get("experts_per_token") or 4
    layer = parts.norms(hidden, 2) + parts.attention(
        *(hidden, heads, config["num_key_value_heads"], config.get("head_dim", 64)),
        bias=config.get("attention_bias", True),
    )
    layer += parts.experts(hidden, mlp, experts, chosen, biases=2 * mlp + hidden)
    layer += Layer(vectors=heads + experts, features=4 * mlp * chosen)  # clamped and scaled gates
    return Layers(layers=(layer,) * config["num_hidden_layers"])


# `model_type`: its layers, and whether head and embedding share a weight unless the config says otherwise
MIXED: Mapping[str, tuple[Callable[[Config], Layers], bool]] = {
    "qwen3_next": (_qwen, False),
    "qwen3_5_text": (_qwen, False),
    "qwen3_5_moe_text": (_qwen, False),
    "olmo_hybrid": (_olmo_hybrid, False),
    "kimi_linear": (_kimi, False),
    "bailing_hybrid": (_kimi, False),
    "lfm2": (_lfm, True),
    "lfm2_moe": (_lfm, True),
    "lfm3": (_lfm, True),
    "mamba2": (_mamba, False),
    "bamba": (_mamba_hybrid, False),
    "falcon_h1": (_mamba_hybrid, False),
    "granitemoehybrid": (_mamba_hybrid, False),
    "nemotron_h": (_nemotron, False),
    "gemma3n_text": (_gemma_3n, True),
    "gemma4_text": (_gemma, True),
    "gemma4_unified_text": (_gemma, True),
    "llama4_text": (_llama, False),
    "gpt_oss": (_gpt_oss, False),
}
