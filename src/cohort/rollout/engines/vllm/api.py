"""Client of a vLLM server's control endpoints, one method each.

Stateless and without retries. The endpoints for weights, pausing and caches require a server started with
VLLM_SERVER_DEV_MODE=1 (https://docs.vllm.ai/en/latest/training/).
"""

import re
from typing import Any, cast

from cohort.rollout.engines.servers.http_api import ServerApi


class VllmApi(ServerApi):
    """The control endpoints of one server. Thread-safe."""

    def version(self) -> str:
        """Return vLLM's version, such as 0.32.0."""
        return cast(str, self._field("/version", self._request("GET", "/version"), "version", str))

    def world_size(self) -> int:
        """Return the number of workers (GPUs), all of which need the weights."""
        return cast(int, self._field("/get_world_size", self._request("GET", "/get_world_size"), "world_size", int))

    def pause(self) -> None:
        """Pause all requests until `resume`. Their KV cache is dropped."""
        self._request("POST", "/pause", params={"mode": "keep"})

    def resume(self) -> None:
        """Resume paused requests."""
        self._request("POST", "/resume")

    def init_weight_transfer(self, info: dict[str, Any]) -> None:
        """Have the server's workers rendezvous with the trainer."""
        self._request("POST", "/init_weight_transfer_engine", json={"init_info": info})

    def start_weight_update(self) -> None:
        """Begin an update. Fails while another one is in progress."""
        self._request("POST", "/start_weight_update")

    def update_weights(self, info: dict[str, Any]) -> None:
        """Run one step of an update on all workers."""
        self._request("POST", "/update_weights", json={"update_info": info})

    def finish_weight_update(self, version: int | None) -> None:
        """Finish an update. New tokens are labeled `version`; None keeps the label."""
        name = None if version is None else str(version)
        self._request("POST", "/finish_weight_update", json={"weight_version": name})

    def set_weight_version(self, version: int) -> None:
        """Label new tokens `version` without a weight update."""
        self._request("POST", "/update_weight_version", json={"new_version": str(version)})

    def weight_version(self) -> int | None:
        """Return the version of the current weights; None for those that the server loaded at startup."""
        said = self._field("/weight_info", self._request("GET", "/weight_info"), "weight_version", str)
        return int(said) if re.fullmatch(r"\d+", said) else None

    def reset_prefix_cache(self) -> None:
        """Drop the prefix cache. Running requests recompute their KV cache."""
        params = {"reset_running_requests": "true"}
        answer = self._request("POST", "/reset_prefix_cache", params=params)
        if not self._field("/reset_prefix_cache", answer, "success", bool):
            raise self._error("/reset_prefix_cache", "keys and values are still in use")

    def sleep(self, level: int) -> None:
        """Free GPU memory. Level 1 offloads weights to host memory; level 2 discards them. Requests are kept."""
        self._request("POST", "/sleep", params={"level": level, "mode": "keep"})

    def release_kv_cache(self) -> None:
        """Free the KV cache and what PyTorch caches, but no weights. Requests must be paused."""
        self._request("POST", "/release_kv_cache_memory")
        self._request("POST", "/collective_rpc", json={"method": "free_cached_memory"})  # as `sleep` does

    def wake_up(self, tags: list[str]) -> None:
        """Reallocate memory for "weights" or "kv_cache", all of which must be asleep.

        The contents of weights are undefined after level 2, and always those of the KV cache.
        """
        self._request("POST", "/wake_up", params={"tags": tags})

    def model_names(self) -> list[str]:
        """Return the model names that requests may use."""
        models = self._field("/v1/models", self._request("GET", "/v1/models"), "data", list)
        return [str(model.get("id")) for model in models]

    def load_lora_adapter(self, name: str, path: str) -> None:
        """Load an adapter's folder as `name`, once. If `name` exists, also requests in flight continue with it."""
        if name in self.model_names():
            # Not by the endpoint's `load_inplace`: vLLM 0.32 repeats it, and reads the folder, at every token.
            self._request("POST", "/collective_rpc", json={"method": "replace_adapter", "kwargs": {"folder": path}})
        else:
            self._request("POST", "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})
