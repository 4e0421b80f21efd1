"""Sizes of a LoRA adapter, computed from the configuration alone.

A target matches every layer whose dotted name ends with it, as in peft. Names follow Llama; for an unknown name all
linear layers are counted. `all-linear` leaves out experts and routers, which are not `nn.Linear`. Adapting a weight
[out, in] at rank r adds r (in + out) parameters.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cohort.config.adapter import AdapterConfig
from cohort.errors import UserError
from cohort.plan.shape import ModelShape, WeightShape

ADAPTER_BYTES = 4  # per trained parameter: peft keeps adapters in float32 whatever the model's dtype
_HEAD, _EMBEDDING = "lm_head", "model.embed_tokens"
_BLOCKS = {"gate_proj": "mlp", "up_proj": "mlp", "down_proj": "mlp"}  # parent modules; others are in self_attn


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterShape:
    """The properties of an adapter that determine memory and time."""

    rank: int
    layer_weights: tuple[WeightShape, ...]
    head_weights: tuple[WeightShape, ...]  # on the head
    embedding_weights: tuple[WeightShape, ...]
    layer_fraction: float  # share of the layers that have these weights
    saved_input_features: int  # per token and layer: inputs saved for the adapter's gradient alone
    rank_features: int  # per token and layer: outputs of the first factors
    qkv_output_features: int  # per token and layer: outputs of both factors of q, k and v
    dropout_features: int  # per token and layer: inputs after dropout, plus a one-byte mask each
    dora_layers: tuple[tuple[int, int], ...] = ()  # (in, out) features of each DoRA layer
    warning: str | None = None  # about targets that are not in the shape

    def num_parameters(self, layers: int) -> int:
        """Number of adapter parameters, all of them trained."""
        return layers * self.layer_parameters + self.non_layer_parameters

    @property
    def layer_parameters(self) -> int:
        """Adapter parameters per layer, averaged over all layers and rounded up."""
        return math.ceil(self.layer_fraction * sum(map(math.prod, self.layer_weights)))

    @property
    def head_parameters(self) -> int:
        """Adapter parameters on the LM head."""
        return sum(map(math.prod, self.head_weights))

    @property
    def non_layer_weights(self) -> tuple[WeightShape, ...]:
        """Shapes of the adapter weights on head and embedding."""
        return (*self.head_weights, *self.embedding_weights)

    @property
    def non_layer_parameters(self) -> int:
        """Adapter parameters on head and embedding."""
        return sum(map(math.prod, self.non_layer_weights))


def adapter_shape(config: AdapterConfig, shape: ModelShape) -> AdapterShape:
    """Compute the sizes of the configured adapter.

    Raises:
        UserError: `path` is a folder without a readable adapter_config.json.
    """
    requested = requested_adapter(config)
    rank, dora = requested.rank, requested.dora
    linear = shape.linear_layers
    names_of = {layer: [_full_name(layer, number) for number in range(shape.layers)] for layer in linear}
    all_names = [name for names in names_of.values() for name in names] + [_HEAD, _EMBEDDING]
    targeted, unknown = _match_targets(requested.targets, all_names)
    if unknown:
        targeted |= {name for names in names_of.values() for name in names}
    counts = {layer: len(targeted.intersection(names)) for layer, names in names_of.items()}
    adapted = {layer: linear[layer] for layer, count in counts.items() if count}
    weights = {layer: _factors(rank, fan_in, fan_out, dora=dora) for layer, (fan_in, fan_out) in adapted.items()}
    sizes = {layer: sum(map(math.prod, factors)) for layer, factors in weights.items()}
    size_on_all_layers = shape.layers * sum(sizes.values())
    adapted_size = sum(size * counts[layer] for layer, size in sizes.items())
    qkv_outputs = [fan_out for name, (_, fan_out) in adapted.items() if name in ("q_proj", "k_proj", "v_proj")]
    return AdapterShape(
        rank=rank,
        layer_weights=tuple(weight for factors in weights.values() for weight in factors),
        layer_fraction=adapted_size / size_on_all_layers if size_on_all_layers else 1.0,
        head_weights=_factors(rank, shape.hidden, shape.vocabulary, dora=dora) if _HEAD in targeted else (),
        embedding_weights=_factors(rank, shape.hidden, shape.vocabulary, dora=False) if _EMBEDDING in targeted else (),
        saved_input_features=shape.hidden * bool(qkv_outputs)
        + shape.hidden * bool({"gate_proj", "up_proj"} & set(adapted))
        + shape.mlp * ("down_proj" in adapted),
        rank_features=rank * len(adapted),
        qkv_output_features=sum(rank + fan_out for fan_out in qkv_outputs),
        dropout_features=sum(fan_in for fan_in, _ in adapted.values()) * bool(config.dropout),
        dora_layers=tuple(adapted.values()) if dora else (),
        warning=f"model.adapter.targets: {unknown} not found in the shape of {shape.name}; "
        f"the plan assumes an adapter on all linear layers"
        if unknown
        else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedAdapter:
    """An adapter as configured, independent of the model."""

    rank: int
    dora: bool
    targets: str | tuple[str, ...]  # "all-linear", a regular expression saved by peft, or module names

    @property
    def modules(self) -> tuple[str, ...]:
        """Target names; of a regular expression only head and embedding, if it matches them."""
        if isinstance(self.targets, tuple):
            return self.targets
        return tuple(sorted(_match_targets(self.targets, [_HEAD, _EMBEDDING])[0]))


def requested_adapter(config: AdapterConfig) -> RequestedAdapter:
    """Read an adapter's rank, DoRA flag and targets without its model.

    Raises:
        UserError: `path` is a folder without a readable adapter_config.json.
    """
    saved = None if config.path is None else _saved(config.path)
    return saved or RequestedAdapter(rank=config.rank, dora=config.dora, targets=config.targets)


def _factors(rank: int, fan_in: int, fan_out: int, *, dora: bool) -> tuple[WeightShape, ...]:
    """Shapes of the weights trained alongside a weight [fan_out, fan_in]."""
    return ((rank, fan_in), (fan_out, rank), *([(fan_out,)] if dora else []))


def _full_name(layer: str, number: int) -> str:
    return f"model.layers.{number}.{_BLOCKS.get(layer, 'self_attn')}.{layer}"


def _match_targets(targets: str | tuple[str, ...], known: list[str]) -> tuple[set[str], str]:
    """Return the known layers that match a target, and the targets that match no layer."""
    if targets == "all-linear":
        return set(known) - {_HEAD, _EMBEDDING}, ""
    if isinstance(targets, str):
        try:
            meant = {name for name in known if re.fullmatch(targets, name)}
        except re.error:
            meant = set()
        return meant, "" if meant else targets
    found = {target: {name for name in known if f".{name}".endswith(f".{target}")} for target in targets}
    return set().union(*found.values()), ", ".join(target for target, names in found.items() if not names)


def _saved(path: str) -> RequestedAdapter | None:
    """Read a saved adapter; None if it is not on this machine."""
    file = Path(path) / "adapter_config.json"
    try:
        saved: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        names = saved["target_modules"]
        targets = names if isinstance(names, str) else tuple(map(str, names))
        return RequestedAdapter(rank=int(saved["r"]), dora=bool(saved.get("use_dora")), targets=targets)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"model.adapter.path: cannot read {file}: {error!r}") from error
