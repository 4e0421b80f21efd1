"""FLOPs of a training step in closed form.

Model FLOPs: matmuls and attention over attended pairs, forward and backward, each once. Recomputation, padding, norms,
activation functions and token mixing other than full attention (windows, recurrent states) are not counted, so MFU is
never overstated.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_INITIAL_FACTOR = re.compile(r"\.lora_\w+\.start\b")  # initial adapter weights, kept as the reference
Parameter = tuple[str, tuple[int, ...], bool]  # name, shape, trained


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """FLOPs of one model per token, loss token and attended pair. A multiply-add is two FLOPs.

    A weight takes two FLOPs per token in forward, two for its own gradient if it is trained, and two for the gradient
    of its input if anything before it is trained.
    """

    body_forward: float  # per token: all matrices but the head
    body_backward: float
    head_forward: float  # per loss token
    head_backward: float
    pair_forward: float  # per attended query-key pair, over all layers: scores and weighted values
    pair_backward: float

    def forward(self, *, tokens: int, loss_tokens: int, pairs: int) -> float:
        """FLOPs of a forward pass.

        Args:
            tokens: number of input tokens.
            loss_tokens: number of positions at which the head is applied.
            pairs: number of attended query-key pairs of one layer and head (`attention_pairs`).
        """
        return self.body_forward * tokens + self.head_forward * loss_tokens + self.pair_forward * pairs

    def forward_backward(self, *, tokens: int, loss_tokens: int, pairs: int) -> float:
        """FLOPs of a forward and a backward pass; arguments as `forward`."""
        backward = self.body_backward * tokens + self.head_backward * loss_tokens + self.pair_backward * pairs
        return self.forward(tokens=tokens, loss_tokens=loss_tokens, pairs=pairs) + backward


def model_flops(parameters: Iterable[Parameter], config: Mapping[str, Any]) -> ModelFlops:
    """Compute the per-token FLOPs of a Hugging Face causal language model.

    Args:
        parameters: parameters in model order, tied weights once, adapter weights included.
        config: content of config.json; for multimodal models the text part.
    """
    body_forward = body_backward = head_forward = head_backward = 0.0
    trained_before = False
    matrices = [
        (name.replace(".base_layer.", "."), shape, trained)  # without peft's wrapper
        for name, shape, trained in parameters
        if len(shape) >= 2 and not _INITIAL_FACTOR.search(name)
    ]
    has_own_head = any(_is_head(name) for name, *_ in matrices)
    body_is_trained = any(trained for name, _, trained in matrices if not _belongs_to_head(name))
    for name, shape, trained in matrices:
        size = 2.0 * math.prod(shape) * _active_fraction(name, shape, config)
        backward = size * (trained + trained_before)
        if _is_embedding(name):
            if name.endswith(".weight") and not has_own_head and not head_forward:
                # a tied embedding is the head as well
                head_forward, head_backward = size, size * (trained + body_is_trained)
        elif _belongs_to_head(name):
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


def _is_embedding(name: str) -> bool:
    """Whether this is an embedding table, of the model or of an adapter."""
    tables = ("embed_tokens", "embed_in", "word_embeddings", "wte", "wpe", "embed_positions", "position_embeddings")
    return name.endswith(tuple(f"{table}.weight" for table in tables)) or ".lora_embedding_A." in name


def _is_head(name: str) -> bool:
    return name.endswith(("lm_head.weight", "embed_out.weight", "value_head.weight"))


def _belongs_to_head(name: str) -> bool:
    """Whether this is the head, or an adapter on it."""
    return _is_head(name) or name.partition(".lora_")[0].endswith(("lm_head", "embed_out"))


def _active_fraction(name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> float:
    """Share of a weight that one token uses: for experts, the routed ones."""
    experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts") or 0
    if not experts or "expert" not in name or "shared" in name:
        return 1.0
    return (_first(config, "num_experts_per_tok", "moe_topk") or experts) / experts


def _num_attention_layers(config: Mapping[str, Any]) -> int:
    """Number of layers with full attention."""
    types = config.get("layer_types")
    return types.count("full_attention") if types else _first(config, "num_hidden_layers", "n_layer") or 0


def _num_heads(config: Mapping[str, Any]) -> int:
    return _first(config, "num_attention_heads", "n_head") or 0


def _head_dims(config: Mapping[str, Any]) -> tuple[int, int]:
    """Query and value features of one head."""
    if config.get("kv_lora_rank"):  # MLA: queries have a rotary part, values do not
        return config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"]
    heads = _num_heads(config)
    dim = config.get("head_dim") or ((_first(config, "hidden_size", "n_embd") or 0) // heads if heads else 0)
    return dim, dim


def _first(config: Mapping[str, Any], *names: str) -> int | None:
    """Value of the first of these keys that is set."""
    return next((config[name] for name in names if config.get(name)), None)
