"""`train.micro_batch_tokens: auto`: the most tokens that fit into memory, found by trying."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cohort.engine.loss import PerTokenLoss
from cohort.engine.train_engine import TrainEngine
from cohort.models import Policy
from cohort.records import TrainSequence

_CLOSE_ENOUGH = 1.1  # the search ends when what fits and what does not differ by less than this factor
_MARGIN = 0.9  # of what fits: a fresh allocator fits a little more than one that has been at work for hours
_HOST_SHARE = 0.5  # of the host's free memory, which the system would rather overbook than refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestShare:
    """The most that a rank computes of a step: the run's longest prompt and longest completions, in groups."""

    prompt_tokens: int
    completion_tokens: int
    num_generations: int  # completions of a prompt
    num_sequences: int  # completions of the rank

    @property
    def sequence_tokens(self) -> int:
        """Input tokens of the prompt and one completion, whose last token is no input."""
        return self.prompt_tokens + self.completion_tokens - 1


def find_budget(
    engine: TrainEngine,
    per_token_loss: PerTokenLoss,
    *,
    share: LargestShare,
    most_tokens: int,
    reserved_bytes: int = 0,
) -> int:
    """The most tokens of a micro-batch that fit on every rank; every rank calls this and gets the same.

    Forward and backward passes are tried on groups that nothing is learned from, whose completions share their prompts
    where those of the run do, with room kept for the optimizer's state. On a CPU, where memory does not run out but the
    process is killed, what a short pass keeps for its backward bounds the trials.

    Args:
        engine: before its first step. Its budget is what is found from here on.
        per_token_loss: of the run.
        share: trials are made of its groups.
        most_tokens: more there never is to compute at a time.
        reserved_bytes: that something else will take on this rank, and has not yet.
    """
    longest = share.sequence_tokens
    if engine.policy.device.type == "cpu":
        most_tokens = max(longest, min(most_tokens, _most_on_host(engine, per_token_loss, share)))
    most_tokens = int(engine.ranks.smallest(most_tokens))

    def fits(tokens: int) -> bool:
        return engine.fits(_trial(tokens, share, engine.policy), per_token_loss, reserved_bytes=reserved_bytes)

    engine.budget.tokens = _largest(fits, longest, most_tokens)
    return engine.budget.tokens


def _largest(fits: Callable[[int], bool], least: int, most: int) -> int:
    """The largest number from `least` to `most` that fits, less a margin; `least` is not tried."""
    if most <= least or fits(most):
        return most
    low, high = least, most
    while high / low > _CLOSE_ENOUGH:
        middle = round((low * high) ** 0.5)
        if fits(middle):
            low = middle
        else:
            high = middle
    return max(least, int(low * _MARGIN))


def _most_on_host(engine: TrainEngine, per_token_loss: PerTokenLoss, share: LargestShare) -> int:
    """How many tokens this process's share of the host's free memory has room for."""
    kept: dict[int, int] = {}
    longest = share.sequence_tokens
    weights = {p.data_ptr() for p in engine.policy.model.parameters()}  # there whatever the micro-batch

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        engine.fits(_trial(longest, share, engine.policy), per_token_loss)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return int(_HOST_SHARE * _free_host_bytes() / processes / (sum(kept.values()) / longest))


def _free_host_bytes() -> int:
    """Memory that this process may still take, by the system or by its control group."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            free = min(free, int(limit) - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, KeyError, ValueError):
        pass  # another system, or another version of control groups
    return max(free, 1)


def _trial(tokens: int, share: LargestShare, policy: Policy) -> tuple[TrainSequence, ...]:
    """Sequences of loss weight 0 that a micro-batch of this policy computes with `tokens` positions, or all there are.

    They are whole groups one after another, and a part of one at the end, whose last completion is as long as there is
    room for. A rest that is shorter than a prompt makes the prompt shorter.
    """
    per_prompt = share.num_generations if policy.shares_prompts else 1
    after = share.completion_tokens - 1  # inputs of a completion, which follow the prompt's
    sequences: list[TrainSequence] = []
    while tokens > 0 and len(sequences) < share.num_sequences:
        prompt = min(share.prompt_tokens, tokens)
        tokens -= prompt
        number = len(sequences)
        for _ in range(min(per_prompt, share.num_sequences - number)):
            inputs = min(after, tokens)
            tokens -= inputs
            sequences.append(_sequence(prompt, inputs, group=number, index=len(sequences)))
            if tokens == 0:
                break
    return tuple(sequences)


def _sequence(num_prompt: int, num_inputs: int, *, group: int, index: int) -> TrainSequence:
    """A prompt and a completion of `num_inputs` tokens and the one that they predict."""
    token_ids = np.arange(num_prompt + num_inputs + 1, dtype=np.int64) % 2
    return TrainSequence.single_turn(
        token_ids[:num_prompt], token_ids[num_prompt:], index=index, group=group, advantages=1.0, returns=1.0
    )
