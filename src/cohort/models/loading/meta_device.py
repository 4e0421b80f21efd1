"""Build models on the meta device, and match their tensors with those of the files."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from cohort.config import ModelConfig
from cohort.errors import UserError, describe_error
from cohort.models.loading.multimodal import build_language_model, is_multimodal, multimodal_of
from cohort.models.loading.safetensors_files import (
    INDEX,
    SINGLE,
    ConvertedTensor,
    StoredTensor,
    map_to_model,
    stored_weights,
)

WeightSource = StoredTensor | ConvertedTensor  # source of a model's tensor
VALUE_HEAD = "value_head"  # of a critic; plain models have no weights for it
# names that peft adds to a layer; the original is its `base_layer`
_ADAPTER_PARTS = {f"lora_{part}" for part in ("A", "B", "embedding_A", "embedding_B", "magnitude_vector")}


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence progress bars and log messages of transformers; we report what matters."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def meta_model(config: ModelConfig) -> Any:
    """Build a model with parameters on the meta device and buffers in host memory.

    For a multimodal model, build its language model only.

    Buffers, such as rotary frequencies, are computed by the constructor from the config.

    Raises:
        UserError: the config cannot be used.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    try:
        with quiet_transformers(), _parameters_on_meta():
            own = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
            _check_not_quantized(own, config.path)
            options = {"dtype": getattr(torch, config.dtype), "trust_remote_code": config.trust_remote_code}
            model = build_language_model(own, config.path, **options) if is_multimodal(own) else None
            if model is None:
                model = AutoModelForCausalLM.from_config(own, **options)
    except UserError:
        raise
    except Exception as error:  # transformers raises many types of errors
        raise UserError(f"model.path: {config.path!r}: cannot load the model: {describe_error(error)}") from error
    with suppress(OSError):  # no file: keep the default
        model.generation_config = GenerationConfig.from_pretrained(config.path)
        if (multimodal := multimodal_of(model)) is not None:
            multimodal.model.generation_config = model.generation_config
    return model


def _check_not_quantized(own: Any, path: str) -> None:
    """Check that the stored weights are not quantized.

    Raises:
        UserError: they are.
    """
    how = getattr(own, "quantization_config", None)
    if how is not None:
        method = how.get("quant_method") if isinstance(how, dict) else getattr(how, "quant_method", how)
        raise UserError(
            f"model.path: {path!r} is already quantized (quantization_config in config.json: {method}); use the "
            f"original model, with model.quantization to save memory"
        )


def local_weights(path: str, *, download: bool = False) -> dict[str, StoredTensor]:
    """List the tensors in the safetensors files of a model folder, or of a hub model in the local cache.

    Args:
        path: a model folder or a hub id.
        download: fetch missing files from the hub.

    Returns:
        tensors by name; empty if there are no safetensors files.

    Raises:
        UserError: a file is damaged.
    """
    if Path(path).is_dir():
        return stored_weights(Path(path))
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    try:
        with quiet_transformers():
            for name in (SINGLE, INDEX):
                found = cached_file(
                    path, name, local_files_only=not download, _raise_exceptions_for_missing_entries=False
                )
                if found is None:
                    continue
                if name == INDEX:
                    get_checkpoint_shard_files(path, found, local_files_only=not download)
                return stored_weights(Path(found).parent)
    except OSError:
        pass  # transformers reports the error when it loads the model
    return {}


def match_weights(model: Any, stored: Mapping[str, StoredTensor]) -> dict[str, WeightSource] | None:
    """Find the source of each parameter (tied ones once) and saved buffer of a model.

    A value head without stored weights is left out and keeps its initial values.

    Returns:
        sources by name; None if the files do not have all tensors in a supported form, so transformers has to load the
        model, or report the error.

    Raises:
        UserError: a stored tensor has another shape.
    """
    found = map_to_model(model, stored) if stored and _is_loaded_as_stored(model) else None
    if found is None:
        return None
    wanted = {n: t for n, t in named_saved_tensors(model) if n in found or not n.startswith(f"{VALUE_HEAD}.")}
    if any(name in found for name in model.state_dict() if name not in wanted):
        return None  # both of a tied pair: transformers ties them only if they are equal
    if not all(name in found and _is_readable(found[name], tensor) for name, tensor in wanted.items()):
        return None  # missing, or quantized
    sources = {name: found[name] for name in wanted}
    _check_shapes(wanted, sources)
    return sources


def sources_digest(sources: Mapping[str, WeightSource]) -> str:
    """Hash weight sources; equal for folders whose files have the same tensors at the same offsets."""
    lines = []
    for name, source in sources.items():
        places = [(t.file.name, t.start, t.shape, t.stored_dtype) for t in source.stored_tensors]
        lines.append(f"{name} {places}")
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def _is_readable(source: WeightSource, tensor: Tensor) -> bool:
    if isinstance(source, ConvertedTensor):
        rows = len(next(iter(source.sources.values())))
        return tensor.is_floating_point() and (not source.is_stacked or rows == len(tensor))
    return source.dtype is not None and source.dtype.is_floating_point == tensor.is_floating_point()


def _check_shapes(wanted: Mapping[str, Tensor], sources: Mapping[str, WeightSource]) -> None:
    for name, tensor in wanted.items():
        place = sources[name]
        if isinstance(place, StoredTensor) and tuple(tensor.shape) != place.shape:
            stored, own = (" x ".join(map(str, shape)) for shape in (place.shape, tensor.shape))
            raise UserError(
                f"model.path: {place.file}: {name} is {stored} in the file, but config.json says {own}. "
                f"Weights and config.json do not belong together"
            )


def named_saved_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield base parameters (tied ones once) and saved buffers by name, without the adapter and its wrappers."""
    for name, parameter in model.named_parameters():
        if _ADAPTER_PARTS.isdisjoint(name.split(".")):
            yield name.replace(".base_layer.", "."), parameter
    saved = model.state_dict()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def keep_first_layers(model: Any) -> None:
    """Truncate a model to its first layers, keeping at least one of each kind, and at least two.

    Layers are of one kind if their modules, attributes and parameter shapes are equal. Does nothing if the layers are
    not in a single list.
    """
    names = model._no_split_modules or ()
    stacks = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and all(type(m).__name__ in names for m in module)
    ]
    if len(stacks) != 1:
        return
    ((name, layers),) = stacks
    types = getattr(model.config.get_text_config(), "layer_types", None) or []
    kinds = [(_kind(layer), types[n] if n < len(types) else None) for n, layer in enumerate(layers)]
    num_kept = max(2, *(kinds.index(kind) + 1 for kind in kinds))
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, layers[:num_kept])


def _kind(layer: nn.Module) -> list[Any]:
    plain = (bool, int, float, str, type(None))
    modules = [
        (name, type(m).__qualname__, {k: v for k, v in vars(m).items() if isinstance(v, plain) and k != "layer_idx"})
        for name, m in layer.named_modules()
    ]
    return [modules, [(name, p.shape) for name, p in layer.named_parameters()]]


def _is_loaded_as_stored(model: Any) -> bool:
    """Whether transformers loads all parameters in one dtype and converts only as `weight_conversions` says."""
    config, dtype = model.config, next(model.parameters()).dtype
    in_float32 = getattr(model, "_keep_in_fp32_modules", None) or getattr(model, "_keep_in_fp32_modules_strict", None)
    return (
        type(model).__module__.startswith("transformers.models.")
        and getattr(config, "transformers_weights", None) is None
        and (not in_float32 or dtype not in (torch.float16, torch.bfloat16))
        and all(parameter.dtype == dtype for parameter in model.parameters())
    )


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Context in which parameters of new modules are on the meta device; buffers are not."""

    def move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None  # unchanged
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(cast("Callable[..., None]", move))  # may return a parameter
    try:
        yield
    finally:
        hook.remove()
