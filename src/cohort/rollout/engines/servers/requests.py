"""What is asked of a server that samples, and of the client that asks.

C tokens of a completion.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

import numpy as np

from cohort.records import IntArray
from cohort.rollout.engines.base import CallKey, Sampled, SamplingParams
from cohort.rollout.engines.call_queue import WaitingCall
from cohort.rollout.engines.token_sampling import prompt_name, turn_name


class ServerError(RuntimeError):
    """A server did not do what it was asked. The message names the server, the endpoint and what came back."""


class BusyError(ServerError):
    """The server takes no more requests for the moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Completions of one context that are sampled together."""

    prompt_id: int  # of the first call, for messages
    token_ids: IntArray  # [K] the context
    num_completions: int
    sampling: SamplingParams
    seed: int  # completion i is sampled with seed + i

    @property
    def total_tokens(self) -> int:
        """Of the context and the longest completion."""
        return len(self.token_ids) + self.sampling.max_completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedGroup:
    """What one request has brought."""

    completions: tuple[Sampled, ...]  # [num_completions]
    policy_versions: tuple[int, ...]  # [num_completions] the oldest one among each completion's tokens


def requests_for(calls: Sequence[WaitingCall], *, max_num_seqs: int) -> list[tuple[GenerateRequest, list[WaitingCall]]]:
    """Join calls into requests, each with the calls that it answers.

    A request has calls with the same context, sampling parameters and consecutive seeds, as many as a server samples at
    a time. Greedy completions are all the same, and one is asked for.
    """
    joined: dict[object, list[WaitingCall]] = {}
    for call in calls:
        rollouts = None if call.sampling.temperature == 0 else replace(call.key, index=0)
        joined.setdefault((call.token_ids.tobytes(), call.sampling, rollouts), []).append(call)
    return [request for same in joined.values() for request in _requests_of(same, max_num_seqs)]


def _requests_of(calls: Sequence[WaitingCall], max_num_seqs: int) -> list[tuple[GenerateRequest, list[WaitingCall]]]:
    """The requests for calls that differ by the index at most."""
    first = calls[0]
    if first.sampling.temperature == 0:
        return [(_request(first, num_completions=1), list(calls))]
    parts: list[list[WaitingCall]] = []
    for call in sorted(calls, key=lambda call: call.key.index):
        if parts and call.key.index == parts[-1][-1].key.index + 1 and len(parts[-1]) < max_num_seqs:
            parts[-1].append(call)
        else:
            parts.append([call])
    return [(_request(part[0], num_completions=len(part)), part) for part in parts]


def _request(first: WaitingCall, *, num_completions: int) -> GenerateRequest:
    return GenerateRequest(
        prompt_id=first.key.prompt_id,
        token_ids=first.token_ids,
        num_completions=num_completions,
        sampling=first.sampling,
        seed=seed_of(first.key, first.sampling),
    )


def seed_of(key: CallKey, sampling: SamplingParams) -> int:
    """The seed of a call, below 2^63. Rollouts of a prompt have consecutive seeds, which are no other prompt's.

    The first seed is a multiple of the smallest power of two that suffices, and not of a larger one, since generators
    on the CPU see the lowest 32 bits of a seed alone.
    """
    total, index = (1, 0) if sampling.temperature == 0 else (sampling.num_generations, key.index)
    assert index < total, key
    name = (*prompt_name(key), *turn_name(key))
    hashed = int(np.random.SeedSequence(name).generate_state(1, np.uint64)[0]) >> 1
    return hashed - hashed % (1 << (total - 1).bit_length()) + index


class Client(Protocol):
    """Asks servers for completions, over whatever they speak. For one event loop."""

    async def __aenter__(self) -> Self:
        """Open what it needs."""
        ...

    async def __aexit__(self, *exception: object) -> None:
        """Close it."""
        ...

    async def healthy(self, url: str) -> bool:
        """Whether the server answers, and can sample."""
        ...

    async def max_model_len(self, url: str) -> int:
        """Most tokens of a prompt and its completion that the server takes.

        Raises:
            ServerError: the server does not say.
        """
        ...

    async def generate(self, url: str, request: GenerateRequest, *, allows: Callable[[int], bool]) -> GeneratedGroup:
        """The completions of a request, sampled by the server at `url`.

        Args:
            url: of the server.
            request: what to sample.
            allows: whether a token may be from this version of the policy; asked when the answer is there.

        Raises:
            ServerError: no answer, or a wrong one; a `BusyError` where the server only has no room.
            UserError: the server refuses the request, as any other would.
        """
        ...
