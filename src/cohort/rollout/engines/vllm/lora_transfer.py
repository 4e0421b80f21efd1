"""Handing a LoRA adapter to vLLM servers: only the adapter travels, as a folder that they read."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from cohort.rollout.engines.servers.requests import ServerError
from cohort.rollout.engines.vllm.api import VllmApi
from cohort.rollout.engines.vllm.server import POLICY_NAME


class AdapterChannel:
    """The way of adapters to one server, which was started with `ServerOptions.lora_rank`."""

    def __init__(self, api: VllmApi):
        """Use `api`, which is closed with the channel."""
        self._api = api
        self._asleep = False

    def load(self, folder: Path, version: int) -> None:
        """Have the server sample with the adapter in `folder`, a path that it sees too.

        What it samples is held while it loads, and goes on with the new adapter.

        Raises:
            ServerError: it did not. It keeps holding what it samples until one is loaded: it has lost the adapter
                before, and its engine would die of the next token.
        """
        self._api.pause()
        if self._asleep:
            self._api.wake_up(["weights", "kv_cache"])
            self._asleep = False
        self._api.load_lora_adapter(POLICY_NAME, str(folder.absolute()))
        self._api.set_weight_version(version)
        self._api.reset_prefix_cache()
        self._api.resume()

    def sleep(self) -> None:
        """Have a server that shares its GPU move its weights to host memory and drop its cache until the next adapter.

        Raises:
            ServerError: it did not.
        """
        self._api.sleep(1)
        self._asleep = True

    def close(self) -> None:
        """Close the connections."""
        self._api.close()


def publish_adapter(
    channels: Sequence[AdapterChannel], version: int, *, save: Callable[[Path], object], folder: Path
) -> dict[AdapterChannel, ServerError]:
    """Write the adapter, and have servers sample with it.

    Args:
        channels: of servers that see `folder` under the same path.
        version: of the adapter; tokens that are sampled with it will say so.
        save: writes the adapter as a folder; of sharded ones all ranks take part.
        folder: of the run's adapters; the one of this version is left in it.

    Returns:
        What went wrong, by channel.
    """
    path = folder / f"version-{version}"  # cached keys and values are told apart by path
    save(path)
    failed = {}
    for channel in channels:
        try:
            channel.load(path, version)
        except ServerError as error:
            failed[channel] = error
    for old in folder.glob("version-*"):
        if old != path:
            shutil.rmtree(old)
    return failed
