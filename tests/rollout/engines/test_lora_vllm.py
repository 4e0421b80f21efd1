"""Adapters for vLLM, with made-up servers: what is refused, the room that servers have, and what they are told."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cohort.config import config_from_dict
from cohort.errors import UserError
from cohort.launch.serve import serve_command
from cohort.plan.rollout_engine import plan_engine
from cohort.rollout.engines.servers.handles import RunningServer, ServerError
from cohort.rollout.engines.servers.placement import PLACEMENT, Placement
from cohort.rollout.engines.servers.secret import Secret
from cohort.rollout.engines.vllm import setup as vllm_setup
from cohort.rollout.engines.vllm.weight_channel import AdapterChannel, send_adapter
from cohort.trainer.inputs import build_inputs
from cohort.trainer.setup import open_engine
from configs import MINIMAL
from fake_vllm import SECRET, ThreadServer
from runs import changed, make_inputs

Find = Callable[..., vllm_setup.VllmSetup]


@pytest.fixture
def find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Find:
    """The servers of a run with an adapter."""
    monkeypatch.setattr(vllm_setup, "check_vllm", lambda python: "0.32.0")
    raw = changed(make_inputs(tmp_path, hidden_size=64), rollout={"engine": "vllm"}, hardware={"device": "cpu"})

    def servers(**adapter: Any) -> vllm_setup.VllmSetup:
        config = config_from_dict(changed(raw, model={"adapter": adapter}))
        return open_engine(config, build_inputs(config))

    return servers


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"model": {"adapter": {"rank": 4, "dora": True}}},
            "adapter.dora: true: vLLM supports plain LoRA only; use dora",
        ),
        (
            {"model": {"adapter": {"rank": 4, "targets": ["q_proj", "lm_head"]}}},
            "adapter.targets: lm_head: vLLM supports adapters inside layers",
        ),
        (
            {"model": {"adapter": {"rank": 4, "targets": ["embed_tokens"]}}},
            "adapter.targets: model.embed_tokens: vLLM supports",
        ),
        ({"rollout": {"temperature": 0.001}}, "rollout.temperature: 0.001 .* 0.01 or more"),
        ({"eval": {"temperature": 0.001}}, "eval.temperature: 0.001 .* 0.01 or more"),
    ],
)
def test_what_vllm_does_not_serve_is_refused_before_servers_start(
    tmp_path: Path, sections: dict[str, Any], message: str
) -> None:
    raw = changed(make_inputs(tmp_path), rollout={"engine": "vllm"}, hardware={"device": "cpu"})
    config = config_from_dict(changed(raw, **sections))
    with pytest.raises(UserError, match=rf"{message}.*, or rollout\.engine: local"):
        open_engine(config, build_inputs(config))


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"model": {"adapter": {"dora": True}}}, "model.adapter.dora: true: vLLM supports plain LoRA only"),
        (
            {"model": {"adapter": {"rank": 513}}},
            "model.adapter.rank: 513 exceeds vLLM's maximum; use at",
        ),
        ({"model": {"adapter": {"targets": ["q_proj", "lm_head"]}}}, "model.adapter.targets: lm_head: vLLM supports"),
        (
            {"model": {"adapter": {"targets": ["model.embed_tokens"]}}},
            "model.adapter.targets: model.embed_tokens",
        ),
        ({"model": {"adapter": {"path": "list"}}}, "model.adapter.targets: lm_head: vLLM supports"),
        ({"model": {"adapter": {"path": "pattern"}}}, "model.adapter.targets: model.embed_tokens: vLLM supports"),
        ({"model": {"adapter": {"path": "wide"}}}, "model.adapter.rank: 600 exceeds"),
        ({"rollout": {"temperature": 0.001}}, "rollout.temperature: 0.001 is below vLLM's minimum; use 0.01"),
        ({"eval": {"path": "d", "temperature": 0.001}}, "eval.temperature: 0.001 is below vLLM's minimum"),
    ],
)
def test_what_is_refused_with_vllm_has_auto_take_the_local_engine(
    tmp_path: Path, sections: dict[str, Any], reason: str
) -> None:
    saved = {"list": (4, ["q_proj", "lm_head"]), "pattern": (4, r".*embed_tokens|.*q_proj"), "wide": (600, ["q_proj"])}
    for name, (rank, targets) in saved.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({"r": rank, "target_modules": targets}))
    auto = config_from_dict(changed(MINIMAL, **sections), base_dir=tmp_path)
    planned, why = plan_engine(auto)
    assert planned.rollout.engine == "local" and str(why).startswith(reason)


def test_servers_have_room_for_the_rank(find: Find, tmp_path: Path):
    assert find(rank=12).make_server("", tmp_path / "log").options.lora_rank == 12
    (tmp_path / "adapter").mkdir()
    saved = {"peft_type": "LORA", "r": 40, "lora_alpha": 1}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(saved))
    for adapter, room in (({"rank": 12}, "16"), ({"path": str(tmp_path / "adapter")}, "64")):
        raw = changed(make_inputs(tmp_path), model={"adapter": adapter}, rollout={"engine": "vllm"})
        raw = changed(raw, rollout={"secret_file": str(tmp_path / "secret")})
        command, _ = serve_command(config_from_dict(raw), host="127.0.0.1", port=8000)
        assert command[command.index("--max-lora-rank") + 1] == room


def test_a_server_without_room_for_an_adapter_is_refused(tmp_path: Path):
    config = config_from_dict(changed(make_inputs(tmp_path), rollout={"engine": "vllm"}))
    server = ThreadServer()
    server.start()
    try:
        with pytest.raises(UserError, match=r"rollout.urls: http\S+ serves the model without an adapter"):
            vllm_setup._connect_adapter(config, Secret(SECRET), server.url, notify=print)
    finally:
        server.stop()


class Api:
    """Remembers what a server is told; one that is `broken` loads nothing."""

    def __init__(self, *, broken: bool = False):
        self.told: list[Any] = []
        self._broken = broken

    def __getattr__(self, name: str) -> Callable[..., None]:
        def tell(*args: Any) -> None:
            self.told.append((name, *args))
            if self._broken and name == "load_lora_adapter":
                raise ServerError("no")

        return tell


def test_what_servers_are_told(tmp_path: Path):
    """A server that fails goes on holding what it samples; one that slept wakes before it loads."""
    well, broken = Api(), Api(broken=True)
    channels = [AdapterChannel(broken), AdapterChannel(well)]  # type: ignore[arg-type]
    failed = send_adapter(channels, 3, save=Path.mkdir, folder=tmp_path)
    assert [*failed] == channels[:1]
    folder = str(tmp_path / "version-3")
    loaded = [("load_lora_adapter", "policy", folder), ("set_weight_version", 3), ("reset_prefix_cache",), ("resume",)]
    assert well.told == [("pause",), *loaded]
    assert broken.told == [("pause",), loaded[0]]
    well.told.clear()
    channels[1].sleep()
    send_adapter(channels[1:], 4, save=Path.mkdir, folder=tmp_path)
    assert well.told[:3] == [("sleep", 1), ("pause",), ("wake_up", ["weights", "kv_cache"])]
    assert [path.name for path in tmp_path.iterdir()] == ["version-4"]


def test_a_server_that_keeps_its_base_only_frees_its_cache(tmp_path: Path):
    """And is told to wake exactly that: vLLM wakes nothing at all if it is told to wake what is awake."""
    api = Api()
    channel = AdapterChannel(api, keeps_base=True)  # type: ignore[arg-type]
    channel.sleep()
    assert send_adapter([channel], 1, save=Path.mkdir, folder=tmp_path) == {}
    folder = str(tmp_path / "version-1")
    woken = [("pause",), ("wake_up", ["kv_cache"]), ("load_lora_adapter", "policy", folder), ("set_weight_version", 1)]
    assert api.told == [("pause",), ("release_kv_cache",), *woken, ("reset_prefix_cache",), ("resume",)]
    api.told.clear()
    send_adapter([channel], 2, save=Path.mkdir, folder=tmp_path)
    assert api.told[:2] == [("pause",), ("load_lora_adapter", "policy", str(tmp_path / "version-2"))]


def test_the_plan_decides_what_servers_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    raw = changed(make_inputs(tmp_path), model={"adapter": {"rank": 4}}, rollout={"engine": "vllm"})
    config = config_from_dict(changed(raw, hardware={"device": "cpu"}))
    server = ThreadServer()
    server.start()
    monkeypatch.setattr(vllm_setup, "check_vllm", lambda python: "0.32.0")
    monkeypatch.setattr(vllm_setup.VllmApi, "model_names", lambda self: ["policy-base"])
    policy = SimpleNamespace(adapter=object())
    processes: Any = SimpleNamespace(policy=policy, save_adapter=None)
    up = RunningServer(index=0, num_starts=1, url=server.url, version=None)
    try:
        for keeps in (True, False):
            placed = Placement(gpus=("0",), shared=True, keeps_base=keeps, reason="")
            monkeypatch.setenv(PLACEMENT, placed.environment()[PLACEMENT])
            setup = open_engine(config, build_inputs(config))
            setup.secret = Secret(SECRET)
            server.fakes[0].calls.clear()
            channels = setup.make_channels(processes, folder=tmp_path, notify=print)
            channels.sleep(up)
            channels.close()
            told = {path.partition("?")[0] for path in server.fakes[0].calls} - {"/version"}
            assert told == ({"/pause", "/release_kv_cache_memory", "/collective_rpc"} if keeps else {"/sleep"})
    finally:
        server.stop()
