"""The language-model head: from the last hidden states to logits and logprobs.

T loss tokens, H hidden, V vocabulary, R rank of an adapter.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cohort.policy.logit_tiles import try_triton
from cohort.policy.logprobs import LinearLoss, TokenLoss, head_logits, linear_logprobs, linear_loss


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
