"""Handing the trainer's weights to vLLM servers: the trainer's end. The servers' is in `worker/`.

A channel and its server's workers meet when the server is up, and agree on a way: a process group of their own, gloo
through host memory or NCCL from GPU to GPU, or memory that the ranks on the server's GPUs lend it. The way is tried
before it is used. An update is declared (names, shapes, dtypes), sent and committed; whatever goes wrong before the
commit leaves the old weights serving, and the next update meets again.
"""

import json
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from cohort.models import TensorSpec
from cohort.rollout.engines.servers.requests import ServerError
from cohort.rollout.engines.vllm.api import VllmApi
from cohort.rollout.engines.vllm.transports import GroupTransfer, LentTransfer, Way, WeightTransfer, wait_for_both
from cohort.rollout.engines.vllm.worker.cohort_weight_group import (
    WeightGroup,
    describe_device,
    in_thread,
    result_within,
)

_WORKERS_PATIENCE = 8  # times the trainer's longest wait for a server
_GIVE_UP_TIMEOUT_S = 10.0  # for each call that puts a server right again
_MEET_TIMEOUT_S = 60.0


class WeightChannel:
    """The way of the weights to one server. One thread calls; every failure is a `ServerError` and ends the update."""

    def __init__(
        self,
        api: VllmApi,
        *,
        device: torch.device,
        num_workers: int,
        timeout_s: float,
        meet_timeout_s: float = _MEET_TIMEOUT_S,
        sleeps: bool = False,
        lenders: Collection[str] = (),
    ):
        """Nothing is sent yet.

        Args:
            api: of the server.
            device: of this process: its GPU with the index, or the CPU.
            num_workers: of the server, which is its number of GPUs.
            timeout_s: longest wait for the server, in each call and for each tensor.
            meet_timeout_s: longest wait until its workers have come, and until a way to them is made and tried.
            sleeps: the server sleeps while the policy trains, and wakes to take the weights.
            lenders: GPUs of the training ranks, by UUID. One of them that a sleeping server has too is lent to it.
        """
        self.url = api.url
        self.version: int | None = None  # the last that was committed here
        self._dropped = False  # the server has slept since, and has no weights
        self.notes: list[str] = []  # messages for the user about the way; cleared once they are shown
        self._noted = ""  # the last of `choose_way`
        self._api = VllmApi(api.url, timeout_s=timeout_s)
        self._device = device
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._meet_timeout_s = meet_timeout_s
        self._sleeps = sleeps
        self._lenders = frozenset(lenders) if sleeps else frozenset()
        self._has_borrowed = False  # the server has opened what is lent to it
        self._transfer: WeightTransfer | None = None
        self._update: _Update | None = None

    @property
    def way(self) -> Way | None:
        """How the weights go; None before the meeting."""
        return None if self._transfer is None else self._transfer.way

    @property
    def may_borrow(self) -> bool:
        """Whether the next update may be read from memory that the ranks lend: it is, or was and meets anew."""
        return bool(self._lenders) if self._transfer is None else self._transfer.way == "ipc"

    def open(self) -> None:
        """Meet the server's workers, agree on a way and try it; `begin` does it where it was not done.

        Raises:
            ServerError: they do not come, or the way does not work.
        """
        self._leave()
        try:
            self._meet()
        except (RuntimeError, OSError) as error:
            self._leave()
            raise self._error(error, "meeting for weights") from error

    def begin(self, version: int, specs: Sequence[TensorSpec], handles: Mapping[str, Any] | None = None) -> None:
        """Begin an update. What the server samples is held where it is until `finish` or `abort`.

        A version that is not newer than the one that this channel committed last is not sent: all calls of this update
        do nothing then.

        Args:
            version: of the weights; tokens that are sampled with them will say so.
            specs: what will be sent, in this order.
            handles: of what the ranks lend, by GPU.

        Raises:
            ServerError: the server cannot take it; `abort` was done.
        """
        assert self._update is None, "an update is under way"
        with self._giving_up("declaring weights"):
            serves = self._api.weight_version()
            if self.version is not None and self.version == serves and not self._dropped and version <= self.version:
                self._update = _Update(version, iter(()), held=True)
                return
            if serves != self.version or self._transfer is None:  # another server than it was, or none
                self.version = None
                self.open()
            transfer = self._prepared(handles or {})
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
            transfer.begin(specs)

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
            assert self._transfer is not None
            self._transfer.post(name, tensor.detach().to(spec.dtype))

    def settle(self) -> None:
        """Wait until what was posted has arrived.

        Raises:
            ServerError: as `send`.
        """
        update = self._update
        assert update is not None, "no update is under way"
        if update.held:
            return
        with self._giving_up("sending weights"):
            assert self._transfer is not None
            self._transfer.settle()

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
            assert self._transfer is not None
            self._transfer.finish()
            self._api.finish_weight_update(update.version)
            if self._sleeps:
                self._api.wake_up(["kv_cache"])
            self._api.reset_prefix_cache()
            self._api.resume()
            self.version, self._dropped = update.version, False
            self._update = None

    def abort(self) -> None:
        """Give the update up, and have the server go on with the weights that it has. Never fails.

        One that sleeps between updates has none: it stays held until it is started again, and ends at once if it has
        part of them.
        """
        update, self._update = self._update, None
        if update is None or update.held:
            return
        self._leave()  # a worker that waits for tensors sees that
        self._discard()
        if not self._sleeps:
            with suppress(ServerError), self._brief_api() as api:
                api.resume()

    def sleep(self) -> None:
        """Have a server that shares this GPU drop its weights and its cache until the next update.

        It says afterwards that it has the same version, and takes part in the same way: only its weights are gone.

        Raises:
            ServerError: it did not.
        """
        self._dropped = True  # whether it answers or not
        self._api.sleep(2)

    def close(self) -> None:
        """Leave the group, and close the connections."""
        self.abort()
        self._leave()
        self._api.close()

    def _meet(self) -> None:
        """Every worker tells of its GPU in a store here; then all of them are told the way."""
        host, size = _address_towards(self.url), 1 + self._num_workers
        store = dist.TCPStore(
            host, 0, size, is_master=True, timeout=timedelta(seconds=self._meet_timeout_s), wait_for_workers=False
        )
        place = {"host": host, "port": store.port, "world_size": size}
        # while the trainer waits for another server that hangs, these wait for their next tensor
        theirs = _WORKERS_PATIENCE * self._timeout_s
        deadlines = {"timeout_s": theirs, "meet_timeout_s": self._meet_timeout_s}
        api = VllmApi(self.url, timeout_s=self._meet_timeout_s)
        joined = in_thread(api.init_weight_transfer, {**place, **deadlines})
        joined.add_done_callback(lambda _: api.close())
        ranks = [f"here/{rank}" for rank in range(1, size)]
        self._poll(lambda: store.check(ranks), joined)
        way, note = choose_way(
            describe_device(self._device),
            [json.loads(store.get(rank)) for rank in ranks],
            lenders=self._lenders,
        )
        if note and note != self._noted:  # it may meet the same server again
            self.notes.append(f"{self.url}: {note}")
        self._noted = note
        store.set("way", way)
        if way == "ipc":
            self._transfer = LentTransfer(self._api)
        else:
            device = self._device if way == "nccl" else torch.device("cpu")
            longest_s = max(theirs, self._meet_timeout_s)
            group = WeightGroup(way, store, rank=0, size=size, device=device, host=host, timeout_s=longest_s)
            self._transfer = GroupTransfer(way, group, self._api, timeout_s=self._timeout_s)
            wait_for_both(group.connect(), joined, self._meet_timeout_s, self.url)
        result_within(joined, self._meet_timeout_s, f"{self.url}: meeting for weights")

    def _prepared(self, handles: Mapping[str, Any]) -> WeightTransfer:
        """The way of this update: the one that was agreed on, or another where the GPU's memory cannot be shared."""
        transfer = self._transfer
        assert transfer is not None, "the channel is open"
        try:
            transfer.prepare(handles)
        except ServerError as error:
            if self._has_borrowed or not handles:  # its memory can be shared: something else is wrong
                raise
            self._lenders = frozenset()
            self.notes.append(f"its GPU's memory cannot be shared, so weights are sent another way: {error}")
            self.open()
            assert self._transfer is not None
            return self._transfer
        self._has_borrowed |= transfer.way == "ipc"
        return transfer

    def _leave(self) -> None:
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.close()

    def _poll(self, done: Callable[[], bool], call: "Future[None]") -> None:
        """Until it is done, the server's call has failed, or time is up."""
        deadline, pause_s = time.monotonic() + self._meet_timeout_s, 1e-3
        while not done():
            if call.done():
                call.result()
                if done():  # it came between the two questions
                    return
                raise ServerError(f"{self.url}: the server ended its part too early")
            if time.monotonic() > deadline:
                raise ServerError(f"{self.url}: the server's workers did not come within {self._meet_timeout_s:g} s")
            time.sleep(pause_s)

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


def choose_way(
    trainer: Mapping[str, str | None], workers: Sequence[Mapping[str, str | None]], *, lenders: Collection[str]
) -> tuple[Way, str]:
    """The fastest way that works between these GPUs.

    Args:
        trainer: rank 0's GPU and version of NCCL, as `describe_device` gives them.
        workers: those of the server's workers.
        lenders: GPUs whose ranks can lend memory to this server.

    Returns:
        the way, and what a person should know of it; "" if nothing.
    """
    gpus = {worker["gpu"] for worker in workers}
    if trainer["gpu"] is None or None in gpus:
        return "gloo", ""
    if gpus <= set(lenders):
        return "ipc", ""
    if trainer["gpu"] in gpus:
        return "gloo", "NCCL does not take two processes on one GPU: weights go through host memory"
    others = sorted({str(worker["nccl"]) for worker in workers} - {str(trainer["nccl"])})
    if others:
        return "gloo", (
            f"NCCL is {trainer['nccl']} here and {', '.join(others)} there, and versions do not mix: weights go "
            f"through host memory, which is slower; install the same torch in both environments to avoid this"
        )
    return "nccl", ""


def _wire(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "shape": list(spec.shape), "dtype": str(spec.dtype).removeprefix("torch.")}


def _address_towards(url: str) -> str:
    """This machine's address on the network that leads to a server."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port or 80), timeout=_GIVE_UP_TIMEOUT_S) as way:
        return str(way.getsockname()[0])
