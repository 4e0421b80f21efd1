"""The transfer of weights to servers on GPUs that train, with stand-ins: `tests/real_vllm` has real servers."""

import inspect
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import reductions

from cohort.models import TensorSpec
from cohort.ranks.collectives import SINGLE_PROCESS
from cohort.ranks.worker_group import WorkerGroup
from cohort.rollout.engines.servers import cuda_ipc
from cohort.rollout.engines.servers.channels import send_to_servers
from cohort.rollout.engines.servers.cuda_ipc import IpcBuffer, allocate, ipc_handle, make_buckets
from cohort.rollout.engines.servers.secret import Secret
from cohort.rollout.engines.vllm import setup as vllm_setup
from cohort.rollout.engines.vllm import weight_channel
from cohort.rollout.engines.vllm.weight_channel import WeightChannel
from cohort.trainer.worker import TrainingWorkers
from fake_vllm import SECRET, ThreadServer
from waiting import PATIENCE_S
from weight_servers import EngineServer, FakeNccl, load_worker

SHAPES = {"a": (2,), "b": (3, 5), "c": (), "d": (300,), "e": (7, 2)}
SPECS = [TensorSpec(name, shape, torch.bfloat16) for name, shape in SHAPES.items()]
DEVICES = [torch.device("cpu", n) for n in range(2)]  # stand in for GPUs: they have an index


class Memory:
    """What the processes of a machine share of their GPUs' memory, by handle."""

    names = tuple(inspect.signature(reductions.rebuild_cuda_tensor).parameters)

    def __init__(self, patch: pytest.MonkeyPatch, worker: Any):
        self.shared: dict[bytes, Tensor] = {}
        self.opened: list[dict[str, Any]] = []
        self.fails = False
        patch.setattr(reductions, "reduce_tensor", self.reduce)
        patch.setattr(reductions, "rebuild_cuda_tensor", self.rebuild)
        patch.setattr(torch.UntypedStorage, "_release_ipc_counter", classmethod(self.release))
        self.released: list[Any] = []
        for module in (cuda_ipc, worker):
            patch.setattr(module, "gpu_uuid", lambda device: f"GPU-{device.index}")
        for module in (weight_channel, worker):
            patch.setattr(module, "describe_device", self.describe)

    def describe(self, device: torch.device) -> dict[str, str | None]:
        return {"gpu": None if device.index is None else f"GPU-{device.index}", "nccl": "2.27.5"}

    def values(self, tensor: Tensor, handle: bytes) -> tuple[Any, ...]:
        memory = (tensor.device.index, handle, tensor.nbytes, 64, False, b"\x02c", 5, b"\x03e", True)
        return (Tensor, tensor.shape, tensor.stride(), 0, torch.UntypedStorage, tensor.dtype, *memory)

    def reduce(self, tensor: Tensor) -> Any:
        handle = b"\x01" + len(self.shared).to_bytes(2, "big")
        self.shared[handle] = tensor
        return reductions.rebuild_cuda_tensor, self.values(tensor, handle)

    def rebuild(self, *arguments: Any) -> Tensor:
        if self.fails:
            raise RuntimeError("pidfd_getfd: Operation not permitted")
        self.opened.append(dict(zip(self.names, arguments, strict=True)))
        return self.shared[self.opened[-1]["storage_handle"]]

    def release(self, _: Any, *arguments: Any, device: Any) -> None:
        self.released.append((*arguments, device))


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load_worker(monkeypatch)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch, worker: Any) -> Memory:
    return Memory(monkeypatch, worker)


def test_memory_is_shared_by_the_names_that_torch_gives_its_arguments(memory: Memory, worker: Any):
    """The way there and back of a buffer in GPU memory, with stand-ins for the GPU alone."""
    buffer = torch.arange(40, dtype=torch.uint8)
    handle = ipc_handle(buffer) | {"probe": bytes(range(16)).hex()}
    assert memory.released == [(b"\x02c", 5, None)]  # a reader that is killed leaves nothing behind
    opened = worker.open_ipc_buffer({"GPU-1": handle}, DEVICES[1])
    assert opened is buffer
    expected = dict(zip(memory.names, memory.values(buffer, b"\x01\0\0"), strict=True))
    assert memory.opened == [expected | {"storage_device": 1}]


@pytest.mark.parametrize(
    ("change", "said"),
    [({"probe": "00" * 16}, "is not the trainer's"), ({"gpu": "GPU-0"}, "no rank shares memory of this GPU")],
)
def test_memory_that_is_not_the_trainers_is_refused(memory: Memory, worker: Any, change: Any, said: str):
    handle = ipc_handle(torch.arange(40, dtype=torch.uint8)) | {"probe": bytes(range(16)).hex()}
    with pytest.raises(ValueError, match=said):
        worker.open_ipc_buffer({change.pop("gpu", "GPU-1"): handle | change}, DEVICES[1])


@pytest.mark.skipif(not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="torch 2.11 does not tell them")
def test_what_is_lent_lies_outside_of_expandable_segments(monkeypatch: pytest.MonkeyPatch):
    """The allocator's settings while it allocates, and after."""
    settings = "expandable_segments:True,garbage_collection_threshold:0.8"
    before, empty, seen = torch._C._accelerator_getAllocatorSettings(), torch.empty, []

    def watched(*arguments: Any, **keywords: Any) -> Tensor:
        seen.append(torch._C._accelerator_getAllocatorSettings())
        return empty(*arguments, **keywords)

    torch._C._accelerator_setAllocatorSettings(settings)
    try:
        monkeypatch.setattr(torch, "empty", watched)
        assert allocate(10, torch.device("cpu")).shape == (10,)
        assert seen == [f"{settings},expandable_segments:False"]
        assert torch._C._accelerator_getAllocatorSettings() == settings
    finally:
        torch._C._accelerator_setAllocatorSettings(before or "expandable_segments:False")


@pytest.mark.parametrize(
    ("environment", "settings"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True,roundup_power2_divisions:4"}, None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:4"}, ""),
    ],
)
def test_with_torch_2_11_the_allocators_settings_are_those_of_the_start(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], settings: str | None
):
    settings = environment["PYTORCH_ALLOC_CONF"] if settings is None else settings
    did: list[str] = []
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings", raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", did.append)
    assert allocate(10, torch.device("cpu")).shape == (10,)
    assert did == ([f"{settings},expandable_segments:False", settings] if settings else [])


def test_tensors_are_laid_out_in_portions_that_fit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda_ipc, "BUCKET_BYTES", 1024)
    assert make_buckets(SPECS) == [{"a": 256, "b": 512, "c": 768}, {"d": 256}, {"e": 256}]
    assert make_buckets([]) == []


class Together:
    """The ranks of a run, as far as sharing memory needs them, in threads."""

    def __init__(self, count: int):
        self.barrier = threading.Barrier(count)
        self.given: dict[int, Any] = {}

    def rank(self, number: int) -> Any:
        outer = self

        class Ranks:
            def all_reduce_max(self, value: float) -> float:
                outer.barrier.wait(PATIENCE_S)
                return value

            def gather(self, value: Any) -> Any:
                outer.given[number] = value
                outer.barrier.wait(PATIENCE_S)
                return [outer.given[n] for n in sorted(outer.given)] if number == 0 else None

        return Ranks()


def weights_of(rank: int, value: float) -> dict[str, Tensor]:
    """They are the same on all ranks of a run; here they tell whose memory was read."""
    return {s.name: torch.full(s.shape, value + rank + n, dtype=s.dtype) for n, s in enumerate(SPECS)}


class Machine:
    """Two ranks, and servers on their GPUs that sleep while the policy trains: one on each, or one on both."""

    def __init__(self, worker: Any, *, tensor_parallel: int = 1):
        self.handles = [
            ThreadServer(
                make=EngineServer,
                worker=worker,
                weights=weights_of(0, -9),
                devices=DEVICES[first : first + tensor_parallel],
            )
            for first in range(0, 2, tensor_parallel)
        ]
        for handle in self.handles:
            handle.start()
        self.servers: list[Any] = [handle.fakes[0] for handle in self.handles]
        self.channels = [
            WeightChannel(
                handle.url,
                secret=Secret(SECRET),
                device=DEVICES[0],
                num_workers=tensor_parallel,
                timeout_s=PATIENCE_S,
                sleeps=True,
                ipc_gpus={"GPU-0", "GPU-1"},
            )
            for handle in self.handles
        ]
        for channel in self.channels:
            channel.open()

    def publish(self, value: float, version: int) -> dict[WeightChannel, Exception]:
        """Both ranks lend, and rank 0 publishes."""
        failed: dict[WeightChannel, Exception] = {}

        def send(weights: Iterator[tuple[str, Tensor]], handles: Any) -> None:
            failed.update(send_to_servers(self.channels, weights, SPECS, version, handles))

        self.send_weights(value, send, share=True)
        return failed

    def send_weights(self, value: float, send: Callable[[Iterator[tuple[str, Tensor]], Any], None], *, share: bool):
        """As `Worker.send_weights`: both ranks take part to the end, whatever becomes of `send`."""
        together = Together(2)

        def rank(number: int) -> None:
            weights: Iterator[tuple[str, Tensor]] = iter(weights_of(number, value).items())
            handles: Any = {}
            if share:
                buffer = IpcBuffer(SPECS, together.rank(number), DEVICES[number])
                weights, handles = buffer.stage(weights), buffer.handles
            try:
                if number == 0:
                    send(weights, handles)
            finally:
                deque(weights, maxlen=0)

        with ThreadPoolExecutor(2) as threads:
            for done in [threads.submit(rank, number) for number in range(2)]:
                done.result()

    def assert_served(self, number: int, rank: int, value: float) -> None:
        engines = [engine for server in self.servers for engine in server.engines]
        served = engines[number].model.weights
        expected = weights_of(rank, value)
        assert served.keys() == expected.keys()
        assert all(torch.equal(served[name], expected[name]) for name in expected)

    def close(self) -> None:
        for channel, handle in zip(self.channels, self.handles, strict=True):
            channel.close()
            handle.stop()


@pytest.fixture
def machine(memory: Memory, worker: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setattr(cuda_ipc, "BUCKET_BYTES", 1024)
    made = Machine(worker)
    yield made
    made.close()


def test_each_server_reads_the_memory_of_the_rank_on_its_gpu(machine: Machine, memory: Memory):
    assert [channel.transport for channel in machine.channels] == ["ipc", "ipc"]
    for version, value in ((1, 10.0), (2, 20.0)):
        for channel in machine.channels:
            channel.sleep()
        assert machine.publish(value, version) == {}
        for number in range(2):
            machine.assert_served(number, rank=number, value=value)
            assert machine.servers[number].version == str(version)
            assert machine.servers[number].engine._ipc_buffer is None  # and lets go of it
            assert machine.servers[number].calls["/update_weights"] == version * (1 + 3)  # declared, and make_buckets
    assert len(memory.shared) == 4  # one handle for each rank and update
    assert not any(channel.notes for channel in machine.channels)


def test_workers_of_one_server_read_the_memory_of_the_ranks_on_their_gpus(
    memory: Memory, worker: Any, monkeypatch: pytest.MonkeyPatch
):
    """And where that cannot be opened, both receive the weights of rank 0."""
    monkeypatch.setattr(cuda_ipc, "BUCKET_BYTES", 1024)
    with closing(Machine(worker, tensor_parallel=2)) as machine:
        (channel,) = machine.channels
        for version, value in ((1, 10.0), (2, 20.0)):
            channel.sleep()
            assert machine.publish(value, version) == {} and channel.transport == "ipc"
            for number in range(2):
                machine.assert_served(number, rank=number, value=value)
    memory.fails = True
    with closing(Machine(worker, tensor_parallel=2)) as machine:
        (channel,) = machine.channels
        assert machine.publish(30.0, 1) == {} and channel.transport == "gloo"
        for number in range(2):
            machine.assert_served(number, rank=0, value=30.0)
        assert "pidfd_getfd: Operation not permitted" in channel.notes[0]


def test_weights_take_another_way_where_memory_cannot_be_opened(
    machine: Machine, memory: Memory, monkeypatch: pytest.MonkeyPatch
):
    """From rank 0's GPU to another one by NCCL, which does not take two processes on one."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    memory.fails = True
    for version in (1, 2):
        assert machine.publish(10.0, version) == {}
        for number in range(2):
            machine.assert_served(number, rank=0, value=10.0)  # whose stream it is
    assert [channel.transport for channel in machine.channels] == ["gloo", "nccl"]
    for channel in machine.channels:
        note = channel.notes[0]
        assert "pidfd_getfd: Operation not permitted" in note and channel.url in note


def test_a_server_that_fails_to_read_costs_itself_alone(machine: Machine):
    """It has part of the weights then: it stays paused until an update is complete."""
    bad = machine.servers[1]
    load, count = bad.engine._load_shared, iter(range(9))

    def fail(info: Any) -> None:
        if next(count) == 1:
            raise RuntimeError("no")
        load(info)

    bad.engine._load_shared = fail
    assert list(machine.publish(10.0, 1)) == [machine.channels[1]]
    machine.assert_served(0, rank=0, value=10.0)
    assert bad.version == "default" and bad.paused
    assert machine.publish(20.0, 2) == {}
    machine.assert_served(1, rank=1, value=20.0)


def test_a_lender_gives_every_tensor_out_as_it_came(memory: Memory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda_ipc, "BUCKET_BYTES", 1024)
    weights = weights_of(0, 3.0)
    buffer = IpcBuffer(SPECS, SINGLE_PROCESS, DEVICES[0])
    assert list(buffer.handles) == ["GPU-0"]
    for (name, tensor), spec in zip(buffer.stage(iter(weights.items())), SPECS, strict=True):
        assert name == spec.name and torch.equal(tensor, weights[name])


def test_a_server_that_has_slept_is_sent_its_version_again(machine: Machine):
    for value in (10.0, 20.0):
        for channel in machine.channels:
            channel.sleep()
        assert machine.publish(value, 7) == {}
        for number in range(2):
            machine.assert_served(number, rank=number, value=value)


def test_servers_that_sleep_stay_connected(machine: Machine, memory: Memory, monkeypatch: pytest.MonkeyPatch):
    """In groups too, which are dear to make."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    memory.fails = True
    assert machine.publish(10.0, 1) == {}
    assert [channel.transport for channel in machine.channels] == ["gloo", "nccl"]
    met = [server.calls["/init_weight_transfer_engine"] for server in machine.servers]
    for channel in machine.channels:
        channel.sleep()
    assert machine.publish(20.0, 2) == {}
    for number in range(2):
        machine.assert_served(number, rank=0, value=20.0)
    assert [server.calls["/init_weight_transfer_engine"] for server in machine.servers] == met


def test_memory_is_lent_again_after_an_update_that_broke_off(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    """As a run publishes, which has the ranks lend only where a server may read it."""
    monkeypatch.setattr(vllm_setup, "weight_specs", lambda policy, dtype: SPECS)

    def publish_in_run(value: float, version: int) -> Any:
        def send_weights(send: Any, dtype: torch.dtype, *, share: bool) -> None:
            machine.send_weights(value, send, share=share)

        worker: Any = SimpleNamespace(policy=None, send_weights=send_weights)
        processes = TrainingWorkers(WorkerGroup(worker, SINGLE_PROCESS))
        return vllm_setup._publish(processes, torch.bfloat16, pytest.fail, machine.channels, version)

    def broken(channels: Any, weights: Iterator[Any], *rest: Any) -> Any:
        def stream() -> Iterator[Any]:
            yield next(weights)
            raise ZeroDivisionError

        return send_to_servers(channels, stream(), *rest)

    assert publish_in_run(10.0, 1) == {}
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(vllm_setup, "send_to_servers", broken)
        publish_in_run(20.0, 2)
    assert [channel.transport for channel in machine.channels] == [None, None]
    assert publish_in_run(30.0, 3) == {}
    assert [channel.transport for channel in machine.channels] == ["ipc", "ipc"]
    for number in range(2):
        machine.assert_served(number, rank=number, value=30.0)


def test_a_server_that_has_read_what_was_lent_is_not_sent_weights_another_way(machine: Machine, memory: Memory):
    """Memory can be shared there, so that something else is wrong: it is started again, and reads it once more."""
    assert machine.publish(10.0, 1) == {}
    memory.fails = True
    failed = machine.publish(20.0, 2)
    assert list(failed) == machine.channels
    assert all("pidfd_getfd" in str(error) for error in failed.values())
    memory.fails = False
    assert machine.publish(30.0, 3) == {}
    assert [channel.transport for channel in machine.channels] == ["ipc", "ipc"]


def test_an_update_of_a_sleeping_server_is_one_order_of_calls(machine: Machine):
    server = machine.servers[0]
    order: list[Any] = []
    work = server.work

    def watched(path: str, body: Any) -> Any:
        order.append((path, body.get("update_info", {}).get("step")))
        return work(path, body)

    assert machine.publish(10.0, 1) == {}
    server.work = watched
    machine.channels[0].sleep()
    assert machine.publish(20.0, 2) == {}
    assert order == [
        ("/sleep", None),
        ("/init_weight_transfer_engine", None),  # what is lent is opened before it is disturbed; they have met before
        ("/pause", None),
        ("/wake_up", None),
        ("/start_weight_update", None),
        ("/update_weights", "declare"),
        *[("/update_weights", "load")] * 3,
        ("/finish_weight_update", None),
        ("/wake_up", None),
        ("/reset_prefix_cache", None),
        ("/resume", None),
    ]
