"""Layers of families without a reader in `mixed_layers`, read off the model that transformers builds without memory.

Parameters are exact. Widths of attention and MLPs are read from the names that transformers gives to projections; a
layer with other names, such as a mixer with a recurrent state, is refused.
"""

from collections.abc import Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from cohort.errors import describe_error
from cohort.plan import layer_parts as parts
from cohort.plan.layer_parts import Layer
from cohort.plan.mixed_layers import Layers

if TYPE_CHECKING:
    from torch import nn

_QUERIES = ("q_proj", "q_b_proj")
_FUSED = ("qkv_proj", "query_key_value", "c_attn", "Wqkv")
_ATTENTION_OUTS = ("o_proj", "out_proj", "dense", "c_proj")
_MLP_OUTS = ("down_proj", "fc2", "c_proj", "dense_4h_to_h")
_QUERY_NORMS = ("q_norm", "k_norm", "query_layernorm", "q_layernorm")
# tensors of the MLP's width that an activation without a gate saves, less those of SiLU with a gate
_ACTIVATIONS = {"relu": -3, "gelu_new": 1, "xielu": 1}
_OTHER_ACTIVATION = -2
_CLAMPED_GATE = 4  # tensors that a gate with `swiglu_limit` saves besides
# keys that readers of layers and shapes use, by the names that a configuration of transformers answers to
_KEYS = (
    *("model_type", "hidden_size", "vocab_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings"),
    *("rope_parameters", "layer_types", "sliding_window", "use_sliding_window", "attention_bias"),
    *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)


class UnknownLayersError(ValueError):
    """transformers cannot build the model, or its layers are not of attention and MLPs under known names."""


def build_layers(config: Mapping[str, Any]) -> tuple[Layers, dict[str, Any], bool]:
    """Read a model's layers off its modules.

    Args:
        config: content of config.json.

    Returns:
        Its layers; the keys of `_KEYS` with transformers' defaults; whether head and embedding share a weight.

    Raises:
        UnknownLayersError: the model cannot be built, or has layers of another kind.
    """
    model = _build(config)
    try:
        return _read(model)
    except UnknownLayersError:
        raise
    except Exception as error:  # from a class of transformers that is built like no other
        raise UnknownLayersError(f"its layers cannot be read ({describe_error(error, limit=120)})") from error


def _read(model: Any) -> tuple[Layers, dict[str, Any], bool]:
    settings = {key: value for key in _KEYS if (value := getattr(model.config, key, None)) is not None}
    if "linear_attention" in settings.get("layer_types", ()):
        raise UnknownLayersError("some of its layers have a recurrent state")
    name, stack = _stack(model, settings["num_hidden_layers"])
    unadapted = mistaken_for_experts((path for path, _ in _linears(model)), model)
    layers = tuple(_layer(layer, settings, model.config, unadapted) for layer in stack)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    tied = embedding is head
    hidden, vocabulary = settings["hidden_size"], settings["vocab_size"]
    if tuple(embedding.shape) != (vocabulary, hidden):
        raise UnknownLayersError(f"its embedding is not {vocabulary} x {hidden}")
    counted = sum(layer.parameters for layer in layers) + vocabulary * hidden * (1 if tied else 2) + hidden
    outer = [(path, m) for path, m in _linears(model) if not path.startswith(f"{name}.") and m.weight is not head]
    return (
        Layers(
            layers=layers,
            outer_parameters=model.num_parameters() - counted,
            outer_linears=tuple((path, *_sides(module)) for path, module in outer),
            streams=getattr(model.config, "hc_mult", 1),
        ),
        settings,
        tied,
    )


def _build(config: Mapping[str, Any]) -> Any:
    """The model, on the meta device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        known = AutoConfig.for_model(
            config.get("model_type", ""), **{k: v for k, v in config.items() if k != "model_type"}
        )
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(known, dtype=torch.float32)
    except Exception as error:  # whatever a configuration of another version lets it raise
        raise UnknownLayersError(f"transformers cannot build it ({describe_error(error, limit=120)})") from error


def _stack(model: "nn.Module", number: int) -> tuple[str, "nn.ModuleList"]:
    """The model's layers, and their path."""
    from torch import nn

    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == number:
            return name, module
    raise UnknownLayersError(f"it has no list of {number} layers")


def _linears(module: "nn.Module") -> list[tuple[str, Any]]:
    """Modules that multiply with a matrix, by path; GPT-2's are no `nn.Linear`."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    return [(path, m) for path, m in module.named_modules() if isinstance(m, nn.Linear | Conv1D)]


def _is_adapted(module: Any) -> bool:
    """Whether `all-linear` adapts it: plain products of more than one output."""
    return type(module).__name__ in ("Linear", "FalconLinear") and min(module.weight.shape) > 1


def _sides(linear: Any) -> tuple[int, int]:
    """In and out features."""
    out, into = linear.weight.shape
    return (out, into) if hasattr(linear, "nf") else (into, out)


def mistaken_for_experts(names: Iterable[str], model: Any) -> set[str]:
    """Return the last parts of those names that peft converts to fused experts, whose layers it would not adapt.

    In some mixture-of-experts models this affects every `gate_proj`, `up_proj` and `down_proj`, including shared
    experts, because adapters saved before transformers fused experts have these names.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    def is_mistaken(part: str) -> bool:
        config = LoraConfig(target_modules=[part])
        try:
            convert_peft_config_for_transformers(config, model=model, conversions=None)
        except ValueError:  # raised for some but not all projections of the experts
            return True
        return bool(config.target_parameters)

    return {part for part in {name.rpartition(".")[-1] for name in names} if is_mistaken(part)}


def _layer(layer: "nn.Module", settings: Mapping[str, Any], config: Any, unadapted: set[str]) -> Layer:
    linears = {path: _sides(module) for path, module in _linears(layer)}
    experts = _experts(layer, settings["hidden_size"], config)
    at = next((name for name, child in layer.named_children() if "Attention" in type(child).__name__), None)
    if at is None:
        raise UnknownLayersError(f"{type(layer).__name__} has no attention")
    deep_first = sorted(linears, key=lambda path: -path.count("."))  # an indexer has names of attention too
    inside = {path.rpartition(".")[2]: linears[path] for path in deep_first if path.startswith(f"{at}.")}
    outside = {path: sides for path, sides in linears.items() if not path.startswith(f"{at}.")}
    adapted = {
        path: _sides(module)
        for path, module in _linears(layer)
        if path.rpartition(".")[2] not in unadapted
        and _is_adapted(module)
        and module.weight.shape[0] != experts.experts
    }
    weights = [f"{path}.weight" for path in adapted]
    others = {name: tuple(p.shape) for name, p in layer.named_parameters() if name not in weights}
    matrices = {
        name: shape for name, shape in others.items() if len(shape) > 1 and min(shape) > 1 and not name.endswith("bias")
    }
    norms = [name for name, child in layer.named_children() if "Norm" in type(child).__name__]
    query_norms = [path for path, _ in layer.named_modules() if path.rpartition(".")[2] in _QUERY_NORMS]
    return (
        _attention(inside, settings, type(layer).__name__)
        + _mlps(outside, config)
        + experts
        + Layer(
            linears=adapted,
            weights=tuple(matrices.values()),
            vectors=sum(prod(shape) for name, shape in others.items() if name not in matrices),
            heads=settings["num_attention_heads"],
            norms=len(norms),
            query_norms=int(bool(query_norms)),
        )
    )


def _attention(linears: Mapping[str, tuple[int, int]], settings: Mapping[str, Any], owner: str) -> Layer:
    """Widths of queries, keys and values."""
    if "kv_b_proj" in linears:
        latent = parts.latent_attention(settings, settings["hidden_size"])
        names = ("query", "key", "latent", "features", "eager_features")
        return Layer(**{name: getattr(latent, name) for name in names})
    query = next((linears[name][1] for name in _QUERIES if name in linears), None)
    fused = next((linears[name][1] for name in _FUSED if name in linears), None)
    out = next((linears[name][0] for name in _ATTENTION_OUTS if name in linears), query)
    gate = linears.get("gate_proj", (0, 0))[1]
    if query is not None and out is not None and "k_proj" in linears:  # values may be wider than keys
        values = linears.get("v_proj", linears["k_proj"])[1]
        return Layer(query=(query + out) // 2, key=(linears["k_proj"][1] + values) // 2, features=2 * gate)
    if query is not None and "kv_proj" in linears:
        return Layer(query=query, key=linears["kv_proj"][1])
    if fused is not None and out is not None:
        return Layer(query=out, key=(fused - out) // 2)
    raise UnknownLayersError(f"attention of {owner} has projections by other names ({', '.join(linears)})")


def _mlps(linears: Mapping[str, tuple[int, int]], config: Any) -> Layer:
    """Widths of MLPs that all tokens go through."""
    sizes = Layer()
    for path, (width, _) in linears.items():
        parent, _, name = path.rpartition(".")
        if name in _MLP_OUTS:
            beside = [sides for other, sides in linears.items() if other.rpartition(".")[0] == parent]
            into = sum(out for _, out in beside) - linears[path][1]
            saved = _saved(config) if into == width else _clamped(config)
            sizes += Layer(mlp=width, features=width * saved)
    return sizes


def _saved(config: Any) -> int:
    names = ("hidden_act", "hidden_activation", "activation_function", "activation")
    activation = next((getattr(config, name) for name in names if hasattr(config, name)), None)
    return _ACTIVATIONS.get(str(activation), _OTHER_ACTIVATION)


def _clamped(config: Any) -> int:
    return _CLAMPED_GATE * (getattr(config, "swiglu_limit", None) is not None)


def _experts(layer: "nn.Module", hidden: int, config: Any) -> Layer:
    """Routed experts, whose weights are fused into one tensor per projection."""
    for path, module in layer.named_modules():
        fused = dict(module.named_parameters(recurse=False))
        if "down_proj" in fused and fused["down_proj"].ndim == 3:
            number, router = len(fused["down_proj"]), layer.get_submodule(path.rpartition(".")[0])
            choices = [k for m in router.modules() if isinstance(k := getattr(m, "top_k", None), int)]
            chosen = choices[0] if choices else int(config.num_experts_per_tok)
            width = fused["down_proj"].numel() // (number * hidden)
            return Layer(
                idle=(number - chosen) * sum(p.numel() for p in fused.values()) // number,
                expert=width,
                experts=number,
                chosen=chosen,
                features=width * chosen * (_clamped(config) if "gate_up_proj" in fused else _OTHER_ACTIVATION),
            )
    return Layer()
