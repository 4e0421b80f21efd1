"""Micro-batches through a Hugging Face model, and its language-model head: from hidden states to logits and logprobs.

S tokens of the row, B sequences of a padded call, L the longest, T loss tokens, H hidden, V vocabulary, R rank of an
adapter.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cohort.batch import MicroBatch
from cohort.policy.attention import KeyValues
from cohort.policy.logit_tiles import try_triton
from cohort.policy.logprobs import LinearLoss, TokenLoss, head_logits, linear_logprobs, linear_loss
from cohort.policy.stream import Branch


def forward(
    module: Any,
    micro_batch: MicroBatch,
    output: Callable[[Any], Tensor],
    *,
    padded: bool,
    branch: Branch | None = None,
    captured: KeyValues | None = None,
) -> Tensor:
    """What `module` puts out at the positions that predict the loss tokens, [T, H].

    Args:
        module: the model, or its body without the head.
        micro_batch: on the module's device; of whole sequences where it is to be padded.
        output: picks the tensor [rows, positions, H] from what the module returns.
        padded: compute rows of equal length with the module's own attention.
        branch: of the prompt that branches of PREFIX go on from; gradients flow into it.
        captured: takes the row's own keys and values of every layer, with their gradients.
    """
    if padded:
        assert branch is None and captured is None, "padded rows cannot share prompts"
        return _forward_padded(module, micro_batch, output)
    returned = module(
        input_ids=micro_batch.input_ids.unsqueeze(0),
        position_ids=micro_batch.position_ids.unsqueeze(0),
        # A mask of four dimensions is taken as it is. So none of S x S is made; attention has the segments.
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=micro_batch.input_ids.device),
        segments=micro_batch.segments,
        prefix=None if branch is None else branch.states,
        captured=captured,
        use_cache=False,
    )
    out = output(returned).squeeze(0)
    if branch is not None:
        out = torch.cat([branch.hidden_1H, out])
    return out.index_select(0, micro_batch.logit_positions)


def _forward_padded(module: Any, micro_batch: MicroBatch, output: Callable[[Any], Tensor]) -> Tensor:
    """Whole sequences as rows. Padding is on the right and attention causal, so that no token ever sees it."""
    assert not micro_batch.segments.blocks.shared, "padded rows cannot share prompts"
    rows = _as_rows(micro_batch, micro_batch.input_ids)
    position_ids = torch.arange(rows.shape[1], device=rows.device).expand_as(rows)
    out = output(module(input_ids=rows, position_ids=position_ids, use_cache=False)).flatten(0, 1)
    return out.index_select(0, _padded_positions(micro_batch).index_select(0, micro_batch.logit_positions))


def computed_counts(micro_batch: MicroBatch, *, padded: bool) -> Tensor:
    """Of how many completions each position that a model computes is an input, in its order; 0 of padding."""
    counts = micro_batch.input_counts
    return _as_rows(micro_batch, counts).flatten() if padded else counts


def _as_rows(micro_batch: MicroBatch, values: Tensor) -> Tensor:
    """Values [S] of the row's tokens as rows of whole sequences [B, L], 0 where they are padded."""
    rows = values.new_zeros(padded_shape(micro_batch))
    rows.view(-1)[_padded_positions(micro_batch)] = values
    return rows


def _padded_positions(micro_batch: MicroBatch) -> Tensor:
    """Where each token of the row is in the padded rows, one after the other, [S]."""
    column = micro_batch.position_ids
    row = (column == 0).cumsum(0) - 1  # every sequence begins at position 0
    return row * padded_shape(micro_batch)[1] + column


def padded_shape(micro_batch: MicroBatch) -> tuple[int, int]:
    """Rows and positions of a micro-batch of whole sequences when padded, (B, L).

    The segments tell it on the host, so that nothing waits for the device.
    """
    lengths = micro_batch.segments.lengths
    return len(lengths), max(lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """How a model turns hidden states into logits."""

    linear: nn.Linear  # its weight may be tied to the embedding
    lora: Any  # peft's layer around it, or None
    scale: float
    softcap: float | None

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Logits [T, V] in float32 or wider, without gradient."""
        return head_logits(hidden_TH, self.linear.weight, **self._transform(hidden_TH))

    def logprobs(
        self, hidden_TH: Tensor, targets_T: Tensor, *, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Logprobs and entropies of targets, see `linear_logprobs`."""
        args = (hidden_TH, self.linear.weight, targets_T)
        return linear_logprobs(*args, temperature=temperature, entropy=entropy, **self._transform(hidden_TH))

    def loss(self, hidden_TH: Tensor, targets_T: Tensor, token_loss: TokenLoss, *, temperature: float) -> LinearLoss:
        """A token-level loss whose gradient is made along with it, see `linear_loss`."""
        args = (hidden_TH, self.linear.weight, targets_T, token_loss)
        return linear_loss(*args, temperature=temperature, entropy=True, **self._transform(hidden_TH))

    def try_kernels(self, device: torch.device) -> None:
        """Find out whether its fused kernels work on a device, see `try_triton`."""
        try_triton(device, bias=self.linear.bias is not None, softcap=self.softcap is not None)

    def _transform(self, hidden_TH: Tensor) -> dict[str, Any]:
        return {
            "bias": self.linear.bias,
            "scale": self.scale,
            "softcap": self.softcap,
            "adapter": self._adapter(hidden_TH),
        }

    def _adapter(self, hidden_TH: Tensor) -> tuple[Tensor, Tensor] | None:
        """Features [T, R] and weight [V, R] of the active adapter; None where it is switched off or merged."""
        if self.lora is None or self.lora.disable_adapters or self.lora.merged or not self.lora.active_adapters:
            return None
        (name,) = self.lora.active_adapters
        down, up = self.lora.lora_A[name], self.lora.lora_B[name]
        return down(hidden_TH.to(down.weight.dtype)) * self.lora.scaling[name], up.weight


def find_head(model: Any) -> Head | None:
    """The model's head as a linear layer with scale and softcap, or None where it is something else.

    The layer may have a LoRA adapter of peft's. The guess is checked against the model's own logits on one short input,
    so a head with a twist that is not known here costs memory (the model computes its full logits) and never
    correctness.
    """
    module = model.get_output_embeddings()
    body = getattr(model, "base_model", None)
    if not (isinstance(module, nn.Linear) or _is_plain_lora(module)) or body is None or body is model:
        return None
    head = head_of(model)
    weight = head.linear.weight
    probe = torch.arange(1, 4, device=weight.device).unsqueeze(0) % model.config.get_text_config().vocab_size
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            expected = model(input_ids=probe, use_cache=False).logits[0].float()
            actual = head.logits(body(input_ids=probe, use_cache=False).last_hidden_state[0]).float()
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None  # a body that returns something else
    finally:
        model.train(was_training)
    # bfloat16 models round their logits to 8 bits; a missing scale or softcap is off by far more than that.
    tolerance = 1e-4 if weight.dtype != torch.bfloat16 else 3e-2
    error = (actual - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
    return head if error <= tolerance else None


def _is_plain_lora(module: Any) -> bool:
    """Whether this is peft's layer that adds one product of two linear layers to a linear one, without dropout.

    A new adapter adds 0, so the probe would not see what is different about it.
    """
    if not isinstance(getattr(module, "base_layer", None), nn.Linear) or not hasattr(module, "lora_A"):
        return False
    adapters = module.lora_A.keys()
    return (
        len(module.active_adapters) <= 1
        and set(module.active_adapters) <= set(adapters)
        and not any(name in module.lora_variant for name in adapters)  # DoRA and others
        and all(getattr(module.lora_dropout[name], "p", 0.0) == 0.0 for name in adapters)
        and all(module.lora_A[name].bias is None and module.lora_B[name].bias is None for name in adapters)
    )


def head_of(model: Any) -> Head:
    """The head with the scale and softcap that its config tells."""
    text_config = model.config.get_text_config()
    scaling = getattr(text_config, "logits_scaling", None) or 1.0  # Granite divides
    module = model.get_output_embeddings()
    is_plain = isinstance(module, nn.Linear)
    return Head(
        linear=module if is_plain else module.base_layer,
        lora=None if is_plain else module,
        scale=(getattr(text_config, "logit_scale", None) or 1.0) / scaling,  # Cohere multiplies
        softcap=getattr(text_config, "final_logit_softcapping", None),
    )
