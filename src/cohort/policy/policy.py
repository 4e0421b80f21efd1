"""A causal language model as the trainer and the sampler use it.

B rows, S positions, T scored tokens, H hidden, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cohort.batch import MicroBatch
from cohort.policy.adapter import Adapter
from cohort.policy.attention import KeyValues
from cohort.policy.forward import computed_counts, find_head, forward, head_of, padded_shape
from cohort.policy.layout import Layout, choose_layout
from cohort.policy.logprobs import TokenLoss, token_logprobs
from cohort.policy.masters import Masters
from cohort.policy.parking import Parking
from cohort.policy.quantization import told
from cohort.policy.routers import remove_noise
from cohort.policy.sharding import Sharding
from cohort.policy.stream import Branch, OpenPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTraits:
    """What has been found out about a model by computing with it."""

    layout: Layout
    reason: str | None  # why the layout is not "shared"
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
        adapter: Adapter | None = None,
        masters: Masters | None = None,
        longest_sequence_tokens: int | None = None,
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
            adapter: of the model, which is all that is trained and saved then.
            masters: of the model's weights, which are a copy of them then; they are what is trained and saved.
            longest_sequence_tokens: of all that will be computed, which tells whether it fits a model's window. None
                is for not known.
        """
        self.model = model
        self.device = device
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self.compute_dtype = compute_dtype
        self.pad_token_id = pad_token_id
        self.sharding = sharding
        self.adapter = adapter
        self.masters = masters
        remove_noise(model)
        if traits is None:
            self._head = find_head(model)
            with self.autocast():  # what training computes in decides which kernels it uses
                layout, reason = choose_layout(model, *self._module(), longest_sequence_tokens=longest_sequence_tokens)
            traits = ModelTraits(
                layout=layout,
                reason=reason,
                has_plain_head=self._head is not None,
                attention=model.config._attn_implementation,
            )
        else:
            self._head = head_of(model) if traits.has_plain_head else None
        self.traits = traits
        if self._head is not None and device.type == "cuda" and torch.float64 not in (self.dtype, compute_dtype):
            self._head.try_kernels(device)  # which have no float64
        self._parking: Parking | None = None
        if sharding is not None:
            sharding.add_forward("scored_logprobs", self._logprobs)
            sharding.add_forward("token_loss", self._loss)
            sharding.add_forward("prompt_hidden", self._prompt_hidden)

    @staticmethod
    def adapt(model: Any) -> None:
        """Make of a causal language model what this class computes with: of a policy's, nothing else than it is."""

    @property
    def layout(self) -> Layout:
        """How micro-batches are computed."""
        return self.traits.layout

    def notes(self) -> list[str]:
        """What a person should know of how the model is computed."""
        ways = {"packed": "rows of whole sequences, without shared prompts", "padded": "padded rows"}
        notes = []
        if self.layout != "shared":
            notes.append(f"the model is computed in {ways[self.layout]}, because {self.traits.reason}")
        if not self.has_plain_head:
            notes.append(
                "the model computes its full logits, because its head is not a linear layer that is known here"
            )
        return notes + told(self.model)

    @property
    def shares_prompts(self) -> bool:
        """Whether completions of one group can go on from one prompt."""
        return self.layout == "shared"

    @property
    def has_plain_head(self) -> bool:
        """Whether logprobs are computed from hidden states; if not, the model computes its full logits."""
        return self._head is not None

    @property
    def state_on_host(self) -> bool:
        """Whether what an optimizer keeps of the weights is in host memory, and takes none of the device's."""
        return self.masters is not None or (self.sharding is not None and self.sharding.on_host)

    @property
    def logprob_tolerance(self) -> float:
        """How far apart two computations of one logprob may be, in batches of different shape, by rounding alone."""
        return 0.3 if torch.bfloat16 in (self.dtype, self.compute_dtype) else 1e-3

    def park(self) -> None:
        """Keep the weights in host memory but in `visit`. Of a frozen model that is not sharded."""
        assert self.sharding is None, "shards stay where they are"
        self._parking = Parking(self.model, self.device)

    def visit(self) -> AbstractContextManager[None]:
        """Whoever computes with the model does so inside: its weights are on the device."""
        return nullcontext() if self._parking is None else self._parking.visit()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """The weights are whole on every rank inside. Every rank enters, and then computes what it likes."""
        if self.sharding is None:
            yield
            return
        with self.sharding.gathered():
            yield

    def as_reference(self) -> "Policy":
        """The policy that the run started from: the same model with its adapter switched off or back."""
        return _AsReference(self)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Compute in `compute_dtype` where one is set."""
        enabled = self.sharding is None and self.compute_dtype is not None and self.compute_dtype != self.dtype
        with torch.autocast(self.device.type, dtype=self.compute_dtype, enabled=enabled):
            yield

    def logprobs(
        self, micro_batch: MicroBatch, *, temperature: float, entropy: bool = True, branch: Branch | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Logprob and entropy of every scored token of a micro-batch, both [T]. Both carry a gradient.

        Of sharded weights every rank computes as many micro-batches, in forward and in backward.

        Args:
            micro_batch: on the policy's device.
            temperature: divides the logits.
            entropy: compute it; None in its place otherwise.
            branch: of the prompt that all sequences of the micro-batch go on from, where it was computed before.
        """
        if self.sharding is None:
            return self._logprobs(micro_batch, temperature, entropy, branch)
        out = self.model.scored_logprobs(micro_batch, temperature, entropy, branch)
        if not torch.is_grad_enabled():
            self.sharding.end_forward()
        return out

    def loss(
        self, micro_batch: MicroBatch, token_loss: TokenLoss, *, temperature: float, branch: Branch | None = None
    ) -> tuple[Tensor, Tensor]:
        """The sum of a token-level loss over a micro-batch, whose head's gradient is made along with it.

        Args:
            micro_batch: on the policy's device.
            token_loss: logprobs [t], entropy [t] and which tokens they belong to -> weighted losses [t].
            temperature: divides the logits.
            branch: like `logprobs`.

        Returns:
            the loss [], which carries the gradient, and the detached logprobs [T].
        """
        compute = self._loss if self.sharding is None else self.model.token_loss
        return compute(micro_batch, token_loss, temperature, branch)

    def open_prompt(self, micro_batch: MicroBatch) -> OpenPrompt:
        """Forward pass of a prompt that micro-batches go on from; its backward pass comes after all of theirs.

        Args:
            micro_batch: of `collate_prompt`.
        """
        states = KeyValues()
        if self.sharding is None:
            return OpenPrompt(self._prompt_hidden(micro_batch, states), states)
        hidden = self.model.prompt_hidden(micro_batch, states)
        self.sharding.end_forward()  # every micro-batch begins with nothing gathered
        return OpenPrompt(hidden, states)

    def _prompt_hidden(self, micro_batch: MicroBatch, states: KeyValues) -> Tensor:
        module, output = self._module()
        with self.autocast():
            return forward(module, micro_batch, output, padded=False, captured=states)

    def _logprobs(
        self, micro_batch: MicroBatch, temperature: float, entropy: bool, branch: Branch | None
    ) -> tuple[Tensor, Tensor | None]:
        with self.autocast():
            out = self._outputs(micro_batch, branch)
            if self._head is None:
                return token_logprobs(_wide(out), micro_batch.targets, temperature, entropy=entropy)
            return self._head.logprobs(out, micro_batch.targets, temperature=temperature, entropy=entropy)

    def _loss(
        self, micro_batch: MicroBatch, token_loss: TokenLoss, temperature: float, branch: Branch | None
    ) -> tuple[Tensor, Tensor]:
        with self.autocast():
            out = self._outputs(micro_batch, branch)
            if self._head is None:  # whole logits are there already
                logprobs, entropy = token_logprobs(_wide(out), micro_batch.targets, temperature, entropy=True)
                return token_loss(logprobs, entropy, slice(None)).sum(), logprobs.detach()
            done = self._head.loss(out, micro_batch.targets, token_loss, temperature=temperature)
            return done.loss, done.logprobs

    def _outputs(self, micro_batch: MicroBatch, branch: Branch | None) -> Tensor:
        """Hidden states, or logits without a plain head, at the positions that predict the scored tokens."""
        module, output = self._module()
        return self._narrow(forward(module, micro_batch, output, padded=self.layout == "padded", branch=branch))

    def _narrow(self, hidden: Tensor) -> Tensor:
        """What the head multiplies, in the compute dtype: the last norm is wide under autocast, and the head's products
        are by far the largest of a small model. Logits are float32 all the same.
        """
        autocasts = self._head is not None and self.sharding is None and self.compute_dtype is not None
        return hidden.to(self.compute_dtype) if autocasts else hidden

    def tables_and_head(self) -> tuple[list[nn.Embedding], Tensor | None]:
        """The model's embeddings that are trained, and the weight of its head if that is plain."""
        modules = (module for module in self.model.modules() if isinstance(module, nn.Embedding))
        tables = [module for module in modules if module.weight.requires_grad]
        return tables, None if self._head is None else self._head.linear.weight

    def num_positions(self, micro_batch: MicroBatch) -> int:
        """Positions that `logprobs` computes for a micro-batch, padding included."""
        return math.prod(padded_shape(micro_batch)) if self.layout == "padded" else len(micro_batch.input_ids)

    def computed_counts(self, micro_batch: MicroBatch) -> Tensor:
        """Of how many completions each position that is computed for a micro-batch is an input; 0 of padding."""
        return computed_counts(micro_batch, padded=self.layout == "padded")

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
                return _wide(logits)
            hidden = self.model.base_model(**model_inputs, use_cache=True).last_hidden_state
            return self._head.logits(self._narrow(hidden[:, -1]))

    def row_logits(self, input_ids: Tensor, position_ids: Tensor, source: Tensor, **attention: Any) -> Tensor:
        """Logits [T, V] after the positions `source` [T] of one row [S], float32 or wider; not of layout "padded".

        `attention` says what the row's tokens attend to.
        """
        inputs = {
            "input_ids": input_ids.unsqueeze(0),
            "position_ids": position_ids.unsqueeze(0),
            "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=input_ids.device),  # taken as it is
            "use_cache": False,
        }
        with self.autocast():
            if self._head is None:
                logits = self.model(**inputs, **attention, logits_to_keep=source).logits[0]
                return logits.to(torch.promote_types(logits.dtype, torch.float32))
            hidden = self.model.base_model(**inputs, **attention).last_hidden_state[0]
            return self._head.logits(self._narrow(hidden.index_select(0, source)))


class _AsReference(Policy):
    """A policy as it was when the run started. Only its logprobs are of use, without a gradient."""

    def __init__(self, policy: Policy):
        assert policy.adapter is not None, "without an adapter there is no way back"
        vars(self).update(vars(policy))

    def logprobs(
        self, micro_batch: MicroBatch, *, temperature: float, entropy: bool = True, branch: Branch | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """As the policy's, which computes as before afterwards."""
        assert self.adapter is not None
        with self.adapter.reference():
            return super().logprobs(micro_batch, temperature=temperature, entropy=entropy, branch=branch)


def _wide(logits: Tensor) -> Tensor:
    """In float32 or wider."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
