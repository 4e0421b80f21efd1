"""A model that is given as an object: saved as a folder, which every part of a run can read."""

import re
import time
from pathlib import Path
from typing import Any

import torch
import xxhash
from peft import PeftModel
from transformers import AutoTokenizer, PreTrainedModel

from cohort.config import Config
from cohort.errors import TrainingError, UserError
from cohort.models.loading.meta_device import quiet_transformers
from cohort.models.loading.multimodal import build_language_model, is_multimodal, multimodal_of
from cohort.ranks.join import rank_of_launcher
from cohort.run.atomic import write_folder_atomically
from cohort.run.folder import GIVEN_MODEL

_PATIENCE_S = 1800.0  # of other ranks, while rank 0 writes


def is_model(value: Any) -> bool:
    """Whether a value is a model of transformers or peft."""
    return isinstance(value, PreTrainedModel | PeftModel)


def names_in_run(model: Any) -> dict[str, str]:
    """Map the names of a given model's parameters to those in the model that trains, where adapters are `default`.

    Of a multimodal model only the language model trains; the other parameters are left out.
    """
    names = {name: name for name, _ in model.named_parameters()}
    if isinstance(model, PeftModel):
        adapter = re.compile(rf"(\.lora_\w+)\.{re.escape(str(model.active_adapter))}(?=\.|$)")
        names = {name: adapter.sub(r"\1.default", name).removeprefix("base_model.model.") for name in names}
        model = model.get_base_model()
    if not is_multimodal(model.config):
        return names
    with quiet_transformers(), torch.device("meta"):
        multimodal = multimodal_of(build_language_model(model.config, ""))
    if multimodal is None:  # it is loaded as it is
        return names
    own = {name: multimodal.own_name(outer) for name, outer in names.items()}
    return {name: own_name for name, own_name in own.items() if own_name is not None}


class GivenModel:
    """A model object with its tokenizer.

    Its folder has the digest of the weights in its name, so a run does not go on with other weights.
    """

    def __init__(self, model: Any, tokenizer: Any = None):
        """Load the tokenizer of the model's origin, unless one is given.

        Raises:
            UserError: the model is quantized, or has no tokenizer.
        """
        self._adapter = model if isinstance(model, PeftModel) else None
        self._base = model if self._adapter is None else model.get_base_model()
        if getattr(self._base, "is_quantized", False):
            raise UserError(
                "model: is quantized, and cannot be saved in full; give its path and model.quantization instead: "
                "model={'path': ..., 'quantization': 'nf4', 'adapter': {...}}"
            )
        self._tokenizer = tokenizer if tokenizer is not None else _tokenizer_of(self._base)
        in_run = names_in_run(model)
        self._frozen = [in_run[n] for n, p in model.named_parameters() if n in in_run and not p.requires_grad]
        self._weights = _base_weights(model)
        every = self._weights if self._adapter is None else model.state_dict()
        self._name = f"{GIVEN_MODEL}-{_digest(every, str(getattr(self._tokenizer, 'chat_template', '')))}"

    def with_paths(self, config: Config) -> Config:
        """Return the configuration with the paths of what `save` writes."""
        folder = Path(config.run.dir).absolute() / self._name
        section = {**config.model.model_dump(exclude_unset=True), "path": str(folder)}
        if self._adapter is not None:
            section["adapter"] = {**(section.get("adapter") or {}), "path": str(folder / "adapter")}
        elif self._frozen and section.get("adapter") is None:
            section["freeze"] = (*section.get("freeze", ()), *self._frozen)
        return config.model_copy(update={"model": type(config.model).model_validate(section)})

    def save(self, config: Config) -> None:
        """Write the folder on rank 0, unless it is there; the other ranks wait for it.

        Raises:
            TrainingError: the disk is full, or rank 0 has not written it.
        """
        folder = Path(config.run.dir).absolute() / self._name
        if rank_of_launcher() == 0:
            if not folder.exists():
                folder.parent.mkdir(parents=True, exist_ok=True)
                write_folder_atomically(folder, self._write)
            return
        deadline = time.monotonic() + _PATIENCE_S
        while not folder.exists():
            if time.monotonic() > deadline:
                raise TrainingError(f"{folder}: rank 0 has not written it; is it on a disk that all ranks see?")
            time.sleep(0.2)

    def _write(self, folder: Path) -> None:
        self._base.save_pretrained(folder, state_dict=self._weights)
        self._tokenizer.save_pretrained(folder)
        if self._adapter is not None:
            name = self._adapter.active_adapter
            self._adapter.save_pretrained(str(folder / "adapter"), selected_adapters=[name])
            if name != "default":  # peft writes others into a folder of their name
                for file in (folder / "adapter" / name).iterdir():
                    file.rename(folder / "adapter" / file.name)


def _tokenizer_of(model: Any) -> Any:
    """Return the tokenizer of the folder or id that a model was loaded from.

    Raises:
        UserError: it has none.
    """
    origin = model.config._name_or_path
    try:
        return AutoTokenizer.from_pretrained(origin)
    except Exception as error:  # transformers raises many types of errors
        raise UserError(f"tokenizer: missing; the model's origin {origin!r} has none. Give tokenizer=") from error


def _base_weights(model: Any) -> dict[str, torch.Tensor]:
    """Return the weights of a model by their names in files, without those of an adapter."""
    if not isinstance(model, PeftModel):
        return dict(model.state_dict())
    return {
        name.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".original_module.", "."): tensor
        for name, tensor in model.state_dict().items()
        if ".lora_" not in name and ".modules_to_save." not in name
    }


def _digest(weights: dict[str, torch.Tensor], text: str) -> str:
    digest = xxhash.xxh3_64(text.encode())
    for name, tensor in weights.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
