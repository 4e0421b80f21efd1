"""A critic: the body of a causal language model, and what it makes of the future instead of the next token.

T loss tokens, H hidden.
"""

from typing import Any

import torch
from torch import Tensor, nn

from cohort.batch import MicroBatch
from cohort.policy.logprobs import TokenLoss
from cohort.policy.policy import Policy
from cohort.policy.skeleton import VALUE_HEAD
from cohort.policy.stream import Branch


class Critic(Policy):
    """Has a value where a policy has a logprob: at the position that predicts a token, before that token is known.

    Layouts, shared prompts, streams and sharding are a policy's. It has no vocabulary to sample from.
    """

    @staticmethod
    def adapt(model: Any) -> None:
        """Put a linear layer H -> 1 in the place of the language-model head. It begins at 0, and so do all values."""
        weight = model.get_input_embeddings().weight
        hidden_size = model.config.get_text_config().hidden_size
        model.set_output_embeddings(nn.Identity())
        # an untied head would be saved beside the embedding otherwise, or looked for
        model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = False
        model.all_tied_weights_keys = {}
        head = nn.Linear(hidden_size, 1, dtype=weight.dtype, device=weight.device)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        model.add_module(VALUE_HEAD, head)

    def values(self, micro_batch: MicroBatch, *, branch: Branch | None = None) -> Tensor:
        """What the critic expects of the rest of the completion, before each loss token; [T], carries a gradient.

        Args:
            micro_batch: on the critic's device.
            branch: of the prompt that all sequences of the micro-batch go on from, where it was computed before.
        """
        return self.logprobs(micro_batch, temperature=1.0, entropy=False, branch=branch)[0]

    def _logprobs(
        self, micro_batch: MicroBatch, temperature: float, entropy: bool, branch: Branch | None
    ) -> tuple[Tensor, Tensor | None]:
        """The values [T], float32 or wider; a temperature and an entropy are of distributions over tokens."""
        with self.autocast():
            hidden_TH = self._outputs(micro_batch, branch)
        head = getattr(self.model, VALUE_HEAD)
        wide = torch.promote_types(hidden_TH.dtype, torch.float32)
        return nn.functional.linear(hidden_TH.to(wide), head.weight.to(wide), head.bias.to(wide)).squeeze(-1), None

    def _loss(
        self, micro_batch: MicroBatch, token_loss: TokenLoss, temperature: float, branch: Branch | None
    ) -> tuple[Tensor, Tensor]:
        raise AssertionError("a head of one row has no gradient that is worth making in forward")

    def _module(self) -> tuple[Any, Any]:
        return self.model.base_model, lambda out: out.last_hidden_state
