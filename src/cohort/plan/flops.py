"""Floating-point operations of a training step, in closed form, and how many a GPU does in a second.

Counted is what the mathematics asks for: matrix products and attention over the pairs that are attended to, forward
and backward, each once. What is computed a second time to save memory is not counted, and neither are padding, norms,
activations, and mixing of tokens other than full attention (windows, recurrent states), so that a share of the peak is
never flattered.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_STANDS_STILL = re.compile(r"\.lora_\w+\.start\b")  # of an adapter, what it was at the start: a reference's
Parameter = tuple[str, tuple[int, ...], bool]  # name, shape, whether it is trained


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """What one model costs per token, scored position and attended pair. A multiply-add is two operations.

    A matrix takes two operations per weight and token in forward, two for the gradient of its input and two for its
    own; the latter only where it is trained, the former only where something before it is.
    """

    body_forward: float  # per token: every matrix that a token passes through, but the head
    body_backward: float
    head_forward: float  # per scored position
    head_backward: float
    pair_forward: float  # per query and key that it sees, over all layers: the scores, and the sum of values
    pair_backward: float

    def forward(self, *, tokens: int, scored: int, pairs: int) -> float:
        """Operations of a forward pass.

        Args:
            tokens: that go through the model.
            scored: of them, those at which the head is applied.
            pairs: of a token and one that it sees, itself included; of one layer and head (`attention_pairs`).
        """
        return self.body_forward * tokens + self.head_forward * scored + self.pair_forward * pairs

    def forward_backward(self, *, tokens: int, scored: int, pairs: int) -> float:
        """Operations of a forward and a backward pass; arguments as `forward`."""
        backward = self.body_backward * tokens + self.head_backward * scored + self.pair_backward * pairs
        return self.forward(tokens=tokens, scored=scored, pairs=pairs) + backward


def model_flops(parameters: Iterable[Parameter], config: Mapping[str, Any]) -> ModelFlops:
    """The costs of a causal language model of the Hugging Face library.

    Args:
        parameters: in the order in which the model has them, which is that of its computation. Tied weights once. An
            adapter's count as weights of their own; what is kept of one to be a reference is left out.
        config: config.json, that of the text where it has several parts.
    """
    body_forward = body_backward = head_forward = head_backward = 0.0
    trained_before = False
    matrices = [
        (name.replace(".base_layer.", "."), shape, trained)  # without what peft puts around a layer's own weight
        for name, shape, trained in parameters
        if len(shape) >= 2 and not _STANDS_STILL.search(name)
    ]
    has_own_head = any(_is_head(name) for name, *_ in matrices)
    body_is_trained = any(trained for name, _, trained in matrices if not _is_of_head(name))
    for name, shape, trained in matrices:
        size = 2.0 * _product(shape) * _share_used(name, shape, config)
        backward = size * (trained + trained_before)
        if _is_looked_up(name):
            if name.endswith(".weight") and not has_own_head and not head_forward:
                # the tokens' table is the head too, after a whole body
                head_forward, head_backward = size, size * (trained + body_is_trained)
        elif _is_of_head(name):
            head_forward += size
            head_backward += backward
        else:
            body_forward += size
            body_backward += backward
        trained_before |= trained
    per_pair = 2.0 * _num_attention_layers(config) * _num_heads(config) * sum(_head_dims(config))
    return ModelFlops(
        body_forward=body_forward,
        body_backward=body_backward,
        head_forward=head_forward,
        head_backward=head_backward,
        pair_forward=per_pair,
        pair_backward=2 * per_pair * body_is_trained,
    )


# Model shapes


def _is_looked_up(name: str) -> bool:
    """Tables that are looked up and not multiplied with; the first of them is the tokens'. An adapter has them too."""
    tables = ("embed_tokens", "embed_in", "word_embeddings", "wte", "wpe", "embed_positions", "position_embeddings")
    return name.endswith(tuple(f"{table}.weight" for table in tables)) or ".lora_embedding_A." in name


def _is_head(name: str) -> bool:
    return name.endswith(("lm_head.weight", "embed_out.weight", "value_head.weight"))


def _is_of_head(name: str) -> bool:
    """The head, or an adapter's part of it."""
    return _is_head(name) or name.partition(".lora_")[0].endswith(("lm_head", "embed_out"))


def _share_used(name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> float:
    """The share of a weight that one token is multiplied with: of experts, those it is sent to."""
    experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts") or 0
    if not experts or "expert" not in name or "shared" in name:
        return 1.0
    return (_first(config, "num_experts_per_tok", "moe_topk") or experts) / experts


def _num_attention_layers(config: Mapping[str, Any]) -> int:
    """Layers in which a token sees all tokens before it."""
    types = config.get("layer_types")
    return types.count("full_attention") if types else _first(config, "num_hidden_layers", "n_layer") or 0


def _num_heads(config: Mapping[str, Any]) -> int:
    return _first(config, "num_attention_heads", "n_head") or 0


def _head_dims(config: Mapping[str, Any]) -> tuple[int, int]:
    """Features of one head's queries and of its values."""
    if config.get("kv_lora_rank"):  # latent attention: queries have a rotated part that values lack
        return config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"]
    heads = _num_heads(config)
    dim = config.get("head_dim") or ((_first(config, "hidden_size", "n_embd") or 0) // heads if heads else 0)
    return dim, dim


def _first(config: Mapping[str, Any], *names: str) -> int | None:
    """The first of these keys that the configuration has."""
    return next((config[name] for name in names if config.get(name)), None)


def _product(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


# Peaks of GPUs

# Dense tera-operations per second, from the makers' data sheets (which print twice these numbers where they mean 2:4
# sparsity): bfloat16 and float16 on tensor cores with float32 sums, TF32 on tensor cores, float32 without them.
# The first name that is part of a device's name counts, so that special ones come first.
_PEAKS: tuple[tuple[str, float, float, float], ...] = (
    ("B200", 2250.0, 1125.0, 75.0),
    ("H200 NVL", 835.5, 417.5, 60.0),
    ("H200", 989.4, 494.7, 66.9),
    ("H100 PCIe", 756.5, 378.0, 51.2),
    ("H100 NVL", 835.5, 417.5, 60.0),
    ("H100", 989.4, 494.7, 66.9),  # SXM: "NVIDIA H100 80GB HBM3"
    ("A100", 312.0, 156.0, 19.5),
    ("L40S", 362.0, 183.0, 91.6),
    ("L20", 119.5, 59.8, 59.8),
    ("L4", 121.0, 60.0, 30.3),
    ("A10", 125.0, 62.5, 31.2),
    ("RTX 4090", 165.2, 82.6, 82.6),
    ("RTX 3090", 71.0, 35.6, 35.6),
)


def peak_flops(device_name: str, dtype: str, *, tf32: bool = False) -> float | None:
    """Dense operations per second of a GPU at its best; None for one that is not known here.

    Args:
        device_name: as the driver tells it, such as "NVIDIA H100 80GB HBM3".
        dtype: of the matrix products, such as "bfloat16".
        tf32: whether products in float32 may be made in TF32.
    """
    for name, half, tensor_float, single in _PEAKS:
        if _is_called(device_name, name):
            peaks = {"bfloat16": half, "float16": half, "float32": tensor_float if tf32 else single}
            return peaks[dtype] * 1e12 if dtype in peaks else None
    return None


# Terabytes per second between a GPU and its memory, from the same data sheets, looked up in the same way.
_BANDWIDTHS: tuple[tuple[str, float], ...] = (
    ("B200", 8.0),
    ("H200", 4.8),
    ("H100 PCIe", 2.0),
    ("H100 NVL", 3.9),
    ("H100", 3.35),
    ("A100 SXM4 80GB", 2.039),
    ("A100 80GB PCIe", 1.935),
    ("A100", 1.555),
    ("L40S", 0.864),
    ("L20", 0.864),
    ("L4", 0.3),
    ("A10", 0.6),
    ("RTX 4090", 1.008),
    ("RTX 3090", 0.936),
)


def memory_bandwidth(device_name: str) -> float | None:
    """Bytes per second that a GPU reads from its memory at its best; None for one that is not known here."""
    return next((tera * 1e12 for name, tera in _BANDWIDTHS if _is_called(device_name, name)), None)


def _is_called(device_name: str, name: str) -> bool:
    return f" {name} " in f" {device_name} ".replace("-", " ")
