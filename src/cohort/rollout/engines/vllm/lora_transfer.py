"""Send a LoRA adapter to vLLM servers, as a folder that they load."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from cohort.rollout.engines.servers.handles import ServerError
from cohort.rollout.engines.vllm.api import VllmApi
from cohort.rollout.engines.vllm.server import POLICY_NAME


class AdapterChannel:
    """Sends adapters to one server that was started with `ServerOptions.lora_rank`."""

    def __init__(self, api: VllmApi, *, keeps_base: bool = False):
        """Create a channel that closes `api` when it is closed.

        Args:
            api: endpoints of the server.
            keeps_base: whether the server keeps its base model, which never changes, on the GPU while it sleeps.
        """
        self._api = api
        self._keeps_base = keeps_base
        self._asleep = False

    def load(self, folder: Path, version: int) -> None:
        """Have the server sample with the adapter in `folder`, which it must see under the same path.

        Requests are paused while it loads, and continue with the new adapter.

        Raises:
            ServerError: it failed. Requests stay paused until an adapter is loaded.
        """
        self._api.pause()
        if self._asleep:
            # vLLM wakes nothing at all if one of these was not asleep
            self._api.wake_up(["kv_cache"] if self._keeps_base else ["weights", "kv_cache"])
            self._asleep = False
        self._api.load_lora_adapter(POLICY_NAME, str(folder.absolute()))
        self._api.set_weight_version(version)
        self._api.reset_prefix_cache()
        self._api.resume()

    def sleep(self) -> None:
        """Have a server that shares its GPU free its KV cache, and offload its base model, until the next adapter.

        Raises:
            ServerError: the server did not go to sleep.
        """
        if self._keeps_base:
            self._api.pause()
            self._api.release_kv_cache()
        else:
            self._api.sleep(1)
        self._asleep = True

    def close(self) -> None:
        """Close the connections."""
        self._api.close()


def send_adapter(
    channels: Sequence[AdapterChannel], version: int, *, save: Callable[[Path], object], folder: Path
) -> dict[AdapterChannel, ServerError]:
    """Write the adapter and have servers sample with it.

    Args:
        channels: channels to servers that see `folder` under the same path.
        version: policy version of the adapter; servers label the tokens they sample with it.
        save: writes the adapter as a folder; a collective if it is sharded.
        folder: folder for adapters; older versions in it are deleted.

    Returns:
        Errors by channel.
    """
    path = folder / f"version-{version}"
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
