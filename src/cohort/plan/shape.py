"""The shape of a language model, read from its `config.json` or taken from a table: no weights, no torch.

Known are the decoders whose layers are attention and a gated MLP, or experts in its place. Their parameters are counted
exactly; the tests compare with what the Hugging Face library builds.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cohort.errors import UserError
from cohort.plan.presets import ALIASES, IDS, PRESETS

WeightShape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What of an architecture decides memory and time."""

    name: str
    hidden: int
    mlp: int  # features between the products of an MLP, or of one expert
    layers: int
    vocabulary: int
    query_width: int  # query heads times their features
    key_width: int  # key heads times their features; values have as many
    num_heads: int  # of queries
    tied: bool  # the embedding is the head too
    norms_per_layer: int  # of the hidden size
    has_query_norm: bool  # norms of queries and keys
    layer_parameters: int
    active_layer_parameters: int  # that one token is multiplied with: fewer with experts
    experts: int  # 1: an ordinary MLP
    experts_per_token: int
    max_positions: int | None  # of prompt and completion together; None: not known
    has_value_head: bool = False  # a critic: one row, with a bias, in the place of the head

    @property
    def embedding_parameters(self) -> int:
        """Of the tokens' table."""
        return self.vocabulary * self.hidden

    @property
    def head_parameters(self) -> int:
        """Of what the last hidden state is multiplied with."""
        return self.hidden + 1 if self.has_value_head else self.embedding_parameters

    @property
    def outer_parameters(self) -> int:
        """Of all that is in no layer: embedding, head, last norm."""
        return self.embedding_parameters + self.head_parameters * (not self.tied) + self.hidden

    @property
    def num_parameters(self) -> int:
        """All of them; tied ones once."""
        return self.layers * self.layer_parameters + self.outer_parameters

    @property
    def active_parameters(self) -> int:
        """That one token is multiplied with, the head among them."""
        return self.layers * self.active_layer_parameters + self.head_parameters

    def kv_bytes(self, bytes_each: int) -> int:
        """Keys and values of one token."""
        return 2 * self.key_width * self.layers * bytes_each

    def as_critic(self) -> "ModelShape":
        """The same body with a value head, which is tied to nothing."""
        return replace(self, has_value_head=True, tied=False)

    @property
    def linear_layers(self) -> Mapping[str, tuple[int, int]]:
        """Inputs and outputs of a layer's linear layers. Experts and their router are none of the library's."""
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
        """Of one layer, as the library has them; all vectors as one."""
        weights: list[WeightShape] = [(out, into) for into, out in self.linear_layers.values()]
        if self.experts > 1:
            experts, mlp = self.experts, self.mlp
            weights += [(experts, self.hidden), (experts, 2 * mlp, self.hidden), (experts, self.hidden, mlp)]
        return (*weights, (self.layer_parameters - sum(map(math.prod, weights)),))

    @property
    def outer_weights(self) -> tuple[WeightShape, ...]:
        """Of what is in no layer."""
        table = (self.vocabulary, self.hidden)
        head = (1, self.hidden + 1) if self.has_value_head else table
        return (table, *([] if self.tied else [head]), (self.hidden,))


@dataclass(frozen=True, slots=True)
class _Family:
    """What a type of model has that its config.json need not say."""

    qkv_bias: bool = False  # always
    reads_bias: bool = True  # attention_bias is of queries, keys, values and output
    query_norm: bool = False  # of queries and of keys, as wide as a head
    wide_norm: bool = False  # the same, as wide as all heads
    norms: int = 2
    tied: bool = False  # unless said otherwise
    head_dim: int | None = None  # unless said otherwise; None: hidden / heads


_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(),
    "mistral": _Family(reads_bias=False),
    "mixtral": _Family(reads_bias=False),
    "qwen2": _Family(qkv_bias=True, reads_bias=False),
    "qwen3": _Family(query_norm=True, head_dim=128),
    "qwen3_moe": _Family(query_norm=True),
    "olmo2": _Family(wide_norm=True),
    "olmo3": _Family(wide_norm=True),
    "olmoe": _Family(wide_norm=True),
    "granite": _Family(),
    "granitemoe": _Family(),
    "smollm3": _Family(tied=True),
    "ministral": _Family(reads_bias=False),
    "ministral3": _Family(reads_bias=False, head_dim=128),
    "seed_oss": _Family(qkv_bias=True, reads_bias=False, head_dim=128),
    "exaone4": _Family(query_norm=True, reads_bias=False),
    "hunyuan_v1_dense": _Family(query_norm=True),
    "ernie4_5": _Family(reads_bias=False, tied=True, head_dim=128),
    "gemma": _Family(tied=True, head_dim=256),
    "gemma2": _Family(norms=4, tied=True, head_dim=256),
    "gemma3_text": _Family(norms=4, query_norm=True, tied=True, head_dim=256),
}


def read_shape(path: str) -> ModelShape:
    """The shape of the model of a folder, or of a common model by its id on the hub.

    Raises:
        UserError: there is no config.json, or it is not of a model that is known here.
    """
    file = Path(path) / "config.json"
    named = preset_of_id(path) if not file.exists() else None
    if named is not None:
        return named
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"model.path: {path!r} is no folder with a config.json on this machine, and nothing is downloaded for a "
            f"plan; name the model's shape with --model-shape ({', '.join(PRESETS)})"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"model.path: {file}: cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"model.path: {file}: has to be a JSON object")
    return shape_of(config, name=Path(path).resolve().name)


def known_shape(path: str) -> ModelShape | None:
    """As `read_shape`; None where the shape is not known."""
    try:
        return read_shape(path)
    except UserError:
        return None


def preset_of_id(model_id: str) -> ModelShape | None:
    """The shape of a model whose id on the hub says which one it is, such as Qwen/Qwen2.5-7B-Instruct."""
    name = model_id.rpartition("/")[2].lower()
    for pattern, preset in IDS:
        match = re.fullmatch(pattern, name)
        if match and preset.format(*match.groups()) in PRESETS:
            return preset_shape(preset.format(*match.groups()))
    return None


def preset_shape(name: str) -> ModelShape:
    """The shape of a common open model, by its name or, as "7b", by its size.

    Raises:
        UserError: it is not known here.
    """
    known = ALIASES.get(name.lower(), name.lower())
    if known not in PRESETS:
        raise UserError(
            f"--model-shape: {name!r} is not known; use one of {', '.join(PRESETS)}, or a size: {', '.join(ALIASES)}"
        )
    return shape_of(PRESETS[known], name=known)


def shape_of(config: Mapping[str, Any], *, name: str) -> ModelShape:
    """The shape that a config.json describes.

    Args:
        config: its content, that of the text where it has several parts.
        name: of the model, for a person.

    Raises:
        UserError: the architecture is not known here, or a number is missing or no number.
    """
    if isinstance(config.get("text_config"), dict):
        inner = config["text_config"]
        outer_type = str(config.get("model_type"))
        config = {"model_type": f"{outer_type}_text", **inner}
    model_type = config.get("model_type")
    family = _FAMILIES.get(str(model_type))
    if family is None:
        raise UserError(
            f"model.path: {name}: model_type {model_type!r} is not one whose memory is known here "
            f"({', '.join(_FAMILIES)}); give the shape of a similar model with --model-shape"
        )
    try:
        return _shape(config, family, name)
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"model.path: {name}: config.json: {error!r} is missing or not a number above 0") from error


def similar_shape(config: Mapping[str, Any], *, name: str, num_parameters: int) -> ModelShape | None:
    """A decoder with the sizes and as many parameters as a model whose architecture is not known here; None: no sizes.

    Args:
        config: content of the model's config.json, that of the text where it has several parts.
        name: of the model, for a person.
        num_parameters: of its files.
    """
    try:
        like = shape_of({**config.get("text_config", config), "model_type": "llama"}, name=name)
    except UserError:
        return None
    layer = max(0, num_parameters - like.outer_parameters) // like.layers
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
            f"model.path: {name}: layers with and without experts are not known here; give the shape of a similar "
            f"model with --model-shape"
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
    """Positions that the model computes as it was made to; None where its config does not say."""
    limit = config.get("max_position_embeddings")
    if not isinstance(limit, int):
        return None
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind, original = rope.get("rope_type") or rope.get("type"), rope.get("original_max_position_embeddings") or limit
    if kind in ("longrope", "dynamic"):  # beyond this the rotation depends on the longest row of a batch
        return int(original)
    if kind in ("linear", "yarn"):  # some configs state the length before, some after stretching
        return max(limit, int(original * rope.get("factor", 1.0)))
    return limit


def _number(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(key)
    return value
