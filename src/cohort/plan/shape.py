"""Shape of a language model, from `config.json` or a table of presets, without weights, for most without torch.

Supports decoders with attention and a gated MLP or mixture of experts per layer, the families of `mixed_layers`,
whose layers may differ, and with transformers those of `built_layers`. Parameter counts are exact; tests compare them
with the models that transformers builds.
"""

import json
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from cohort.config import Config
from cohort.errors import UserError
from cohort.plan.built_layers import UnknownLayersError, build_layers
from cohort.plan.layer_parts import Layer, WeightShape
from cohort.plan.mixed_layers import MIXED, Layers

_TABLES = tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))

PRESETS: Mapping[str, Mapping[str, Any]] = _TABLES["shapes"]
IDS: Mapping[str, str] = _TABLES["ids"]
ALIASES: Mapping[str, str] = _TABLES["sizes"]
FAMILIES: Mapping[str, Mapping[str, Any]] = _TABLES["families"]
HUB_IDS: Mapping[str, str] = _TABLES["hub"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The properties of an architecture that determine memory and time.

    If layers differ, those of one layer are of the largest kind, and `own_kinds` has a shape for each kind.
    """

    name: str
    hidden: int
    mlp: int  # intermediate size of the MLP or of one expert
    layers: int
    vocabulary: int
    query_width: int  # query heads x head size
    key_width: int  # key heads x head size; the same for values
    num_heads: int  # query heads
    tied: bool  # the head shares the embedding's weight
    norms_per_layer: int  # norms over the hidden size
    has_query_norm: bool  # query and key norms
    layer_parameters: int
    active_layer_parameters: int  # used per token: fewer with experts
    experts: int  # 1: a dense MLP
    experts_per_token: int
    max_positions: int | None  # prompt and completion together; None: unknown
    window: int | None = None  # of layers with a window or chunks: tokens that a token attends to, at most
    other_parameters: int = 0  # outside of layers, embedding, head and norm
    outer_linears: tuple[tuple[str, int, int], ...] = ()  # `nn.Linear` among them: name, in and out features
    own_linears: tuple[tuple[str, int, int], ...] = ()  # `linear_layers`, if they are not those of a Llama
    own_weights: tuple[WeightShape, ...] | None = None  # its router and experts
    own_kinds: "tuple[ModelShape, ...]" = ()
    layer_numbers: tuple[int, ...] = ()  # of a kind: which layers these are
    shared_mlp: int = 0  # width of an MLP beside experts
    streams: int = 1  # hidden states per token between layers
    latent_width: int = 0  # features per token and layer that servers cache instead of keys and values
    other_features: int = 0  # per token and layer, saved for backward besides those of attention and MLP
    eager_features: int = 0  # more of them without a GPU's kernels, in float32
    eager_gradients: int = 0  # per token, in float32 while a mixer's gradients are computed without such kernels
    layer_state: int = 0  # elements of the recurrent state of one sequence in one layer
    has_value_head: bool = False  # a critic: one output with a bias instead of the LM head
    approximate: bool = False  # from `similar_shape`

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding."""
        return self.vocabulary * self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters of the LM head or value head."""
        return self.hidden + 1 if self.has_value_head else self.embedding_parameters

    @property
    def non_layer_parameters(self) -> int:
        """Parameters outside of layers: embedding, head, final norm."""
        head = self.head_parameters * (not self.tied)
        return self.embedding_parameters + head + self.hidden + self.other_parameters

    @property
    def num_parameters(self) -> int:
        """Number of parameters, tied ones once."""
        return self.all_layer_parameters + self.non_layer_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with, head included."""
        return sum(kind.layers * kind.active_layer_parameters for kind in self.kinds) + self.head_parameters

    @property
    def kinds(self) -> "tuple[ModelShape, ...]":
        """Shapes of models of one kind of layers each, which together are this model's layers."""
        return self.own_kinds or (self,)

    @property
    def all_layer_parameters(self) -> int:
        """Parameters of all layers."""
        return sum(kind.layers * kind.layer_parameters for kind in self.kinds)

    @property
    def largest_pair_parameters(self) -> int:
        """Parameters of the largest two layers in succession."""
        if not self.own_kinds:
            return min(2, self.layers) * self.layer_parameters
        sizes = {number: kind.layer_parameters for kind in self.own_kinds for number in kind.layer_numbers}
        return max(map(sum, pairwise(sizes[number] for number in range(self.layers))))

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent states of one sequence while it is sampled, in float32."""
        return 4 * sum(kind.layers * kind.layer_state for kind in self.kinds)

    @property
    def attention_width(self) -> int:
        """Query width, added up over all layers."""
        return sum(kind.layers * kind.query_width for kind in self.kinds)

    @property
    def mlp_features(self) -> int:
        """Width of all MLPs that one token goes through in a layer."""
        return self.experts_per_token * self.mlp + self.shared_mlp

    def kv_bytes(self, bytes_each: int, *, on_server: bool = False) -> int:
        """KV-cache bytes per token. Servers cache the latents of latent attention."""
        return bytes_each * sum(
            kind.layers * (kind.latent_width if on_server and kind.latent_width else 2 * kind.key_width)
            for kind in self.kinds
        )

    def as_critic(self) -> "ModelShape":
        """The same body with an untied value head."""
        return replace(self, has_value_head=True, tied=False)

    @property
    def linear_layers(self) -> Mapping[str, tuple[int, int]]:
        """(in, out) features of a layer's `nn.Linear` modules by path, without experts and routers."""
        if self.own_weights is not None:
            return {name: (fan_in, fan_out) for name, fan_in, fan_out in self.own_linears}
        hidden, query, key, mlp = self.hidden, self.query_width, self.key_width, self.mlp
        layers = {
            "self_attn.q_proj": (hidden, query),
            "self_attn.k_proj": (hidden, key),
            "self_attn.v_proj": (hidden, key),
            "self_attn.o_proj": (query, hidden),
        }
        if self.experts == 1:
            layers |= {"mlp.gate_proj": (hidden, mlp), "mlp.up_proj": (hidden, mlp), "mlp.down_proj": (mlp, hidden)}
        return layers

    @property
    def linear_weights(self) -> list[tuple[WeightShape, int]]:
        """Weight shapes of the `nn.Linear` modules of all layers, and in how many layers each is."""
        return [((b, a), kind.layers) for kind in self.kinds for a, b in kind.linear_layers.values()]

    @property
    def layer_weights(self) -> tuple[WeightShape, ...]:
        """Weight shapes of one layer as in transformers, with all vectors merged into one."""
        weights: list[WeightShape] = [(fan_out, fan_in) for fan_in, fan_out in self.linear_layers.values()]
        weights += self.own_weights or ()
        if self.experts > 1 and self.own_weights is None:
            experts, mlp = self.experts, self.mlp
            weights += [(experts, self.hidden), (experts, 2 * mlp, self.hidden), (experts, self.hidden, mlp)]
        return (*weights, (self.layer_parameters - sum(map(math.prod, weights)),))

    @property
    def non_layer_weights(self) -> tuple[WeightShape, ...]:
        """Weight shapes outside of layers."""
        table = (self.vocabulary, self.hidden)
        head = (1, self.hidden + 1) if self.has_value_head else table
        others = [(self.other_parameters,)] if self.other_parameters else []
        return (table, *([] if self.tied else [head]), (self.hidden,), *others)


@dataclass(frozen=True, slots=True)
class _Family:
    """Properties of a `model_type` that its config.json may leave out."""

    qkv_bias: bool = False  # biases on q, k and v, whatever the config says
    reads_bias: bool = True  # honors attention_bias (q, k, v and o)
    query_norm: bool = False  # query and key norms over one head
    wide_norm: bool = False  # query and key norms over all heads
    norms: int = 2
    tied: bool = False  # default
    head_dim: int | None = None  # default; None: hidden / heads


_FAMILIES = {name: _Family(**properties) for name, properties in FAMILIES.items()}


def read_shape(path: str) -> ModelShape:
    """Read the shape of a model folder, or look up a common model by its Hugging Face id.

    Raises:
        UserError: no config.json, or an unknown architecture.
    """
    file = Path(path) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        if (named := preset_from_hub_id(path)) is not None:
            return named
        raise UserError(
            f"model.path: {path!r} is not a local folder with a config.json, and planning downloads nothing; give the "
            f"model's shape with --model ({', '.join(PRESETS)})"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"model.path: cannot read {file}: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"model.path: {file}: must be a JSON object")
    return shape_from_config(config, name=Path(path).resolve().name)


def try_read_shape(path: str) -> ModelShape | None:
    """Like `read_shape`, but return None for an unknown model."""
    try:
        return read_shape(path)
    except UserError:
        return None


def preset_from_hub_id(model_id: str) -> ModelShape | None:
    """Shape of a preset by Hugging Face id, such as Qwen/Qwen2.5-7B-Instruct; None if unknown."""
    name = model_id.rpartition("/")[2].lower()
    for pattern, preset in IDS.items():
        match = re.fullmatch(pattern, name)
        if match and preset.format(*match.groups()) in PRESETS:
            return preset_shape(preset.format(*match.groups()))
    return None


def find_shape(model: str) -> ModelShape:
    """Shape of a model by folder, Hugging Face id, preset or size.

    Raises:
        UserError: unknown model, or a folder that cannot be read.
    """
    if (Path(model) / "config.json").exists():
        return read_shape(model)
    return preset_from_hub_id(model) or preset_shape(model)


def preset_shape(name: str) -> ModelShape:
    """Shape of a preset by name, or by size such as "7b".

    Raises:
        UserError: unknown name.
    """
    known = ALIASES.get(name.lower(), name.lower())
    if known not in PRESETS:
        raise UserError(
            f"--model: {name!r} is neither a preset, a known Hugging Face id nor a folder with config.json; give its "
            f"folder, or use a similar preset: {', '.join(PRESETS)}, or a size: {', '.join(ALIASES)}"
        )
    return shape_from_config(PRESETS[known], name=known)


def shape_from_config(config: Mapping[str, Any], *, name: str) -> ModelShape:
    """Parse a model's shape from its config.json.

    Args:
        config: content of config.json; of a multimodal model the text part is used.
        name: display name of the model.

    Raises:
        UserError: an unknown architecture, or a missing or invalid number.
    """
    if isinstance(config.get("text_config"), dict):
        inner = config["text_config"]
        tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}  # decides for both
        config = {"model_type": f"{config.get('model_type')}_text", **inner, **tied}
    model_type = config.get("model_type")
    if model_type in MIXED:
        return _or_refused(_mixed_shape, config, name)
    family = _FAMILIES.get(str(model_type))
    mixes = config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1  # dense MLPs and experts
    if family is not None and not mixes:
        return _or_refused(partial(_shape, family), config, name)
    try:
        layers, settings, shares_head = build_layers(config)
    except UnknownLayersError as error:
        raise UserError(
            f"model.path: {name}: model_type {model_type!r} is not supported by the plan: {error}; give the shape of a "
            f"similar model with --model, or measure a few steps with `cohort train`"
        ) from error
    return _shape_of_layers(layers, settings, name, tied=shares_head)


def _or_refused(
    parse: Callable[[Mapping[str, Any], str], ModelShape], config: Mapping[str, Any], name: str
) -> ModelShape:
    try:
        return parse(config, name)
    except (KeyError, ValueError) as error:
        key = error.args[0]
        raise UserError(f"model.path: {name}: config.json: {key!r} is missing or not a positive integer") from error
    except (AttributeError, TypeError, ZeroDivisionError) as error:
        raise UserError(f"model.path: {name}: config.json has a value that the plan cannot read: {error}") from error


def similar_shape(config: Mapping[str, Any], *, name: str, num_parameters: int) -> ModelShape | None:
    """Approximate an unknown architecture by a Llama of the same sizes and parameter count; None without sizes.

    Args:
        config: content of the model's config.json; of a multimodal model the text part is used.
        name: display name of the model.
        num_parameters: number of parameters in its files.
    """
    try:
        like = shape_from_config({**config.get("text_config", config), "model_type": "llama"}, name=name)
    except UserError:
        return None
    layer = max(0, num_parameters - like.non_layer_parameters) // like.layers
    active = layer if like.experts == 1 else min(layer, like.active_layer_parameters)
    return replace(like, layer_parameters=layer, active_layer_parameters=active, approximate=True)


def _shape(family: _Family, config: Mapping[str, Any], name: str) -> ModelShape:
    hidden, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    key_heads = _number(config, "num_key_value_heads", heads)
    head_dim = _number(config, "head_dim", family.head_dim or hidden // heads)
    layers, vocabulary = _number(config, "num_hidden_layers"), _number(config, "vocab_size")
    query, key = heads * head_dim, key_heads * head_dim
    attention = 2 * hidden * (query + key)
    if family.qkv_bias or (family.reads_bias and config.get("attention_bias")):
        attention += query + 2 * key + (0 if family.qkv_bias else hidden)
    attention += 2 * head_dim * family.query_norm + (query + key) * family.wide_norm + family.norms * hidden
    experts_key = next((key for key in ("num_experts", "num_local_experts") if config.get(key)), None)
    experts = 0 if experts_key is None else _number(config, experts_key)
    chosen = _number(config, "num_experts_per_tok", 2) if experts else 1
    mlp = _number(
        config, "moe_intermediate_size" if experts and "moe_intermediate_size" in config else "intermediate_size"
    )
    one = 3 * hidden * mlp + (2 * mlp + hidden) * bool(config.get("mlp_bias"))
    router = hidden * experts
    return ModelShape(
        name=name,
        hidden=hidden,
        mlp=mlp,
        layers=layers,
        vocabulary=vocabulary,
        query_width=query,
        key_width=key,
        num_heads=heads,
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        norms_per_layer=family.norms,
        has_query_norm=family.query_norm or family.wide_norm,
        layer_parameters=attention + router + one * (experts or 1),
        active_layer_parameters=attention + router + one * chosen,
        experts=experts or 1,
        experts_per_token=chosen,
        max_positions=_known_positions(config),
        window=_window(config),
    )


def _mixed_shape(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape of a family of `mixed_layers`."""
    read, default = MIXED[config["model_type"]]
    keys = ("num_attention_heads", "num_heads", "num_key_value_heads", "num_hidden_layers")
    for key in ("hidden_size", "vocab_size", *(key for key in keys if config.get(key) is not None)):
        _number(config, key)  # raises
    tied = bool(config.get("tie_word_embeddings", config.get("tie_embedding", default)))
    return _shape_of_layers(read(config), config, name, tied=tied)


def _shape_of_layers(parts: Layers, config: Mapping[str, Any], name: str, *, tied: bool) -> ModelShape:
    """The shape of a model whose layers are known one by one."""
    hidden = config["hidden_size"]
    whole = {
        "name": name,
        "vocabulary": config["vocab_size"],
        "tied": tied,
        "max_positions": _known_positions(config),
        "window": _window(config),
        "streams": parts.streams,
    }
    numbers: dict[ModelShape, list[int]] = {}
    for number, layer in enumerate(parts.layers):
        numbers.setdefault(_kind(layer, hidden, whole), []).append(number)
    kinds = [replace(kind, layers=len(which), layer_numbers=tuple(which)) for kind, which in numbers.items()]
    return replace(
        max(kinds, key=lambda kind: kind.layer_parameters),
        layers=len(parts.layers),
        experts=max(kind.experts for kind in kinds),
        experts_per_token=max(kind.experts_per_token for kind in kinds),
        num_heads=config.get("num_attention_heads") or _number(config, "num_heads", 128),  # Mamba 2 alone
        other_parameters=parts.outer_parameters,
        outer_linears=parts.outer_linears,
        own_kinds=tuple(kinds) if len(kinds) > 1 else (),
        layer_numbers=(),
    )


def _kind(layer: Layer, hidden: int, whole: Mapping[str, Any]) -> ModelShape:
    """The shape of a model of this layer alone, without what is outside of layers."""
    return ModelShape(
        **whole,
        hidden=hidden,
        layers=1,
        mlp=layer.expert or layer.mlp,
        shared_mlp=layer.mlp if layer.experts else 0,
        experts=layer.experts or 1,
        experts_per_token=layer.chosen or 1,
        query_width=layer.query,
        key_width=layer.key,
        num_heads=layer.heads,
        latent_width=layer.latent,
        norms_per_layer=layer.norms,
        has_query_norm=layer.query_norms > 0,
        layer_parameters=layer.parameters,
        active_layer_parameters=layer.parameters - layer.idle,
        own_linears=tuple((name, *sides) for name, sides in layer.linears.items()),
        own_weights=layer.weights,
        other_features=layer.features,
        eager_features=layer.eager_features,
        eager_gradients=layer.eager_gradients,
        layer_state=layer.state,
    )


def _window(config: Mapping[str, Any]) -> int | None:
    """Window or chunk size of those layers that have one; None if no layer has."""
    types = config.get("layer_types")
    if types and not {"sliding_attention", "chunked_attention"} & set(types):
        return None
    qwen = str(config.get("model_type")).startswith("qwen")  # these have to be asked for it
    window = config.get("sliding_window") if config.get("use_sliding_window", not qwen) else None
    return window or config.get("attention_chunk_size") or None


def _known_positions(config: Mapping[str, Any]) -> int | None:
    """Maximum positions without changing the rotary embedding; None if the config does not say."""
    limit = config.get("max_position_embeddings") or config.get("model_max_length")
    if not isinstance(limit, int):
        return None
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind, original = rope.get("rope_type") or rope.get("type"), rope.get("original_max_position_embeddings") or limit
    if kind in ("longrope", "dynamic"):  # beyond this RoPE depends on the longest sequence of a batch
        return int(original)
    if kind in ("linear", "yarn"):  # some configs give the length before scaling, some after
        return max(limit, int(original * rope.get("factor", 1.0)))
    return limit


def _number(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(key)
    return value


def critic_shape(config: Config, shape: ModelShape) -> ModelShape | None:
    """Shape of the critic, or None if the algorithm has none.

    Args:
        config: configuration of the run.
        shape: shape of the policy, used if the shape of `critic.path` is unknown.
    """
    if not config.algorithm.needs_critic:
        return None
    path = config.critic.path if config.critic else None
    return ((try_read_shape(path) if path else None) or shape).as_critic()
