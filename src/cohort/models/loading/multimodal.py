"""Multimodal checkpoints, whose language model is trained alone.

Prompts have no images, so the rest of the model (vision tower, projector) is never loaded. What is saved has its
weights from the files, byte for byte.
"""

import shutil
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Multimodal:
    """The multimodal model that a language model is part of. It is the attribute `multimodal` of that."""

    model: Any  # on the meta device, for its names and its config
    path: str  # folder or hub id with the weights that are not loaded
    modules: Mapping[str, str]  # names of body and head in the language model -> in the multimodal model

    def name_of(self, name: str) -> str:
        """Return the name in the multimodal model of a module or tensor of the language model."""
        for own, outer in self.modules.items():
            if name == own or name.startswith(f"{own}."):
                return outer + name[len(own) :]
        return name

    def own_name(self, name: str) -> str | None:
        """Return the language model's name of a module or tensor of the multimodal model; None if outside of it."""
        for own, outer in self.modules.items():
            if name == outer or name.startswith(f"{outer}."):
                return own + name[len(outer) :]
        return None


def multimodal_of(model: Any) -> Multimodal | None:
    """Return the multimodal model that a language model is part of, if any."""
    return getattr(model, "multimodal", None)


def saved_model(model: Any, multimodal: Multimodal | None) -> Any:
    """Return the model that config, names and shapes are saved for: the multimodal one, if there is one."""
    return model if multimodal is None else multimodal.model


def copy_processor_files(multimodal: Multimodal | None, folder: Path) -> None:
    """Copy the files of a multimodal model's processors, if there is one."""
    for file in () if multimodal is None else processor_files(multimodal.path):
        shutil.copy(file, folder)


def outer_name(model: Any, name: str) -> str:
    """Return the name of a module or tensor in the multimodal model, or its own name if there is none."""
    multimodal = multimodal_of(model)
    return name if multimodal is None else multimodal.name_of(name)


def is_multimodal(config: Any) -> bool:
    """Whether a config is of a multimodal model whose language model transformers can build alone."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return (
        type(config) in AutoModelForImageTextToText._model_mapping
        and config.get_text_config() is not config
        and type(config.get_text_config()) in AutoModelForCausalLM._model_mapping
    )


def build_language_model(config: Any, path: str, **options: Any) -> Any:
    """Build the language model of a multimodal model.

    Args:
        config: of the multimodal model, see `is_multimodal`.
        path: folder or hub id of the model.
        options: further arguments of `from_config`.

    Returns:
        the language model, with `multimodal`; None if its weights have other names than those of the multimodal model.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    outer = AutoModelForImageTextToText.from_config(config, **options)
    text_config = deepcopy(config.get_text_config())
    # files may say so for the multimodal model only
    text_config.tie_word_embeddings = outer.get_output_embeddings().weight is outer.get_input_embeddings().weight
    model = AutoModelForCausalLM.from_config(text_config, **options)
    names = [{m: name for name, m in part.named_modules()} for part in (model, outer)]
    embeddings = [n[part.get_input_embeddings()] for n, part in zip(names, (model, outer), strict=True)]
    heads = [n[part.get_output_embeddings()] for n, part in zip(names, (model, outer), strict=True)]
    body, outer_body = (name.rpartition(".")[0] for name in embeddings)
    multimodal = Multimodal(model=outer, path=path, modules={body: outer_body, heads[0]: heads[1]})
    if not {multimodal.name_of(name) for name in model.state_dict()} <= outer.state_dict().keys():
        return None
    model.multimodal = multimodal
    return model


def load_language_model(model: Any, path: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Load a multimodal model with transformers, and keep its language model.

    Args:
        model: result of `build_language_model`, on the meta device.
        path: folder or hub id of the multimodal model.
        options: further arguments of `from_pretrained`.

    Returns:
        the language model, and what transformers says about loading.
    """
    from transformers import AutoModelForImageTextToText

    outer, info = AutoModelForImageTextToText.from_pretrained(path, output_loading_info=True, **options)
    for own, name in model.multimodal.modules.items():
        model.set_submodule(own, outer.get_submodule(name))
    return model, info


@cache
def processor_files(path: str) -> tuple[Path, ...]:
    """Return the files of a model's processors, which are downloaded if it is on the hub."""
    from transformers.utils.hub import cached_file

    found = [cached_file(path, name, _raise_exceptions_for_missing_entries=False) for name in _PROCESSOR_FILES]
    return tuple(Path(file) for file in found if file is not None)
