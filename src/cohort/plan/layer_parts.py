"""Parts that layers of models are made of: attention, MLPs, experts and mixers with a recurrent state.

Features are counted from the tensors that transformers' layers save for backward; tests/plan/test_plan_memory.py
compares them with a symbolic run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import prod
from typing import Any

_CHUNK = 64  # tokens at a time in PyTorch code of delta rules

Config = Mapping[str, Any]
WeightShape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer, or a part of one."""

    linears: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # (in, out) of `nn.Linear`, by path in it
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
    eager_gradients: int = 0  # per token, in float32 while PyTorch code computes the gradients of a mixer
    state: int = 0  # elements of the recurrent state of one sequence

    def __add__(self, other: "Layer") -> "Layer":
        names = [f.name for f in fields(self) if f.name != "linears"]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return Layer(**sums, linears={**self.linears, **other.linears})

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(map(prod, (*self.linears.values(), *self.weights))) + self.vectors


def norms(hidden: int, number: int) -> Layer:
    """Norms over the hidden size."""
    return Layer(norms=number, vectors=number * hidden)


def attention(
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


def latent_attention(config: Config, hidden: int) -> Layer:
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


def mlp(
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


def experts(
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
        router: size of the router's inputs, if it is not `hidden`.
        gated: whether they have a gate.
        biases: parameters in biases of one expert.
    """
    into = (1 + gated) * width
    return Layer(
        weights=((number, router or hidden), (number, into, hidden), (number, hidden, width)),
        vectors=number * biases,
        idle=(number - chosen) * (hidden * (into + width) + biases),
        expert=width,
        experts=number,
        chosen=chosen,
        features=-2 * width * chosen * (not gated),
    )


def short_convolution(hidden: int, kernel: int, *, bias: bool) -> Layer:
    """Short convolution of LFM2, with two gates."""
    return Layer(
        linears={"conv.in_proj": (hidden, 3 * hidden), "conv.out_proj": (hidden, hidden)},
        vectors=hidden * kernel + 5 * hidden * bias,
        features=6 * hidden,  # inputs and outputs of convolution and gates
        state=hidden * kernel,
    )


def delta_rule(heads: int, key: int, size: int, kernel: int, *, keys: int) -> Layer:
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


def channel_delta_rule(hidden: int, heads: int, head: int, kernel: int, gates: Mapping[str, tuple[int, int]]) -> Layer:
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
        eager_gradients=5 * _CHUNK * wide // 2,
        state=3 * wide * kernel + heads * head * head,
    )


def state_space(
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
        eager_gradients=2 * chunk * heads,
        state=mixed * kernel + heads * head * state,
    )
