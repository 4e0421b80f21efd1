"""Shape of an adapter: its weights, and what its gradients need.

A target of an adapter matches every layer whose dotted name ends with it, as in peft. Names follow Llama; for an
unknown name all linear layers are counted. `all-linear` leaves out experts and routers, which are not `nn.Linear`.
Adapting a weight [out, in] at rank r adds r (in + out) parameters.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from cohort.config.model import AdapterConfig
from cohort.errors import UserError
from cohort.plan.layer_parts import WeightShape
from cohort.plan.shape import ModelShape

ADAPTER_BYTES = 4  # per trained parameter: peft keeps adapters in float32 whatever the model's dtype
_HEAD, _EMBEDDING = "lm_head", "model.embed_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterShape:
    """The properties of an adapter that determine memory and time; those of one layer as in `ModelShape`."""

    rank: int
    layers: int
    layer_weights: tuple[WeightShape, ...]
    head_weights: tuple[WeightShape, ...]  # on the head
    other_weights: tuple[WeightShape, ...]  # on the embedding, and on linear layers outside of layers
    layer_fraction: float  # share of the layers that have these weights
    all_layer_parameters: int
    own_kinds: "tuple[AdapterShape, ...]" = ()  # for each kind of layers, if they differ
    saved_input_features: int  # per token and layer: inputs saved for the adapter's gradient alone
    rank_features: int  # per token and layer: outputs of the first factors
    qkv_output_features: int  # per token and layer: outputs of both factors of q, k and v
    dropout_features: int  # per token and layer: inputs after dropout, plus a one-byte mask each
    dora_layers: tuple[tuple[int, int], ...] = ()  # (in, out) features of each DoRA layer
    warning: str | None = None  # about targets that are not in the shape

    @property
    def kinds(self) -> "tuple[AdapterShape, ...]":
        """Adapters of the model's kinds of layers, in their order."""
        return self.own_kinds or (self,)

    @property
    def num_parameters(self) -> int:
        """Number of adapter parameters, all of them trained."""
        return sum(kind.all_layer_parameters for kind in self.kinds) + self.non_layer_parameters

    @property
    def layer_parameters(self) -> int:
        """Adapter parameters per layer, averaged over all layers and rounded up."""
        return -(-self.all_layer_parameters // self.layers)

    @property
    def head_parameters(self) -> int:
        """Adapter parameters on the LM head."""
        return sum(map(math.prod, self.head_weights))

    @property
    def non_layer_weights(self) -> tuple[WeightShape, ...]:
        """Shapes of the adapter weights outside of layers."""
        return (*self.head_weights, *self.other_weights)

    @property
    def non_layer_parameters(self) -> int:
        """Adapter parameters outside of layers."""
        return sum(map(math.prod, self.non_layer_weights))


def adapter_shape(config: AdapterConfig, shape: ModelShape) -> AdapterShape:
    """Compute the sizes of the configured adapter.

    Raises:
        UserError: `path` is a folder without a readable adapter_config.json.
    """
    return _adapter_shape(requested_adapter(config), shape, has_dropout=bool(config.dropout))


@lru_cache(maxsize=256)  # a search asks thousands of times
def _adapter_shape(requested: "RequestedAdapter", shape: ModelShape, *, has_dropout: bool) -> AdapterShape:
    rank = requested.rank
    names_of = [
        {layer: [f"model.layers.{number}.{layer}" for number in numbers] for layer in kind.linear_layers}
        for kind in shape.kinds
        for numbers in (kind.layer_numbers or range(kind.layers),)
    ]
    linear = {name for of_kind in names_of for names in of_kind.values() for name in names}
    linear |= {name for name, *_ in shape.outer_linears}
    targeted, unknown = _match_targets(requested.targets, [*linear, _HEAD, _EMBEDDING])
    if unknown:
        targeted |= linear
    outer = [(name, (a, b), requested.dora) for name, a, b in shape.outer_linears]
    outer.append((_EMBEDDING, (shape.hidden, shape.vocabulary), False))
    kinds = [
        _adapter_of_kind(
            requested,
            kind,
            {layer: len(targeted.intersection(names)) for layer, names in of_kind.items()},
            has_dropout=has_dropout,
        )
        for kind, of_kind in zip(shape.kinds, names_of, strict=True)
    ]
    return replace(
        max(kinds, key=lambda kind: kind.layer_parameters),
        own_kinds=tuple(kinds) if len(kinds) > 1 else (),
        head_weights=_factors(rank, shape.hidden, shape.vocabulary, dora=requested.dora) if _HEAD in targeted else (),
        other_weights=tuple(
            weight for name, sides, dora in outer if name in targeted for weight in _factors(rank, *sides, dora=dora)
        ),
        warning=f"model.adapter.targets: {unknown} not found in the shape of {shape.name}; "
        f"the plan assumes an adapter on all linear layers"
        if unknown
        else None,
    )


# Last projections of mixers and attention, whose inputs are saved anyway, and of MLPs
_MIXED_OUT, _MLP_OUT = ("o_proj", "out_proj"), ("down_proj", "w2", "output_linear")


def _adapter_of_kind(
    requested: "RequestedAdapter", shape: ModelShape, counts: Mapping[str, int], *, has_dropout: bool
) -> AdapterShape:
    """Sizes of an adapter in layers of one kind; `counts`: in how many of them it is on each linear layer."""
    rank, dora = requested.rank, requested.dora
    adapted = {layer: sides for layer, sides in shape.linear_layers.items() if counts[layer]}
    weights = {layer: _factors(rank, fan_in, fan_out, dora=dora) for layer, (fan_in, fan_out) in adapted.items()}
    sizes = {layer: sum(map(math.prod, factors)) for layer, factors in weights.items()}
    size_on_all_layers = shape.layers * sum(sizes.values())
    adapted_size = sum(size * counts[layer] for layer, size in sizes.items())
    inputs: dict[str, int] = {}  # modules of a parent have one input, but for the last projection
    for layer, (fan_in, _) in adapted.items():
        parent, _, name = layer.rpartition(".")
        if name not in _MIXED_OUT:
            inputs[layer if name in _MLP_OUT else f"{parent} {fan_in}"] = fan_in
    qkv_outputs = [
        fan_out for layer, (_, fan_out) in adapted.items() if layer.endswith((".q_proj", ".k_proj", ".v_proj"))
    ]
    return AdapterShape(
        rank=rank,
        layers=shape.layers,
        layer_weights=tuple(weight for factors in weights.values() for weight in factors),
        layer_fraction=adapted_size / size_on_all_layers if size_on_all_layers else 1.0,
        all_layer_parameters=adapted_size,
        head_weights=(),
        other_weights=(),
        saved_input_features=sum(inputs.values()),
        rank_features=rank * len(adapted),
        qkv_output_features=sum(rank + fan_out for fan_out in qkv_outputs),
        dropout_features=sum(fan_in for fan_in, _ in adapted.values()) * has_dropout,
        dora_layers=tuple(adapted.values()) if dora else (),
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
