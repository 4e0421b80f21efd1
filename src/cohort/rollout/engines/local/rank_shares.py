"""Split sampling over ranks in equal shares. A call's random stream is its own, so its rank does not change it."""

from collections.abc import Sequence
from dataclasses import replace

from cohort.rollout.engines.base import Sampled, SampleRequest


def split_requests(requests: Sequence[SampleRequest], world_size: int) -> list[list[SampleRequest]]:
    """Return one list of requests per rank; their numbers of calls differ by one at most.

    Consecutive calls stay together, so that few contexts are prefilled on two ranks.
    """
    total = sum(len(request.keys) for request in requests)
    bounds = [total * rank // world_size for rank in range(world_size + 1)]
    shares: list[list[SampleRequest]] = [[] for _ in range(world_size)]
    rank = position = 0
    for request in requests:
        left = request.keys
        while left:
            while position == bounds[rank + 1]:
                rank += 1
            taken = left[: bounds[rank + 1] - position]
            shares[rank].append(replace(request, keys=taken))
            position += len(taken)
            left = left[len(taken) :]
    return shares


def merge_shares(
    requests: Sequence[SampleRequest], shares: Sequence[Sequence[tuple[Sampled, ...]]]
) -> list[tuple[Sampled, ...]]:
    """Return the completions of each request from what the ranks sampled of them, in the order of the ranks."""
    sampled = [completion for share in shares for part in share for completion in part]
    merged, start = [], 0
    for request in requests:
        merged.append(tuple(sampled[start : start + len(request.keys)]))
        start += len(request.keys)
    return merged
