"""Routers of mixture-of-experts models: find them, remove their noise, and capture their logits.

N positions of a router's input, E experts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_NOISE = "jitter"  # in the attribute names of transformers' router noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """A module that routes tokens to experts."""

    name: str  # in the model
    module: nn.Module
    output: int  # index of the logits [N, E] in its outputs


def find_routers(model: Any) -> tuple[Router, ...]:
    """Find the routers of a transformers model, in layer order: those whose logits transformers can record."""
    found: dict[str, Router] = {}
    for outer, module in model.named_modules():
        recorded = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        for recorder in recorded if isinstance(recorded, list | tuple) else [recorded]:
            if recorder is None:
                continue
            # in transformers 5.17, Llama 4 names the layer of experts, whose child is the router
            layer = recorder if isinstance(recorder, type) else None
            for inner, candidate in module.named_modules():
                name = f"{outer}.{inner}".strip(".")
                if layer is not None and isinstance(candidate, layer) and hasattr(candidate, "router"):
                    name = f"{name}.router"
                    found[name] = Router(name=name, module=candidate.router, output=1)
                elif layer is None and isinstance(candidate, recorder.target_class):
                    found[name] = Router(name=name, module=candidate, output=recorder.index)
    return tuple(found.values())


def remove_noise(model: Any) -> None:
    """Make routers behave in training as in sampling, in place.

    Some architectures add noise to the router or its input in training. The logprobs of a sampled token would then be
    those of a different policy from the one that sampled it.
    """
    noisy = [m for m in model.modules() if any(_NOISE in key and value for key, value in vars(m).items())]
    for module in {id(m): m for m in (*noisy, *(router.module for router in find_routers(model)))}.values():
        _stay_in_eval(module)


def _stay_in_eval(module: nn.Module) -> None:
    """Keep the module in eval mode, but not its children."""

    def train(mode: bool = True) -> nn.Module:
        for child in module.children():
            child.train(mode)
        return module

    module.training = False
    module.train = train  # type: ignore[method-assign]


@contextmanager
def constant_routing(model: Any) -> Iterator[None]:
    """Context in which the routers of a model send all tokens to the same experts, to compare numbers in 16 bits.

    Rounding decides between experts that are almost equally likely, and then outputs differ by far more than rounding.
    """

    def as_ones(module: nn.Module, args: Any, kwargs: Any) -> Any:
        def replaced(x: Any) -> Any:
            return torch.ones_like(x) if isinstance(x, Tensor) and x.is_floating_point() else x

        return tuple(map(replaced, args)), {key: replaced(x) for key, x in kwargs.items()}

    hooks = [r.module.register_forward_pre_hook(as_ones, with_kwargs=True) for r in find_routers(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class RouterLogits:
    """Capture the logits of a model's routers during forward passes."""

    def __init__(self, model: Any):
        """Register hooks on the routers of a model, which must have some."""
        self._take: Callable[[int, Tensor], None] | None = None
        for number, router in enumerate(find_routers(model)):
            router.module.register_forward_hook(self._hook(number, router.output))

    @contextmanager
    def collect_into(self, take: Callable[[int, Tensor], None]) -> Iterator[None]:
        """Context in which every router call passes its index and its logits [N, E], with graph, to `take`.

        With gradient checkpointing, recomputation happens outside of the context. So `take` must only store its
        arguments: the recomputation has to match the first forward.
        """
        assert self._take is None, "cannot be nested"
        self._take = take
        try:
            yield
        finally:
            self._take = None

    def _hook(self, number: int, output: int) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, outputs: Any) -> None:
            if self._take is not None:
                self._take(number, outputs[output].flatten(0, -2))

        return hook
