"""A causal language model as the trainer and the sampler use it.

B rows, S positions, T scored tokens, H hidden, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cohort.batch import MicroBatch
from cohort.policy.forward import Layout, choose_layout, forward, padded_shape
from cohort.policy.logprobs import head_logits, linear_logprobs, token_logprobs
from cohort.policy.sharding import Sharding


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """How a model turns hidden states into logits."""

    module: nn.Linear  # its weight may be tied to the embedding
    scale: float
    softcap: float | None

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Logits [T, V] in float32 or wider."""
        return head_logits(hidden_TH, self.module.weight, self.module.bias, self.scale, self.softcap)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTraits:
    """What has been found out about a model by computing with it."""

    layout: Layout
    has_plain_head: bool
    attention: str  # the implementation that goes with the layout


class Policy:
    """A Hugging Face model, its device and its dtypes. The weights are the model's own: there is one copy."""

    def __init__(
        self,
        model: Any,
        *,
        device: torch.device,
        compute_dtype: torch.dtype | None,
        pad_token_id: int,
        traits: ModelTraits | None = None,
        sharding: Sharding | None = None,
    ):
        """Wrap a loaded model.

        Args:
            model: an `AutoModelForCausalLM`.
            device: where its weights are.
            compute_dtype: dtype to compute in; None computes in the weights' dtype.
            pad_token_id: fills rows of unequal length; never attended to.
            traits: of the model, where they are known; otherwise it is tried out.
            sharding: of the model over ranks; gathered weights are in `compute_dtype`. None: they are whole, and
                autocast computes in it.
        """
        self.model = model
        self.device = device
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self.compute_dtype = compute_dtype
        self.pad_token_id = pad_token_id
        self.sharding = sharding
        if traits is None:
            self._head = _find_head(model)
            layout = choose_layout(model, *self._module())
            attention = model.config._attn_implementation
            traits = ModelTraits(layout=layout, has_plain_head=self._head is not None, attention=attention)
        else:
            self._head = _head_of(model) if traits.has_plain_head else None
        self.traits = traits
        if sharding is not None:
            sharding.add_forward("scored_logprobs", self._logprobs)

    @property
    def layout(self) -> Layout:
        """How micro-batches are computed."""
        return self.traits.layout

    @property
    def shares_prompts(self) -> bool:
        """Whether completions of one group can go on from one prompt."""
        return self.layout == "shared"

    @property
    def has_plain_head(self) -> bool:
        """Whether logprobs are computed from hidden states; if not, the model computes its full logits."""
        return self._head is not None

    @property
    def logprob_tolerance(self) -> float:
        """How far apart two computations of one logprob may be, in batches of different shape, by rounding alone."""
        return 0.3 if torch.bfloat16 in (self.dtype, self.compute_dtype) else 1e-3

    @contextmanager
    def whole(self) -> Iterator[None]:
        """The weights are whole on every rank inside. Every rank enters, and then computes what it likes."""
        if self.sharding is None:
            yield
            return
        with self.sharding.gathered():
            yield

    def whole_weights(self) -> dict[str, Tensor] | None:
        """The weights to save: by name on rank 0 where they are sharded, None where the model has them all."""
        if self.sharding is None:
            return None
        weights = self.sharding.whole_weights()
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        return {name: weight for name, weight in weights.items() if name not in tied}

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Compute in `compute_dtype` where one is set."""
        enabled = self.sharding is None and self.compute_dtype is not None and self.compute_dtype != self.dtype
        with torch.autocast(self.device.type, dtype=self.compute_dtype, enabled=enabled):
            yield

    def logprobs(self, micro_batch: MicroBatch, *, temperature: float) -> tuple[Tensor, Tensor]:
        """Logprob and entropy of every scored token of a micro-batch, both [T]. Logprobs carry the gradient.

        Of sharded weights every rank computes as many micro-batches, in forward and in backward.
        """
        if self.sharding is None:
            return self._logprobs(micro_batch, temperature)
        logprobs, entropy = self.model.scored_logprobs(micro_batch, temperature)
        if not torch.is_grad_enabled():
            self.sharding.end_forward()
        return logprobs, entropy

    def _logprobs(self, micro_batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        module, output = self._module()
        with self.autocast():
            out = forward(module, micro_batch, output, padded=self.layout == "padded")
            if self._head is None:
                logits = out.to(torch.promote_types(out.dtype, torch.float32))
                return token_logprobs(logits, micro_batch.targets, temperature)
            return linear_logprobs(
                out,
                self._head.module.weight,
                micro_batch.targets,
                bias=self._head.module.bias,
                temperature=temperature,
                scale=self._head.scale,
                softcap=self._head.softcap,
            )

    def num_positions(self, micro_batch: MicroBatch) -> int:
        """Positions that `logprobs` computes for a micro-batch, padding included."""
        return math.prod(padded_shape(micro_batch)) if self.layout == "padded" else len(micro_batch.input_ids)

    def _module(self) -> tuple[Any, Callable[[Any], Tensor]]:
        """What is called in training, and which of its outputs is used: hidden states, or logits without a head."""
        if self._head is None:
            return self.model, lambda out: out.logits
        return self.model.base_model, lambda out: out.last_hidden_state

    def next_token_logits(self, **model_inputs: Any) -> Tensor:
        """Logits [B, V] after the last position, float32 or wider. The inputs are those of the model's forward."""
        with self.autocast():
            if self._head is None:
                logits = self.model(**model_inputs, use_cache=True, logits_to_keep=1).logits[:, -1]
                return logits.to(torch.promote_types(logits.dtype, torch.float32))
            hidden = self.model.base_model(**model_inputs, use_cache=True).last_hidden_state
            return self._head.logits(hidden[:, -1])


def _find_head(model: Any) -> Head | None:
    """The model's head as a plain linear layer with scale and softcap, or None where it is something else.

    The guess is checked against the model's own logits on one short input, so a head with a twist that is not known
    here costs memory (the model computes its full logits) and never correctness.
    """
    module = model.get_output_embeddings()
    body = getattr(model, "base_model", None)
    if not isinstance(module, nn.Linear) or body is None or body is model:
        return None
    head = _head_of(model)
    probe = torch.arange(1, 4, device=module.weight.device).unsqueeze(0) % model.config.get_text_config().vocab_size
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
    tolerance = 1e-4 if module.weight.dtype != torch.bfloat16 else 3e-2
    error = (actual - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
    return head if error <= tolerance else None


def _head_of(model: Any) -> Head:
    """The head with the scale and softcap that its config tells."""
    text_config = model.config.get_text_config()
    scaling = getattr(text_config, "logits_scaling", None) or 1.0  # Granite divides
    return Head(
        module=model.get_output_embeddings(),
        scale=(getattr(text_config, "logit_scale", None) or 1.0) / scaling,  # Cohere multiplies
        softcap=getattr(text_config, "final_logit_softcapping", None),
    )
