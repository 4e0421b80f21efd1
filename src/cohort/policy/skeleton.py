"""A model before its weights: built without memory for them, and matched with the tensors of its files."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from cohort.config import ModelConfig
from cohort.errors import UserError
from cohort.policy.conversion import Converted, by_name_in_model
from cohort.policy.weights import INDEX, SINGLE, StoredTensor, stored_weights

Source = StoredTensor | Converted  # what a tensor of the model is read from
VALUE_HEAD = "value_head"  # of a critic; a model that is none has no weights for it
# peft's names of what it adds to a layer, which it puts around the model's own as `base_layer`
_ADAPTER_PARTS = {f"lora_{part}" for part in ("A", "B", "embedding_A", "embedding_B", "magnitude_vector")}


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No bars and tables of the library's own: what matters of them is in our messages."""
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


def empty_model(config: ModelConfig) -> Any:
    """The model without memory for its parameters (they are on the meta device), and with its buffers computed.

    Its constructor computes the buffers, as rotary frequencies, in host memory and from the model's config alone.

    Raises:
        UserError: the config cannot be used.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    try:
        with quiet_transformers(), _parameters_on_meta():
            own = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
            _check_plain(own, config.path)
            model = AutoModelForCausalLM.from_config(
                own,
                dtype=getattr(torch, config.dtype),
                trust_remote_code=config.trust_remote_code,
            )
    except UserError:
        raise
    except Exception as error:  # the loader raises many types; all mean the same to the user
        raise UserError(f"model.path: {config.path!r}: cannot be loaded: {type(error).__name__}: {error}") from error
    with suppress(OSError):  # there is none; the model has made one
        model.generation_config = GenerationConfig.from_pretrained(config.path)
    return model


def _check_plain(own: Any, path: str) -> None:
    """Look whether the files hold numbers.

    Raises:
        UserError: they hold what somebody has quantized.
    """
    how = getattr(own, "quantization_config", None)
    if how is not None:
        method = how.get("quant_method") if isinstance(how, dict) else getattr(how, "quant_method", how)
        raise UserError(
            f"model.path: {path!r} is quantized already (quantization_config in its config.json: {method}); give the "
            f"model that it was made from, and model.quantization where it is to take less memory"
        )


def local_weights(path: str, *, download: bool = False) -> dict[str, StoredTensor]:
    """The tensors of the safetensors files of a model folder, or of a hub's model in the cache of this machine.

    Args:
        path: a folder or an id of a hub.
        download: fetch what the cache lacks.

    Returns:
        Nothing where there are no such files here.

    Raises:
        UserError: a file is broken.
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
        pass  # what it is, the library says when it loads the model itself
    return {}


def match(model: Any, stored: Mapping[str, StoredTensor]) -> dict[str, Source] | None:
    """What each parameter (a tied one once) and each buffer that is saved is read from.

    A value head that the files lack is left out: it stays as it was made.

    Returns:
        None where the files do not hold all of them in a form that is known here: the library has to load, or refuse.

    Raises:
        UserError: the files hold each of them, and one has another shape.
    """
    found = by_name_in_model(model, stored) if stored and _is_loaded_as_stored(model) else None
    if found is None:
        return None
    wanted = {n: t for n, t in saved_tensors(model) if n in found or not n.startswith(f"{VALUE_HEAD}.")}
    if any(name in found for name in model.state_dict() if name not in wanted):
        return None  # both of a tied pair: they are tied only if they are equal
    if not all(name in found and _is_readable(found[name], tensor) for name, tensor in wanted.items()):
        return None  # missing, or quantized
    places = {name: found[name] for name in wanted}
    _check_shapes(wanted, places)
    return places


def digest(places: Mapping[str, Source]) -> str:
    """The same for two folders whose files hold the same tensors at the same places."""
    lines = []
    for name, place in places.items():
        parts = {"": (place,)} if isinstance(place, StoredTensor) else place.sources
        for pattern, tensors in parts.items():
            where = ((t.file.name, t.start, t.shape, t.stored_dtype) for t in tensors)
            lines.append(f"{name} {pattern} {list(where)}")
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def _is_readable(source: Source, tensor: Tensor) -> bool:
    if isinstance(source, Converted):
        rows = len(next(iter(source.sources.values())))
        return tensor.is_floating_point() and (not source.is_stacked or rows == len(tensor))
    return source.dtype is not None and source.dtype.is_floating_point == tensor.is_floating_point()


def _check_shapes(wanted: Mapping[str, Tensor], places: Mapping[str, Source]) -> None:
    for name, tensor in wanted.items():
        place = places[name]
        if isinstance(place, StoredTensor) and tuple(tensor.shape) != place.shape:
            stored, own = (" x ".join(map(str, shape)) for shape in (place.shape, tensor.shape))
            raise UserError(
                f"model.path: {place.file}: {name} is {stored} in its file and {own} by config.json; weights "
                f"and config.json are of different models"
            )


def saved_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Each parameter by its name without an adapter, a tied one once, and each buffer that is saved; no adapter's."""
    for name, parameter in model.named_parameters():
        if _ADAPTER_PARTS.isdisjoint(name.split(".")):
            yield name.replace(".base_layer.", "."), parameter
    saved = model.state_dict()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def keep_first_layers(model: Any) -> None:
    """Shorten a model to its first layers, so that at least one of each kind is left, and at least two.

    Layers are of one kind if their modules are, with all numbers and switches that the modules hold. Nothing happens
    where a model's layers are not one list.
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
    """Whether the library puts what the files have, converted where it has to be, into parameters of one dtype."""
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
    """Parameters of modules that are made inside have no memory; buffers have."""

    def move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None  # as it is
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(cast("Callable[..., None]", move))  # may return a parameter
    try:
        yield
    finally:
        hook.remove()
