"""Servers that take weights as a real one does, with Cohort's own part of it: vLLM's is made up, and so is NCCL."""

import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cohort.rollout.engines.servers.process import SERVER_SIDE
from cohort.rollout.engines.servers.server_side import cohort_weight_group
from cohort.rollout.engines.vllm.server import WORKER_FOLDER
from fake_vllm import FakeVllm, ThreadServer
from forked import fork
from waiting import PATIENCE_S, free_port, num_lines, until

Weights = dict[str, Tensor]
GROUP_MODULE = "cohort_weight_group"  # as the worker imports it, from its folder
DIED = 7  # exit code of a server that has met its fault


class Engine:
    """What vLLM's base class of engines does."""

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any):
        self.parallel_config = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
        self.model_config = vllm_config
        self.device, self.model = device, model

    def parse_init_info(self, info: dict[str, Any]) -> Any:
        return self.init_info_cls(**info)  # type: ignore[attr-defined]

    def parse_update_info(self, info: dict[str, Any]) -> Any:
        return self.update_info_cls(**info)  # type: ignore[attr-defined]

    def __class_getitem__(cls, _: Any) -> Any:
        return cls


def load_worker(patch: pytest.MonkeyPatch) -> Any:
    """The module that a server loads, from its folder, with nothing behind what it imports of vLLM."""
    named = {
        "distributed.weight_transfer": {
            "WeightTransferEngineFactory": SimpleNamespace(register_engine=lambda *_: None)
        },
        "distributed.weight_transfer.base": {
            "WeightTransferEngine": Engine,
            "WeightTransferInitInfo": object,
            "WeightTransferUpdateInfo": object,
        },
        "lora.request": {"LoRARequest": SimpleNamespace},
        "model_executor.model_loader.reload": {
            "initialize_layerwise_reload": lambda model: None,
            "finalize_layerwise_reload": lambda model, config: None,
        },
        "model_executor.model_loader.reload.layerwise": {"get_layerwise_info": lambda layer: None},
    }
    for path, contents in named.items():
        parts = ["vllm", *path.split(".")]
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in sys.modules:
                patch.setitem(sys.modules, name, ModuleType(name))
        for key, value in contents.items():
            patch.setattr(sys.modules[f"vllm.{path}"], key, value, raising=False)
    for folder in (SERVER_SIDE, WORKER_FOLDER):
        patch.syspath_prepend(str(folder))
    for name in ("cohort_vllm_worker", GROUP_MODULE):  # nothing else imports them by these names
        sys.modules.pop(name, None)
    worker = importlib.import_module("cohort_vllm_worker")
    # one process has both ends here, and its environment is set by one of them
    patch.setattr(sys.modules[GROUP_MODULE], "_no_watchdog", cohort_weight_group._no_watchdog)
    return worker


class Model:
    """One that is nothing but its weights."""

    def __init__(self, weights: Weights):
        self.weights = weights

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.weights = {**self.weights, name: tensor.clone()}

    def modules(self) -> list[Any]:
        return []


class EngineServer(FakeVllm):
    """A server whose workers, one for each device, are Cohort's engines; what they do, they do one after the other, as
    vLLM's do."""

    def __init__(self, faults: list[str] | None = None, *, worker: Any, weights: Weights, devices: list[torch.device]):
        super().__init__(faults)
        self.engines = [
            worker.CohortWeightTransferEngine(None, SimpleNamespace(), device, Model(weights)) for device in devices
        ]
        for rank, engine in enumerate(self.engines):
            engine._expected = {name: (list(tensor.shape), False) for name, tensor in weights.items()}
            engine.parallel_config = SimpleNamespace(data_parallel_index=0, world_size=len(devices), rank=rank)
        self.engine = self.engines[0]
        self.updating = self.paused = False
        self.turn = threading.Lock()

    def tell(self, path: str) -> Any:
        return {"weight_version": self.version} if path == "/weight_info" else super().tell(path)

    def do(self, path: str, body: Any) -> tuple[Any, int]:
        try:
            with self.turn:
                return self.work(path, body), 200
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}, 500

    @property
    def model(self) -> Model:
        """The first worker's."""
        return self.engine.model

    def on_all(self, call: Callable[[Any], None]) -> None:
        """At the same time on all workers: they may wait for each other."""
        with ThreadPoolExecutor(len(self.engines)) as pool:
            done = [pool.submit(call, engine) for engine in self.engines]
        for future in done:
            future.result()

    def work(self, path: str, body: Any) -> Any:
        if path == "/init_weight_transfer_engine":
            self.on_all(lambda engine: engine.init_transfer_engine(engine.parse_init_info(body["init_info"])))
        elif path == "/start_weight_update":
            if self.updating:
                raise RuntimeError("an update is under way")
            self.on_all(lambda engine: engine.start_weight_update())
            self.updating = True
        elif path == "/update_weights":
            if not self.updating:
                raise RuntimeError("no update is under way")
            try:
                self.on_all(lambda engine: engine.update_weights(body["update_info"]))
            except BaseException:
                self.updating = False
                raise
        elif path == "/finish_weight_update":
            if not self.updating:
                raise RuntimeError("no update is under way")
            self.on_all(lambda engine: engine.finish_weight_update())
            self.updating = False
            if body["weight_version"] is not None:
                self.version = body["weight_version"]
        elif path in ("/pause", "/resume"):
            self.paused = path == "/pause"
        elif path == "/reset_prefix_cache":
            return {"success": True}
        else:
            return super().do(path, body)[0]
        return {}


@dataclass
class Fault:
    """What goes wrong in one call of a group: `raises`, `hangs` for as long as the test lasts, or `dies`."""

    call: Literal["make", "try", "broadcast", "wait", "abort", "finish"] = "make"
    rank: int = 0
    how: str = ""  # nothing goes wrong
    nth: int = 1  # of these calls, which are counted by rank

    def __str__(self) -> str:
        return f"{'server' if self.rank else 'trainer'} {self.how} in {self.call} {self.nth}"


class FakeNccl:
    """Takes the place of ProcessGroupNCCL: sends by gloo, and fails where a fault says so."""

    fault = Fault()
    calls: dict[tuple[str, int], int] = {}  # noqa: RUF012
    released = threading.Event()  # what hangs goes on then, and fails
    environment: Callable[[], None] = staticmethod(lambda: None)

    class Options:
        """Of NCCL, as far as Cohort sets them."""

        _timeout: Any = None

    def __init__(self, store: Any, rank: int, size: int, options: Options):
        self.rank = rank
        FakeNccl.environment()
        self.meet("make")
        of_gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        of_gloo._timeout = options._timeout
        of_gloo._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        # as NCCL, it connects to the others in the first collective
        self.connect = lambda: dist.ProcessGroupGloo(store, rank, size, of_gloo)

    def meet(self, call: str) -> None:
        """The fault, where this call is its."""
        count = self.calls[call, self.rank] = self.calls.get((call, self.rank), 0) + 1
        fault = self.fault
        if fault.how and (fault.call, fault.rank, fault.nth) == (call, self.rank, count):
            if fault.how == "dies":
                os._exit(DIED)
            if fault.how == "hangs":
                self.released.wait()
            raise RuntimeError(f"NCCL error: {call} failed")

    def allreduce(self, tensor: Tensor) -> Any:
        self.meet("try")
        self.gloo = self.connect()
        return self.gloo.allreduce(tensor)

    def broadcast(self, tensor: Tensor, root: int) -> Any:
        self.meet("broadcast")
        work = self.gloo.broadcast(tensor, root)

        def wait() -> None:
            self.meet("wait")
            work.wait()

        return SimpleNamespace(wait=wait)

    def abort(self) -> None:
        self.meet("abort")


@contextmanager
def fault_in_nccl(fault: Fault) -> Iterator[None]:
    """One that everything after meets."""
    FakeNccl.fault, FakeNccl.calls, FakeNccl.released = fault, {}, threading.Event()
    try:
        yield
    finally:
        FakeNccl.released.set()
        FakeNccl.fault = Fault()


@contextmanager
def process_server(fault: Fault, out: Path) -> Iterator[str]:
    """The address of a server that is a process of its own, and dies of the fault; it prints into `out`."""
    port = free_port()
    process = fork(serve, port, fault, out=out)
    try:
        until(lambda: num_lines(out) == 1)
        yield f"http://127.0.0.1:{port}"
        process.join(PATIENCE_S)
        assert process.exitcode == DIED  # of its fault, and of nothing else
    finally:
        process.kill()


def serve(port: int, fault: Fault) -> None:
    """Serve until the fault comes."""
    patch = pytest.MonkeyPatch()
    worker = load_worker(patch)
    patch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    patch.setattr(worker, "describe_device", lambda device: {"gpu": "GPU of the server", "nccl": "2.27.5"})
    FakeNccl.fault = fault
    weights = {name: torch.zeros(2, 3) for name in "abc"}
    server = ThreadServer(make=EngineServer, worker=worker, weights=weights, devices=[torch.device("cpu", 0)])
    server.start(port)
    (fake,) = server.fakes
    if fault.call == "finish":
        fake.engine.finish_weight_update = lambda: os._exit(DIED)  # type: ignore[attr-defined]
    print("up", flush=True)
    threading.Event().wait()
