"""Weights on their way out of the training process, without vLLM: a process group of one rank, and another process.

The other process is a server of the tests: Cohort's own part of a vLLM worker behind a stand-in for vLLM. On a GPU it
opens the trainer's memory through CUDA IPC; on a CPU weights go through gloo.
"""

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cohort.models import TensorSpec
from cohort.ranks.collectives import SINGLE_PROCESS
from cohort.rollout.engines.servers.channels import send_to_servers
from cohort.rollout.engines.servers.cuda_ipc import IpcBuffer
from cohort.rollout.engines.servers.secret import Secret
from cohort.rollout.engines.servers.server_side.cohort_weight_group import WeightGroup, gpu_uuid, result_within
from cohort.rollout.engines.vllm.weight_channel import WeightChannel
from comparisons import Check
from harness import FailedError, SkippedError

HELPERS = Path(__file__).parents[1] / "tests" / "helpers"
MOST_S = 60.0  # of any call
ALONE_S = 3.0  # that is waited for a peer who never comes


def process_group(device: torch.device, tiny: bool) -> dict[str, Any]:
    """Connect, broadcast and abort, alone; and abort while a peer is waited for."""
    measured: dict[str, float] = {}

    def run(name: str, future: "Future[None]") -> None:
        start = time.perf_counter()
        result_within(future, MOST_S, name)
        measured[f"{name}, s"] = time.perf_counter() - start

    group = _group(device, size=1)
    run("connect", group.connect())
    sent = torch.randn(1 << (10 if tiny else 28), device=device, dtype=torch.bfloat16)
    received = sent.clone()
    run("broadcast", group.broadcast(received))
    group.abort()
    lonely = _group(device, size=2)
    connecting = lonely.connect()
    came = _succeeds(connecting, ALONE_S)
    start = time.perf_counter()
    lonely.abort()
    measured["abort while a peer is waited for, s"] = time.perf_counter() - start
    wrong = {
        "a broadcast changes the tensor": not torch.equal(sent, received),
        "a group that was aborted still broadcasts": _succeeds(group.broadcast(received), MOST_S),
        "a peer is there that never came": came,
        "the device does not work after an abort": (torch.ones(8, device=device) * 2).sum().item() != 16,
        "the watchdog stays off": "TORCH_NCCL_BLOCKING_WAIT" in os.environ,
    }
    checks = [Check(name=f"process group: {name}", error=float(is_so), limit=0.0) for name, is_so in wrong.items()]
    return {"checks": [check.row() for check in checks], "measured": measured}


def _group(device: torch.device, *, size: int) -> WeightGroup:
    transport: Any = "nccl" if device.type == "cuda" else "gloo"
    return WeightGroup(
        transport, dist.HashStore(), rank=0, size=size, device=device, host="127.0.0.1", timeout_s=2 * ALONE_S
    )


def _succeeds(future: "Future[None]", timeout_s: float) -> bool:
    try:
        result_within(future, timeout_s, "it")
    except RuntimeError:
        return False
    return True


def other_process(device: torch.device, tiny: bool) -> dict[str, Any]:
    """Publish twice to a server on the same GPU that sleeps in between.

    Raises:
        SkippedError: pytest is missing, which the tests' server imports.
    """
    if find_spec("pytest") is None:
        raise SkippedError("needs pytest, not installed")
    shape = (16, 8) if tiny else (4096, 4096)
    specs = [TensorSpec(f"layer.{n}", shape, torch.bfloat16) for n in range(3 if tiny else 48)]
    on_gpu = device.type == "cuda"
    checks: list[Check] = []
    measured: dict[str, Any] = {}
    with _server(device, specs) as (url, secret):
        channel = WeightChannel(
            url, secret=Secret(secret), device=device, num_workers=1, timeout_s=MOST_S, sleeps=True,
            ipc_gpus={gpu_uuid(device)} if on_gpu else (),
        )  # fmt: skip
        for version in (1, 2):
            if version > 1:
                channel.sleep()
            weights = {s.name: torch.randn(s.shape, device=device).to(s.dtype) for s in specs}
            start = time.perf_counter()
            failed = _publish(channel, weights, specs, version, device)
            seconds = time.perf_counter() - start
            measured[f"version {version}, GB/s"] = sum(w.nbytes for w in weights.values()) / seconds / 1e9
            served = _get(url, secret, "/checksums")
            wrong = sum(served.get(name) != checksum(tensor) for name, tensor in weights.items())
            wrong += bool(failed) + (_get(url, secret, "/weight_info")["weight_version"] != str(version))
            checks.append(Check(name=f"tensors that arrived wrongly, version {version}", error=wrong, limit=0.0))
        measured["transport"] = channel.transport
        is_wrong = channel.transport != ("ipc" if on_gpu else "gloo")
        note = "; ".join([*channel.notes, *map(str, failed.values())])
        checks.append(Check(name="another transport than was expected", error=float(is_wrong), limit=0.0, note=note))
        channel.close()
    return {"checks": [check.row() for check in checks], "measured": measured | {"notes": note}}


def _publish(
    channel: WeightChannel, weights: dict[str, Tensor], specs: list[TensorSpec], version: int, device: torch.device
) -> dict[WeightChannel, Any]:
    """Send weights as `Worker.send_weights` does."""
    stream: Iterator[tuple[str, Tensor]] = iter(weights.items())
    handles: dict[str, Any] = {}
    if channel.may_use_ipc:
        buffer = IpcBuffer(specs, SINGLE_PROCESS, device)
        stream, handles = buffer.stage(stream), buffer.handles
    try:
        return send_to_servers([channel], stream, specs, version, handles)
    finally:
        deque(stream, maxlen=0)


def checksum(tensor: Tensor) -> int:
    """A sum of a tensor's bits that depends on their order."""
    bits = tensor.flatten().view(torch.int16).long()
    return int((bits * (1 + torch.arange(len(bits), device=bits.device) % 251)).sum())


def _get(url: str, secret: str, path: str) -> Any:
    request = urllib.request.Request(url + path, headers={"Authorization": f"Bearer {secret}"})
    with urllib.request.urlopen(request, timeout=MOST_S) as answer:
        return json.load(answer)


@contextmanager
def _server(device: torch.device, specs: list[TensorSpec]) -> Iterator[tuple[str, str]]:
    """Address and secret of a server in another process."""
    shapes = json.dumps({spec.name: spec.shape for spec in specs})
    process = subprocess.Popen([sys.executable, __file__, str(device), shapes], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline().split()
        if not said:
            raise FailedError(f"the server ended with {process.wait()}")
        yield said[0], said[1]
    finally:
        process.kill()
        process.wait()


def serve(device: torch.device, shapes: dict[str, list[int]]) -> None:
    """Serve until killed."""
    sys.path.append(str(HELPERS))
    import pytest

    from fake_vllm import SECRET, ThreadServer
    from weight_servers import EngineServer, load_worker

    class Server(EngineServer):
        def tell(self, path: str) -> Any:
            if path != "/checksums":
                return super().tell(path)
            return {name: checksum(tensor) for name, tensor in self.model.weights.items()}

    worker = load_worker(pytest.MonkeyPatch())
    weights = {name: torch.zeros(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()}
    server = ThreadServer(make=Server, worker=worker, weights=weights, devices=[device])
    server.start()
    print(server.url, SECRET, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    serve(torch.device(sys.argv[1]), json.loads(sys.argv[2]))
