"""A run of two processes whose server hangs while it is given weights. The server is made up, all the rest is real."""

import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

import cohort
from cohort.rollout.engines.servers.server_side.cohort_weight_group import WeightGroup, describe_device
from fake_vllm import HANG_S, SECRET, FakeVllm, ThreadServer
from runs import changed, make_inputs, metric
from selection import slow

CPU = torch.device("cpu")


class WeightTaker(FakeVllm):
    """Takes weights as the worker in a real server does, and hangs in one of the pauses before that."""

    hangs_at = 3  # the first two are the weights of the start and those of the first step

    def tell(self, path: str) -> Any:
        return {"weight_version": self.version} if path == "/weight_info" else super().tell(path)

    def do(self, path: str, body: Any) -> tuple[Any, int]:
        if path == "/init_weight_transfer_engine":
            self.join(**body["init_info"])
            return {}, 200
        if path == "/pause" and self.calls["/pause"] == self.hangs_at:
            time.sleep(HANG_S)
        elif path == "/update_weights":
            info = body["update_info"]
            self.specs = info.get("specs") or self.specs
            if info["step"] == "receive":
                self.weights = {spec["name"]: self.receive(**spec) for spec in self.specs}
        elif path == "/finish_weight_update" and body["weight_version"] is None:
            return {}, 200
        elif path == "/reset_prefix_cache":
            return {"success": True}, 200
        return super().do(path, body)

    def join(self, *, host: str, port: int, world_size: int, **_: float) -> None:
        store = dist.TCPStore(host, port, world_size)
        store.set("here/1", json.dumps(describe_device(CPU)))
        assert store.get("transport") == b"gloo"
        self.group = WeightGroup("gloo", store, rank=1, size=world_size, device=CPU, host=host, timeout_s=60)
        self.group.connect().result()

    def receive(self, *, name: str, shape: list[int], dtype: str) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        self.group.broadcast(tensor).result()
        return tensor


@slow("a run of two processes that waits for 20 s; test_workers has the waiting")
def test_the_other_ranks_do_not_give_up_while_a_server_hangs(tmp_path: Path):
    """They wait inside of the gathering of weights, for as long as rank 0 waits for the server, and not longer."""
    server = ThreadServer(make=WeightTaker)
    server.start()
    (tmp_path / "secret").touch(mode=0o600)
    (tmp_path / "secret").write_text(SECRET)
    config = changed(
        make_inputs(tmp_path),
        rollout={"engine": "vllm", "urls": [server.url], "secret_file": str(tmp_path / "secret"), "parity_every": 0},
        hardware={"processes": 2, "timeout_s": 16, "device": "cpu"},
        train={"steps": 3},
        eval={"every": 0},
    )
    try:
        run = cohort.train(config)
    finally:
        server.stop()
    (taker,) = server.fakes
    assert isinstance(taker, WeightTaker)
    assert metric(run.run_dir, "processes") == [2] * 3
    # the first weights and those of each step, one of them twice
    assert taker.calls["/pause"] == 5 and taker.version == "3"
    final = load_file(run.final_dir / "model.safetensors")
    assert taker.weights.keys() == final.keys()
    assert all(torch.equal(taker.weights[name], final[name]) for name in final)
