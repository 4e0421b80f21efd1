"""The critic: the body of a causal language model with a value head.

T loss tokens, H hidden size.
"""

from typing import Any

import torch
from torch import Tensor, nn

from cohort.models.forward import PrefixState, find_body
from cohort.models.lm_head.logprobs import TokenLoss
from cohort.models.loading.meta_device import VALUE_HEAD
from cohort.models.policy import Policy
from cohort.packing.batch import MicroBatch


class Critic(Policy):
    """A value model. It returns a value where a policy returns a logprob: at the position that predicts a token.

    Layouts, shared prefixes and sharding are inherited from the policy. It cannot be sampled from.
    """

    @staticmethod
    def replace_head(model: Any) -> None:
        """Replace the language-model head by a zero-initialized linear layer H -> 1."""
        weight = model.get_input_embeddings().weight
        hidden_size = model.config.get_text_config().hidden_size
        model.set_output_embeddings(nn.Identity())
        # otherwise an untied head would be saved, or expected, next to the embedding
        model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = False
        model.all_tied_weights_keys = {}
        head = nn.Linear(hidden_size, 1, dtype=weight.dtype, device=weight.device)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        model.add_module(VALUE_HEAD, head)

    @property
    def multimodal(self) -> None:
        """A critic is saved alone."""

    def values(self, micro_batch: MicroBatch, *, prefix: PrefixState | None = None) -> Tensor:
        """Return the value of the state before each loss token, [T], with gradient.

        Args:
            micro_batch: micro-batch on the critic's device.
            prefix: computed prefix that all sequences of the micro-batch continue, if any.
        """
        return self.logprobs(micro_batch, temperature=1.0, entropy=False, prefix=prefix)[0]

    def _logprobs(
        self, micro_batch: MicroBatch, temperature: float, entropy: bool, prefix: PrefixState | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the values [T] in float32 or wider; temperature and entropy do not apply."""
        with self.autocast():
            hidden_TH = self._outputs(micro_batch, prefix)
        head = getattr(self.model, VALUE_HEAD)
        wide = torch.promote_types(hidden_TH.dtype, torch.float32)
        return nn.functional.linear(hidden_TH.to(wide), head.weight.to(wide), head.bias.to(wide)).squeeze(-1), None

    def _loss(
        self, micro_batch: MicroBatch, token_loss: TokenLoss, temperature: float, prefix: PrefixState | None
    ) -> tuple[Tensor, Tensor]:
        raise AssertionError("gradients in forward save nothing for a value head")

    def _module(self) -> tuple[Any, Any]:
        return find_body(self.model), lambda out: out.last_hidden_state
