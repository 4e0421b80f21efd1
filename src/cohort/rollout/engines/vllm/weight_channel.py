"""Send the trainer's weights to vLLM servers: the trainer's side. The servers' side is in `worker/`.

Once a server is up, its channel and its workers rendezvous and choose a transport: a process group (gloo through host
memory, or NCCL from GPU to GPU), or CUDA IPC if they share a GPU with training ranks. The transport is tested before
its first use. An update is declared (names, shapes, dtypes), sent and committed. After an error in between the server
answers no request until it has received a complete update, which starts with a new rendezvous.
"""

import json
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import closing, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from cohort.errors import describe_error
from cohort.models import TensorSpec
from cohort.rollout.engines.servers.cuda_ipc import IpcHandle
from cohort.rollout.engines.servers.handles import ServerError
from cohort.rollout.engines.servers.secret import Secret
from cohort.rollout.engines.servers.server_side.cohort_weight_group import (
    WeightGroup,
    describe_device,
    in_thread,
    own_address,
    result_within,
)
from cohort.rollout.engines.servers.weight_transfer import (
    GroupTransfer,
    IpcTransfer,
    Transport,
    WeightTransfer,
    choose_transport,
    wait_for_both,
)
from cohort.rollout.engines.vllm.api import VllmApi
from cohort.rollout.engines.vllm.server import POLICY_NAME

_WORKER_TIMEOUT_FACTOR = 8  # workers wait this many times longer than the trainer
_ABORT_TIMEOUT_S = 10.0  # per call that restores a server after an error
_RENDEZVOUS_TIMEOUT_S = 60.0  # setting up and testing a transport takes seconds if it works


@dataclass(eq=False)
class WeightChannel:
    """Sends weights to one server. Not thread-safe; every failure is a `ServerError` and aborts the update."""

    url: str  # address of the server
    _: KW_ONLY
    secret: Secret | None  # sent with every request; None for a server without a secret
    device: torch.device  # this process's GPU with its index, or the CPU
    num_workers: int  # of the server, one per GPU
    timeout_s: float  # maximum time per call and per tensor
    sleeps: bool = False  # whether the server sleeps during training, and wakes to receive weights
    ipc_gpus: Collection[str] = ()  # UUIDs of the training ranks' GPUs, which share memory with a sleeping server there

    def __post_init__(self) -> None:
        """Connect nothing yet."""
        self.version: int | None = None  # last version committed by this channel
        self.notes: list[str] = []  # messages for the user; cleared once they are shown
        self._last_note = ""  # last note of `choose_transport`
        self._new_api = partial(VllmApi, self.url, secret=self.secret)
        self._api = self._new_api(timeout_s=self.timeout_s)
        self._meet_timeout_s = min(self.timeout_s, _RENDEZVOUS_TIMEOUT_S)
        self._abort_timeout_s = min(self.timeout_s, _ABORT_TIMEOUT_S)
        self._ipc_gpus = frozenset(self.ipc_gpus) if self.sleeps else frozenset()
        self._ipc_opened = False  # the server has opened the shared buffers before
        self._nccl_connected = False  # NCCL has connected to this server before
        self._excludes_nccl = False  # NCCL cannot connect to it
        self._joined: Future[None] | None = None  # the server's call of the last rendezvous
        self._transfer: WeightTransfer | None = None
        self._unsent: Iterator[TensorSpec] | None = None  # declared tensors of the update in progress
        self._has_declared = False  # and the server has accepted them

    @property
    def transport(self) -> Transport | None:
        """How weights are sent; None before the rendezvous."""
        return None if self._transfer is None else self._transfer.transport

    @property
    def may_use_ipc(self) -> bool:
        """Whether the next update may use CUDA IPC, so that the ranks must allocate shared buffers."""
        return bool(self._ipc_gpus) if self._transfer is None else self.transport == "ipc"

    def open(self) -> None:
        """Rendezvous with the server's workers, choose a transport and test it. `begin` does so if needed.

        Raises:
            ServerError: the workers do not connect, or the transport does not work.
        """
        self._close_transfer()
        try:
            self._rendezvous()
        except (RuntimeError, OSError) as error:
            failed = self.transport
            self._close_transfer()
            failure = self._error(error, "weight transfer rendezvous")
            if failed != "nccl" or self._nccl_connected:  # NCCL worked before: something else is wrong
                raise failure from error
            self._open_without_nccl(failure)
        self._nccl_connected |= self.transport == "nccl"

    def begin(self, specs: Sequence[TensorSpec], handles: Mapping[str, IpcHandle] | None = None) -> None:
        """Begin an update. The server's requests are paused until `finish` or `abort`.

        Args:
            specs: the tensors that will be sent, in order.
            handles: CUDA IPC handles of the ranks' buffers, by GPU.

        Raises:
            ServerError: the server cannot take the update, which was aborted.
        """
        assert self._unsent is None, "an update is in progress"
        with self._abort_on_error("declaring weights"):
            has_restarted = self._api.weight_version() != self.version
            if has_restarted or self._transfer is None:
                self.version = None
                self.open()
            transfer = self._prepare_transfer(handles or {})
            self._unsent = iter(specs)
            self._api.pause()
            if self.sleeps:
                self._api.wake_up(["weights"])
            try:
                self._api.start_weight_update()
            except ServerError:  # an unfinished update of another trainer
                self._discard()
                self._api.start_weight_update()
            self._api.update_weights({"step": "declare", "specs": [_spec_to_json(spec) for spec in specs]})
            self._has_declared = True
            transfer.begin(specs)

    def post(self, name: str, tensor: Tensor) -> None:
        """Start sending the next declared tensor, cast to the declared dtype. Call `flush` before the next one.

        Raises:
            ServerError: the server is gone or too slow; the update was aborted.
        """
        assert self._unsent is not None, "no update is in progress"
        with self._abort_on_error(f"sending {name}"):
            spec = next(self._unsent, None)
            if spec is None or spec.name != name or spec.shape != tuple(tensor.shape):
                raise ServerError(f"{self.url}: sent {name} {list(tensor.shape)}, but declared {spec}")
            assert self._transfer is not None
            self._transfer.post(name, tensor.detach().to(spec.dtype))

    def flush(self) -> None:
        """Wait until posted tensors have arrived. Raises as `post` does."""
        with self._abort_on_error("sending weights"):
            assert self._transfer is not None
            self._transfer.flush()

    def finish(self, version: int) -> None:
        """Have the server load the weights into its model and resume sampling.

        Args:
            version: policy version of the weights, with which the server labels the tokens it samples.

        Raises:
            ServerError: it failed; the update was aborted.
        """
        assert self._unsent is not None, "no update is in progress"
        with self._abort_on_error("committing weights"):
            missing = next(self._unsent, None)
            if missing is not None:
                raise ServerError(f"{self.url}: {missing.name} was declared but not sent")
            assert self._transfer is not None
            self._transfer.finish()
            self._api.finish_weight_update(version)
            if self.sleeps:
                self._api.wake_up(["kv_cache"])
            self._api.reset_prefix_cache()
            self._api.resume()
            self.version, self._unsent, self._has_declared = version, None, False

    def abort(self) -> None:
        """Abort the update. Never fails.

        The server answers no request until its next complete update, but resumes if it refused the declared tensors.
        """
        if self._unsent is None:
            return
        has_declared, self._unsent, self._has_declared = self._has_declared, None, False
        self._close_transfer()  # so that workers still waiting for tensors stop waiting
        self._discard()
        if not (self.sleeps or has_declared):
            with suppress(ServerError), closing(self._new_api(timeout_s=self._abort_timeout_s)) as api:
                api.resume()

    def sleep(self) -> None:
        """Have a server that shares this GPU free its weights and KV cache until the next update.

        The server still reports the same version and keeps its connection; only its weights are gone.

        Raises:
            ServerError: the server did not go to sleep.
        """
        self._api.sleep(2)

    def close(self) -> None:
        """Close the transport and the connections."""
        self.abort()
        self._close_transfer()
        self._api.close()

    def _rendezvous(self) -> None:
        """Collect the workers' GPUs in a store, then broadcast the chosen transport through it."""
        server = urlsplit(self.url)
        host = own_address(str(server.hostname), server.port or 80, _ABORT_TIMEOUT_S)
        size = 1 + self.num_workers
        store = dist.TCPStore(
            host, 0, size, is_master=True, timeout=timedelta(seconds=self._meet_timeout_s), wait_for_workers=False
        )
        address = {"host": host, "port": store.port, "world_size": size}
        # while the trainer waits for another, hung server, these workers wait for their next tensor
        worker_timeout_s = _WORKER_TIMEOUT_FACTOR * self.timeout_s
        deadlines = {"timeout_s": worker_timeout_s, "rendezvous_timeout_s": self._meet_timeout_s}
        api = self._new_api(timeout_s=self._meet_timeout_s)
        joined = in_thread(api.init_weight_transfer, {**address, **deadlines})
        joined.add_done_callback(lambda _: api.close())
        self._joined = joined
        ranks = [f"here/{rank}" for rank in range(1, size)]
        self._wait_for_workers(lambda: store.check(ranks), joined)
        transport, note = choose_transport(
            describe_device(self.device),
            [json.loads(store.get(rank)) for rank in ranks],
            ipc_gpus=self._ipc_gpus,
        )
        if transport == "nccl" and self._excludes_nccl:
            transport = "gloo"
        if note and note != self._last_note:  # may be another rendezvous with the same server
            self.notes.append(f"{self.url}: {note}")
        self._last_note = note
        store.set("transport", transport)
        if transport == "ipc":
            self._transfer = IpcTransfer(
                open_buffers=lambda handles: self._api.init_weight_transfer({"ipc_handles": dict(handles)}),
                load=lambda offsets: self._api.update_weights({"step": "load", "offsets": offsets}),
            )
        else:
            device = self.device if transport == "nccl" else torch.device("cpu")
            longest_s = max(worker_timeout_s, self._meet_timeout_s)
            group = WeightGroup(transport, store, rank=0, size=size, device=device, host=host, timeout_s=longest_s)
            receiving = self._new_api(timeout_s=None)
            self._transfer = GroupTransfer(
                transport,
                group,
                url=receiving.url,
                receive=partial(receiving.update_weights, {"step": "receive"}),
                hang_up=receiving.close,
                timeout_s=self.timeout_s,
            )
            wait_for_both(group.connect(), joined, self._meet_timeout_s, self.url)
        result_within(joined, self._meet_timeout_s, f"{self.url}: weight transfer rendezvous")

    def _open_without_nccl(self, failure: ServerError) -> None:
        """Open through gloo after a `failure` of NCCL, which containers, firewalls and network interfaces can block."""
        self._excludes_nccl = True
        assert self._joined is not None
        wait((self._joined,), self._meet_timeout_s)  # the workers have given up, too
        try:
            self.open()
        except ServerError:
            raise failure from None
        self.notes.append(
            f"NCCL cannot connect trainer and server, so weights go through host memory, which is slower; run with "
            f"NCCL_DEBUG=WARN to see why: {failure}"
        )

    def _prepare_transfer(self, handles: Mapping[str, IpcHandle]) -> WeightTransfer:
        """Prepare the chosen transport, or another one if the GPU's memory cannot be shared."""
        transfer = self._transfer
        assert transfer is not None, "the channel is open"
        try:
            transfer.prepare(handles)
        except ServerError as error:
            if self._ipc_opened or not handles:  # sharing worked before: something else is wrong
                raise
            self._ipc_gpus = frozenset()
            self.notes.append(f"{self.url}: cannot share GPU memory, so weights are sent another way: {error}")
            self.open()
            assert self._transfer is not None
            return self._transfer
        self._ipc_opened |= transfer.transport == "ipc"
        return transfer

    def _close_transfer(self) -> None:
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.close()

    def _wait_for_workers(self, done: Callable[[], bool], call: "Future[None]") -> None:
        """Wait until `done`, a failure of the server's call, or the timeout."""
        deadline, pause_s = time.monotonic() + self._meet_timeout_s, 1e-3
        while not done():
            if call.done():
                call.result()
                if done():  # became true in between
                    return
                raise ServerError(f"{self.url}: the server ended the rendezvous too early")
            if time.monotonic() > deadline:
                raise ServerError(f"{self.url}: the server's workers did not connect within {self._meet_timeout_s:g} s")
            time.sleep(pause_s)

    def _discard(self) -> None:
        """Have the server discard an unfinished update, if there is one."""
        with suppress(ServerError), closing(self._new_api(timeout_s=self._abort_timeout_s)) as api:
            api.update_weights({"step": "discard"})

    @contextmanager
    def _abort_on_error(self, what: str) -> Iterator[None]:
        """Abort the update if the block raises."""
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
        return ServerError(f"{self.url}: {what}: {describe_error(error, 300)}")


@dataclass(slots=True, eq=False)
class AdapterChannel:
    """Sends adapters to one server that was started with `ServerOptions.lora_rank`."""

    api: VllmApi  # endpoints of the server; closed with the channel
    _: KW_ONLY
    keeps_base: bool = False  # whether the server keeps its base model, which never changes, on the GPU while it sleeps
    _asleep: bool = field(default=False, init=False)

    def load(self, folder: Path, version: int) -> None:
        """Have the server sample with the adapter in `folder`, which it must see under the same path.

        Requests are paused while it loads, and continue with the new adapter.

        Raises:
            ServerError: it failed. Requests stay paused until an adapter is loaded.
        """
        self.api.pause()
        if self._asleep:
            # vLLM wakes nothing at all if one of these was not asleep
            self.api.wake_up(["kv_cache"] if self.keeps_base else ["weights", "kv_cache"])
            self._asleep = False
        self.api.load_lora_adapter(POLICY_NAME, str(folder.absolute()))
        self.api.set_weight_version(version)
        self.api.reset_prefix_cache()
        self.api.resume()

    def sleep(self) -> None:
        """Have a server that shares its GPU free its KV cache, and offload its base model, until the next adapter.

        Raises:
            ServerError: the server did not go to sleep.
        """
        if self.keeps_base:
            self.api.pause()
            self.api.release_kv_cache()
        else:
            self.api.sleep(1)
        self._asleep = True

    def close(self) -> None:
        """Close the connections."""
        self.api.close()


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


def _spec_to_json(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "shape": list(spec.shape), "dtype": str(spec.dtype).removeprefix("torch.")}
