"""Which layers of a model an adapter is for, and adapters as peft saves them: a folder of two files.

Everything here works with a model that has no memory for its weights, so that mistakes are found before any are loaded.
"""

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from cohort.config import AdapterConfig, ModelConfig, Quantization
from cohort.errors import UserError
from cohort.policy.fingerprint import BASE_FINGERPRINT, base_fingerprint, check_base
from cohort.policy.routers import find_routers
from cohort.policy.weights import StoredTensor, stored_file

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every name in a saved adapter
BASE_QUANTIZATION = "base_quantization"  # in the metadata of the weights' file: peft has no place for it
_FIELD = "model.adapter.path"
# What of peft's LoraConfig changes the computation in ways that are not trained here, if it is not as given.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", None),  # others change the model's own weights
    **dict.fromkeys(("fan_in_fan_out", "lora_bias", "use_qalora", "modules_to_save", "rank_pattern"), (False, None)),
    **dict.fromkeys(("alpha_pattern", "layer_replication", "trainable_token_indices"), (False, None)),
    **dict.fromkeys(("target_parameters", "alora_invocation_tokens"), (False, None)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """The shape of an adapter in a model."""

    rank: int
    alpha: float
    modules: tuple[str, ...]  # full names of the layers, in the model's order
    names: tuple[str, ...]  # the fewest names that mean these layers and no others
    dropout: float
    rslora: bool
    dora: bool
    base: str  # folder or id of the model
    fingerprint: str | None = None  # of the model, where its files are here
    quantization: Quantization | None = None  # of the model's own weights while this is trained

    @property
    def scaling(self) -> float:
        """Factor of the product that is added."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def adapter_spec(config: ModelConfig, model: Any, *, download: bool = False) -> AdapterSpec:
    """What the `model` section asks for; with `path`, what was saved there.

    Args:
        config: with an adapter.
        model: from `empty_model`; of the weights only a sample is read, to know the model again.
        download: fetch files of the model that this machine lacks; without, its weights may stay unknown.

    Raises:
        UserError: a target is no layer of the model, the rank is larger than a layer, or the saved adapter is of
            another model or contradicts a key.
    """
    adapter = config.adapter
    assert adapter is not None
    layers = _possible_layers(model)
    wanted = _find_targets(adapter.targets, layers, model)
    if adapter.path is None:
        rank, alpha, rslora, dora, modules = adapter.rank, adapter.alpha, adapter.rslora, adapter.dora, wanted
        for name in modules:
            limit = min(layers[name].weight.shape)
            if rank > limit:
                out, into = layers[name].weight.shape
                raise UserError(
                    f"model.adapter.rank: {rank}: the layer {name} is {out} x {into}, and a rank above {limit} adds "
                    f"nothing to it; use at most {limit}, or other targets"
                )
    else:
        saved, stored = _read_config(Path(adapter.path)), _stored(Path(adapter.path), _FIELD)
        rank, alpha = int(saved["r"]), float(saved["lora_alpha"])
        rslora, dora = bool(saved.get("use_rslora")), bool(saved.get("use_dora"))
        modules = tuple(name for name in layers if any(_is_of(key, name) for key in stored))
        _check_given(adapter, {"rank": rank, "alpha": alpha, "rslora": rslora, "dora": dora})
        if "targets" in adapter.model_fields_set and set(modules) != set(wanted):
            raise UserError(
                f"model.adapter.targets: the adapter at {adapter.path} is on other layers than "
                f"{adapter.targets}, on {_few(set(modules) - set(wanted)) or 'fewer'}; remove targets"
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
            f"model.quantization: {config.quantization} with model.adapter.dora: true: DoRA wants the lengths of whole "
            f"rows in every forward pass, so that each weight would be there unquantized; use dora: false"
        )
    return spec


def read_adapter(folder: Path, spec: AdapterSpec, model: Any, *, field: str = _FIELD) -> dict[str, Tensor]:
    """The weights of a saved adapter, by name.

    Raises:
        UserError: they are not those of such an adapter; the message begins with `field`.
    """
    from safetensors.torch import load_file

    _check_model(_stored(folder, field), spec, model, folder, field)
    return load_file(folder / WEIGHTS_FILE)


def saved_quantization(folder: Path) -> str | None:
    """What the base's weights were quantized to while a saved adapter was trained; None: not, or it does not say."""
    return _metadata(folder).get(BASE_QUANTIZATION)


def saved_rank(path: str) -> int:
    """The rank of a saved adapter.

    Raises:
        UserError: there is none.
    """
    return int(_read_config(Path(path))["r"])


def is_adapter_folder(path: str | Path) -> bool:
    """Whether it holds an adapter and no model."""
    return (Path(path) / CONFIG_FILE).is_file() and not (Path(path) / "config.json").is_file()


def with_base(config: ModelConfig) -> ModelConfig:
    """The `model` section whose `path` may be an adapter's folder: then its base, with the adapter.

    Raises:
        UserError: the folder does not say what its base is.
    """
    if not is_adapter_folder(config.path):
        return config
    base = _read_config(Path(config.path), "model.path").get("base_model_name_or_path")
    if not base:
        raise UserError(
            f"model.path: {config.path!r} is an adapter that does not say of which model; write "
            f"base_model_name_or_path into its {CONFIG_FILE}"
        )
    return config.model_copy(update={"path": str(base), "adapter": AdapterConfig(path=config.path)})


def _possible_layers(model: Any) -> dict[str, Any]:
    """The linear layers and the embedding of tokens, by name.

    Some routers are linear layers by descent, and return something else.
    """
    embedding = model.get_input_embeddings()
    routers = {id(router.module) for router in find_routers(model)}
    return {
        name: module
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) and id(module) not in routers)
        or (module is embedding and isinstance(module, nn.Embedding))
    }


def _taken_for_experts(layers: Iterable[str], model: Any) -> set[str]:
    """The layers that peft would not put an adapter on: it takes their names for those of fused experts.

    In some mixtures of experts it does so with every `gate_proj`, `up_proj` and `down_proj`, shared experts' too, since
    adapters that were saved before the library fused experts have such names.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    def is_taken(part: str) -> bool:
        config = LoraConfig(target_modules=[part])
        try:
            convert_peft_config_for_transformers(config, model=model, conversions=None)
        except ValueError:  # some of the experts' parts, and not all
            return True
        return bool(config.target_parameters)

    parts = {name.rpartition(".")[-1] for name in layers}
    taken = {part for part in parts if is_taken(part)}
    return {name for name in layers if name.rpartition(".")[-1] in taken}


def _find_targets(targets: Any, layers: Mapping[str, Any], model: Any) -> tuple[str, ...]:
    """The full names of the layers that `model.adapter.targets` means."""
    taken = _taken_for_experts(layers, model)
    if targets == "all-linear":
        head = model.get_output_embeddings()
        found = [
            name
            for name, m in layers.items()
            if isinstance(m, nn.Linear) and m is not head and name not in taken and min(m.weight.shape) > 1
        ]
        if not found:
            raise UserError("model.adapter.targets: all-linear: this model has no linear layers that are known here")
        return tuple(found)
    chosen: set[str] = set()
    for target in targets:
        matching = [name for name in layers if _ends_with(name, target)]
        if not matching:
            raise UserError(f"model.adapter.targets: {target!r} {_no_target(target, layers, model)}")
        if confused := taken.intersection(matching):
            raise UserError(
                f"model.adapter.targets: {target!r}: peft takes layers of the name of {min(confused)} for the fused "
                f"experts of this model, which are no linear layers; name others, such as q_proj and v_proj"
            )
        chosen.update(matching)
    return tuple(name for name in layers if name in chosen)


def _no_target(target: str, layers: Iterable[str], model: Any) -> str:
    """Why it is none, and what is near."""
    others = [type(m).__name__ for name, m in model.named_modules() if name and _ends_with(name, target)]
    last_parts = sorted({name.rpartition(".")[-1] for name in layers})
    near = difflib.get_close_matches(target.rpartition(".")[-1], last_parts, n=3, cutoff=0.4)
    why = f"is a {others[0]} and no linear layer" if others else "is the name of no layer"
    hint = f"; nearest: {', '.join(near)}" if near else ""
    return f"{why} of this model{hint}. Its linear layers and embedding are: {', '.join(last_parts)}"


def _short_names(modules: Iterable[str], model: Any) -> tuple[str, ...]:
    """The last parts of the names where these mean the same layers, and the whole names otherwise."""
    modules = tuple(modules)
    last = tuple(dict.fromkeys(name.rpartition(".")[-1] for name in modules))
    meant = [name for name, _ in model.named_modules() if any(_ends_with(name, part) for part in last)]
    return last if set(meant) == set(modules) else modules


def _ends_with(name: str, part: str) -> bool:
    return name == part or name.endswith(f".{part}")


def _is_of(key: str, module: str) -> bool:
    return key.startswith(f"{PREFIX}{module}.lora_")


def _read_config(folder: Path, field: str = _FIELD) -> dict[str, Any]:
    """peft's description of a saved adapter.

    Raises:
        UserError: there is none, or it is of a kind that is not trained here.
    """
    file = folder / CONFIG_FILE
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{field}: {str(folder)!r} has no {CONFIG_FILE}; give a folder that peft has saved") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{field}: {file}: cannot be read: {error}") from error
    if not isinstance(saved, dict) or saved.get("peft_type") != "LORA" or not {"r", "lora_alpha"} <= saved.keys():
        kind = saved.get("peft_type") if isinstance(saved, dict) else None
        raise UserError(f"{field}: {file}: peft_type {kind!r} is not trained here; LORA is")
    for key, plain in _PLAIN.items():
        value = saved.get(key)
        if value not in plain and value not in ({}, []):
            raise UserError(f"{field}: {file}: {key}: {value!r} is not trained here; save the adapter without it")
    return saved


def _stored(folder: Path, field: str) -> dict[str, StoredTensor]:
    """The tensors of a saved adapter, from the header of its file.

    Raises:
        UserError: there is no such file, or it is broken.
    """
    if not (folder / WEIGHTS_FILE).is_file():
        raise UserError(f"{field}: {str(folder)!r} has no {WEIGHTS_FILE}; give a folder that peft has saved")
    return stored_file(folder / WEIGHTS_FILE, field=field)


def _check_given(adapter: AdapterConfig, saved: Mapping[str, Any]) -> None:
    """Compare what was given with what the saved adapter is.

    Raises:
        UserError: they contradict each other.
    """
    for key, value in saved.items():
        given = getattr(adapter, key)
        if key in adapter.model_fields_set and given != value:
            raise UserError(
                f"model.adapter.{key}: {given}: the adapter at {adapter.path} has {value}; remove {key}, or use {value}"
            )


def _metadata(folder: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(folder / WEIGHTS_FILE, "pt") as file:
        return file.metadata() or {}


def _check_model(stored: Mapping[str, StoredTensor], spec: AdapterSpec, model: Any, folder: Path, field: str) -> None:
    """Compare the model that a saved adapter is of with this one.

    Raises:
        UserError: they are two.
    """
    _check_tensors(stored, spec, model, folder, field)
    saved, named = _metadata(folder).get(BASE_FINGERPRINT), _read_config(folder, field).get("base_model_name_or_path")
    check_base(folder, saved, named, base=spec.base, fingerprint=spec.fingerprint, field=field)


def _check_tensors(stored: Mapping[str, StoredTensor], spec: AdapterSpec, model: Any, folder: Path, field: str) -> None:
    """Compare the tensors of a saved adapter with those that it has on this model.

    Raises:
        UserError: they are of another one.
    """
    expected = _expected_shapes(spec, model)
    unknown = [key for key in stored if key not in expected]
    missing = [key for key in expected if key not in stored]
    if unknown or missing or not expected:
        listed = [f"it lacks {_few(missing)}"] if missing else []
        if unknown or not missing:
            listed.append(f"the model has no layer for its {_few(unknown)}")
        raise UserError(
            f"{field}: {str(folder)!r} is an adapter of another model than {spec.base!r}: {'; '.join(listed)}"
        )
    for key, shape in expected.items():
        if stored[key].shape != shape:
            found, own = (" x ".join(map(str, s)) for s in (stored[key].shape, shape))
            raise UserError(
                f"{field}: {str(folder)!r} is an adapter of another model than {spec.base!r}: {key} is {found}, and "
                f"here it would be {own}"
            )


def _expected_shapes(spec: AdapterSpec, model: Any) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of the adapter, by name in its file."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name in spec.modules:
        layer = model.get_submodule(name)
        rows, columns = layer.weight.shape
        key = f"{PREFIX}{name}.lora_"
        if isinstance(layer, nn.Embedding):
            shapes |= {f"{key}embedding_A": (spec.rank, rows), f"{key}embedding_B": (columns, spec.rank)}
            shapes |= {f"{key}magnitude_vector": (columns,)} if spec.dora else {}
        else:
            shapes |= {f"{key}A.weight": (spec.rank, columns), f"{key}B.weight": (rows, spec.rank)}
            shapes |= {f"{key}magnitude_vector": (rows,)} if spec.dora else {}
    return shapes


def _few(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
