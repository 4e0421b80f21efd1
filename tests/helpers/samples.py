"""Inputs of advantages and policy losses for tests that state numbers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from cohort.algorithms import AdvantageInputs
from cohort.packing.batch import LossInputs
from cohort.records import FinishReason, ModelCall, Prompt, ScoredGroup, Trajectory
from tiny import VOCAB_SIZE

NAN = float("nan")
# Of each sequence of a trajectory: whether it begins with the prompt, and the turns: new context and sampled tokens
History = Sequence[tuple[bool, Sequence[tuple[int, int]]]]


def answer(
    prompt: Prompt,
    token_ids: Sequence[int] | np.ndarray,
    *,
    logprobs: Sequence[float] | np.ndarray | None = None,
    finish: FinishReason = "stop",
    version: int = 0,
    text: str = "",
) -> Trajectory:
    """The trajectory of one call that answers a prompt; by default the sampler was sure of each token."""
    ids = np.array(token_ids, dtype=np.int64)
    call = ModelCall(
        context_ids=prompt.token_ids,
        token_ids=ids,
        sampling_logprobs=np.zeros(len(ids)) if logprobs is None else np.array(logprobs),
        finish_reason=finish,
        policy_version=version,
    )
    return Trajectory.single_turn(call, text=text)


def random_calls(prompt_ids: np.ndarray, history: History, rng: Any) -> tuple[ModelCall, ...]:
    """Model calls with this history and random tokens."""
    found: list[ModelCall] = []
    for begins_with_prompt, turns in history:
        past = prompt_ids if begins_with_prompt else rng.integers(2, VOCAB_SIZE, 1)
        for new, sampled in turns:
            call = ModelCall(
                context_ids=np.concatenate([past, rng.integers(2, VOCAB_SIZE, new)]),
                token_ids=rng.integers(2, VOCAB_SIZE, sampled),
                sampling_logprobs=-4 * rng.random(sampled),
                finish_reason="stop",
                policy_version=0,
            )
            found.append(call)
            past = np.concatenate([call.context_ids, call.token_ids])
    return tuple(found)


def loss_inputs(
    ratios: Sequence[float],
    advantages: Sequence[float],
    *,
    ids: Sequence[int] | None = None,
    reference: Sequence[float] | None = None,
    dtype: torch.dtype = torch.float64,
) -> LossInputs:
    """Tokens of these ratios of the current to the old policy; the old one was sure of each, as was the sampler."""
    zeros = torch.zeros(len(ratios), dtype=dtype)
    return LossInputs(
        logprobs=torch.tensor(ratios, dtype=dtype).log().requires_grad_(),
        old_logprobs=zeros,
        sampling_logprobs=zeros,
        reference_logprobs=None if reference is None else torch.tensor(reference, dtype=dtype),
        entropy=torch.zeros(1),
        advantages=torch.tensor(advantages, dtype=dtype),
        trajectory_ids=torch.arange(len(ratios)) if ids is None else torch.tensor(ids),
    )


def advantage_inputs(rewards_PG: torch.Tensor, *, lengths: Sequence[Sequence[int]] | None = None) -> AdvantageInputs:
    """Completions with their reward at the last token, of one token each unless `lengths` says otherwise."""
    lengths_PG = torch.ones_like(rewards_PG, dtype=torch.int64) if lengths is None else torch.tensor(lengths)
    tokens_PGL = torch.zeros(*rewards_PG.shape, int(lengths_PG.max()), dtype=rewards_PG.dtype)
    return AdvantageInputs(
        rewards=rewards_PG,
        reward_parts=rewards_PG.unsqueeze(-1),
        reward_weights=torch.ones(1, dtype=rewards_PG.dtype),
        token_rewards=tokens_PGL.scatter(2, lengths_PG.unsqueeze(-1) - 1, rewards_PG.nan_to_num(0.0).unsqueeze(-1)),
        lengths=lengths_PG,
    )


def scored(
    rewards: Sequence[float],
    lengths: Sequence[int],
    finish: Sequence[FinishReason] | None = None,
    parts: dict[str, Sequence[float]] | None = None,
) -> ScoredGroup:
    """A group of completions of these rewards and lengths."""
    prompt = Prompt(id=0, epoch=0, content="q", token_ids=np.array([7, 8]), columns={})
    trajectories = tuple(
        answer(prompt, np.arange(n), logprobs=-np.ones(n), finish=reason)
        for n, reason in zip(lengths, finish or ["stop"] * len(lengths), strict=True)
    )
    by_name = {name: np.array(values) for name, values in (parts or {}).items()}
    return ScoredGroup(prompt=prompt, trajectories=trajectories, rewards=np.array(rewards), reward_parts=by_name)
