"""Send one stream of weights to several servers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from operator import methodcaller
from typing import Any

from torch import Tensor

from cohort.models import TensorSpec
from cohort.rollout.engines.servers.handles import ServerError
from cohort.rollout.engines.vllm.weight_channel import WeightChannel

_Call = Callable[[WeightChannel], None]


def send_to_servers(
    channels: Sequence[WeightChannel],
    weights: Iterable[tuple[str, Tensor]],
    specs: Sequence[TensorSpec],
    version: int,
    handles: Mapping[str, Any] | None = None,
) -> dict[WeightChannel, ServerError]:
    """Send one stream of weights to several servers simultaneously.

    The stream is consumed to its end even if servers fail: producing it may be a collective of the training ranks.

    Args:
        channels: one per server.
        weights: names and full (unsharded) tensors.
        specs: all tensors, in the order of `weights`.
        version: policy version of the weights.
        handles: CUDA IPC handles of the ranks' buffers, by GPU; None if they share no memory.

    Returns:
        Errors by channel; all other servers have the new weights.
    """
    failed: dict[WeightChannel, ServerError] = {}

    def call_all(channels: Sequence[WeightChannel], call: _Call) -> list[WeightChannel]:
        calls = {channel: threads.submit(call, channel) for channel in channels}
        wait(calls.values())
        return _call_each(channels, lambda channel: calls[channel].result(), failed)

    # in parallel, so that several hung servers cost one timeout
    with ThreadPoolExecutor(max(1, len(channels))) as threads:
        try:
            live = call_all(channels, methodcaller("begin", specs, handles))
            for name, tensor in weights:
                # in this thread, whose CUDA stream produces the tensor; does not block
                live = _call_each(live, methodcaller("post", name, tensor), failed)
                live = call_all(live, methodcaller("flush"))
            call_all(live, methodcaller("finish", version))
        except BaseException:
            call_all(channels, methodcaller("abort"))  # those that have begun and not finished
            raise
    return failed


def _call_each(
    channels: Sequence[WeightChannel], call: _Call, failed: dict[WeightChannel, ServerError]
) -> list[WeightChannel]:
    """Call each channel and return those that succeeded; add the others to `failed`."""
    succeeded = []
    for channel in channels:
        try:
            call(channel)
            succeeded.append(channel)
        except ServerError as error:
            failed[channel] = error
    return succeeded
