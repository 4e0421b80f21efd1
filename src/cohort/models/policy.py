"""The policy: a causal language model as used by trainer and sampler.

B rows, S positions, T loss tokens (t of a tile), H hidden size, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cohort.health.facts import logprob_tolerance
from cohort.models.adapters.lora import Adapter
from cohort.models.attention import KVCache, PackedAttention
from cohort.models.attention.cascade import upcast
from cohort.models.attention.own_layers import support_own_attention
from cohort.models.batch_layout import Layout, choose_layout, is_narrow
from cohort.models.dropout import RemovedDropout
from cohort.models.forward import (
    PrefixState,
    SharedPrefix,
    build_head,
    find_body,
    find_head,
    forward,
    packed_inputs,
    padded_shape,
    sequences_per_position,
)
from cohort.models.fsdp import Sharding
from cohort.models.host_memory import MasterWeights, OffloadedWeights
from cohort.models.kv_cache import CachedDecoding, CacheDecoder, choose_decoding
from cohort.models.lm_head.logprobs import TokenLoss, token_logprobs
from cohort.models.loading.multimodal import Multimodal, multimodal_of
from cohort.models.mixers import support_segments
from cohort.models.packed_weights import PackedLayers, packable_layers
from cohort.models.quantization import quantization_notes
from cohort.models.routers import constant_routing, remove_noise
from cohort.packing.batch import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTraits:
    """Properties of a model that were found by running it."""

    layout: Layout
    reason: str | None  # why the layout is not "shared"
    has_plain_head: bool
    attention: str  # the implementation that goes with the layout
    decoding: CachedDecoding = "padded"  # of the local sampler, if prompts are not shared
    decoding_reason: str | None = None  # why it is not "padded"


class Policy:
    """A transformers model with its device and dtypes. It holds the only copy of the weights on the device."""

    def __init__(
        self,
        model: Any,
        *,
        device: torch.device,
        compute_dtype: torch.dtype | None,
        pad_token_id: int,
        traits: ModelTraits | None = None,
        sharding: Sharding | None = None,
        adapter: Adapter | None = None,
        master_weights: MasterWeights | None = None,
        longest_sequence_tokens: int | None = None,
        dropout: bool = False,
    ):
        """Wrap a loaded model.

        Args:
            model: an `AutoModelForCausalLM`.
            device: device of the weights.
            compute_dtype: dtype to compute in; None computes in the dtype of the weights.
            pad_token_id: fills padded batches; never attended to.
            traits: properties of the model; None finds them by running it.
            sharding: how FSDP2 shards the model; gathered weights have `compute_dtype`. None: not sharded, autocast is
                used.
            adapter: LoRA adapter, if any; then only the adapter is trained and saved.
            master_weights: if any, these are trained and saved, and the model holds a copy.
            longest_sequence_tokens: longest sequence of the run, checked against sliding windows; None if unknown.
            dropout: keep the model's dropout in training; an adapter's stays in any case.
        """
        self.model = model
        self.device = device
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self.compute_dtype = compute_dtype
        self.pad_token_id = pad_token_id
        self.sharding = sharding
        self.adapter = adapter
        self.master_weights = master_weights
        remove_noise(model)
        support_segments(model)
        support_own_attention(model)
        self.removed_dropout = None if dropout else RemovedDropout(model)
        if self.dtype == torch.float64 and model.config._experts_implementation is not None:
            model.set_experts_implementation("eager")  # the grouped products have no float64
        if traits is None:
            self._head = find_head(model)
            with self.autocast():  # kernels depend on the dtype that training computes in
                traits = self._find_traits(longest_sequence_tokens)
        else:
            self._head = build_head(model) if traits.has_plain_head else None
        self.traits = traits
        if self._head is not None and device.type == "cuda" and torch.float64 not in (self.dtype, compute_dtype):
            self._head.check_kernels(device)  # they do not support float64
        self._offloaded: OffloadedWeights | None = None
        self._packed: PackedLayers | None = None
        self._packs: bool | None = None if device.type == "cpu" else False  # None: not measured yet
        if sharding is not None:
            sharding.add_forward("scored_logprobs", self._logprobs)
            sharding.add_forward("token_loss", self._loss)
            sharding.add_forward("prompt_hidden", self._prompt_hidden)

    def _find_traits(self, longest_sequence_tokens: int | None) -> ModelTraits:
        """Find the properties of the model by running it."""
        model, module = self.model, self._module()
        decoding: CachedDecoding = "padded"
        decoding_reason = None
        with constant_routing(model) if is_narrow(model) else nullcontext():
            layout, reason = choose_layout(model, *module, longest_sequence_tokens=longest_sequence_tokens)
            if layout != "shared":
                decoding, decoding_reason = choose_decoding(model, *module, is_narrow=is_narrow(model))
        return ModelTraits(
            layout=layout,
            reason=reason,
            has_plain_head=self._head is not None,
            attention=model.config._attn_implementation,
            decoding=decoding,
            decoding_reason=decoding_reason,
        )

    @staticmethod
    def replace_head(model: Any) -> None:
        """Modify a causal language model for this class; a policy needs no change."""

    @property
    def layout(self) -> Layout:
        """Layout of micro-batches."""
        return self.traits.layout

    def notes(self) -> list[str]:
        """Messages for the user about how the model is computed."""
        ways = {"packed": "packed rows without shared prompts", "padded": "padded batches"}
        notes = []
        if self.layout != "shared":
            notes.append(f"the model runs on {ways[self.layout]}, because {self.traits.reason}")
        if self.traits.decoding == "unpadded":
            notes.append(
                f"the local sampler decodes prompts of one length at a time, because {self.traits.decoding_reason}"
            )
        if self.removed_dropout is not None and self.removed_dropout.largest_rate:
            rate = f"{self.removed_dropout.largest_rate:g}"
            notes.append(
                f"the model's dropout ({rate}) is off in training as in sampling; model.dropout: true keeps it"
            )
        if not self.has_plain_head:
            notes.append("the model computes full logits, because its head is not a supported linear layer")
        if self.sharding is not None and not self.sharding.can_recover:
            notes.append(
                f"with torch {torch.__version__}, running out of memory ends a run whose weights are sharded; "
                f"with torch 2.13 or newer it goes on with smaller micro-batches"
            )
        return notes + quantization_notes(self.model)

    @property
    def shares_prompts(self) -> bool:
        """Whether the completions of a group can share their prompt."""
        return self.layout == "shared"

    @property
    def has_plain_head(self) -> bool:
        """Whether logprobs are computed from hidden states; otherwise the model computes full logits."""
        return self._head is not None

    @property
    def multimodal(self) -> Multimodal | None:
        """The multimodal model that the policy is saved as, if it is part of one."""
        return multimodal_of(self.model)

    @property
    def state_on_host(self) -> bool:
        """Whether the optimizer state is in host memory."""
        return self.master_weights is not None or (self.sharding is not None and self.sharding.on_host)

    @property
    def logprob_tolerance(self) -> float:
        """Largest difference of a logprob between batches of different shape that rounding explains, in nats."""
        return logprob_tolerance(has_bfloat16=torch.bfloat16 in (self.dtype, self.compute_dtype))

    def offload_weights(self) -> None:
        """Keep the weights in host memory, except within `on_device`. For frozen models that are not sharded."""
        assert self.sharding is None, "sharded weights use FSDP2's offload"
        self._offloaded = OffloadedWeights(self.model, self.device)

    def published_config(self) -> AbstractContextManager[None]:
        """Context for saving the model's config: it has the dropout that training leaves out."""
        return nullcontext() if self.removed_dropout is None else self.removed_dropout.published_config()

    def on_device(self) -> AbstractContextManager[None]:
        """Context for computing with the model: its weights are on the device."""
        return nullcontext() if self._offloaded is None else self._offloaded.on_device()

    def unsharded(self) -> AbstractContextManager[None]:
        """Context in which every rank has the full weights and needs no collectives. Enter it on every rank."""
        return nullcontext() if self.sharding is None else self.sharding.unsharded()

    def as_reference(self) -> "Policy":
        """Return the policy that the run started from: the same model without its adapter, or with the initial one."""
        return _ReferencePolicy(self)

    def autocast(self) -> torch.autocast:
        """Context that computes in `compute_dtype`."""
        return torch.autocast(self.device.type, dtype=self.compute_dtype, enabled=self._casts_weights)

    @property
    def _casts_weights(self) -> bool:
        """Whether weights are cast to be multiplied."""
        return self.sharding is None and self.compute_dtype is not None and self.compute_dtype != self.dtype

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Context for many forward passes without gradients, all ranks together: each weight is gathered and cast once.

        Autocast caches its copies of weights, but only of leaves that require a gradient. So frozen weights require
        one here, which nothing computes. No inference mode: training could not use tensors that the model caches, such
        as rotary embeddings.
        """
        frozen: list[Tensor] = []
        head = self._head
        if self._casts_weights:
            frozen = [p for p in self.model.parameters() if p.dtype == torch.float32 and not p.requires_grad]
        try:
            for parameter in frozen:
                parameter.requires_grad_(True)
            with torch.no_grad(), self.unsharded(), self.autocast():
                if head is not None and self._casts_weights:  # not a product of autocast
                    self._head = head.rounded(self.compute_dtype)
                yield
        finally:
            self._head = head
            if self._packed is not None:
                self._packed.remove()
                self._packed = None
            for parameter in frozen:
                parameter.requires_grad_(False)

    def pack_weights(self) -> None:
        """Use packed copies of the weights until `sampling` ends (CPU only).

        The first call measures; if packing is slower, this and later calls do nothing.
        """
        if self._packs is False or self._packed is not None:
            return
        dtype, head = self.compute_dtype or self.dtype, self._head
        layers = packable_layers(self.model, dtype)
        if head is not None:
            layers = [layer for layer in layers if layer is not head.linear]
        if not layers:
            self._packs = False
            return
        torch.clear_autocast_cache()  # its copies of these weights are not needed any more
        packed = PackedLayers(layers, dtype)
        if self._packs is None:
            self._packs = packed.are_faster()
        if self._packs:
            self._packed = packed  # before anything is replaced: a signal may raise at any time
            packed.install()
            self._head = None if head is None else head.packed()

    def logprobs(
        self, micro_batch: MicroBatch, *, temperature: float, entropy: bool = True, prefix: PrefixState | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return logprob and entropy of every loss token, both [T] with gradient.

        With a sharded model, every rank must call it equally often, forward and backward.

        Args:
            micro_batch: micro-batch on the policy's device.
            temperature: divides the logits.
            entropy: compute the entropy; otherwise it is None.
            prefix: computed prefix that all sequences of the micro-batch continue, if any.
        """
        if self.sharding is None:
            return self._logprobs(micro_batch, temperature, entropy, prefix)
        out = self.model.scored_logprobs(micro_batch, temperature, entropy, prefix)
        if not torch.is_grad_enabled():
            self.sharding.end_forward()
        return out

    def loss(
        self, micro_batch: MicroBatch, token_loss: TokenLoss, *, temperature: float, prefix: PrefixState | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute the sum of a token-level loss, with the head's gradient computed in forward.

        Args:
            micro_batch: micro-batch on the policy's device.
            token_loss: logprobs [t], entropy [t] and their slice of tokens -> weighted losses [t].
            temperature: divides the logits.
            prefix: see `logprobs`.

        Returns:
            the loss [] with gradient, and the detached logprobs [T].
        """
        compute = self._loss if self.sharding is None else self.model.token_loss
        return compute(micro_batch, token_loss, temperature, prefix)

    def forward_prefix(self, micro_batch: MicroBatch) -> SharedPrefix:
        """Compute a prefix that several micro-batches share. Call its `backward` after all of theirs.

        Args:
            micro_batch: result of `collate_prompt`.
        """
        states = KVCache()
        if self.sharding is None:
            return SharedPrefix(self._prompt_hidden(micro_batch, states), states)
        hidden = self.model.prompt_hidden(micro_batch, states)
        self.sharding.end_forward()  # micro-batches start with nothing gathered
        return SharedPrefix(hidden, states)

    def _prompt_hidden(self, micro_batch: MicroBatch, states: KVCache) -> Tensor:
        module, output = self._module()
        with self.autocast():
            return forward(module, micro_batch, output, padded=False, captured=states)

    def _logprobs(
        self, micro_batch: MicroBatch, temperature: float, entropy: bool, prefix: PrefixState | None
    ) -> tuple[Tensor, Tensor | None]:
        with self.autocast():
            out = self._outputs(micro_batch, prefix)
            if self._head is None:
                return token_logprobs(upcast(out), micro_batch.labels, temperature, entropy=entropy)
            return self._head.logprobs(out, micro_batch.labels, temperature=temperature, entropy=entropy)

    def _loss(
        self, micro_batch: MicroBatch, token_loss: TokenLoss, temperature: float, prefix: PrefixState | None
    ) -> tuple[Tensor, Tensor]:
        with self.autocast():
            out = self._outputs(micro_batch, prefix)
            if self._head is None:  # `out` is full logits
                logprobs, entropy = token_logprobs(upcast(out), micro_batch.labels, temperature, entropy=True)
                assert entropy is not None
                return token_loss(logprobs, entropy, slice(None)).sum(), logprobs.detach()
            return self._head.loss(out, micro_batch.labels, token_loss, temperature=temperature)

    def _outputs(self, micro_batch: MicroBatch, prefix: PrefixState | None) -> Tensor:
        """Hidden states (logits without a plain head) at the positions that predict the loss tokens."""
        module, output = self._module()
        return self._narrow(forward(module, micro_batch, output, padded=self.layout == "padded", prefix=prefix))

    def _narrow(self, hidden: Tensor) -> Tensor:
        """Cast the input of the head to the compute dtype.

        Under autocast the last norm is float32, and the head is the largest product of a small model. Logits are
        float32 in any case.
        """
        autocasts = self._head is not None and self.sharding is None and self.compute_dtype is not None
        return hidden.to(self.compute_dtype) if autocasts else hidden

    def embeddings_and_head(self) -> tuple[list[nn.Embedding], Tensor | None]:
        """Return the trained embeddings, and the weight of the head if it is plain."""
        modules = (module for module in self.model.modules() if isinstance(module, nn.Embedding))
        tables = [module for module in modules if module.weight.requires_grad]
        return tables, None if self._head is None else self._head.linear.weight

    def num_positions(self, micro_batch: MicroBatch) -> int:
        """Number of positions computed for a micro-batch, including padding."""
        return math.prod(padded_shape(micro_batch)) if self.layout == "padded" else len(micro_batch.input_ids)

    def sequences_per_position(self, micro_batch: MicroBatch) -> Tensor:
        """Number of sequences that have each computed position as input; 0 at padding."""
        return sequences_per_position(micro_batch, padded=self.layout == "padded")

    def _module(self) -> tuple[Any, Callable[[Any], Tensor]]:
        """Return the module to call, and a function that selects its hidden states (logits without a plain head)."""
        if self._head is None:
            return self.model, lambda out: out.logits
        return find_body(self.model), lambda out: out.last_hidden_state

    def next_token_logits(self, **model_inputs: Any) -> Tensor:
        """Return next-token logits [B, V] in float32 or wider. Takes the inputs of the model's forward."""
        with self.autocast():
            if self._head is None:
                logits = self.model(**model_inputs, use_cache=True, logits_to_keep=1).logits[:, -1]
                return upcast(logits)
            hidden = find_body(self.model)(**model_inputs, use_cache=True).last_hidden_state
            return self._head.logits(self._narrow(hidden[:, -1]))

    def cache_decoder(self) -> CacheDecoder:
        """Return a decoder that uses the cache of transformers."""
        return CacheDecoder(self.model, self.next_token_logits, pad_token_id=self.pad_token_id)

    def packed_logits(self, input_ids: Tensor, logit_positions: Tensor, attention: PackedAttention) -> Tensor:
        """Return logits [T, V] at `logit_positions` [T] of a packed row [S], float32 or wider; not if "padded"."""
        inputs = packed_inputs(self.model, input_ids, attention)
        with self.autocast():
            if self._head is None:
                logits = self.model(**inputs, logits_to_keep=logit_positions).logits[0]
                return upcast(logits)
            hidden = find_body(self.model)(**inputs).last_hidden_state[0]
            return self._head.logits(self._narrow(hidden.index_select(0, logit_positions)))


class _ReferencePolicy(Policy):
    """The policy as it was when the run started. Use only its logprobs, without gradient."""

    def __init__(self, policy: Policy):
        assert policy.adapter is not None, "needs an adapter, whose base is unchanged"
        vars(self).update(vars(policy))

    def logprobs(
        self, micro_batch: MicroBatch, *, temperature: float, entropy: bool = True, prefix: PrefixState | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See `Policy.logprobs`; switches the adapter for the duration of the call."""
        assert self.adapter is not None
        with self.adapter.reference():
            return super().logprobs(micro_batch, temperature=temperature, entropy=entropy, prefix=prefix)
