"""Merge an adapter into its base model, tensor by tensor."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cohort.config import AdapterConfig, ModelConfig
from cohort.errors import UserError
from cohort.models.adapters.adapter_folder import PREFIX, AdapterSpec, adapter_spec, read_adapter, with_base
from cohort.models.loading.meta_device import local_weights, meta_model, quiet_transformers
from cohort.models.loading.safetensors_files import (
    StoredTensor,
    TensorInfo,
    read_bytes,
    read_rows,
    write_index,
    write_tensors,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _MergedTensor:
    """Source of a tensor of the merged model."""

    source: StoredTensor  # in the base
    module: str | None  # adapted layer, if any


def merge(adapter: Path, folder: Path, *, on_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Save the base model with the adapter merged in, computed in float32 and rounded to the dtype of the base.

    Args:
        adapter: adapter folder that names its base model.
        folder: existing empty output folder; gets as many weight files as the base has.
        on_progress: called with the number of tensors written and their total.

    Raises:
        UserError: adapter and base do not match, or the files of the base cannot be used.
    """
    config = with_base(ModelConfig(path=str(adapter)))
    assert isinstance(config.adapter, AdapterConfig)
    stored = local_weights(config.path, download=True)
    dtypes = {tensor.dtype for tensor in stored.values()}
    model = meta_model(config)
    spec = adapter_spec(config, model)
    weights = read_adapter(adapter, spec, model)
    tensors = _plan(model, spec, stored, config.path)
    files: dict[str, list[str]] = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].source.start):
        files.setdefault(tensor.source.file.name, []).append(name)
    described = {
        file: [TensorInfo(n, s.stored_dtype, s.shape, s.num_bytes) for n, s in ((n, tensors[n].source) for n in names)]
        for file, names in files.items()
    }
    done = 0

    def merged(names: list[str]) -> Iterator[Tensor]:
        nonlocal done
        for name in names:
            yield _merge_tensor(tensors[name], model, spec, weights)
            done += 1
            on_progress(done, len(tensors))

    for file, names in sorted(files.items()):
        write_tensors(folder / file, described[file], merged(names))
    if len(files) > 1:
        write_index(folder, described)
    if len(dtypes) == 1:
        model.config.dtype = dtypes.pop()
    _save_configs(model, config, adapter, folder)


def _plan(model: Any, spec: AdapterSpec, stored: Mapping[str, StoredTensor], base: str) -> dict[str, _MergedTensor]:
    """Return the sources of the merged model's tensors, by name in its files."""
    tensors = {name: _MergedTensor(source=source, module=None) for name, source in stored.items()}
    names = {m: name for name, m in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    changed = {names[module] for module in (embedding, head) if module in names} & set(spec.modules)

    def place(module: str) -> str:
        name = f"{module}.weight"
        found = next((n for n in (name, name.removeprefix(f"{model.base_model_prefix}.")) if n in stored), None)
        if found is None or stored[found].dtype is None or not stored[found].dtype.is_floating_point:  # type: ignore[union-attr]
            raise UserError(
                f"{base!r}: cannot merge into {module}, whose weight is not stored as a plain tensor; use peft's "
                f"merge_and_unload and save the model"
            )
        return found

    if tied and changed:  # untie them
        source = stored[place(names[embedding])]
        tensors[f"{names[head]}.weight"] = _MergedTensor(source=source, module=None)
        model.config.tie_word_embeddings = False
        model.config.get_text_config().tie_word_embeddings = False
    for module in spec.modules:
        name = f"{module}.weight"
        if not (tied and module == names[head]):
            name = place(module)
        tensors[name] = _MergedTensor(source=tensors[name].source, module=module)
    return tensors


def _merge_tensor(tensor: _MergedTensor, model: Any, spec: AdapterSpec, weights: Mapping[str, Tensor]) -> Tensor:
    """Read a tensor of the base, and merge the adapter of its layer if there is one."""
    dtype = tensor.source.dtype
    if dtype is None or tensor.module is None:
        return read_bytes(tensor.source)
    base = torch.empty(tensor.source.shape, dtype=torch.promote_types(dtype, torch.float32))
    read_rows(tensor.source, base, 0)
    key = f"{PREFIX}{tensor.module}.lora_"
    is_embedding = isinstance(model.get_submodule(tensor.module), nn.Embedding)
    if is_embedding:
        product = (weights[f"{key}embedding_B"].to(base.dtype) @ weights[f"{key}embedding_A"].to(base.dtype)).T
    else:
        product = weights[f"{key}B.weight"].to(base.dtype) @ weights[f"{key}A.weight"].to(base.dtype)
    base.add_(product, alpha=spec.scaling)
    if spec.dora:
        norms = torch.linalg.vector_norm(base, dim=0 if is_embedding else 1, keepdim=True)
        base.mul_(weights[f"{key}magnitude_vector"].to(base.dtype).view_as(norms) / norms)
    return base.to(dtype)


def _save_configs(model: Any, config: ModelConfig, adapter: Path, folder: Path) -> None:
    """Save config, generation config and tokenizer."""
    from transformers import AutoTokenizer

    with quiet_transformers():
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
        has_tokenizer = any(adapter.glob("tokenizer*"))
        AutoTokenizer.from_pretrained(str(adapter) if has_tokenizer else config.path).save_pretrained(folder)
