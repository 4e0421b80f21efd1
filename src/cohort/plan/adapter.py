"""The size of an adapter: what LoRA adds to a model's shape, counted from the configuration alone.

Targets are known by the last part of their names, as peft has them. Experts and their router are no linear layers of
the library, so `all-linear` leaves them alone. r rank; an addition to a weight [out, in] has r (in + out) parameters.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cohort.config.adapter import AdapterConfig
from cohort.errors import UserError
from cohort.plan.shape import ModelShape, WeightShape

ADAPTER_BYTES = 4  # of a trained number: peft keeps adapters in float32, whatever the model has
_HEAD, _EMBEDDING = "lm_head", "embed_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterShape:
    """What of an adapter decides memory and time."""

    rank: int
    layer_weights: tuple[WeightShape, ...]
    head_weights: tuple[WeightShape, ...]  # on the head
    embedding_weights: tuple[WeightShape, ...]
    kept_features: int  # of one token and layer: inputs of frozen products that only the adapter's gradient wants
    rank_features: int  # of one token and layer: what lies between the two factors
    early_features: int  # of one token and layer: outputs of both factors of queries, keys and values
    dropout_features: int  # of one token and layer: inputs after dropout, and one byte each for what was dropped

    def num_parameters(self, layers: int) -> int:
        """All of them, which are all that is trained."""
        return layers * self.layer_parameters + self.outer_parameters

    @property
    def layer_parameters(self) -> int:
        """In one layer."""
        return sum(map(math.prod, self.layer_weights))

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
        UserError: `path` is a folder without a readable adapter_config.json, or no layer is a target.
    """
    rank, dora = config.rank, config.dora
    names: str | tuple[str, ...] = config.targets
    if config.path is not None and (saved := _saved(config.path)) is not None:
        rank, names, dora = saved
    linear = shape.linear_layers
    targets = set(linear) if names == "all-linear" else set(names)
    chosen = {name: sizes for name, sizes in linear.items() if name in targets}
    if not chosen and not targets & {_HEAD, _EMBEDDING}:
        raise UserError(
            f"model.adapter.targets: {', '.join(sorted(targets))}: none is a linear layer of {shape.name}, which has "
            f"{', '.join(linear)}"
        )
    early = [out for name, (_, out) in chosen.items() if name in ("q_proj", "k_proj", "v_proj")]
    return AdapterShape(
        rank=rank,
        layer_weights=tuple(w for into, out in chosen.values() for w in _factors(rank, into, out, dora=dora)),
        head_weights=_factors(rank, shape.hidden, shape.vocabulary, dora=dora) if _HEAD in targets else (),
        embedding_weights=_factors(rank, shape.hidden, shape.vocabulary, dora=False) if _EMBEDDING in targets else (),
        kept_features=shape.hidden * bool(early)
        + shape.hidden * bool({"gate_proj", "up_proj"} & set(chosen))
        + shape.mlp * ("down_proj" in chosen),
        rank_features=rank * len(chosen),
        early_features=sum(rank + out for out in early),
        dropout_features=sum(into for into, _ in chosen.values()) * bool(config.dropout),
    )


def _factors(rank: int, into: int, out: int, *, dora: bool) -> tuple[WeightShape, ...]:
    """What is trained beside a weight [out, in]."""
    return ((rank, into), (out, rank), *([(out,)] if dora else []))


def _saved(path: str) -> tuple[int, str | tuple[str, ...], bool] | None:
    """Rank, targets and whether it is DoRA of an adapter that was saved; None where it is not on this machine."""
    file = Path(path) / "adapter_config.json"
    if not file.is_file():
        return None
    try:
        saved: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        names = saved["target_modules"]
        return int(saved["r"]), names if isinstance(names, str) else tuple(names), bool(saved.get("use_dora"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"model.adapter.path: {file}: cannot be read: {error!r}") from error
