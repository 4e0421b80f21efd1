"""Shapes of common open models, with their Hugging Face ids and short names, and model families (`presets.toml`)."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

PRESETS: Mapping[str, Mapping[str, Any]] = _TABLES["shapes"]
IDS: Mapping[str, str] = _TABLES["ids"]
ALIASES: Mapping[str, str] = _TABLES["sizes"]
FAMILIES: Mapping[str, Mapping[str, Any]] = _TABLES["families"]
