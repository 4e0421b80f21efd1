"""Layers of models beyond attention with a gated MLP: recurrent states, latent attention, experts in some layers.

A layer is the sum of its parts, such as norms, attention and an MLP. A reader per family puts them together from
config.json. Features are counted from the tensors that transformers' layers save for backward (`tests/plan`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import Any

_CHUNK = 64  # tokens at a time in PyTorch code of delta rules

Config = Mapping[str, Any]
WeightShape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer, or a part of one."""

    linears: Mapping[str, tuple[int, int]] = field(
        default_factory=dict
    )  # (in, out) of `nn.Linear` by path in the layer
    weights: tuple[WeightShape, ...] = ()  # other matrices: routers and experts
    vectors: int = 0  # parameters in norms, biases, convolutions
    idle: int = 0  # parameters of experts that a token is not sent to
    query: int = 0  # query heads x head size; with latent attention the mean of queries and outputs
    key: int = 0  # key heads x head size, if the layer has keys of its own
    heads: int = 0  # query heads
    latent: int = 0  # features per token that servers cache instead of keys and values
    mlp: int = 0  # width of MLPs that all tokens go through
    expert: int = 0  # width of one expert
    experts: int = 0
    chosen: int = 0  # experts per token
    norms: int = 0  # over the hidden size
    query_norms: int = 0  # 1: query and key norms
    features: int = 0  # per token, saved for backward besides those of attention and MLP
    eager_features: int = 0  # the same in float32 by PyTorch code instead of a GPU's kernels
    state: int = 0  # elements of the recurrent state of one sequence

    def __add__(self, other: "Layer") -> "Layer":
        names = [f.name for f in fields(self) if f.name != "linears"]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return Layer(**sums, linears={**self.linears, **other.linears})

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(map(prod, (*self.linears.values(), *self.weights))) + self.vectors


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


# Parts of layers


def _norms(hidden: int, number: int) -> Layer:
    return Layer(norms=number, vectors=number * hidden)


def _attention(
    hidden: int,
    heads: int,
    key_heads: int,
    head: int,
    *,
    at: str = "self_attn",
    out: str = "o_proj",
    bias: bool = False,
    norm: int = 0,
    values: bool = True,
    gates: int = 0,
) -> Layer:
    """Attention.

    Args:
        hidden: hidden size.
        heads: query heads.
        key_heads: key heads; 0 if the layer uses keys of an earlier one.
        head: size of one head.
        at: path of the module.
        out: name of the last projection.
        bias: whether all projections have a bias.
        norm: parameters of query and key norms.
        values: whether there is a projection of values.
        gates: more outputs of the projection of queries.
    """
    query, key = heads * head, key_heads * head
    outs = {"q_proj": query + gates, "k_proj": key, "v_proj": key * values}
    linears = {f"{at}.{name}": (hidden, width) for name, width in outs.items() if width}
    return Layer(
        linears={**linears, f"{at}.{out}": (query, hidden)},
        vectors=norm + (sum(outs.values()) + hidden) * bias,
        query=query,
        key=key,
        heads=heads,
        query_norms=int(norm > 0),
        features=2 * gates,  # the gate and its product with the outputs
    )


def _latent_attention(config: Config, hidden: int) -> Layer:
    """Multi-head latent attention of DeepSeek-V2 and later. Projections from latents are saved as queries and keys."""
    heads, rank = config["num_attention_heads"], config.get("kv_lora_rank") or 512
    nope, rope, value = (
        config.get(key) or default
        for key, default in (("qk_nope_head_dim", 128), ("qk_rope_head_dim", 64), ("v_head_dim", 128))
    )
    queries, latent = config.get("q_lora_rank") or 0, rank + rope
    wide = heads * (nope + rope)
    projections = (
        {"q_a_proj": (hidden, queries), "q_b_proj": (queries, wide)} if queries else {"q_proj": (hidden, wide)}
    ) | {
        "kv_a_proj_with_mqa": (hidden, latent),
        "kv_b_proj": (rank, heads * (nope + value)),
        "o_proj": (heads * value, hidden),
    }
    mean = heads * (nope + rope + value) // 2
    return Layer(
        linears={f"self_attn.{name}": sides for name, sides in projections.items()},
        vectors=queries + rank + (queries + latent + hidden) * bool(config.get("attention_bias")),
        query=mean,
        key=mean,
        heads=heads,
        latent=latent,
        features=2 * (queries + rank) + heads * (nope + value),  # inputs of the second projections; keys before copies
        eager_features=queries + rank,
    )


def _mlp(
    hidden: int,
    width: int,
    *,
    at: str = "mlp",
    names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
    bias: bool = False,
) -> Layer:
    """MLP with a gate, or without one if it has two projections."""
    *into, out = names
    return Layer(
        linears={**{f"{at}.{name}": (hidden, width) for name in into}, f"{at}.{out}": (width, hidden)},
        vectors=(len(into) * width + hidden) * bias,
        mlp=width,
        features=-2 * width * (len(into) == 1),  # a squared ReLU saves two tensors fewer than a gate
    )


def _experts(
    hidden: int,
    width: int,
    number: int,
    chosen: int,
    *,
    router: int | None = None,
    gated: bool = True,
    biases: int = 0,
) -> Layer:
    """Routed experts and their router.

    Args:
        hidden: size of their inputs.
        width: width of one expert.
        number: number of experts.
        chosen: experts per token.
        router: size of the router's inputs, if it is not `hidden`; 0: the router is counted elsewhere.
        gated: whether they have a gate.
        biases: parameters in biases of one expert.
    """
    into, routed = (1 + gated) * width, hidden if router is None else router
    return Layer(
        weights=(*(((number, routed),) if routed else ()), (number, into, hidden), (number, hidden, width)),
        vectors=number * biases,
        idle=(number - chosen) * (hidden * (into + width) + biases),
        expert=width,
        experts=number,
        chosen=chosen,
        features=-2 * width * chosen * (not gated),
    )


def _short_convolution(hidden: int, kernel: int, *, bias: bool) -> Layer:
    """Short convolution of LFM2, with two gates."""
    return Layer(
        linears={"conv.in_proj": (hidden, 3 * hidden), "conv.out_proj": (hidden, hidden)},
        vectors=hidden * kernel + 5 * hidden * bias,
        features=6 * hidden,  # inputs and outputs of convolution and gates
        state=hidden * kernel,
    )


def _delta_rule(heads: int, key: int, size: int, kernel: int, *, keys: int) -> Layer:
    """Gated delta rule without its projections: keys of `keys` features, `heads` matrices of key x size."""
    values, mixed = heads * size, 2 * keys + heads * size
    return Layer(
        vectors=mixed * kernel + 2 * heads + size,
        # convolution's inputs and outputs, outputs before and after the norm, gates, and products within chunks of 64
        features=2 * mixed + 3 * values + (_CHUNK + 4) * heads,
        # queries, keys, values and products with them; in chunks of 64, decays, scores and states
        eager_features=heads * (8 * key + 4 * size + 5 * _CHUNK + key * size // 32),
        state=mixed * kernel + heads * size * key,
    )


def _channel_delta_rule(hidden: int, heads: int, head: int, kernel: int, gates: Mapping[str, tuple[int, int]]) -> Layer:
    """Kimi's delta attention: a decay per channel."""
    wide = heads * head
    projections = {"q_proj": wide, "k_proj": wide, "v_proj": wide, "b_proj": heads}
    # PyTorch code solves for one row of a chunk after the other, and keeps the earlier rows each time
    rows = (_CHUNK - 1) * (2 * _CHUNK - 1) // 6 + 2 * _CHUNK + _CHUNK // 2
    return Layer(
        linears={
            **{f"self_attn.{name}": (hidden, width) for name, width in projections.items()},
            **{f"self_attn.{name}": sides for name, sides in gates.items()},
            "self_attn.o_proj": (wide, hidden),
        },
        vectors=3 * wide * kernel + wide + heads + head,
        features=6 * wide + 3 * wide + heads,
        eager_features=heads * (3 * _CHUNK * head + 20 * head + rows + head * head // _CHUNK),
        state=3 * wide * kernel + heads * head * head,
    )


def _state_space(
    hidden: int,
    *,
    at: str,
    heads: int,
    head: int,
    state: int,
    groups: int,
    kernel: int,
    chunk: int,
    conv_bias: bool,
    in_bias: bool = False,
    out_bias: bool = False,
    norm: bool = True,
) -> Layer:
    """Mamba 2."""
    inner = heads * head
    mixed = inner + 2 * groups * state
    return Layer(
        linears={f"{at}.in_proj": (hidden, inner + mixed + heads), f"{at}.out_proj": (inner, hidden)},
        vectors=mixed * (kernel + conv_bias)
        + 3 * heads
        + inner * norm
        + (inner + mixed + heads) * in_bias
        + hidden * out_bias,
        # the projection, convolution's inputs and outputs, outputs before and after the norm
        features=3 * mixed + 3 * inner + heads,
        # inputs, keys and queries of all heads; in chunks, decays, scores, their products and states
        eager_features=heads * (10 * head + 5 * state + 3 * chunk + 6 + 2 * head * state // chunk)
        - (mixed + inner) // 2,
        state=mixed * kernel + heads * head * state,
    )


# Families


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
        mlp = _mlp(hidden, shared, at="mlp.shared_expert") + Layer(vectors=hidden)  # its gate
        if config["model_type"] == "qwen3_next":  # peft takes it for fused experts, so adapters leave it out
            mlp = replace(mlp, linears={}, weights=tuple((b, a) for a, b in mlp.linears.values()))
        mlp += _experts(hidden, config["moe_intermediate_size"], experts, config.get("num_experts_per_tok", 8))
    else:
        mlp = _mlp(hidden, config["intermediate_size"])
    query = config["num_attention_heads"] * head
    full = _attention(
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
    linear = _delta_rule(heads, key, size, kernel, keys=keys) + Layer(
        linears={**projections, "linear_attn.out_proj": (values, hidden)}
    )
    kinds = {"full_attention": _norms(hidden, 2) + full + mlp, "linear_attention": _norms(hidden, 2) + linear + mlp}
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
    full = _attention(
        *(hidden, heads, key_heads, head),
        bias=bool(config.get("attention_bias")),
        norm=(heads + key_heads) * head,
    )
    widths = {"q": keys, "k": keys, "v": values, "a": delta_heads, "b": delta_heads, "g": values}
    linear = _delta_rule(delta_heads, key, size, config.get("linear_conv_kernel_dim") or 4, keys=keys) + Layer(
        linears={
            **{f"linear_attn.{name}_proj": (hidden, width) for name, width in widths.items()},
            "linear_attn.o_proj": (values, hidden),
        },
        eager_features=2 * values,
    )
    common = _norms(hidden, 2) + _mlp(hidden, config["intermediate_size"])
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
    linear = _channel_delta_rule(hidden, heads, head, kernel, gates)
    full = _latent_attention(config, hidden)
    if ling:
        full += Layer(linears={"self_attn.g_proj": (hidden, config["num_attention_heads"])})
    width = config["moe_intermediate_size"]
    sparse = _experts(
        *(hidden, width, _first(config, "num_experts", "num_local_experts")),
        _first(config, "num_experts_per_token", "num_experts_per_tok", default=8),
    )
    shared = width * _first(config, "num_shared_experts", "n_shared_experts", default=1)
    sparse += _mlp(hidden, shared, at="mlp.shared_experts")
    dense, common = _mlp(hidden, config["intermediate_size"]), _norms(hidden, 2)
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
    attention = _attention(
        *(hidden, heads, config["num_key_value_heads"], head),
        out="o_proj" if newer else "out_proj",
        bias=bias,
        norm=2 * head,
    )
    if newer and config.get("use_attention_gate", True):
        attention += Layer(linears={"self_attn.g_proj": (hidden, heads)}, features=heads * head)
    convolution = _short_convolution(
        hidden, config.get("conv_L_cache") or (7 if newer else 3), bias=bool(config.get("conv_bias"))
    )
    common = _norms(hidden, 4 if newer and config.get("use_sandwich_norm", True) else 2)
    width = config["intermediate_size"]
    if kind == "lfm2":
        width = config.get("block_ff_dim") or width
        if config.get("block_auto_adjust_ff_dim", True):
            multiple = config.get("block_multiple_of") or 256
            width = int(config.get("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
            width = multiple * -(-width // multiple)
    dense = _mlp(hidden, width, at="feed_forward", names=("w1", "w3", "w2"))
    sparse = dense
    if kind == "lfm2_moe":
        sparse = _experts(
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
    return _state_space(
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
    attention = _attention(
        *(hidden, heads, config.get("num_key_value_heads") or (heads if kind == "granitemoehybrid" else 8)),
        config.get("head_dim") or hidden // heads,
        bias=bool(config.get("attention_bias")),
    )
    common = _norms(hidden, 2)
    if kind == "granitemoehybrid":
        width = config.get("shared_intermediate_size") or 1024
        common += Layer(
            linears={"shared_mlp.input_linear": (hidden, 2 * width), "shared_mlp.output_linear": (width, hidden)},
            mlp=width,
        )
        if experts := config.get("num_local_experts", 8):
            chosen = config.get("num_experts_per_tok") or 2
            common += _experts(hidden, config["intermediate_size"], experts, chosen)
    else:
        common += _mlp(hidden, config["intermediate_size"], at="feed_forward", bias=bool(config.get("mlp_bias")))
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
    mixer = _state_space(
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
    return Layers(layers=(_norms(hidden, 1) + mixer,) * config["num_hidden_layers"])


_NEMOTRON_LAYERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


def _nemotron(config: Config) -> Layers:
    """Nemotron-H: each layer is one of Mamba 2, attention, experts and an MLP without a gate."""
    hidden, use_bias = config["hidden_size"], bool(config.get("use_bias"))
    bias = bool(config.get("mlp_bias"))
    mamba = _state_space(
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
    attention = _attention(
        *(hidden, config["num_attention_heads"], config.get("num_key_value_heads") or config["num_attention_heads"]),
        config.get("head_dim") or 128,
        at="mixer",
        bias=bool(config.get("attention_bias")),
    )
    two = ("up_proj", "down_proj")
    kinds = {
        "linear_attention": mamba,
        "full_attention": attention,
        "mlp": _mlp(hidden, config.get("intermediate_size") or 21504, at="mixer", names=two, bias=bias),
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
        moe = _experts(
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
        kinds["moe"] = moe + _mlp(hidden, shared, at="mixer.shared_experts", names=two, bias=bias)
    return Layers(layers=tuple(_norms(hidden, 1) + kinds[kind] for kind in types))


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
    common = _norms(hidden, 7) + Layer(
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
        features=(2 * streams + 4) * hidden + 4 * own + 2 * rank,
    )

    def layer(index: int) -> Layer:
        borrows = index >= borrowing > 0
        attention = _attention(
            *(hidden, config["num_attention_heads"], 0 if borrows else config["num_key_value_heads"], head),
            bias=bool(config.get("attention_bias")),
            norm=head * (1 if borrows else 2),
        )
        width = widths[index]
        return common + attention + _mlp(hidden, width) + Layer(features=2 * width * (sparsity[index] > 0))

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
    common = _norms(hidden, 4) + Layer(vectors=hidden * ((own > 0) + 4 * (experts > 0)) + experts)
    if own:
        common += Layer(
            linears={"per_layer_input_gate": (hidden, own), "per_layer_projection": (own, hidden)},
            features=4 * own + 5 * hidden,  # the gated input and its norm; norms save float32
        )
    if experts:
        numbers = experts, config["top_k_experts"]
        common += _experts(hidden, config["moe_intermediate_size"], *numbers, router=0)
        common += Layer(linears={"router.proj": (hidden, experts)})
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
        attention = _attention(
            *(hidden, heads, key_heads, head),
            bias=bool(config.get("attention_bias")),
            norm=head * (1 if borrows else 2),
            values=not same,
        )
        mlp = config["intermediate_size"] * (2 if borrows and config.get("use_double_wide_mlp") else 1)
        return common + attention + _mlp(hidden, mlp) + Layer(features=2 * attention.key)

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
    common = _norms(hidden, 2) + _attention(
        *(hidden, config["num_attention_heads"], config["num_key_value_heads"], config.get("head_dim") or 128),
        bias=bool(config.get("attention_bias")),
    )
    numbers = config.get("num_local_experts") or 16, config.get("num_experts_per_tok") or 1
    sparse = _mlp(hidden, expert, at="feed_forward.shared_expert") + _experts(hidden, expert, *numbers)
    plain = _mlp(hidden, dense, at="feed_forward")
    return Layers(layers=tuple(common + (sparse if i in routed else plain) for i in range(number)))


def _gpt_oss(config: Config) -> Layers:
    """gpt-oss: sinks, and biases everywhere."""
    hidden, heads, mlp = config["hidden_size"], config["num_attention_heads"], config["intermediate_size"]
    experts = config["num_local_experts"]
    chosen = config.get("num_experts_per_tok") or config.get("experts_per_token") or 4
    layer = _norms(hidden, 2) + _attention(
        *(hidden, heads, config["num_key_value_heads"], config.get("head_dim", 64)),
        bias=config.get("attention_bias", True),
    )
    layer += _experts(hidden, mlp, experts, chosen, biases=2 * mlp + hidden)
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
