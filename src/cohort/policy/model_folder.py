"""A model folder before its weights are loaded: what it has to hold, and its tokenizer."""

import json
from pathlib import Path
from typing import Any

from cohort.config import ModelConfig
from cohort.errors import UserError
from cohort.policy.adapter_folder import is_adapter_folder
from cohort.policy.weights import check_embedding, stored_weights

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def check_model_folder(path: str, *, field: str = "model.path") -> None:
    """Look at a local model folder without loading it. An id of a hub passes.

    Raises:
        UserError: the folder does not exist or lacks config.json, weights or a tokenizer, or a file of weights is
            broken, going by its header and size.
    """
    folder = Path(path)
    if not folder.exists():
        looks_like_id = path.count("/") == 1 and not path.startswith((".", "/", "~"))
        if looks_like_id:
            return
        raise UserError(f"{field}: {path!r}: no such folder. Give a model folder, or a Hugging Face id like org/name")
    if not folder.is_dir():
        raise UserError(f"{field}: {path!r} is a file; give the folder that holds config.json")
    if is_adapter_folder(folder):
        raise UserError(
            f"{field}: {path!r} is an adapter and no model; give the folder of its base, and this one as "
            f"model.adapter.path"
        )
    if not (folder / "config.json").is_file():
        inside = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
        raise UserError(f"{field}: {path!r} has no config.json, so it is not a model folder. It holds: {inside}")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{field}: {path}/config.json is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{field}: {path}/config.json is not a model's configuration: it has to be a JSON object")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise UserError(f"{field}: {path!r} has no weights (*.safetensors)")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise UserError(
            f"{field}: {path!r} has no tokenizer ({', '.join(_TOKENIZER_FILES[:3])}); copy the tokenizer files of the "
            f"model into it (tokenizer.save_pretrained)"
        )
    check_embedding(stored_weights(folder, field=field), config, field=field)


def load_tokenizer(config: ModelConfig, *, field: str = "model.path") -> Any:
    """The model's tokenizer.

    Raises:
        UserError: there is none, or it cannot be loaded.
    """
    from transformers import AutoTokenizer

    check_model_folder(config.path, field=field)
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # the loader raises many types; all mean the same to the user
        raise UserError(f"{field}: {config.path!r}: the tokenizer cannot be loaded: {error}") from error
    return tokenizer
