"""Merge an adapter into its base model, tensor by tensor."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cohort.config import AdapterConfig, ModelConfig
from cohort.errors import UserError
from cohort.models.adapters.adapter_folder import AdapterSpec, adapter_spec, key_prefix, read_adapter, with_base
from cohort.models.loading.meta_device import local_weights, meta_model, quiet_transformers
from cohort.models.loading.multimodal import copy_processor_files, multimodal_of, outer_name, saved_model
from cohort.models.loading.safetensors_files import (
    StoredTensor,
    TensorInfo,
    map_to_model,
    write_index,
    write_tensors,
)


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
    sources, adapted = _plan(model, spec, stored, config.path)
    files: dict[str, list[TensorInfo]] = {}
    for name, source in sorted(sources.items(), key=lambda item: item[1].start):
        info = TensorInfo(name, source.stored_dtype, source.shape, source.num_bytes)
        files.setdefault(source.file.name, []).append(info)
    done = 0

    def merged(tensors: list[TensorInfo]) -> Iterator[Tensor]:
        nonlocal done
        for tensor in tensors:
            yield _merge_tensor(sources[tensor.name], adapted.get(tensor.name), model, spec, weights)
            done += 1
            on_progress(done, len(sources))

    for file, tensors in sorted(files.items()):
        write_tensors(folder / file, tensors, merged(tensors))
    if len(files) > 1:
        write_index(folder, files)
    saved = saved_model(model, multimodal_of(model))
    if len(dtypes) == 1:
        saved.config.dtype = dtypes.pop()
    _save_configs(saved, config, adapter, folder)
    copy_processor_files(multimodal_of(model), folder)


def _plan(
    model: Any, spec: AdapterSpec, stored: Mapping[str, StoredTensor], base: str
) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return the sources of the merged model's tensors, and the adapted layers, both by name in its files."""
    sources, adapted = dict(stored), {}
    names = {m: name for name, m in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    changed = {names[module] for module in (embedding, head) if module in names} & set(spec.modules)

    mapped = map_to_model(model, stored) or stored
    stored_name = {id(tensor): name for name, tensor in stored.items()}

    def place(module: str) -> str:
        source = mapped.get(f"{module}.weight")
        found = stored_name.get(id(source))
        if found is None or stored[found].dtype is None or not stored[found].dtype.is_floating_point:  # type: ignore[union-attr]
            raise UserError(
                f"{base!r}: cannot merge into {module}, whose weight is not stored as a plain tensor; use peft's "
                f"merge_and_unload and save the model"
            )
        return found

    if tied and changed:  # untie them
        untied = f"{outer_name(model, names[head])}.weight"
        sources[untied] = stored[place(names[embedding])]
        config = saved_model(model, multimodal_of(model)).config
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    for module in spec.modules:
        adapted[untied if tied and module == names[head] else place(module)] = module
    return sources, adapted


def _merge_tensor(
    source: StoredTensor, module: str | None, model: Any, spec: AdapterSpec, weights: Mapping[str, Tensor]
) -> Tensor:
    """Read a tensor of the base, and merge the adapter of its layer `module` if there is one."""
    dtype = source.dtype
    if dtype is None or module is None:
        return source.read_bytes()
    base = torch.empty(source.shape, dtype=torch.promote_types(dtype, torch.float32))
    source.read_rows(base, 0)
    key = key_prefix(model, module)
    is_embedding = isinstance(model.get_submodule(module), nn.Embedding)
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
