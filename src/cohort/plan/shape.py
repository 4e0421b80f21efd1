"""Shape of a language model, from its `config.json` or a table of presets, without weights or torch.

Supports decoders with attention and a gated MLP or mixture of experts per layer. Parameter counts are exact; tests
compare them with the models that transformers builds.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cohort.errors import UserError
from cohort.plan.presets import ALIASES, FAMILIES, IDS, PRESETS

WeightShape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The properties of an architecture that determine memory and time."""

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
    has_value_head: bool = False  # a critic: one output with a bias instead of the LM head

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
        return self.embedding_parameters + self.head_parameters * (not self.tied) + self.hidden

    @property
    def num_parameters(self) -> int:
        """Number of parameters, tied ones once."""
        return self.layers * self.layer_parameters + self.non_layer_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with, head included."""
        return self.layers * self.active_layer_parameters + self.head_parameters

    def kv_bytes(self, bytes_each: int) -> int:
        """KV-cache bytes per token."""
        return 2 * self.key_width * self.layers * bytes_each

    def as_critic(self) -> "ModelShape":
        """The same body with an untied value head."""
        return replace(self, has_value_head=True, tied=False)

    @property
    def linear_layers(self) -> Mapping[str, tuple[int, int]]:
        """(in, out) features of a layer's `nn.Linear` modules, without experts and routers."""
        hidden, query, key, mlp = self.hidden, self.query_width, self.key_width, self.mlp
        layers = {
            "q_proj": (hidden, query),
            "k_proj": (hidden, key),
            "v_proj": (hidden, key),
            "o_proj": (query, hidden),
        }
        if self.experts == 1:
            layers |= {"gate_proj": (hidden, mlp), "up_proj": (hidden, mlp), "down_proj": (mlp, hidden)}
        return layers

    @property
    def layer_weights(self) -> tuple[WeightShape, ...]:
        """Weight shapes of one layer as in transformers, with all vectors merged into one."""
        weights: list[WeightShape] = [(fan_out, fan_in) for fan_in, fan_out in self.linear_layers.values()]
        if self.experts > 1:
            experts, mlp = self.experts, self.mlp
            weights += [(experts, self.hidden), (experts, 2 * mlp, self.hidden), (experts, self.hidden, mlp)]
        return (*weights, (self.layer_parameters - sum(map(math.prod, weights)),))

    @property
    def non_layer_weights(self) -> tuple[WeightShape, ...]:
        """Weight shapes outside of layers."""
        table = (self.vocabulary, self.hidden)
        head = (1, self.hidden + 1) if self.has_value_head else table
        return (table, *([] if self.tied else [head]), (self.hidden,))


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
            f"model's shape with --model-shape ({', '.join(PRESETS)})"
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


def preset_shape(name: str) -> ModelShape:
    """Shape of a preset by name, or by size such as "7b".

    Raises:
        UserError: unknown name.
    """
    known = ALIASES.get(name.lower(), name.lower())
    if known not in PRESETS:
        raise UserError(
            f"--model-shape: {name!r} is unknown; use one of {', '.join(PRESETS)}, or a size: {', '.join(ALIASES)}"
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
        outer_type = str(config.get("model_type"))
        config = {"model_type": f"{outer_type}_text", **inner}
    model_type = config.get("model_type")
    family = _FAMILIES.get(str(model_type))
    if family is None:
        raise UserError(
            f"model.path: {name}: model_type {model_type!r} is not supported by the plan "
            f"({', '.join(_FAMILIES)}); give the shape of a similar model with --model-shape"
        )
    try:
        return _shape(config, family, name)
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"model.path: {name}: config.json: {error!r} is missing or not a positive number") from error


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
    return replace(like, layer_parameters=layer, active_layer_parameters=active)


def _shape(config: Mapping[str, Any], family: _Family, name: str) -> ModelShape:
    hidden, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    key_heads = _number(config, "num_key_value_heads", heads)
    head_dim = _number(config, "head_dim", family.head_dim or hidden // heads)
    layers, vocabulary = _number(config, "num_hidden_layers"), _number(config, "vocab_size")
    query, key = heads * head_dim, key_heads * head_dim
    attention = 2 * hidden * (query + key)
    if family.qkv_bias or (family.reads_bias and config.get("attention_bias")):
        attention += query + 2 * key + (0 if family.qkv_bias else hidden)
    attention += 2 * head_dim * family.query_norm + (query + key) * family.wide_norm + family.norms * hidden
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    chosen = _number(config, "num_experts_per_tok", 2) if experts else 1
    mlp = _number(
        config, "moe_intermediate_size" if experts and "moe_intermediate_size" in config else "intermediate_size"
    )
    if experts and (config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1):
        raise UserError(
            f"model.path: {name}: mixing dense and expert layers is not supported by the plan; give the "
            f"shape of a similar model with --model-shape"
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
    )


def _known_positions(config: Mapping[str, Any]) -> int | None:
    """Maximum positions without changing the rotary embedding; None if the config does not say."""
    limit = config.get("max_position_embeddings")
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
