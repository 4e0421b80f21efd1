"""Weights for two servers, while the group with one of them fails, hangs or dies at one call after the other."""

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cohort.models import TensorSpec
from cohort.rollout.engines.servers import weight_transfer
from cohort.rollout.engines.servers.channels import send_to_servers
from cohort.rollout.engines.servers.handles import ServerError
from cohort.rollout.engines.servers.secret import Secret
from cohort.rollout.engines.servers.server_side import cohort_weight_group
from cohort.rollout.engines.servers.weight_transfer import GroupTransfer
from cohort.rollout.engines.vllm import weight_channel
from cohort.rollout.engines.vllm.weight_channel import WeightChannel
from fake_vllm import SECRET, ThreadServer
from selection import slow
from waiting import PATIENCE_S, until
from weight_servers import (
    GROUP_MODULE,
    EngineServer,
    FakeNccl,
    Fault,
    Weights,
    fault_in_nccl,
    load_worker,
    process_server,
)

CPU, GPU = torch.device("cpu"), torch.device("cpu", 0)  # stands in for a GPU: it has an index
DEADLINE_S = 2.0  # of all servers, where something hangs
NAMES = ("a", "b", "c")
NO_WATCHDOG = "TORCH_NCCL_BLOCKING_WAIT"


def weights_of(value: float) -> Weights:
    return {name: torch.full((2, 3), value + n) for n, name in enumerate(NAMES)}


SPECS = [TensorSpec(name, (2, 3), torch.float32) for name in NAMES]
OLD = weights_of(0)


def same(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Place:
    """A trainer and its servers, some of which say that they have a GPU."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.worker = load_worker(patch)
        self.nccl = {"trainer": "2.27.5", "server": "2.27.5"}
        patch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
        patch.setattr(weight_channel, "describe_device", lambda device: self.describe("trainer", device))
        patch.setattr(self.worker, "describe_device", lambda device: self.describe("server", device))
        patch.setattr(weight_channel, "_ABORT_TIMEOUT_S", 0.5)
        patch.setattr(weight_channel, "_WORKER_TIMEOUT_FACTOR", 4)
        for module in (cohort_weight_group, __import__(GROUP_MODULE)):
            patch.setattr(module, "_ABORT_TIMEOUT_S", 0.1)
        self.servers: list[ThreadServer] = []
        self.channels: list[WeightChannel] = []

    def describe(self, who: str, device: torch.device) -> dict[str, str | None]:
        on_gpu = device.index is not None
        return {"gpu": f"GPU of the {who}" if on_gpu else None, "nccl": self.nccl[who] if on_gpu else None}

    def server(self, device: torch.device) -> EngineServer:
        handle = ThreadServer(make=EngineServer, worker=self.worker, weights=OLD, devices=[device])
        handle.start()
        self.servers.append(handle)
        (fake,) = handle.fakes
        assert isinstance(fake, EngineServer)
        return fake

    def channel(self, url: str, *, deadline_s: float = PATIENCE_S) -> WeightChannel:
        made = WeightChannel(url, secret=Secret(SECRET), device=GPU, num_workers=1, timeout_s=deadline_s)
        self.channels.append(made)
        return made

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        for server in self.servers:
            server.stop()


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    made = Place(monkeypatch)
    yield made
    made.close()


def test_weights_arrive_in_a_group_that_was_made_and_tried_before(place: Place):
    server = place.server(GPU)
    channel = place.channel(place.servers[0].url)
    seen: list[str | None] = []
    with fault_in_nccl(Fault()):
        FakeNccl.environment = staticmethod(lambda: seen.append(os.environ.get(NO_WATCHDOG)))
        channel.open()
        assert FakeNccl.calls == {("make", 0): 1, ("make", 1): 1, ("try", 0): 1, ("try", 1): 1}
        new = weights_of(10)
        assert send_to_servers([channel], new.items(), SPECS, 1) == {}
        assert FakeNccl.calls["broadcast", 0] == FakeNccl.calls["broadcast", 1] == len(SPECS)
    FakeNccl.environment = staticmethod(lambda: None)
    assert channel.transport == "nccl" and same(server.model.weights, new) and server.version == "1"
    assert seen == ["1", "1"] and NO_WATCHDOG not in os.environ  # no watchdog, in these groups alone


@pytest.mark.parametrize("before", [None, "0"])
def test_making_a_group_that_hangs_leaves_the_environment_as_it_was(
    place: Place, monkeypatch: pytest.MonkeyPatch, before: str | None
):
    if before is not None:
        monkeypatch.setenv(NO_WATCHDOG, before)
    place.server(GPU)
    channel = place.channel(place.servers[0].url, deadline_s=DEADLINE_S)
    with fault_in_nccl(Fault("make", 0, "hangs")):
        channel.open()
        assert os.environ.get(NO_WATCHDOG) == before
    assert channel.transport == "gloo"
    assert re.search("(within|longer than) 2 s", channel.notes[0])  # the trainer's word, or the server's


def test_a_group_that_computes_wrong_sums_is_not_used(place: Place, monkeypatch: pytest.MonkeyPatch):
    server = place.server(GPU)
    channel = place.channel(place.servers[0].url)
    real = FakeNccl.allreduce

    def allreduce(self: FakeNccl, tensor: torch.Tensor) -> Any:
        work = real(self, tensor)
        return SimpleNamespace(wait=lambda: (work.wait(), tensor.add_(1)))

    monkeypatch.setattr(FakeNccl, "allreduce", allreduce)
    channel.open()
    assert channel.transport == "gloo" and same(server.model.weights, OLD)
    assert "nccl returns wrong sums between trainer and server" in channel.notes[0]


CONNECTS = [Fault(call, rank, how) for call in ("make", "try") for rank in (0, 1) for how in ("raises", "hangs")]
WAITS = slow("waits for deadlines; the others are such calls too")
FIRST, *OTHERS, LAST = CONNECTS


@pytest.mark.parametrize("fault", [FIRST, LAST, *(pytest.param(fault, marks=WAITS) for fault in OTHERS)], ids=str)
def test_weights_go_through_the_host_if_nccl_does_not_connect(
    place: Place, monkeypatch: pytest.MonkeyPatch, fault: Fault
):
    monkeypatch.setattr(weight_transfer, "_REASON_TIMEOUT_S", 0.2)  # less than the deadline
    server = place.server(GPU)
    channel = place.channel(place.servers[0].url, deadline_s=DEADLINE_S)
    with fault_in_nccl(fault):
        assert send_to_servers([channel], weights_of(10).items(), SPECS, 1) == {}
    assert channel.transport == "gloo" and same(server.model.weights, weights_of(10)) and server.version == "1"
    (note,) = channel.notes
    assert note.startswith("NCCL cannot connect trainer and server, so weights go through host memory")
    assert f"NCCL_DEBUG=WARN to see why: {channel.url}" in note
    assert (f"NCCL error: {fault.call} failed" if fault.how == "raises" else "2 s") in note
    channel.open()
    assert channel.transport == "gloo" and len(channel.notes) == 1, "NCCL is not tried again"


def test_a_server_that_fails_over_nccl_and_gloo_has_failed(place: Place, monkeypatch: pytest.MonkeyPatch):
    place.server(GPU)
    channel = place.channel(place.servers[0].url)
    monkeypatch.setattr(weight_channel, "wait", lambda *_: place.servers[0].stop())
    with fault_in_nccl(Fault("make", 1, "raises")), pytest.raises(ServerError, match="NCCL error: make failed"):
        channel.open()
    assert channel.transport is None and not channel.notes


def test_nccl_that_connected_once_is_not_given_up(place: Place):
    server = place.server(GPU)
    channel = place.channel(place.servers[0].url, deadline_s=DEADLINE_S)
    with fault_in_nccl(Fault("make", 1, "raises", 2)):
        channel.open()
        with pytest.raises(ServerError, match="NCCL error: make failed"):
            channel.open()
        with server.turn:  # until its worker has given up too
            pass
        channel.open()
    assert channel.transport == "nccl" and not channel.notes


CALLS = [("broadcast", 1), ("broadcast", 3), ("wait", 1), ("wait", 3)]
FAULTS = [Fault(call, rank, how, nth) for call, nth in CALLS for rank in (0, 1) for how in ("raises", "hangs")]
QUICK = [Fault("broadcast", 1, "hangs", 3), Fault("wait", 0, "raises", 3)]
SLOW = [pytest.param(fault, marks=WAITS) for fault in FAULTS if fault not in QUICK]


@pytest.mark.parametrize("fault", [*QUICK, *SLOW], ids=str)
def test_what_fails_costs_that_server_alone(place: Place, fault: Fault):
    bad, good = place.server(GPU), place.server(CPU)  # whose weights go by gloo
    to_bad, to_good = (place.channel(server.url, deadline_s=DEADLINE_S) for server in place.servers)
    new, newer = weights_of(10), weights_of(20)
    with fault_in_nccl(fault):
        assert list(send_to_servers([to_bad, to_good], new.items(), SPECS, 1)) == [to_bad]
        assert same(good.model.weights, new) and good.version == "1" and not good.paused
        assert bad.paused and bad.version == "default"
    with bad.turn:  # until its worker has given up too
        pass
    to_bad = place.channel(place.servers[0].url)
    assert send_to_servers([to_bad, to_good], newer.items(), SPECS, 2) == {}
    assert same(good.model.weights, newer) and same(bad.model.weights, newer)
    assert bad.version == good.version == "2"


@pytest.mark.parametrize("how", ["raises", "hangs"])
def test_an_abort_that_does_not_end_is_left_behind(place: Place, how: str):
    server = place.server(GPU)
    channel = place.channel(place.servers[0].url, deadline_s=DEADLINE_S)
    with fault_in_nccl(Fault("abort", 0, how)):
        channel.open()
        channel.close()
        assert FakeNccl.calls["abort", 0] == 1 and channel.transport is None
    assert send_to_servers([place.channel(channel.url)], weights_of(10).items(), SPECS, 2) == {}
    assert same(server.model.weights, weights_of(10))


REQUESTS = ["/pause", "/start_weight_update", "/finish_weight_update"]


@pytest.mark.parametrize("call", ["/update_weights", *(pytest.param(call, marks=WAITS) for call in REQUESTS)])
def test_a_server_that_hangs_in_a_request_costs_itself_alone(place: Place, call: str):
    bad, good = place.server(GPU), place.server(GPU)
    to_bad, to_good = (place.channel(server.url, deadline_s=DEADLINE_S) for server in place.servers)
    released, work = threading.Event(), bad.work

    def hang(path: str, body: Any) -> Any:
        if path == call and not released.is_set():
            released.wait()
            raise RuntimeError("too late")
        return work(path, body)

    bad.work = hang  # type: ignore[method-assign]
    try:
        assert list(send_to_servers([to_bad, to_good], weights_of(10).items(), SPECS, 1)) == [to_bad]
        assert same(good.model.weights, weights_of(10)) and good.version == "1"
    finally:
        released.set()
    assert bad.version == "default" and (bad.paused or same(bad.model.weights, OLD))


def test_a_call_that_the_server_never_answers_ends_with_the_transfer(place: Place):
    """The stream may take any time, so this call has no deadline of its own."""
    server, released = place.server(CPU), threading.Event()
    channel = place.channel(place.servers[0].url, deadline_s=DEADLINE_S)
    channel.open()
    server.work = lambda path, body: released.wait()  # type: ignore[method-assign]
    assert isinstance(channel._transfer, GroupTransfer)
    transfer = channel._transfer
    try:
        transfer.begin(SPECS)
        until(lambda: server.calls["/update_weights"] == 1)
        assert transfer.received is not None and not transfer.received.done()
        channel.close()
        assert isinstance(transfer.received.exception(PATIENCE_S), ServerError)
    finally:
        released.set()


class Meeting:
    """A channel each of whose waits ends when the other channel is in it too."""

    def __init__(self, together: threading.Barrier):
        self.together = together
        self.aborted = False

    def begin(self, *_: Any) -> None:
        self.together.wait()

    def post(self, *_: Any) -> None:
        pass

    def flush(self) -> None:
        self.together.wait()
        raise ServerError("hung")

    def abort(self) -> None:
        self.together.wait()
        self.aborted = True


def test_servers_that_hang_are_waited_for_together():
    together = threading.Barrier(2, timeout=60)  # one that waits alone never gets through
    channels: list[Any] = [Meeting(together), Meeting(together)]
    failed = send_to_servers(channels, OLD.items(), SPECS, 1)
    assert [str(failed[channel]) for channel in channels] == ["hung", "hung"]


def test_servers_are_given_up_together():
    together = threading.Barrier(2, timeout=60)
    channels: list[Any] = [Meeting(together), Meeting(together)]

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        raise ZeroDivisionError
        yield

    with pytest.raises(ZeroDivisionError):
        send_to_servers(channels, broken(), SPECS, 1)
    assert all(channel.aborted for channel in channels)


def test_different_versions_of_nccl_are_named_and_go_through_the_host(place: Place):
    server = place.server(GPU)
    place.nccl["server"] = "2.28.3"
    channel = place.channel(place.servers[0].url)
    with fault_in_nccl(Fault("make", 0, "raises")):  # it is not tried
        assert send_to_servers([channel], weights_of(10).items(), SPECS, 1) == {}
    assert channel.transport == "gloo" and same(server.model.weights, weights_of(10))
    (note,) = channel.notes
    assert place.servers[0].url in note and "trainer: 2.27.5, server: 2.28.3" in note


OF_A, ON_CPU = {"gpu": "A", "nccl": "2.27.5"}, {"gpu": None, "nccl": None}
OF_B = {"gpu": "B", "nccl": "2.27.5"}


@pytest.mark.parametrize(
    ("trainer", "workers", "ipc_gpus", "transport", "said"),
    [
        (OF_A, [OF_B], "", "nccl", ""),
        (OF_A, [ON_CPU], "", "gloo", ""),
        (ON_CPU, [OF_B], "", "gloo", ""),
        (OF_A, [OF_B, {"gpu": "C", "nccl": "2.26.1"}], "", "gloo", "server: 2.26.1"),
        (OF_A, [OF_A], "", "gloo", "does not support two processes on one GPU"),
        (OF_A, [{"gpu": "B", "nccl": "2.28.3"}], "AB", "ipc", ""),
        (OF_A, [{"gpu": "A", "nccl": "2.28.3"}, {"gpu": "B", "nccl": "2.28.3"}], "AB", "ipc", ""),
        (OF_A, [{"gpu": "C", "nccl": "2.27.5"}], "AB", "nccl", ""),
    ],
)
def test_the_transport_follows_from_the_gpus(trainer: Any, workers: Any, ipc_gpus: str, transport: str, said: str):
    found, note = weight_channel.choose_transport(trainer, workers, ipc_gpus=set(ipc_gpus))
    assert found == transport and said in note and bool(note) == bool(said)


def test_a_group_of_gpus_needs_to_know_which():
    with pytest.raises(AssertionError, match="need the index of this process"):
        cohort_weight_group.WeightGroup(
            "nccl", None, rank=0, size=2, device=torch.device("cuda"), host="127.0.0.1", timeout_s=1
        )


@slow("a process for each server; the same calls fail and hang in one process above")
@pytest.mark.parametrize(("call", "nth"), [("make", 1), ("try", 1), *CALLS, ("finish", 1)])
def test_a_server_that_dies_costs_itself_alone(place: Place, tmp_path: Path, call: Any, nth: int):
    good, fault = place.server(CPU), Fault(call, 1, "dies", nth)
    with process_server(fault, tmp_path / "out") as url, fault_in_nccl(Fault()):
        to_bad, to_good = place.channel(url), place.channel(place.servers[0].url)
        assert list(send_to_servers([to_bad, to_good], weights_of(10).items(), SPECS, 1)) == [to_bad]
    assert same(good.model.weights, weights_of(10)) and good.version == "1"
