"""Adapter specs: resolve target modules, read and validate adapters saved by peft, and recognize their base model.

Names and shapes do not tell an adapter's base model: they are the same in every fine-tuned copy. A fingerprint depends
on the weights and not on their path or sharding, so a model that is moved, copied or re-sharded keeps it.

Everything here works on a meta-device model, so errors are found before any weights are loaded.
"""

import difflib
import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from cohort.config import AdapterConfig, ModelConfig, Quantization
from cohort.errors import UserError
from cohort.models.loading.meta_device import local_weights
from cohort.models.loading.multimodal import multimodal_of, outer_name, saved_model
from cohort.models.loading.safetensors_files import StoredTensor, few, stored_weights
from cohort.models.routers import find_routers
from cohort.plan.built_layers import mistaken_for_experts

BASE_FINGERPRINT = "base_fingerprint"  # key in the metadata of a saved adapter's weights; peft has no field for it
_MAX_TENSORS, _SAMPLE_BYTES = 512, 4096  # at most 2 MiB of a model: fine-tuning changes all weights


def base_fingerprint(path: str, *, download: bool = False) -> str | None:
    """Hash names, shapes and dtypes of a model's weights, and bytes from the middle of up to 512 of them.

    Args:
        path: a model folder or a hub id.
        download: fetch missing files from the hub.

    Returns:
        32 hexadecimal digits; None if there are no safetensors files on this machine.

    Raises:
        UserError: a file is damaged or cannot be read.
    """
    stored = sorted(local_weights(path, download=download).items())
    if not stored:
        return None
    sha256 = hashlib.sha256()
    for name, tensor in stored:
        sha256.update(f"{name} {tensor.shape} {tensor.stored_dtype}\n".encode())
    for _, tensor in stored[:: -(-len(stored) // _MAX_TENSORS)]:
        size = min(tensor.num_bytes, _SAMPLE_BYTES)
        sha256.update(tensor.read_bytes((tensor.num_bytes - size) // 2, size).numpy().data)
    return sha256.hexdigest()[:32]


def _is_id(path: str) -> bool:
    """Whether `path` is a hub id like org/name rather than a folder."""
    return path.count("/") == 1 and not path.startswith((".", "/", "~")) and not Path(path).exists()


CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of all names in a saved adapter
BASE_QUANTIZATION = "base_quantization"  # key in the metadata of the weights file; peft has no field for it
_FIELD = "model.adapter.path"
# Fields of peft's LoraConfig with the values that are supported here.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", None),  # others change the base weights
    **dict.fromkeys(("fan_in_fan_out", "lora_bias", "use_qalora", "modules_to_save", "rank_pattern"), (False, None)),
    **dict.fromkeys(("alpha_pattern", "layer_replication", "trainable_token_indices"), (False, None)),
    **dict.fromkeys(("target_parameters", "alora_invocation_tokens"), (False, None)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """Hyperparameters and target modules of an adapter."""

    rank: int
    alpha: float
    modules: tuple[str, ...]  # full names of the target layers, in model order
    names: tuple[str, ...]  # shortest names that match these layers only, for adapter_config.json
    dropout: float
    rslora: bool
    dora: bool
    base: str  # path or id of the base model
    fingerprint: str | None = None  # of the base model; None if its files are not on this machine
    quantization: Quantization | None = None  # of the base weights during training

    @property
    def scaling(self) -> float:
        """LoRA scaling factor."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def adapter_spec(config: ModelConfig, model: Any, *, download: bool = False) -> AdapterSpec:
    """Resolve the adapter of the `model` section: a new one, or the one saved at `model.adapter.path`.

    Args:
        config: the `model` section, with an adapter.
        model: result of `meta_model`; only a sample of its weights is read, for the fingerprint.
        download: fetch missing files from the hub; otherwise the fingerprint may be None.

    Raises:
        UserError: a target is not a layer of the model, the rank exceeds the size of a layer, or the saved adapter is
            for another model or contradicts a key.
    """
    adapter = config.adapter
    assert adapter is not None
    layers = _supported_layers(model)
    wanted = _find_targets(adapter.targets, layers, model)
    if adapter.path is None:
        rank, alpha, rslora, dora, modules = adapter.rank, adapter.alpha, adapter.rslora, adapter.dora, wanted
        for name in modules:
            limit = min(layers[name].weight.shape)
            if rank > limit:
                out, into = layers[name].weight.shape
                raise UserError(
                    f"model.adapter.rank: {rank} exceeds the size of layer {name} ({out} x {into}); use at "
                    f"most {limit}, or other targets"
                )
    else:
        saved, stored = _read_config(Path(adapter.path)), _stored(Path(adapter.path), _FIELD)
        rank, alpha = int(saved["r"]), float(saved["lora_alpha"])
        rslora, dora = bool(saved.get("use_rslora")), bool(saved.get("use_dora"))
        modules = tuple(name for name in layers if any(key.startswith(key_prefix(model, name)) for key in stored))
        _check_given(adapter, {"rank": rank, "alpha": alpha, "rslora": rslora, "dora": dora})
        if "targets" in adapter.model_fields_set and set(modules) != set(wanted):
            raise UserError(
                f"model.adapter.targets: {adapter.targets} does not match the layers of the adapter at {adapter.path} "
                f"({few(set(modules) - set(wanted)) or 'fewer'}); remove targets"
            )
    spec = AdapterSpec(
        rank=rank,
        alpha=alpha,
        modules=modules,
        names=_short_names(modules, model),
        dropout=adapter.dropout,
        rslora=rslora,
        dora=dora,
        base=config.path,
        fingerprint=base_fingerprint(config.path, download=download),
        quantization=config.quantization,
    )
    if adapter.path is not None:
        _check_model(stored, spec, model, Path(adapter.path), _FIELD)
    if spec.dora and config.quantization is not None:
        raise UserError(
            f"model.quantization: {config.quantization} does not work with model.adapter.dora: true, which would "
            f"dequantize every weight in each forward pass to compute its norms; use dora: false"
        )
    return spec


def read_adapter(folder: Path, spec: AdapterSpec, model: Any, *, field: str = _FIELD) -> dict[str, Tensor]:
    """Read the weights of a saved adapter, by name.

    Raises:
        UserError: they do not match `spec`; the message starts with `field`.
    """
    from safetensors.torch import load_file

    _check_model(_stored(folder, field), spec, model, folder, field)
    return load_file(folder / WEIGHTS_FILE)


def saved_quantization(folder: Path) -> str | None:
    """Quantization of the base weights that a saved adapter was trained with; None: none, or unknown."""
    return _metadata(folder).get(BASE_QUANTIZATION)


def saved_rank(path: str) -> int:
    """Return the LoRA rank of a saved adapter.

    Raises:
        UserError: there is no adapter at `path`.
    """
    return int(_read_config(Path(path))["r"])


def is_adapter_folder(path: str | Path) -> bool:
    """Whether a folder holds an adapter rather than a model."""
    return os.path.isfile(Path(path) / CONFIG_FILE) and not os.path.isfile(Path(path) / "config.json")


def with_base(config: ModelConfig) -> ModelConfig:
    """Resolve a `model.path` that is an adapter folder to its base model plus `model.adapter.path`.

    Raises:
        UserError: the adapter does not name its base model.
    """
    if not is_adapter_folder(config.path):
        return config
    base = _read_config(Path(config.path), "model.path").get("base_model_name_or_path")
    if not base:
        raise UserError(
            f"model.path: {config.path!r} is an adapter that does not name its base model; set "
            f"base_model_name_or_path in its {CONFIG_FILE}"
        )
    return config.model_copy(update={"path": str(base), "adapter": AdapterConfig(path=config.path)})


def _supported_layers(model: Any) -> dict[str, Any]:
    """Return the linear layers and the token embedding, by name.

    Some routers and the grouped projections of DeepSeek-V4 subclass `nn.Linear` but compute something else; they are
    excluded.
    """
    embedding = model.get_input_embeddings()
    routers = {id(module) for router in find_routers(model) for module in router.module.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) and id(module) not in routers and not _overrides_linear(module))
        or (module is embedding and isinstance(module, nn.Embedding))
    }


_SAME_PRODUCT = ("FalconLinear",)  # classes that write the product of `nn.Linear` in another way


def _overrides_linear(module: nn.Linear) -> bool:
    """Whether an architecture of transformers has replaced the product of a linear layer."""
    kind = type(module)
    overrides = kind.__module__.startswith("transformers.models.") and kind.forward is not nn.Linear.forward
    return overrides and kind.__name__ not in _SAME_PRODUCT


def _find_targets(targets: Any, layers: Mapping[str, Any], model: Any) -> tuple[str, ...]:
    """Return the full names of the layers that match `model.adapter.targets`."""
    experts = mistaken_for_experts(layers, model)
    taken = {name for name in layers if name.rpartition(".")[-1] in experts}
    if targets == "all-linear":
        head = model.get_output_embeddings()
        found = [
            name
            for name, m in layers.items()
            if isinstance(m, nn.Linear) and m is not head and name not in taken and min(m.weight.shape) > 1
        ]
        if not found:
            raise UserError(
                "model.adapter.targets: all-linear matches nothing: this model has no supported linear layers"
            )
        return tuple(found)
    chosen: set[str] = set()
    for target in targets:
        matching = [name for name in layers if _ends_with(name, target)]
        if not matching:
            raise UserError(f"model.adapter.targets: {target!r} {_explain_mismatch(target, layers, model)}")
        if confused := taken.intersection(matching):
            raise UserError(
                f"model.adapter.targets: {target!r} is not supported: peft mistakes layers named like "
                f"{min(confused)} for the fused experts of this model; name others, such as q_proj and v_proj"
            )
        chosen.update(matching)
    return tuple(name for name in layers if name in chosen)


def _explain_mismatch(target: str, layers: Iterable[str], model: Any) -> str:
    """Explain why a target matches no layer, with the nearest names."""
    others = [type(m).__name__ for name, m in model.named_modules() if name and _ends_with(name, target)]
    last_parts = sorted({name.rpartition(".")[-1] for name in layers})
    near = difflib.get_close_matches(target.rpartition(".")[-1], last_parts, n=3, cutoff=0.4)
    why = f"is a {others[0]}, not a linear layer" if others else "is not a layer"
    hint = f"; nearest: {', '.join(near)}" if near else ""
    return f"{why} of this model{hint}. Its linear layers and embedding are: {', '.join(last_parts)}"


def _short_names(modules: Iterable[str], model: Any) -> tuple[str, ...]:
    """Shorten names to their last component if that matches the same layers, otherwise return them in full.

    The names are those in the multimodal model if there is one.
    """
    modules = tuple(outer_name(model, module) for module in modules)
    model = saved_model(model, multimodal_of(model))
    last = tuple(dict.fromkeys(name.rpartition(".")[-1] for name in modules))
    meant = [name for name, _ in model.named_modules() if any(_ends_with(name, part) for part in last)]
    return last if set(meant) == set(modules) else modules


def _ends_with(name: str, part: str) -> bool:
    return name == part or name.endswith(f".{part}")


def key_prefix(model: Any, module: str) -> str:
    """Return the start of the names of a module's tensors in a saved adapter."""
    return f"{PREFIX}{outer_name(model, module)}.lora_"


def _read_config(folder: Path, field: str = _FIELD) -> dict[str, Any]:
    """Read adapter_config.json of a saved adapter.

    Raises:
        UserError: it is missing or of an unsupported kind.
    """
    file = folder / CONFIG_FILE
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{field}: {str(folder)!r} has no {CONFIG_FILE}; give an adapter folder saved by peft"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{field}: {file}: cannot read it: {error}") from error
    if saved.get("peft_type") != "LORA":
        raise UserError(f"{field}: {file}: peft_type {saved.get('peft_type')!r} is not supported; only LORA is")
    for key, supported in _SUPPORTED.items():
        value = saved.get(key)
        if value not in supported and value not in ({}, []):
            raise UserError(f"{field}: {file}: {key}: {value!r} is not supported; save the adapter without it")
    return saved


def _stored(folder: Path, field: str) -> dict[str, StoredTensor]:
    """List the tensors of a saved adapter from the header of its weights file.

    Raises:
        UserError: the file is missing or damaged.
    """
    if not (folder / WEIGHTS_FILE).is_file():
        raise UserError(f"{field}: {str(folder)!r} has no {WEIGHTS_FILE}; give an adapter folder saved by peft")
    return stored_weights(folder / WEIGHTS_FILE, field=field)


def _check_given(adapter: AdapterConfig, saved: Mapping[str, Any]) -> None:
    """Check explicitly set keys against the saved adapter.

    Raises:
        UserError: they contradict it.
    """
    for key, value in saved.items():
        given = getattr(adapter, key)
        if key in adapter.model_fields_set and given != value:
            raise UserError(
                f"model.adapter.{key}: {given} contradicts the adapter at {adapter.path}, which has {value}; remove "
                f"{key}, or use {value}"
            )


def _metadata(folder: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(folder / WEIGHTS_FILE, "pt") as file:
        return file.metadata() or {}


def _check_model(stored: Mapping[str, StoredTensor], spec: AdapterSpec, model: Any, folder: Path, field: str) -> None:
    """Check that a saved adapter was trained on this base model.

    Raises:
        UserError: it was trained on another one.
    """
    _check_tensors(stored, spec, model, folder, field)
    check_base(folder, spec, field=field)


def check_base(folder: Path, spec: AdapterSpec, *, field: str = _FIELD) -> None:
    """Check that a saved adapter was trained on the base model of `spec`, by its fingerprint or the name of its base.

    Passes if that cannot be determined: the adapter has no fingerprint, and its base is not on this machine.

    Raises:
        UserError: it was trained on another model; the message starts with `field`.
    """
    base, fingerprint, saved = spec.base, spec.fingerprint, _metadata(folder).get(BASE_FINGERPRINT)
    named = _read_config(folder, field).get("base_model_name_or_path") or base
    if saved is None and named != base:  # saved by another program
        with suppress(UserError):  # damaged or partial files: unknown
            saved = base_fingerprint(named)
        if (saved is None or fingerprint is None) and _is_id(named) and _is_id(base):
            raise UserError(
                f"{field}: {str(folder)!r} is an adapter for {named!r}, but model.path is {base!r}; use "
                f"model.path={named}, or if both are the same model, set base_model_name_or_path to {base!r} in its "
                f"adapter_config.json"
            )
    if saved is None or fingerprint is None or saved == fingerprint:
        return
    origin, use = f"an earlier model at {base!r}", "the model it was trained on"
    if named != base:
        origin, use = repr(named), f"model.path={named}"
    raise UserError(
        f"{field}: {str(folder)!r} is an adapter for a different model, not {base!r}: it was trained on {origin}, "
        f"which has other weights of the same shapes (fingerprint {saved[:8]}, here {fingerprint[:8]}); use {use}"
    )


def _check_tensors(stored: Mapping[str, StoredTensor], spec: AdapterSpec, model: Any, folder: Path, field: str) -> None:
    """Check names and shapes of the tensors of a saved adapter.

    Raises:
        UserError: they do not fit this model.
    """
    expected = _expected_shapes(spec, model)
    unknown = [key for key in stored if key not in expected]
    missing = [key for key in expected if key not in stored]
    if unknown or missing or not expected:
        listed = [f"it lacks {few(missing)}"] if missing else []
        if unknown or not missing:
            listed.append(f"the model has no layer for {few(unknown)}")
        raise UserError(
            f"{field}: {str(folder)!r} is an adapter for a different model, not {spec.base!r}: {'; '.join(listed)}"
        )
    for key, shape in expected.items():
        if stored[key].shape != shape:
            found, own = (" x ".join(map(str, s)) for s in (stored[key].shape, shape))
            raise UserError(
                f"{field}: {str(folder)!r} is an adapter for a different model, not {spec.base!r}: {key} is {found}, "
                f"expected {own}"
            )


def _expected_shapes(spec: AdapterSpec, model: Any) -> dict[str, tuple[int, ...]]:
    """Return the expected shape of each tensor of the adapter, by name in its file."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name in spec.modules:
        layer = model.get_submodule(name)
        rows, columns = layer.weight.shape
        key = key_prefix(model, name)
        if isinstance(layer, nn.Embedding):
            shapes |= {f"{key}embedding_A": (spec.rank, rows), f"{key}embedding_B": (columns, spec.rank)}
            shapes |= {f"{key}magnitude_vector": (columns,)} if spec.dora else {}
        else:
            shapes |= {f"{key}A.weight": (spec.rank, columns), f"{key}B.weight": (rows, spec.rank)}
            shapes |= {f"{key}magnitude_vector": (rows,)} if spec.dora else {}
    return shapes
