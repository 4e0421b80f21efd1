"""Find the largest token budget that fits into memory, for `train.micro_batch_tokens: auto`."""

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cohort.learner.loss import PerTokenLoss
from cohort.learner.train_engine import TrainEngine
from cohort.models import Policy
from cohort.processes.this_process import available_memory_bytes
from cohort.records import TrainSequence

_RATIO = 1.1  # the search ends when the smallest budget that fails is at most this times the largest that fits
_MARGIN = 0.9  # of the largest that fits: memory becomes fragmented over time
_HOST_SHARE = 0.5  # of the host's free memory: systems overcommit memory instead of failing an allocation


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstCaseShard:
    """The largest shard of a step that a rank can get: groups of the longest prompt and the longest completions."""

    prompt_tokens: int
    completion_tokens: int
    num_generations: int  # completions per prompt
    num_sequences: int  # completions of this rank

    @property
    def sequence_tokens(self) -> int:
        """Input tokens of the prompt and one completion; the last token is not an input."""
        return self.prompt_tokens + self.completion_tokens - 1


def find_budget(
    engine: TrainEngine,
    per_token_loss: PerTokenLoss,
    *,
    shard: WorstCaseShard,
    max_tokens: int,
    reserved_bytes: int = 0,
) -> int:
    """Find the largest token budget that fits on every rank, and set it. Every rank calls this and gets the same.

    Forward and backward passes are tried on groups with loss weight 0, sharing prompts as in training, with memory
    reserved for the optimizer's state. On a CPU the process would be killed instead of getting an error, so the trials
    are bounded by an estimate from the activations of a short pass.

    Args:
        engine: before its first step.
        per_token_loss: loss of the run.
        shard: the trials consist of its groups.
        max_tokens: upper bound: a micro-batch never needs more tokens.
        reserved_bytes: memory to leave free on this rank for something that is not allocated yet.
    """
    longest = shard.sequence_tokens
    if engine.policy.device.type == "cpu":
        max_tokens = max(longest, min(max_tokens, _most_on_host(engine, per_token_loss, shard)))
    max_tokens = int(engine.ranks.all_reduce_min(max_tokens))

    def fits(tokens: int) -> bool:
        return engine.fits(_trial(tokens, shard, engine.policy), per_token_loss, reserved_bytes=reserved_bytes)

    engine.budget.tokens = _largest(fits, longest, max_tokens)
    return engine.budget.tokens


def _largest(fits: Callable[[int], bool], least: int, most: int) -> int:
    """Return the largest number from `least` to `most` that fits, minus a margin; `least` is not tried."""
    if most <= least or fits(most):
        return most
    low, high = least, most
    while high / low > _RATIO:
        middle = round((low * high) ** 0.5)
        if fits(middle):
            low = middle
        else:
            high = middle
    return max(least, int(low * _MARGIN))


def _most_on_host(engine: TrainEngine, per_token_loss: PerTokenLoss, shard: WorstCaseShard) -> int:
    """Estimate how many tokens fit into this process's share of the host's free memory."""
    kept: dict[int, int] = {}
    longest = shard.sequence_tokens
    weights = {p.data_ptr() for p in engine.policy.model.parameters()}  # allocated in any case

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        engine.fits(_trial(longest, shard, engine.policy), per_token_loss)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return int(_HOST_SHARE * available_memory_bytes() / processes / (sum(kept.values()) / longest))


def _trial(tokens: int, shard: WorstCaseShard, policy: Policy) -> tuple[TrainSequence, ...]:
    """Make sequences of loss weight 0 for a micro-batch of `tokens` positions, or of all sequences if they have fewer.

    They are whole groups and, at the end, part of a group, whose last completion or prompt is cut to fit.
    """
    per_prompt = shard.num_generations if policy.shares_prompts else 1
    completion_inputs = shard.completion_tokens - 1
    sequences: list[TrainSequence] = []
    while tokens > 0 and len(sequences) < shard.num_sequences:
        prompt = min(shard.prompt_tokens, tokens)
        tokens -= prompt
        number = len(sequences)
        for _ in range(min(per_prompt, shard.num_sequences - number)):
            inputs = min(completion_inputs, tokens)
            tokens -= inputs
            sequences.append(_sequence(prompt, inputs, group=number, index=len(sequences)))
            if tokens == 0:
                break
    return tuple(sequences)


def _sequence(num_prompt: int, num_inputs: int, *, group: int, index: int) -> TrainSequence:
    """Make a sequence of a prompt and a completion with `num_inputs` inputs and one token more."""
    token_ids = np.arange(num_prompt + num_inputs + 1, dtype=np.int64) % 2
    return TrainSequence.single_turn(
        token_ids[:num_prompt], token_ids[num_prompt:], index=index, group=group, advantages=1.0, returns=1.0
    )
