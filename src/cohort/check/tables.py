"""Read the tables of this package: YAML, JSON and TOML files beside its modules."""

import json
import tomllib
from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import Any

import yaml

_PARSERS: dict[str, Callable[[str], Any]] = {"json": json.loads, "toml": tomllib.loads, "yaml": yaml.safe_load}


@cache
def load_table(path: str) -> Any:
    """Return the content of a file, by its path in `cohort/check`. It is shared: do not change it."""
    text = resources.files("cohort.check").joinpath(path).read_text(encoding="utf-8")
    return _PARSERS[path.rpartition(".")[2]](text)
