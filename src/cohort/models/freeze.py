"""Freeze weights by name (`model.freeze`)."""

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from cohort.errors import UserError
from cohort.models.routers import find_routers

ROUTERS = "routers"  # special pattern: the routers of a mixture-of-experts model


def freeze(model: Any, patterns: Iterable[str]) -> None:
    """Freeze the weights whose names match any of the patterns.

    Args:
        model: a transformers model, possibly on the meta device.
        patterns: `model.freeze`, with shell-style wildcards.

    Raises:
        UserError: a pattern matches nothing, or nothing is left to train.
    """
    named = dict(model.named_parameters())
    for pattern in patterns:
        names = _of_routers(model) if pattern == ROUTERS else {name for name in named if fnmatchcase(name, pattern)}
        if not names:
            raise UserError(f"model.freeze: {pattern!r} matches no weight of the model{_hint(pattern, named)}")
        for name in names:
            named[name].requires_grad_(False)
    if patterns and not any(p.requires_grad for p in named.values()):
        raise UserError("model.freeze: all weights are frozen, nothing is left to train; freeze less")


def _of_routers(model: Any) -> set[str]:
    return {f"{router.name}.{name}" for router in find_routers(model) for name, _ in router.module.named_parameters()}


def _hint(pattern: str, names: Iterable[str]) -> str:
    if pattern == ROUTERS:
        return ", which has no routers; remove it"
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3)
    return f"; nearest: {', '.join(near)}" if near else ""
