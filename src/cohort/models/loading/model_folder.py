"""Check model folders before loading weights, and load tokenizers."""

import json
import os
from pathlib import Path
from typing import Any

from cohort.config import ModelConfig
from cohort.errors import UserError
from cohort.models.adapters.adapter_folder import is_adapter_folder
from cohort.models.loading.safetensors_files import check_embedding, stored_weights

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def check_model_folder(path: str, *, field: str = "model.path") -> None:
    """Check a local model folder without loading it. Hub ids pass.

    Raises:
        UserError: the folder does not exist, cannot be read, lacks config.json, weights or a tokenizer, or has a
            weights file that is damaged, judging by header and size.
    """
    folder = Path(path)
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, ValueError):  # ValueError: a name that no folder can have
        looks_like_id = path.count("/") == 1 and not path.startswith((".", "/", "~"))
        if looks_like_id:
            return
        raise UserError(
            f"{field}: {path!r}: no such folder; give a model folder, or a Hugging Face id like org/name"
        ) from None
    except NotADirectoryError:
        raise UserError(f"{field}: {path!r} is a file; give the folder that holds config.json") from None
    except OSError as error:
        raise UserError(f"{field}: {path!r} cannot be read: {error.strerror}") from error
    if is_adapter_folder(folder):
        raise UserError(
            f"{field}: {path!r} is an adapter, not a model; give its base model, and this folder as model.adapter.path"
        )
    if "config.json" not in names:
        inside = ", ".join(names[:8]) or "nothing"
        raise UserError(f"{field}: {path!r} is not a model folder: it has no config.json. It contains: {inside}")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{field}: {path}/config.json cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{field}: {path}/config.json is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{field}: {path}/config.json is not a model config: it must be a JSON object")
    if not any(name.endswith((".safetensors", ".bin")) for name in names):
        raise UserError(f"{field}: {path!r} has no weights (*.safetensors)")
    if not any(name in names for name in _TOKENIZER_FILES):
        raise UserError(
            f"{field}: {path!r} has no tokenizer ({', '.join(_TOKENIZER_FILES[:3])}); copy the model's tokenizer files "
            f"into it (tokenizer.save_pretrained)"
        )
    check_embedding(stored_weights(folder, field=field), config, field=field)


def load_tokenizer(config: ModelConfig) -> Any:
    """Load the tokenizer of a model.

    Raises:
        UserError: it is missing or cannot be loaded.
    """
    from transformers import AutoTokenizer

    check_model_folder(config.path)
    try:
        return AutoTokenizer.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # transformers raises many types of errors
        raise UserError(f"model.path: {config.path!r}: cannot load the tokenizer: {error}") from error
