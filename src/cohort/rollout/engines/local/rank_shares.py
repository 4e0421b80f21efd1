"""Split sampling evenly over ranks. A call's random stream does not depend on its rank."""

from collections.abc import Sequence
from dataclasses import replace

from cohort.rollout.engines.base import Sampled, SampleRequest


def split_requests(requests: Sequence[SampleRequest], world_size: int) -> list[list[SampleRequest]]:
    """Return one list of requests per rank; their numbers of calls differ by at most one.

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
    """Merge the completions sampled by each rank, in rank order, into one tuple per request."""
    sampled = [completion for share in shares for part in share for completion in part]
    merged, start = [], 0
    for request in requests:
        merged.append(tuple(sampled[start : start + len(request.keys)]))
        start += len(request.keys)
    return merged
