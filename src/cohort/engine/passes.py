"""The passes of a step: micro-batches forward and backward, and prompts of streams, forward first and backward last."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from cohort.batch import MicroBatch
from cohort.engine.accumulation import Accumulation, attempt
from cohort.engine.balance import Balance
from cohort.engine.loss import AnyStepLoss, per_sequence
from cohort.engine.out_of_memory import TooLarge, too_large, too_large_prompt
from cohort.engine.totals import Totals
from cohort.engine.work import Piece, Sequences, Stream
from cohort.packing import collate, collate_part, collate_prompt
from cohort.policy import OpenPrompt, Policy
from cohort.records import TrainSequence
from cohort.staging import to_device


class Passes:
    """Adds the gradient of pieces and streams to the parameters', and keeps what comes out of them."""

    def __init__(self, loss: AnyStepLoss, accumulation: Accumulation, balance: Balance | None = None):
        """Of one way through a step's sequences.

        Args:
            loss: of their tokens.
            accumulation: of the gradients.
            balance: the loss of the routers, where there is one.
        """
        self.totals = Totals()
        self.outputs: dict[int, torch.Tensor] = {}  # sequence index -> [C], of the old model
        self._loss = loss
        self._policy = loss.policy
        self._accumulation = accumulation
        self._balance = balance
        self._prompt: OpenPrompt | None = None
        self._prompt_tokens = 0  # of the open prompt; 0 where that is nothing in particular
        self._prompt_loss: torch.Tensor | None = None  # of the routers, in the open prompt

    def compute(self, piece: Piece) -> TooLarge | None:
        """Add a piece's gradient.

        Args:
            piece: to compute; an empty one keeps step with the other ranks.

        Returns:
            what did not fit into memory; then this way through the step leads nowhere.
        """
        fits = self._attempt(
            lambda: self._micro_batch(piece.sequences, self._prompt if piece.in_stream else None),
            lambda nothing: nothing._micro_batch((), None),
        )
        return None if fits else too_large(num_positions(piece.sequences, self._policy), piece.sequences)

    def open(self, stream: Stream | None) -> TooLarge | None:
        """Forward of a stream's prompt, see `compute`; of nothing in particular where this rank has no stream."""
        fits = self._attempt(lambda: self._open(stream), lambda nothing: nothing._open(None))
        return None if fits else too_large_prompt(self._prompt_tokens)

    def close(self) -> TooLarge | None:
        """Backward of the open prompt, see `compute`."""

        def open_and_close(nothing: Passes) -> None:
            with self._accumulation.behind():
                nothing._open(None)
            nothing._close()

        return None if self._attempt(self._close, open_and_close) else too_large_prompt(self._prompt_tokens)

    def _attempt(self, compute: Callable[[], None], compute_nothing: Callable[["Passes"], None]) -> bool:
        """A pass; where it fails, the same without sequences, of which nothing is kept."""
        nothing = Passes(self._loss, self._accumulation, self._balance)
        return attempt(self._accumulation, compute, lambda: compute_nothing(nothing))

    def _open(self, stream: Stream | None) -> None:
        prompt = stream.prompt if stream else np.zeros(0, dtype=np.int64)
        num_tokens = self._prompt_tokens = len(prompt)
        self.totals.count(
            {
                "num_inputs": num_tokens,
                "num_positions": num_tokens,
                "num_prompt_inputs": num_tokens,
                "attention_pairs": num_tokens * (num_tokens + 1) // 2,
            }
        )
        num_completions = sum(map(len, stream.parts)) if stream else 0
        micro_batch = on_device(collate_prompt(prompt, num_completions=num_completions), self._policy)
        with self._routed(micro_batch) as losses:
            self._prompt = self._policy.open_prompt(micro_batch)
        self._prompt_loss = losses[0] * self._accumulation.scale if losses else None

    def _close(self) -> None:
        assert self._prompt is not None, "ranks open and close together"
        self._prompt.backward(self._prompt_loss)
        self._prompt = self._prompt_loss = None

    def _micro_batch(self, sequences: Sequences, prompt: OpenPrompt | None) -> None:
        """Forward and backward of some sequences, or of none: to stay in step with the other ranks."""
        branch = None if prompt is None else prompt.branch()
        share = self._policy.shares_prompts
        on_host = collate(sequences, share_prompts=share) if branch is None else collate_part(sequences)
        micro_batch = on_device(on_host, self._policy)
        with self._routed(micro_batch) as losses:
            out = self._loss(micro_batch, sequences, branch)
        loss = sum(losses, start=out.loss)
        if loss.requires_grad:
            (loss * self._accumulation.scale).backward()
        self.outputs |= per_sequence(out.outputs, sequences)
        self.totals.add(out.sums, largest=out.largest)
        if sequences:
            self.totals.count(_counts(on_host, sequences, self._policy))
        if prompt is not None and branch is not None:
            prompt.add(branch)

    def _routed(self, micro_batch: MicroBatch) -> AbstractContextManager[list[torch.Tensor]]:
        """The loss of the routers of what is computed inside, once that is done; nothing where there is none."""
        return nullcontext([]) if self._balance is None else self._balance.of(micro_batch)


def num_positions(sequences: Sequences, policy: Policy) -> int:
    """Of a micro-batch, as its budget counts them."""
    return policy.num_positions(collate(sequences, share_prompts=policy.shares_prompts)) if sequences else 0


def on_device(micro_batch: MicroBatch, policy: Policy) -> MicroBatch:
    """A micro-batch where the policy computes, its real numbers in float32 or wider."""
    return to_device(micro_batch, policy.device, torch.promote_types(policy.dtype, torch.float32))


def _counts(micro_batch: MicroBatch, sequences: Sequence[TrainSequence], policy: Policy) -> dict[str, int]:
    """What a micro-batch on the host comes to."""
    num_inputs = len(micro_batch.input_ids)
    num_prompt_inputs = num_inputs - sum(len(s.token_ids) - 1 - s.shared_prefix_tokens for s in sequences)
    return {
        "num_inputs": num_inputs,
        "num_positions": policy.num_positions(micro_batch),
        "num_unshared_inputs": sum(len(s.token_ids) - 1 for s in sequences),
        "num_prompt_inputs": num_prompt_inputs,  # of a part of a stream: none
        # a token sees all of its sequence up to itself, wherever that is in the row
        "attention_pairs": num_inputs + int(micro_batch.position_ids.sum()),
    }
