"""The endpoints of a vLLM server that a trainer needs besides generation, one method each.

Nothing is tried again and nothing is remembered here. The endpoints of weights, pauses and caches are there only where
the server runs with VLLM_SERVER_DEV_MODE=1 (https://docs.vllm.ai/en/latest/training/).
"""

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import httpx2 as httpx

from cohort.rollout.engines.servers.requests import ServerError


class VllmApi:
    """One server's endpoints. Any thread may call."""

    def __init__(self, url: str, *, timeout_s: float | None):
        """Nothing is sent yet.

        Args:
            url: such as http://127.0.0.1:8000.
            timeout_s: longest wait for one answer; None for as long as the server is there, or until `close`.
        """
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        # servers are on this machine or its network: a proxy of the environment would only be in the way
        self._client = httpx.Client(
            base_url=self.url,
            timeout=timeout_s,
            verify=self.url.startswith("https:"),  # loading certificates takes longer than most calls
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=0),  # a server closes a connection after some errors
        )
        self._sockets: set[socket.socket] = set()  # of the calls under way
        self._closed = False
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the connections. Calls that are under way in other threads fail at once."""
        with self._lock:
            self._closed = True
            for one in self._sockets:
                _shut_down(one)
        self._client.close()

    def version(self) -> str:
        """Of vLLM, such as 0.32.0."""
        return cast(str, self._field("/version", self._ask("GET", "/version"), "version", str))

    def world_size(self) -> int:
        """Its workers, which are its GPUs: the weights have to reach each of them."""
        return cast(int, self._field("/get_world_size", self._ask("GET", "/get_world_size"), "world_size", int))

    def pause(self) -> None:
        """Hold all requests where they are; they go on after `resume`. Keys and values that were cached are dropped."""
        self._ask("POST", "/pause", params={"mode": "keep"})

    def resume(self) -> None:
        """Go on with the requests that are held."""
        self._ask("POST", "/resume")

    def init_weight_transfer(self, info: dict[str, Any]) -> None:
        """Have the server's workers meet the trainer, as `info` says."""
        self._ask("POST", "/init_weight_transfer_engine", json={"init_info": info})

    def start_weight_update(self) -> None:
        """Begin an update; refused while one has begun and is neither finished nor failed."""
        self._ask("POST", "/start_weight_update")

    def update_weights(self, info: dict[str, Any]) -> None:
        """One step of an update that has begun; the answer comes once all workers have done it."""
        self._ask("POST", "/update_weights", json={"update_info": info})

    def finish_weight_update(self, version: int | None) -> None:
        """End an update. Tokens sampled from now on are told to be of `version`; None leaves that as it is."""
        name = None if version is None else str(version)
        self._ask("POST", "/finish_weight_update", json={"weight_version": name})

    def set_weight_version(self, version: int) -> None:
        """Tell tokens sampled from now on to be of `version`, without an update of weights."""
        self._ask("POST", "/update_weight_version", json={"new_version": str(version)})

    def weight_version(self) -> int | None:
        """The version of the weights that sample; None for those of the files that the server was started with."""
        said = self._field("/weight_info", self._ask("GET", "/weight_info"), "weight_version", str)
        return int(said) if re.fullmatch(r"\d+", said) else None

    def reset_prefix_cache(self) -> None:
        """Drop the prefix cache. Requests under way recompute their keys and values."""
        params = {"reset_running_requests": "true"}
        answer = self._ask("POST", "/reset_prefix_cache", params=params)
        if not self._field("/reset_prefix_cache", answer, "success", bool):
            raise self._error("/reset_prefix_cache", "keys and values are still in use")

    def sleep(self, level: int) -> None:
        """Free GPU memory: at level 1 weights go to host memory, at level 2 they are dropped. Requests are kept."""
        self._ask("POST", "/sleep", params={"level": level, "mode": "keep"})

    def wake_up(self, tags: list[str]) -> None:
        """Take memory again for "weights" or "kv_cache"; what it holds after level 2 is undefined."""
        self._ask("POST", "/wake_up", params={"tags": tags})

    def model_names(self) -> list[str]:
        """What requests may give as `model`."""
        models = self._field("/v1/models", self._ask("GET", "/v1/models"), "data", list)
        return [str(model.get("id")) for model in models]

    def load_lora_adapter(self, name: str, path: str) -> None:
        """Load an adapter's folder as `name`, in the place of the one that has this name."""
        self._ask("POST", "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, "load_inplace": True})

    def _ask(self, method: str, endpoint: str, **request: Any) -> Any:
        """The answer: an object where it is JSON, its text otherwise.

        Raises:
            ServerError: the server did not answer in time, or with an error.
        """
        try:
            with self._watched() as trace:
                response = self._client.request(method, endpoint, extensions={"trace": trace}, **request)
        except httpx.TimeoutException as error:
            raise self._error(endpoint, f"no answer within {self.timeout_s:g} s") from error
        except httpx.HTTPError as error:
            raise self._error(endpoint, f"{type(error).__name__}: {error}") from error
        if response.status_code != 200:
            raise self._error(endpoint, f"HTTP {response.status_code}: {_said(response)}")
        try:
            return response.json()
        except ValueError:
            return response.text

    @contextmanager
    def _watched(self) -> Iterator[Callable[[str, Any], None]]:
        """What to tell of a call's connections, so that `close` can end it.

        Closing a socket leaves a thread that reads from it where it is, with the socket; a shutdown wakes it.
        """
        mine: list[socket.socket] = []

        def trace(event: str, info: Any) -> None:
            if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
                mine.append(info["return_value"].get_extra_info("socket"))
                with self._lock:
                    self._sockets.add(mine[-1])
                    if self._closed:
                        _shut_down(mine[-1])

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
    with suppress(OSError):  # it is closed, or TLS has taken its place
        one.shutdown(socket.SHUT_RDWR)


def _said(response: httpx.Response) -> str:
    """The first line of an error, without the JSON around it."""
    try:
        said = response.json()
        while isinstance(said, dict):
            said = next((said[key] for key in ("error", "message", "detail") if key in said), str(said))
    except ValueError:
        said = response.text
    lines = str(said).strip().splitlines()
    return lines[0][:500] if lines else "no explanation"
