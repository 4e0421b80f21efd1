"""Dropout of a model: find it and switch it off."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_CONFIG_KEYS = ("attention_dropout", "attn_pdrop", "hidden_dropout")  # some layers read these rates in forward


def dropout_rates(model: Any) -> list[tuple[Any, str, float]]:
    """List a model's dropout rates above 0, without those of adapters: the object, its attribute and the rate."""
    rates = []
    for path, module in model.named_modules():
        if "lora_dropout" in path.split("."):
            continue
        names = [name for name in vars(module) if "drop" in name]
        names += ["p"] if isinstance(module, nn.Dropout) else []
        rates += [(module, name, vars(module)[name]) for name in names]
    config = model.config.get_text_config()
    rates += [(config, name, getattr(config, name, None)) for name in _CONFIG_KEYS]
    return [(owner, name, x) for owner, name, x in rates if isinstance(x, float | int) and x is not True and x > 0]


class RemovedDropout:
    """Dropout that has been switched off, so that a model computes in training what it computes in sampling.

    Otherwise the logprob of a sampled token would be that of a different policy from the one that sampled it.
    """

    def __init__(self, model: Any):
        """Set all rates of a model to 0, in place, except those of adapters."""
        removed = dropout_rates(model)
        for owner, name, _ in removed:
            setattr(owner, name, 0.0)
        self.largest_rate = max((rate for *_, rate in removed), default=0.0)
        self._in_config = [place for place in removed if not isinstance(place[0], nn.Module)]

    @contextmanager
    def published_config(self) -> Iterator[None]:
        """Context in which the model's config has the rates that it was loaded with."""
        for config, name, rate in self._in_config:
            setattr(config, name, rate)
        try:
            yield
        finally:
            for config, name, _ in self._in_config:
                setattr(config, name, 0.0)
