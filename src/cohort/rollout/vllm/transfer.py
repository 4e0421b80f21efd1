"""Handing the trainer's weights to vLLM servers: the trainer's end. The servers' is in `worker/`.

A channel and its server's workers form a process group of their own, gloo on CPU and NCCL on GPUs, with the trainer as
rank 0. An update is declared (names, shapes, dtypes), sent and committed; whatever goes wrong before the commit leaves
the old weights serving, and the next update meets again in a new group. Where trainer and server share a GPU, the
server reads the trainer's memory itself (CUDA IPC).
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from cohort.policy.export import TensorSpec
from cohort.rollout.vllm.api import ServerError, VllmApi

_GIVE_UP_TIMEOUT_S = 10.0  # for each call that puts a server right again
_REASON_TIMEOUT_S = 2.0
_SHARED_BYTES = 256 << 20  # of tensors that are shared in one call


class WeightChannel:
    """The way of the weights to one server. One thread calls; every failure is a `ServerError` and ends the update."""

    def __init__(self, api: VllmApi, *, device: torch.device, num_workers: int, timeout_s: float, sleeps: bool = False):
        """Nothing is sent yet.

        Args:
            api: of the server.
            device: of the tensors on their way: the CPU of a server without GPU, this process's GPU otherwise.
            num_workers: of the server, which is its number of GPUs.
            timeout_s: longest wait for the server, in each call and for each tensor.
            sleeps: the server sleeps while the policy trains, and wakes to take the weights. Where `device` is a GPU,
                it is the server's only one too, and the server reads the weights where they are.
        """
        self.url = api.url
        self.version: int | None = None  # the last that was committed here
        self._api = VllmApi(api.url, timeout_s=timeout_s)
        # lasts as long as the stream does; a server that does not take the next tensor is seen by that
        self._long_api = VllmApi(api.url, timeout_s=None)
        self._device = device
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        on_gpu: Literal["nccl", "ipc"] = "ipc" if sleeps else "nccl"
        self._way: Literal["gloo", "nccl", "ipc"] = on_gpu if device.type == "cuda" else "gloo"
        self._sleeps = sleeps
        self._is_open = False
        self._group: Any = None
        self._update: _Update | None = None

    def open(self) -> None:
        """Meet the server's workers; `begin` does it where it was not done.

        Raises:
            ServerError: they do not come.
        """
        self._leave()
        try:
            self._group = None if self._way == "ipc" else self._meet()
            if self._way == "ipc":
                self._api.init_weight_transfer({"way": self._way, "timeout_s": self._timeout_s})
        except (RuntimeError, OSError) as error:
            self._leave()
            raise self._error(error, "meeting for weights") from error
        self._is_open = True

    def begin(self, version: int, specs: Sequence[TensorSpec]) -> None:
        """Begin an update. What the server samples is held where it is until `finish` or `abort`.

        A version that is not newer than the one that this channel committed last is not sent: all calls of this update
        do nothing then.

        Args:
            version: of the weights; tokens that are sampled with them will say so.
            specs: what will be sent, in this order.

        Raises:
            ServerError: the server cannot take it; `abort` was done.
        """
        assert self._update is None, "an update is under way"
        with self._giving_up("declaring weights"):
            serves = self._api.weight_version()
            if self.version is not None and self.version == serves and version <= self.version:
                self._update = _Update(version, iter(()), held=True)
                return
            if serves != self.version or not self._is_open:  # the server is another one than it was, or there is none
                self.version = None
                self.open()
            self._update = _Update(version, iter(specs))
            self._api.pause()
            if self._sleeps:
                self._api.wake_up(["weights"])
            try:
                self._api.start_weight_update()
            except ServerError:  # another trainer's update may have been left halfway
                self._discard()
                self._api.start_weight_update()
            self._api.update_weights({"step": "declare", "specs": [_wire(spec) for spec in specs]})
            if self._way != "ipc":
                self._update.received = _in_thread(self._long_api.update_weights, {"step": "receive"})

    def send(self, name: str, tensor: Tensor) -> None:
        """The next tensor of those that were declared, from any device; it is cast to the declared dtype.

        Raises:
            ServerError: the server is gone, or does not take it in time; `abort` was done.
        """
        self.post(name, tensor)
        self.settle()

    def post(self, name: str, tensor: Tensor) -> None:
        """As `send`, without waiting: `settle` has to follow before the next one."""
        update = self._update
        assert update is not None, "no update is under way"
        if update.held:
            return
        with self._giving_up(f"sending {name}"):
            spec = next(update.specs, None)
            if spec is None or spec.name != name or spec.shape != tuple(tensor.shape):
                raise ServerError(f"{self.url}: {name} {list(tensor.shape)} was to be sent, and declared was {spec}")
            tensor = tensor.detach().to(device=self._device, dtype=spec.dtype).contiguous()
            if self._way == "ipc":
                update.shared.append((name, tensor))
                return
            update.work = self._group.broadcast(tensor.view(-1).view(torch.uint8), 0)
            update.in_flight = tensor  # until it has arrived

    def settle(self) -> None:
        """Wait until what was posted has arrived.

        Raises:
            ServerError: as `send`.
        """
        update = self._update
        assert update is not None, "no update is under way"
        with self._giving_up("sending weights"):
            if sum(tensor.nbytes for _, tensor in update.shared) >= _SHARED_BYTES:
                self._share(update)
            if update.work is not None:
                self._arrive(update)

    def finish(self) -> None:
        """Have the server put the weights that were sent into its model, and go on sampling.

        Raises:
            ServerError: it did not. If it was over the commit, its process ends.
        """
        update = self._update
        assert update is not None, "no update is under way"
        if update.held:
            self._update = None
            return
        with self._giving_up("committing weights"):
            missing = next(update.specs, None)
            if missing is not None:
                raise ServerError(f"{self.url}: {missing.name} was declared and not sent; nothing was changed")
            if update.shared:
                self._share(update)
            if update.received is not None:
                update.received.result(self._timeout_s)
            self._api.finish_weight_update(update.version)
            if self._sleeps:
                self._api.wake_up(["kv_cache"])
            self._api.reset_prefix_cache()
            self._api.resume()
            self.version = update.version
            self._update = None

    def abort(self) -> None:
        """Give the update up, and have the server go on with the weights that it has. Never fails.

        Where the GPU is shared a server that has part of the weights ends, since it has no others.
        """
        update, self._update = self._update, None
        if update is None or update.held:
            return
        self._leave()  # a worker that waits for tensors sees that
        self._discard()
        with suppress(ServerError), self._brief_api() as api:
            api.resume()

    def sleep(self) -> None:
        """Have a server that shares this GPU drop its weights and its cache until the next update.

        Raises:
            ServerError: it did not.
        """
        self._api.sleep(2)
        self.version = None  # the same one has to be sent once more

    def close(self) -> None:
        """Leave the group, and close the connections."""
        self.abort()
        self._leave()
        self._api.close()
        self._long_api.close()

    def _meet(self) -> Any:
        """The process group, once all workers have come to the store."""
        host, timeout = _address_towards(self.url), timedelta(seconds=self._timeout_s)
        size = 1 + self._num_workers
        store = dist.TCPStore(host, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
        info = {"way": self._way, "timeout_s": self._timeout_s, "host": host, "port": store.port, "world_size": size}
        joined = _in_thread(self._api.init_weight_transfer, info)
        self._poll(lambda: store.check([f"here/{rank}" for rank in range(1, size)]), joined)
        options: Any
        if self._way == "gloo":
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = timeout
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            group: Any = dist.ProcessGroupGloo(store, 0, size, options)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            torch.cuda.set_device(self._device)
            group = dist.ProcessGroupNCCL(store, 0, size, options)
        joined.result(self._timeout_s)
        return group

    def _leave(self) -> None:
        group, self._group, self._is_open = self._group, None, False
        if group is not None and self._way == "nccl":
            group.abort()

    def _arrive(self, update: "_Update") -> None:
        assert update.work is not None and update.received is not None
        self._poll(update.work.is_completed, update.received)
        try:
            update.work.wait()
        except RuntimeError:
            with suppress(FutureTimeoutError):
                update.received.result(_REASON_TIMEOUT_S)  # why the server has left, if it says so
            raise
        update.work = update.in_flight = None

    def _share(self, update: "_Update") -> None:
        """Let the server read what has been gathered. Never run on a GPU yet."""
        torch.cuda.synchronize(self._device)
        shared = [share(name, tensor) for name, tensor in update.shared]
        self._api.update_weights({"step": "load", "shared": shared})
        update.shared.clear()
        torch.cuda.ipc_collect()

    def _poll(self, done: Callable[[], bool], call: "Future[None]") -> None:
        """Until it is done, the server's call has failed, or time is up."""
        deadline, pause_s = time.monotonic() + self._timeout_s, 5e-5
        while not done():
            if call.done():
                call.result()
                if not done():
                    raise ServerError(f"{self.url}: the server ended its part too early")
                return
            if time.monotonic() > deadline:
                raise ServerError(f"{self.url}: the server's workers did not answer within {self._timeout_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1e-3)

    def _discard(self) -> None:
        """Have the server forget an update that came halfway, if there is one."""
        with self._brief_api() as api:
            with suppress(ServerError):
                api.update_weights({"step": "discard"})
            with suppress(ServerError):
                api.finish_weight_update(None)

    @contextmanager
    def _brief_api(self) -> Iterator[VllmApi]:
        api = VllmApi(self.url, timeout_s=min(self._timeout_s, _GIVE_UP_TIMEOUT_S))
        try:
            yield api
        finally:
            api.close()

    @contextmanager
    def _giving_up(self, what: str) -> Iterator[None]:
        """An error inside gives up the update."""
        try:
            yield
        except (RuntimeError, OSError, FutureTimeoutError) as error:
            self.abort()
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise self._error(error, what) from error
        except BaseException:
            self.abort()
            raise

    def _error(self, error: Exception, what: str) -> ServerError:
        if isinstance(error, ServerError):
            return error
        lines = str(error).splitlines()
        return ServerError(f"{self.url}: {what}: {lines[0] if lines else type(error).__name__}")


class _Update:
    """One update under way."""

    def __init__(self, version: int, specs: Iterator[TensorSpec], *, held: bool = False):
        self.version = version
        self.specs = specs  # those that are still to be sent
        self.held = held  # the server has it already
        self.received: Future[None] | None = None  # the server's call that receives
        self.work: Any = None
        self.in_flight: Tensor | None = None
        self.shared: list[tuple[str, Tensor]] = []


def share(name: str, tensor: Tensor) -> dict[str, Any]:
    """How another process on this GPU opens the tensor, as JSON; the tensor has to be kept until it has.

    The order of `reduce_tensor`'s arguments is that of `torch.multiprocessing.reductions.rebuild_cuda_tensor`.
    """
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(tensor)
    (_, shape, stride, offset, _, dtype, _, handle, storage_bytes, storage_offset, _, *counter_and_event) = arguments
    counter, counter_offset, event, event_sync_required = counter_and_event
    return {
        "name": name,
        "shape": list(shape),
        "stride": list(stride),
        "offset": offset,
        "dtype": _dtype_name(dtype),
        "handle": handle.hex(),
        "storage_bytes": storage_bytes,
        "storage_offset_bytes": storage_offset,
        "ref_counter_handle": counter.hex(),
        "ref_counter_offset": counter_offset,
        "event_handle": event.hex(),
        "event_sync_required": event_sync_required,
    }


def _in_thread(call: Callable[[dict[str, Any]], None], info: dict[str, Any]) -> "Future[None]":
    """Do it besides, in a thread that the end of this process does not wait for: a server may never answer."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            call(info)
            future.set_result(None)
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return future


def _wire(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "shape": list(spec.shape), "dtype": _dtype_name(spec.dtype)}


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _address_towards(url: str) -> str:
    """This machine's address on the network that leads to a server."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port or 80), timeout=_GIVE_UP_TIMEOUT_S) as way:
        return str(way.getsockname()[0])
