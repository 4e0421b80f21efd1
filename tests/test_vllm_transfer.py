"""The transfer of weights to a server that shares a GPU, with stand-ins: `tests/real_vllm` has real servers."""

import importlib.util
import inspect
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from cohort.rollout.vllm import transfer
from cohort.rollout.vllm.publish import publish
from cohort.rollout.vllm.server import WORKER_FOLDER


def test_memory_is_shared_by_the_names_that_torch_gives_its_arguments(monkeypatch: pytest.MonkeyPatch):
    """The way there and back of a tensor in GPU memory, with stand-ins for the GPU alone."""
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    size = torch.Size([2, 3])
    memory = (0, b"\x01h", 512, 64, False, b"\x02c", 5, b"\x03e", True)
    values = (torch.Tensor, size, (3, 1), 6, torch.UntypedStorage, torch.bfloat16, *memory)
    sent = dict(zip(names, values, strict=True))
    monkeypatch.setattr(reductions, "reduce_tensor", lambda _: (reductions.rebuild_cuda_tensor, tuple(sent.values())))
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda *arguments: dict(zip(names, arguments, strict=True)))
    entry = transfer.share("w", torch.zeros(0))
    assert entry["name"] == "w"
    received = load_worker(monkeypatch).open_shared(entry, torch.device("cuda", 3))
    assert received == sent | {"storage_device": 3}


class SleepyServer:
    """Stands in for a server: writes down what it is asked, and tells its version, asleep or not."""

    url = "http://server"

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.version: int | None = None

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.calls.append((name, *arguments))

    def weight_version(self) -> int | None:
        self.calls.append(("weight_version",))
        return self.version

    def finish_weight_update(self, version: int) -> None:
        self.calls.append(("finish_weight_update", version))
        self.version = version


SPECS = [transfer.TensorSpec(name, (2,), torch.bfloat16) for name in "abc"]
DECLARED = {"step": "declare", "specs": [{"name": name, "shape": [2], "dtype": "bfloat16"} for name in "abc"]}


@pytest.fixture
def sleepy(monkeypatch: pytest.MonkeyPatch) -> SleepyServer:
    """The server's part, with stand-ins for the GPU's too."""
    server = SleepyServer()
    monkeypatch.setattr(transfer, "VllmApi", lambda *_, **__: server)
    monkeypatch.setattr(transfer, "share", lambda name, tensor: {"name": name, "values": tensor.tolist()})
    monkeypatch.setattr(transfer, "_SHARED_BYTES", 8)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    return server


def channel_to(server: Any, device: str) -> transfer.WeightChannel:
    channel = transfer.WeightChannel(server, device=torch.device(device), num_workers=1, timeout_s=5, sleeps=True)
    channel._device = torch.device("cpu")  # there is no GPU to put tensors on
    return channel


def send(channel: transfer.WeightChannel, version: int) -> None:
    weights = [(spec.name, torch.full((2,), n, dtype=torch.float32)) for n, spec in enumerate(SPECS)]
    assert publish([channel], weights, SPECS, version) == {}
    assert channel.version == version


UPDATE_OF_A_SHARED_GPU = [
    ("weight_version",),
    ("init_weight_transfer", {"way": "ipc", "timeout_s": 5}),
    ("pause",),
    ("wake_up", ["weights"]),
    ("start_weight_update",),
    ("update_weights", DECLARED),
    (
        "update_weights",
        {"step": "load", "shared": [{"name": "a", "values": [0, 0]}, {"name": "b", "values": [1, 1]}]},
    ),
    ("update_weights", {"step": "load", "shared": [{"name": "c", "values": [2, 2]}]}),
    ("finish_weight_update", 7),
    ("wake_up", ["kv_cache"]),
    ("reset_prefix_cache",),
    ("resume",),
]


def test_a_shared_gpu_is_woken_for_the_weights_first(sleepy: SleepyServer):
    channel = channel_to(sleepy, "cuda")
    channel.sleep()
    send(channel, 7)
    assert sleepy.calls == [("sleep", 2), *UPDATE_OF_A_SHARED_GPU]


def test_what_a_server_has_slept_off_is_sent_once_more(sleepy: SleepyServer):
    """It dropped its weights, and still says that it has their version."""
    channel = channel_to(sleepy, "cuda")
    send(channel, 7)
    sleepy.calls.clear()
    send(channel, 7)
    assert sleepy.calls == [("weight_version",)]  # awake, it has them
    channel.sleep()
    send(channel, 7)
    assert sleepy.calls == [("weight_version",), ("sleep", 2), *UPDATE_OF_A_SHARED_GPU]


def test_weights_for_a_server_that_sleeps_come_through_a_group_where_the_device_is_a_cpu(
    sleepy: SleepyServer, monkeypatch: pytest.MonkeyPatch
):
    """Several ranks share GPUs with servers: the way is gloo, and the server is woken all the same."""

    class Group:
        def __init__(self) -> None:
            self.came: list[list[int]] = []

        def broadcast(self, tensor: torch.Tensor, rank: int) -> Any:
            self.came.append(tensor.tolist())
            return SimpleNamespace(is_completed=lambda: True, wait=lambda: None)

    group = Group()
    monkeypatch.setattr(transfer.WeightChannel, "_meet", lambda _: group)
    channel = channel_to(sleepy, "cpu")
    channel.sleep()
    send(channel, 7)
    assert group.came == [[0, 0, 0, 0], [128, 63, 128, 63], [0, 64, 0, 64]]  # 0, 1 and 2 in bfloat16, as bytes
    assert sleepy.calls == [
        ("sleep", 2),
        ("weight_version",),
        ("pause",),
        ("wake_up", ["weights"]),
        ("start_weight_update",),
        ("update_weights", DECLARED),
        ("update_weights", {"step": "receive"}),
        ("finish_weight_update", 7),
        ("wake_up", ["kv_cache"]),
        ("reset_prefix_cache",),
        ("resume",),
    ]


def load_worker(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The worker's module, with nothing behind what it imports of vLLM."""

    class Anything(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {"__class_getitem__": classmethod(lambda cls, _: cls), "register_engine": print})

    for module in (
        "distributed.weight_transfer",
        "distributed.weight_transfer.base",
        "model_executor.model_loader.reload",
    ):
        monkeypatch.setitem(sys.modules, f"vllm.{module}", Anything(module))
    logger = Anything("logger")
    logger.init_logger = lambda _: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.logger", logger)
    for package in ("", ".distributed", ".model_executor", ".model_executor.model_loader"):
        monkeypatch.setitem(sys.modules, f"vllm{package}", Anything(package))
    spec = importlib.util.spec_from_file_location("worker", WORKER_FOLDER / "cohort_vllm_worker.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "worker", module)
    spec.loader.exec_module(module)
    return module
