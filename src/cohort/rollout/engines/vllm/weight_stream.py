"""One stream of weights to several servers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from operator import methodcaller
from typing import Any

from torch import Tensor

from cohort.models import TensorSpec
from cohort.rollout.engines.servers.requests import ServerError
from cohort.rollout.engines.vllm.weight_transfer import WeightChannel

_Do = Callable[[WeightChannel], None]


def publish(
    channels: Sequence[WeightChannel],
    weights: Iterable[tuple[str, Tensor]],
    specs: Sequence[TensorSpec],
    version: int,
    handles: Mapping[str, Any] | None = None,
) -> dict[WeightChannel, ServerError]:
    """Send one stream of weights to several servers at the same time.

    The stream is consumed to its end whatever happens to servers: making it may be a collective of the training ranks.

    Args:
        channels: one for each server.
        weights: names and tensors as in `specs`, each tensor whole.
        specs: all that will come.
        version: of the weights.
        handles: of what the ranks lend, by GPU; None where they lend nothing.

    Returns:
        What went wrong, by channel; those that are not there serve the weights now.
    """
    failed: dict[WeightChannel, ServerError] = {}

    def at_once(channels: Sequence[WeightChannel], do: _Do) -> list[WeightChannel]:
        calls = {channel: threads.submit(do, channel) for channel in channels}
        wait(calls.values())
        return _those_that_work(channels, lambda channel: calls[channel].result(), failed)

    # several servers that hang are waited for, and given up, together: they cost one deadline
    with ThreadPoolExecutor(max(1, len(channels))) as threads:
        try:
            live = at_once(channels, methodcaller("begin", version, specs, handles))
            for name, tensor in weights:
                # in this thread, whose stream makes the tensor; nothing is waited for
                live = _those_that_work(live, methodcaller("post", name, tensor), failed)
                live = at_once(live, methodcaller("settle"))
            at_once(live, methodcaller("finish"))
        except BaseException:
            at_once(channels, methodcaller("abort"))  # of those that have begun and not finished
            raise
    return failed


def _those_that_work(
    channels: Sequence[WeightChannel], do: _Do, failed: dict[WeightChannel, ServerError]
) -> list[WeightChannel]:
    """Do it for each, and return those that it worked for."""
    well = []
    for channel in channels:
        try:
            do(channel)
            well.append(channel)
        except ServerError as error:
            failed[channel] = error
    return well
