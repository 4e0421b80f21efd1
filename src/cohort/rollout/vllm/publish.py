"""One stream of weights to several servers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import methodcaller
from typing import Any

from torch import Tensor

from cohort.policy import TensorSpec
from cohort.rollout.vllm.api import ServerError
from cohort.rollout.vllm.transfer import WeightChannel

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
    live = _at_once(channels, methodcaller("begin", version, specs, handles), failed)
    try:
        for name, tensor in weights:
            live = _in_turn(live, methodcaller("post", name, tensor), failed)
            live = _in_turn(live, methodcaller("settle"), failed)
    except BaseException:
        for channel in live:
            channel.abort()
        raise
    _at_once(live, methodcaller("finish"), failed)
    return failed


def _at_once(
    channels: Sequence[WeightChannel], do: _Do, failed: dict[WeightChannel, ServerError]
) -> list[WeightChannel]:
    """Do it for all at the same time; those that it worked for."""
    if not channels:
        return []
    with ThreadPoolExecutor(len(channels)) as threads:
        calls = {channel: threads.submit(do, channel) for channel in channels}
    return _in_turn(channels, lambda channel: calls[channel].result(), failed)


def _in_turn(
    channels: Sequence[WeightChannel], do: _Do, failed: dict[WeightChannel, ServerError]
) -> list[WeightChannel]:
    """Do it for one after the other; those that it worked for."""
    well = []
    for channel in channels:
        try:
            do(channel)
            well.append(channel)
        except ServerError as error:
            failed[channel] = error
    return well
