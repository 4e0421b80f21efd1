"""Forward pass of micro-batches through a transformers model and its language-model head.

A prompt that several micro-batches share is computed once, and its forward pass keeps its graph. Each micro-batch
starts from detached copies of its keys, values and recurrent states, and leaves gradients on them. Then one backward
pass of the prompt takes the sum of these gradients. By the chain rule, the result is the gradient of one micro-batch
with all completions.

P tokens of the prompt, S of the row, B sequences of a padded batch, L the longest, T loss tokens, H hidden size,
V vocabulary, R LoRA rank.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from cohort.models.attention import KVCache, PackedAttention
from cohort.models.attention.cascade import AttentionSpec
from cohort.models.lm_head.logprobs import TokenLoss, head_logits, linear_logprobs, linear_loss
from cohort.models.lm_head.softmax import LogitTransform
from cohort.models.lm_head.tiled_matmul import Operands
from cohort.models.lm_head.tiled_softmax import check_triton
from cohort.models.mixers import LAYER_TYPES, MASK_ARGUMENT
from cohort.models.packed_weights import PackedWeight
from cohort.packing.batch import MicroBatch


class PrefixState:
    """A detached prefix that a micro-batch continues, and the gradients that it leaves there."""

    def __init__(self, hidden_1H: Tensor, states: KVCache):
        self.hidden_1H = _leaf(hidden_1H)  # at the last token of the prompt
        self.states = KVCache({layer: tuple(map(_leaf, tensors)) for layer, tensors in states.items()})

    def gradients(self) -> list[Tensor | None]:
        """Gradients left by the backward pass of the micro-batch."""
        return [leaf.grad for leaf in (self.hidden_1H, *_tensors(self.states))]


class SharedPrefix:
    """A prompt after its forward and before its backward pass."""

    def __init__(self, hidden: Tensor, states: KVCache):
        """Start with no gradients.

        Args:
            hidden: [1, H] at the last token, with graph; [0, H] on a rank that has no prompt to compute.
            states: keys and values of every layer, with graph.
        """
        self._hidden = hidden
        self._states = states
        self._gradients: list[Tensor | None] = [None] * (1 + len(_tensors(states)))

    def detach(self) -> PrefixState:
        """Return a detached copy for one micro-batch."""
        return PrefixState(self._hidden, self._states)

    def add(self, prefix: PrefixState) -> None:
        """Add the gradients of a micro-batch after its backward pass."""
        for i, gradient in enumerate(prefix.gradients()):
            total = self._gradients[i]
            if total is not None and gradient is not None:
                total += gradient
            elif gradient is not None:  # accumulate in float32
                self._gradients[i] = gradient.to(torch.promote_types(gradient.dtype, torch.float32))

    def backward(self, own_loss: Tensor | None = None) -> None:
        """Backpropagate the added gradients through the prompt.

        Args:
            own_loss: [], loss of the prompt's own forward pass, such as that of routers.
        """
        tensors = [self._hidden, *_tensors(self._states)]
        pairs: list[tuple[Tensor, Tensor | None]] = [
            (t, g.to(t.dtype)) for t, g in zip(tensors, self._gradients, strict=True) if g is not None
        ]
        if not pairs and self._hidden.requires_grad:  # no completions: keeps collectives in step with other ranks
            pairs = [(self._hidden, torch.zeros_like(self._hidden))]
        if own_loss is not None and own_loss.requires_grad:
            pairs.append((own_loss, None))
        if pairs:
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])


def _tensors(states: KVCache) -> list[Tensor]:
    """Keys, values and recurrent states of all layers, in the order of their keys."""
    return [tensor for layer in sorted(states) for tensor in states[layer]]


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def forward(
    module: Any,
    micro_batch: MicroBatch,
    output: Callable[[Any], Tensor],
    *,
    padded: bool,
    prefix: PrefixState | None = None,
    captured: KVCache | None = None,
    specs: dict[int, AttentionSpec] | None = None,
) -> Tensor:
    """Return the outputs of `module` at the positions that predict the loss tokens, [T, H].

    Args:
        module: the model, or its body without the head.
        micro_batch: micro-batch on the module's device; without shared prefixes if padded.
        output: selects the tensor [rows, positions, H] of the module's outputs.
        padded: compute a padded batch with the module's own attention.
        prefix: the cached prefix of the micro-batch; gradients flow into it.
        captured: filled with the keys and values of every layer, with their graph.
        specs: filled with what every layer asks of attention.
    """
    if padded:
        assert prefix is None and captured is None, "padded batches cannot share prefixes"
        return _forward_padded(module, micro_batch, output)
    attention = PackedAttention(
        position_ids=micro_batch.position_ids,
        attn_metadata=micro_batch.attn_metadata,
        prefix=None if prefix is None else prefix.states,
        captured=captured,
        specs=specs,
    )
    out = output(module(**packed_inputs(module, micro_batch.input_ids, attention))).squeeze(0)
    if prefix is not None:
        out = torch.cat([prefix.hidden_1H, out])
    return out.index_select(0, micro_batch.logit_positions)


def packed_inputs(module: Any, input_ids: Tensor, attention: PackedAttention) -> dict[str, Any]:
    """Return the inputs of a transformers model for a packed row [S]."""
    inputs: dict[str, Any] = {
        "input_ids": input_ids.unsqueeze(0),
        "position_ids": attention.position_ids.unsqueeze(0),
        "attention_mask": _masks(module.config, attention.as_mask()),
        "use_cache": False,
    }
    if is_attention_free(module.config):  # such models make masks of mixers from 2D masks only
        inputs |= {"attention_mask": None, MASK_ARGUMENT: attention.as_mask()}
    # BLOOM has no positions and Falcon makes other masks, so either may bring metadata to the layers
    inputs["position_ids"].packed_attention = attention
    shares_keys = getattr(module.config.get_text_config(), "num_kv_shared_layers", 0)
    if shares_keys and "logits_to_keep" in inspect.signature(module.forward).parameters:
        inputs["logits_to_keep"] = slice(None)  # a number, as the default 0, would slice the mask, which loses metadata
    return inputs


def is_attention_free(config: Any) -> bool:
    """Whether all layers of a model have a recurrent state and no attention."""
    types = getattr(config.get_text_config(), "layer_types", None)
    return types is not None and set(types) == {"linear_attention"}


def _forward_padded(module: Any, micro_batch: MicroBatch, output: Callable[[Any], Tensor]) -> Tensor:
    """Compute whole sequences as a right-padded batch. Attention is causal, so no token attends to padding."""
    assert not micro_batch.attn_metadata.padded.prefix, "padded batches cannot share prefixes"
    rows = _pad(micro_batch, micro_batch.input_ids)
    position_ids = torch.arange(rows.shape[1], device=rows.device).expand_as(rows)
    out = output(module(input_ids=rows, position_ids=position_ids, use_cache=False)).flatten(0, 1)
    return out.index_select(0, _padded_positions(micro_batch).index_select(0, micro_batch.logit_positions))


def sequences_per_position(micro_batch: MicroBatch, *, padded: bool) -> Tensor:
    """Number of sequences that have each computed position as input; 0 at padding."""
    counts = micro_batch.input_counts
    return _pad(micro_batch, counts).flatten() if padded else counts


def _pad(micro_batch: MicroBatch, values: Tensor) -> Tensor:
    """Convert values [S] of a packed row to a padded batch [B, L], 0 at padding."""
    rows = values.new_zeros(padded_shape(micro_batch))
    rows.view(-1)[_padded_positions(micro_batch)] = values
    return rows


def _padded_positions(micro_batch: MicroBatch) -> Tensor:
    """Index of each token of the row in the flattened padded batch, [S]."""
    column = micro_batch.position_ids
    row = (column == 0).cumsum(0) - 1  # every sequence starts at position 0
    return row * padded_shape(micro_batch)[1] + column


def padded_shape(micro_batch: MicroBatch) -> tuple[int, int]:
    """Shape (B, L) of a micro-batch when padded. Computed on the host, without waiting for the device."""
    lengths = micro_batch.attn_metadata.lengths
    return len(lengths), max(lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A linear language-model head, with optional LoRA, scale and softcap."""

    linear: nn.Linear  # may be tied to the embedding
    lora: Any  # peft's wrapper, or None
    transform: LogitTransform  # at temperature 1
    copy: Tensor | None = None  # replaces the weight of `linear`, without gradient
    product: PackedWeight | None = None  # replaces it in `logits`

    def rounded(self, dtype: torch.dtype | None) -> "Head":
        """Return this head with a copy of its weight in `dtype`, for many calls of `logits`."""
        return replace(self, copy=self.linear.weight.to(dtype))

    def packed(self) -> "Head":
        """Return this head with a packed copy of its weight, for many calls of `logits` with few rows."""
        weight = self.linear.weight if self.copy is None else self.copy
        return replace(self, copy=None, product=PackedWeight(weight, None, torch.float32))

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Logits [T, V] in float32 or wider, without gradient."""
        return head_logits(self._operands(hidden_TH), self.transform, product=self.product)

    def logprobs(
        self, hidden_TH: Tensor, targets_T: Tensor, *, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Logprobs and entropies, see `linear_logprobs`."""
        transform = replace(self.transform, temperature=temperature)
        return linear_logprobs(self._operands(hidden_TH), targets_T, transform, entropy=entropy)

    def loss(
        self, hidden_TH: Tensor, targets_T: Tensor, token_loss: TokenLoss, *, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """A token-level loss with gradients computed in forward, and logprobs; see `linear_loss`."""
        transform = replace(self.transform, temperature=temperature)
        return linear_loss(self._operands(hidden_TH), targets_T, token_loss, transform)

    def check_kernels(self, device: torch.device) -> None:
        """Check that the fused kernels work on a device, see `check_triton`."""
        check_triton(device, bias=self.linear.bias is not None, softcap=self.transform.softcap is not None)

    def _operands(self, hidden_TH: Tensor) -> Operands:
        """Add the weights of the head, and of its adapter unless that is disabled or merged."""
        weight = self.linear.weight if self.copy is None else self.copy
        operands = Operands(hidden_TH, weight, self.linear.bias)
        if self.lora is None or self.lora.disable_adapters or self.lora.merged or not self.lora.active_adapters:
            return operands
        (name,) = self.lora.active_adapters
        down, up = self.lora.lora_A[name], self.lora.lora_B[name]
        lora_hidden_TR = down(hidden_TH.to(down.weight.dtype)) * self.lora.scaling[name]
        return operands._replace(lora_hidden=lora_hidden_TR, lora_b=up.weight)


def find_body(model: Any) -> Any:
    """Return a model without its head, or the model if that is not a module of its own."""
    body = getattr(model, "base_model", model)
    # the prefix of Llama 4's text model is that of the multimodal one
    return getattr(model, "model", model) if body is model else body


def find_head(model: Any) -> Head | None:
    """Find the linear head of a model, or return None if it is not supported.

    The head is checked against the model's own logits on a short input. So an unsupported head costs memory (the model
    computes full logits), never correctness.
    """
    module = model.get_output_embeddings()
    body = find_body(model)
    if not (isinstance(module, nn.Linear) or _is_plain_lora(module)) or body is model:
        return None
    head = build_head(model)
    weight = head.linear.weight
    probe = torch.arange(1, 4, device=weight.device).unsqueeze(0) % model.config.get_text_config().vocab_size
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            expected = model(input_ids=probe, use_cache=False).logits[0].float()
            actual = head.logits(body(input_ids=probe, use_cache=False).last_hidden_state[0]).float()
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None  # the body does not return hidden states
    finally:
        model.train(was_training)
    # bfloat16 logits have 8 significant bits; a missing scale or softcap is off by far more.
    tolerance = 1e-4 if weight.dtype != torch.bfloat16 else 3e-2
    error = (actual - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
    return head if error <= tolerance else None


def _is_plain_lora(module: Any) -> bool:
    """Whether a module is peft's plain LoRA around a linear layer, without dropout or DoRA.

    `find_head` could not tell from logits, because a new adapter adds 0.
    """
    if not isinstance(getattr(module, "base_layer", None), nn.Linear) or not hasattr(module, "lora_A"):
        return False
    return not module.lora_variant and all(getattr(d, "p", 0.0) == 0.0 for d in module.lora_dropout.values())


def build_head(model: Any) -> Head:
    """Build the head with scale and softcap from the model's config."""
    text_config = model.config.get_text_config()
    multiplier = getattr(text_config, "logit_scale", None) or 1.0  # Cohere
    divisor = getattr(text_config, "logits_scaling", None) or 1.0  # Granite
    softcap = getattr(text_config, "final_logit_softcapping", None)
    module = model.get_output_embeddings()
    is_plain = isinstance(module, nn.Linear)
    return Head(
        linear=module if is_plain else module.base_layer,
        lora=None if is_plain else module,
        transform=LogitTransform(scale=multiplier / divisor, softcap=softcap),
    )


def _masks(config: Any, mask: Tensor) -> Tensor | Mapping[str, Tensor]:
    """Return the attention mask that brings metadata to all layers: models make that of mixers from 2D masks only."""
    types = set(getattr(config.get_text_config(), "layer_types", None) or ())
    if not types & LAYER_TYPES:
        return mask
    return dict.fromkeys(types | {"full_attention", "linear_attention"}, mask)
