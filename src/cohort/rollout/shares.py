"""Sampling spread over ranks: each takes an equal share of the completions. A completion's random stream is its own, so
who samples it does not change it.
"""

from collections.abc import Sequence
from dataclasses import replace

from cohort.rollout.base import Sampled, SampleRequest


def split_requests(requests: Sequence[SampleRequest], world_size: int) -> list[list[SampleRequest]]:
    """One list of requests per rank, whose numbers of completions differ by one at most.

    Consecutive completions stay together, so that few prompts are computed on two ranks. What a prompt holds besides
    its tokens stays behind: a sampler does not look at it.
    """
    total = sum(len(request.indices) for request in requests)
    bounds = [total * rank // world_size for rank in range(world_size + 1)]
    shares: list[list[SampleRequest]] = [[] for _ in range(world_size)]
    rank = position = 0
    for request in requests:
        bare = replace(request.prompt, content="", columns={})
        left = request.indices
        while left:
            while position == bounds[rank + 1]:
                rank += 1
            taken = left[: bounds[rank + 1] - position]
            shares[rank].append(SampleRequest(prompt=bare, indices=taken))
            position += len(taken)
            left = left[len(taken) :]
    return shares


def merge_shares(
    requests: Sequence[SampleRequest], shares: Sequence[Sequence[tuple[Sampled, ...]]]
) -> list[tuple[Sampled, ...]]:
    """The completions of each request, from what the ranks sampled of them, in the order of the ranks."""
    sampled = [completion for share in shares for part in share for completion in part]
    merged, start = [], 0
    for request in requests:
        merged.append(tuple(sampled[start : start + len(request.indices)]))
        start += len(request.indices)
    return merged
