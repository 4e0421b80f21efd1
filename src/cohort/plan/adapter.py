"""The size of an adapter: what LoRA adds to a model's shape, counted from the configuration alone.

A target means every layer whose name ends with it, from a dot on, as when the adapter is made. Names are those of Llama
and what is built like it; with another name the shape cannot tell which layers are meant, and all linear ones are
counted. Experts and their router are no linear layers of the library, so `all-linear` leaves them alone. r rank; an
addition to a weight [out, in] has r (in + out) parameters.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cohort.config.adapter import AdapterConfig
from cohort.errors import UserError
from cohort.plan.shape import ModelShape

ADAPTER_BYTES = 4  # of a trained number: peft keeps adapters in float32, whatever the model has
_HEAD, _EMBEDDING = "lm_head", "model.embed_tokens"
_BLOCKS = {"gate_proj": "mlp", "up_proj": "mlp", "down_proj": "mlp"}  # that hold a layer; else attention's
_Targets = str | tuple[str, ...]  # all-linear, a pattern as peft saves it, or names


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterShape:
    """What of an adapter decides memory and time."""

    rank: int
    layer_parameters: int  # in the mean of all layers, rounded up: some may have none
    head_parameters: int  # on the head
    embedding_parameters: int
    kept_features: int  # of one token and layer: inputs of frozen products that only the adapter's gradient wants
    rank_features: int  # of one token and layer: what lies between the two factors
    early_features: int  # of one token and layer: outputs of both factors of queries, keys and values
    dropout_features: int  # of one token and layer: inputs after dropout, and one byte each for what was dropped
    note: str | None = None  # what could not be told from the shape

    def num_parameters(self, layers: int) -> int:
        """All of them, which are all that is trained."""
        return layers * self.layer_parameters + self.outer_parameters

    @property
    def outer_parameters(self) -> int:
        """In no layer."""
        return self.head_parameters + self.embedding_parameters


def adapter_shape(config: AdapterConfig, shape: ModelShape) -> AdapterShape:
    """The size of the adapter that the configuration asks for.

    Raises:
        UserError: `path` is a folder without a readable adapter_config.json.
    """
    rank, dora = config.rank, config.dora
    targets: _Targets = config.targets
    if config.path is not None and (saved := _saved(config.path)) is not None:
        rank, targets, dora = saved
    linear = _linear_layers(shape)
    places = {layer: [_full_name(layer, number) for number in range(shape.layers)] for layer in linear}
    known = [name for names in places.values() for name in names] + [_HEAD, _EMBEDDING]
    meant, unknown = _meant(targets, known)
    if unknown:
        meant |= {name for names in places.values() for name in names}
    counts = {layer: len(meant.intersection(names)) for layer, names in places.items()}
    chosen = {layer: linear[layer] for layer, count in counts.items() if count}
    in_layers = sum((rank * (into + out) + dora * out) * counts[layer] for layer, (into, out) in chosen.items())
    outer = rank * (shape.hidden + shape.vocabulary)
    early = [out for name, (_, out) in chosen.items() if name in ("q_proj", "k_proj", "v_proj")]
    return AdapterShape(
        rank=rank,
        layer_parameters=-(-in_layers // shape.layers),
        head_parameters=(outer + dora * shape.vocabulary) * (_HEAD in meant),
        embedding_parameters=outer * (_EMBEDDING in meant),
        kept_features=shape.hidden * bool(early)
        + shape.hidden * bool({"gate_proj", "up_proj"} & set(chosen))
        + shape.mlp * ("down_proj" in chosen),
        rank_features=rank * len(chosen),
        early_features=sum(rank + out for out in early),
        dropout_features=sum(into for into, _ in chosen.values()) * bool(config.dropout),
        note=f"model.adapter.targets: {unknown}: which layers these are cannot be told from the shape of {shape.name}; "
        f"the adapter is counted as if on all of its linear layers"
        if unknown
        else None,
    )


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


def _linear_layers(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of a layer's linear layers."""
    hidden, query, key, mlp = shape.hidden, shape.query_width, shape.key_width, shape.mlp
    layers = {
        "q_proj": (hidden, query),
        "k_proj": (hidden, key),
        "v_proj": (hidden, key),
        "o_proj": (query, hidden),
    }
    if shape.experts_per_token == 1:
        layers |= {"gate_proj": (hidden, mlp), "up_proj": (hidden, mlp), "down_proj": (mlp, hidden)}
    return layers


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
