"""Split sampling evenly over ranks. A call's random stream does not depend on its rank."""

from collections.abc import Sequence
from dataclasses import replace

from cohort.rollout.engines.base import SampleRequest


def split_requests(requests: Sequence[SampleRequest], world_size: int) -> list[list[SampleRequest]]:
    """Return one list of requests per rank; their numbers of calls differ by at most one.

    Shares are consecutive: few contexts are prefilled on two ranks, and the ranks' completions only need concatenation.
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
