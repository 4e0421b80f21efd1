"""Requests to sampling servers, and the client protocol."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

import numpy as np

from cohort.records import IntArray, ModelCall
from cohort.rollout.engines.base import CallKey, SamplingParams
from cohort.rollout.engines.call_queue import PendingCall
from cohort.rollout.engines.token_sampling import prompt_seed, turn_seed


class ServerError(RuntimeError):
    """A request to a server failed. The message names the server, the endpoint and the response."""


class BusyError(ServerError):
    """The server accepts no more requests at the moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A request for several completions of one context."""

    prompt_id: int  # shown in messages
    token_ids: IntArray  # [K] the context
    num_completions: int
    sampling: SamplingParams
    seed: int  # completion i is sampled with seed + i
    urgent: bool  # a step waits for evaluation and parity checks; training samples may be for later steps

    @property
    def total_tokens(self) -> int:
        """Context tokens plus the maximum completion tokens."""
        return len(self.token_ids) + self.sampling.max_completion_tokens


def requests_for(calls: Sequence[PendingCall], *, max_num_seqs: int) -> list[tuple[GenerateRequest, list[PendingCall]]]:
    """Batch calls into requests, and return each request with its calls.

    The calls of a request have the same context and sampling parameters and consecutive seeds, and are at most
    `max_num_seqs`. Greedy calls with the same context share a single completion.
    """
    joined: dict[object, list[PendingCall]] = {}
    for call in calls:
        group = None if call.sampling.temperature == 0 else replace(call.key, index=0)
        joined.setdefault((call.token_ids.tobytes(), call.sampling, group), []).append(call)
    return [request for same in joined.values() for request in _requests_of(same, max_num_seqs)]


def _requests_of(calls: Sequence[PendingCall], max_num_seqs: int) -> list[tuple[GenerateRequest, list[PendingCall]]]:
    """Return the requests for calls that differ only in their index."""
    first = calls[0]
    if first.sampling.temperature == 0:
        return [(_request(first, num_completions=1), list(calls))]
    parts: list[list[PendingCall]] = []
    for call in sorted(calls, key=lambda call: call.key.index):
        if parts and call.key.index == parts[-1][-1].key.index + 1 and len(parts[-1]) < max_num_seqs:
            parts[-1].append(call)
        else:
            parts.append([call])
    return [(_request(part[0], num_completions=len(part)), part) for part in parts]


def _request(first: PendingCall, *, num_completions: int) -> GenerateRequest:
    return GenerateRequest(
        prompt_id=first.key.prompt_id,
        token_ids=first.token_ids,
        num_completions=num_completions,
        sampling=first.sampling,
        seed=call_seed(first.key, first.sampling),
        urgent=first.key.purpose != "train",
    )


def call_seed(key: CallKey, sampling: SamplingParams) -> int:
    """Return the random seed of a call, below 2^63. The trajectories of a group have consecutive seeds.

    The first seed is a multiple of the smallest power of two that keeps prompts apart. A larger one would waste bits:
    generators on the CPU only use the lowest 32.
    """
    total, index = (1, 0) if sampling.temperature == 0 else (sampling.num_generations, key.index)
    assert index < total, key
    name = (*prompt_seed(key), *turn_seed(key))
    hashed = int(np.random.SeedSequence(name).generate_state(1, np.uint64)[0]) >> 1
    return hashed - hashed % (1 << (total - 1).bit_length()) + index


class Client(Protocol):
    """Requests completions from servers over their protocol. For one event loop."""

    async def __aenter__(self) -> Self:
        """Open the client."""
        ...

    async def __aexit__(self, *exception: object) -> None:
        """Close the client."""
        ...

    async def healthy(self, url: str) -> bool:
        """Whether the server answers and can sample."""
        ...

    async def max_model_len(self, url: str) -> int:
        """Return the server's maximum tokens of prompt and completion.

        Raises:
            ServerError: the server does not report it.
        """
        ...

    async def generate(self, url: str, request: GenerateRequest, *, allows: Callable[[int], bool]) -> list[ModelCall]:
        """Sample the completions of a request and return them in order of their seeds.

        Args:
            url: address of the server.
            request: what to sample.
            allows: whether tokens of a policy version are acceptable; called when the answer arrives.

        Raises:
            ServerError: no answer, or an invalid one; a `BusyError` if the server has no room.
            UserError: the server rejects the request, and any other server would too.
        """
        ...
