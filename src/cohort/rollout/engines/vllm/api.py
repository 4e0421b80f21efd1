"""Client of a vLLM server's control endpoints, one method each.

Stateless and without retries. The endpoints for weights, pausing and caches require a server started with
VLLM_SERVER_DEV_MODE=1 (https://docs.vllm.ai/en/latest/training/).
"""

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import httpx2 as httpx

from cohort.errors import describe_error
from cohort.rollout.engines.servers.handles import ServerError
from cohort.rollout.engines.servers.secret import Secret, request_headers
from cohort.rollout.engines.vllm.server_proof import CONNECTED, check_server


class VllmApi:
    """The control endpoints of one server. Thread-safe."""

    def __init__(self, url: str, *, secret: Secret | None, timeout_s: float | None):
        """Create a client without connecting.

        Args:
            url: address of the server, such as http://127.0.0.1:8000.
            secret: sent with every request, after the server's proof if it is mutual; None for a server without one.
            timeout_s: maximum time per call; None to wait until the server exits or `close` is called.
        """
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._secret = secret
        # servers are on the local network: ignore proxies from the environment
        self._client = httpx.Client(
            base_url=self.url,
            headers=request_headers(secret),
            timeout=timeout_s,
            verify=self.url.startswith("https:"),  # loading certificates takes longer than most calls
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=0),  # a server closes a connection after some errors
        )
        self._sockets: set[socket.socket] = set()  # sockets of calls in progress
        self._closed = False
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the connections. Calls in progress in other threads fail at once."""
        with self._lock:
            self._closed = True
            for one in self._sockets:
                _shut_down(one)
        self._client.close()

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

    def _request(self, method: str, endpoint: str, **request: Any) -> Any:
        """Send a request and return the answer, parsed if it is JSON, else as text.

        Raises:
            ServerError: no answer in time, an error, or a process that is not the run's server.
        """
        try:
            with self._track_sockets() as trace:
                response = self._client.request(method, endpoint, extensions={"trace": trace}, **request)
        except httpx.TimeoutException as error:
            raise self._error(endpoint, f"no answer within {self.timeout_s:g} s") from error
        except httpx.HTTPError as error:
            raise self._error(endpoint, describe_error(error)) from error
        if response.status_code != 200:
            raise self._error(endpoint, f"HTTP {response.status_code}: {_error_text(response)}")
        try:
            return response.json()
        except ValueError:
            return response.text

    @contextmanager
    def _track_sockets(self) -> Iterator[Callable[[str, Any], None]]:
        """Yield a trace callback that registers a call's sockets, so that `close` can end it, and asks for proofs.

        Closing a socket does not wake a thread that reads from it; shutting it down does.
        """
        mine: list[socket.socket] = []

        def trace(event: str, info: Any) -> None:
            if event in (CONNECTED, "connection.start_tls.complete"):
                mine.append(info["return_value"].get_extra_info("socket"))
                with self._lock:
                    self._sockets.add(mine[-1])
                    if self._closed:
                        _shut_down(mine[-1])
            if event == CONNECTED and self._secret is not None and self._secret.mutual:
                check_server(info["return_value"], self.url, self._secret, timeout_s=self.timeout_s)

        try:
            yield trace
        finally:
            with self._lock:
                self._sockets.difference_update(mine)

    def _field(self, endpoint: str, answer: Any, name: str, kind: type) -> Any:
        value = answer.get(name) if isinstance(answer, dict) else None
        if not isinstance(value, kind):
            raise self._error(endpoint, f"no {name} in the answer {str(answer)[:200]!r}")
        return value

    def _error(self, endpoint: str, what: str) -> ServerError:
        return ServerError(f"{self.url}{endpoint}: {what}")


def _shut_down(one: socket.socket) -> None:
    with suppress(OSError):  # already closed, or replaced by a TLS socket
        one.shutdown(socket.SHUT_RDWR)


def _error_text(response: httpx.Response) -> str:
    """Return the first line of an error, without its JSON wrapping."""
    try:
        said = response.json()
        while isinstance(said, dict):
            said = next((said[key] for key in ("error", "message", "detail") if key in said), str(said))
    except ValueError:
        said = response.text
    lines = str(said).strip().splitlines()
    return lines[0][:500] if lines else "no explanation"
