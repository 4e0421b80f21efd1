"""The size of an adapter: what LoRA adds to a model's shape, counted from the configuration alone.

A target means every layer whose name ends with it, from a dot on, as when the adapter is made. Names are those of Llama
and what is built like it; with another name the shape cannot tell which layers are meant, and all linear ones are
counted. Experts and their router are no linear layers of the library, so `all-linear` leaves them alone. r rank; an
addition to a weight [out, in] has r (in + out) parameters.
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

ADAPTER_BYTES = 4  # of a trained number: peft keeps adapters in float32, whatever the model has
_HEAD, _EMBEDDING = "lm_head", "model.embed_tokens"
_BLOCKS = {"gate_proj": "mlp", "up_proj": "mlp", "down_proj": "mlp"}  # that hold a layer; else attention's
_Targets = str | tuple[str, ...]  # all-linear, a pattern as peft saves it, or names


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterShape:
    """What of an adapter decides memory and time."""

    rank: int
    layer_weights: tuple[WeightShape, ...]
    head_weights: tuple[WeightShape, ...]  # on the head
    embedding_weights: tuple[WeightShape, ...]
    share_of_layers: float  # that the layers' weights are in: 1 where each layer has them
    kept_features: int  # of one token and layer: inputs of frozen products that only the adapter's gradient wants
    rank_features: int  # of one token and layer: what lies between the two factors
    early_features: int  # of one token and layer: outputs of both factors of queries, keys and values
    dropout_features: int  # of one token and layer: inputs after dropout, and one byte each for what was dropped
    turned_layers: tuple[tuple[int, int], ...] = ()  # inputs and outputs of each that DoRA gives a direction
    note: str | None = None  # what could not be told from the shape

    def num_parameters(self, layers: int) -> int:
        """All of them, which are all that is trained."""
        return layers * self.layer_parameters + self.outer_parameters

    @property
    def layer_parameters(self) -> int:
        """In the mean of all layers, rounded up: some may have none."""
        return math.ceil(self.share_of_layers * sum(map(math.prod, self.layer_weights)))

    @property
    def head_parameters(self) -> int:
        """On the head."""
        return sum(map(math.prod, self.head_weights))

    @property
    def outer_weights(self) -> tuple[WeightShape, ...]:
        """In no layer."""
        return (*self.head_weights, *self.embedding_weights)

    @property
    def outer_parameters(self) -> int:
        """In no layer."""
        return sum(map(math.prod, self.outer_weights))


def adapter_shape(config: AdapterConfig, shape: ModelShape) -> AdapterShape:
    """The size of the adapter that the configuration asks for.

    Raises:
        UserError: `path` is a folder without a readable adapter_config.json.
    """
    rank, targets, dora = _requested(config)
    linear = shape.linear_layers
    places = {layer: [_full_name(layer, number) for number in range(shape.layers)] for layer in linear}
    known = [name for names in places.values() for name in names] + [_HEAD, _EMBEDDING]
    meant, unknown = _meant(targets, known)
    if unknown:
        meant |= {name for names in places.values() for name in names}
    counts = {layer: len(meant.intersection(names)) for layer, names in places.items()}
    chosen = {layer: linear[layer] for layer, count in counts.items() if count}
    weights = {layer: _factors(rank, into, out, dora=dora) for layer, (into, out) in chosen.items()}
    sizes = {layer: sum(map(math.prod, of_layer)) for layer, of_layer in weights.items()}
    everywhere = shape.layers * sum(sizes.values())
    there = sum(size * counts[layer] for layer, size in sizes.items())
    early = [out for name, (_, out) in chosen.items() if name in ("q_proj", "k_proj", "v_proj")]
    return AdapterShape(
        rank=rank,
        layer_weights=tuple(weight for of_layer in weights.values() for weight in of_layer),
        share_of_layers=there / everywhere if everywhere else 1.0,
        head_weights=_factors(rank, shape.hidden, shape.vocabulary, dora=dora) if _HEAD in meant else (),
        embedding_weights=_factors(rank, shape.hidden, shape.vocabulary, dora=False) if _EMBEDDING in meant else (),
        kept_features=shape.hidden * bool(early)
        + shape.hidden * bool({"gate_proj", "up_proj"} & set(chosen))
        + shape.mlp * ("down_proj" in chosen),
        rank_features=rank * len(chosen),
        early_features=sum(rank + out for out in early),
        dropout_features=sum(into for into, _ in chosen.values()) * bool(config.dropout),
        turned_layers=tuple(chosen.values()) if dora else (),
        note=f"model.adapter.targets: {unknown}: which layers these are cannot be told from the shape of {shape.name}; "
        f"the adapter is counted as if on all of its linear layers"
        if unknown
        else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedAdapter:
    """An adapter as the configuration names it, whatever the model."""

    rank: int
    dora: bool
    modules: tuple[str, ...]  # as they are named; of a pattern only the head and the embedding, where it means them


def requested_adapter(config: AdapterConfig) -> RequestedAdapter:
    """What is known of an adapter without its model.

    Raises:
        UserError: `path` is a folder without a readable adapter_config.json.
    """
    rank, targets, dora = _requested(config)
    modules = targets if isinstance(targets, tuple) else tuple(sorted(_meant(targets, [_HEAD, _EMBEDDING])[0]))
    return RequestedAdapter(rank=rank, dora=dora, modules=modules)


def _requested(config: AdapterConfig) -> tuple[int, _Targets, bool]:
    """Rank, targets and whether it is DoRA."""
    saved = None if config.path is None else _saved(config.path)
    return (config.rank, config.targets, config.dora) if saved is None else saved


def _factors(rank: int, into: int, out: int, *, dora: bool) -> tuple[WeightShape, ...]:
    """What is trained beside a weight [out, in]."""
    return ((rank, into), (out, rank), *([(out,)] if dora else []))


def _full_name(layer: str, number: int) -> str:
    return f"model.layers.{number}.{_BLOCKS.get(layer, 'self_attn')}.{layer}"


def _meant(targets: _Targets, known: list[str]) -> tuple[set[str], str]:
    """Which of the known layers are meant, and those targets that none of them has."""
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


def _saved(path: str) -> tuple[int, _Targets, bool] | None:
    """Rank, targets and whether it is DoRA of an adapter that was saved; None where it is not on this machine."""
    file = Path(path) / "adapter_config.json"
    if not file.is_file():
        return None
    try:
        saved: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        names = saved["target_modules"]
        targets = names if isinstance(names, str) else tuple(map(str, names))
        return int(saved["r"]), targets, bool(saved.get("use_dora"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"model.adapter.path: {file}: cannot be read: {error!r}") from error
