"""The routers of a mixture of experts: found, kept free of noise, and their logits while a micro-batch is computed.

N positions that a router is given, E experts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

_NOISE = "jitter"  # in the name of what the library's blocks multiply their inputs with in training


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """One module that chooses experts for tokens."""

    name: str  # in the model
    module: nn.Module
    output: int  # which of what it returns are the logits, [N, E]


def find_routers(model: Any) -> tuple[Router, ...]:
    """The routers of a model of the library, in the order of its layers: what it can record the logits of itself."""
    found: dict[str, Router] = {}
    for outer, module in model.named_modules():
        recorded = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        for recorder in recorded if isinstance(recorded, list | tuple) else [recorded]:
            if recorder is None:
                continue
            for inner, candidate in module.named_modules():
                name = f"{outer}.{inner}".strip(".")
                if isinstance(candidate, recorder.target_class):
                    found[name] = Router(name=name, module=candidate, output=recorder.index)
    return tuple(found.values())


def remove_noise(model: Any) -> None:
    """Have routers choose in training as in sampling, in place.

    Some architectures choose at random in training, or shake what a router sees. The logprobs of a sampled token would
    be those of another policy than the one that it was sampled from.
    """
    noisy = [m for m in model.modules() if any(_NOISE in key and value for key, value in vars(m).items())]
    for module in {id(m): m for m in (*noisy, *(router.module for router in find_routers(model)))}.values():
        _stay_in_eval(module)


def _stay_in_eval(module: nn.Module) -> None:
    """The module itself, and not what is in it."""

    def train(mode: bool = True) -> nn.Module:
        for child in module.children():
            child.train(mode)
        return module

    module.training = False
    module.train = train  # type: ignore[method-assign]


class RouterLogits:
    """Hands on the logits of a model's routers while it computes."""

    def __init__(self, model: Any):
        """Of a model's routers, of which there are some."""
        self._take: Callable[[int, Tensor], None] | None = None
        for number, router in enumerate(find_routers(model)):
            router.module.register_forward_hook(self._hook(number, router.output))

    @contextmanager
    def given_to(self, take: Callable[[int, Tensor], None]) -> Iterator[None]:
        """Inside, every router that computes gives its number and its logits [N, E] with their graph to `take`.

        Not of layers that are computed again in backward, which is outside. So with gradient checkpointing `take` only
        keeps what it is given: the layer's second computation has to be the same as the first.
        """
        assert self._take is None, "one micro-batch at a time"
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
