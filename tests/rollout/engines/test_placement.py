"""Which GPUs servers and ranks see: one machine, restarts, and other launchers. The GPUs themselves are made up."""

import json
import os
from pathlib import Path

import pytest
import torch

from cohort.config import Config, config_from_dict, to_yaml
from cohort.display import Display
from cohort.errors import UserError
from cohort.launch import local, start
from cohort.plan.hardware import hardware
from cohort.plan.rollout_engine import plan_engine
from cohort.plan.shape import preset_shape
from cohort.plan.split import GpuSplit
from cohort.ranks.collectives import SINGLE_PROCESS, Ranks
from cohort.rollout.engines.auto import choose_engine
from cohort.rollout.engines.servers import placement
from cohort.rollout.engines.servers.placement import PLACEMENT, Placement, place, server_placement, split_machine
from cohort.run.result import EXIT_STATUS_FILE, ExitStatus
from cohort.trainer.setup import rank_device
from runs import changed, make_inputs


def config_with(*overrides: str, folder: str = "runs/a", engine: str = "vllm") -> Config:
    raw = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "rewards": [{"use": "math"}], "run": {"dir": folder}}
    return config_from_dict(raw | {"rollout": {"engine": engine}}, overrides)


@pytest.fixture
def gpus(monkeypatch):
    """A machine with so many GPUs, of which this process may see some."""

    def make(num: int, visible: str | None = None) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num)
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", PLACEMENT, "COHORT_VLLM_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    return make


def under_torchrun(monkeypatch: pytest.MonkeyPatch, *, here: int, all_: int) -> None:
    for name, value in {"RANK": 0, "LOCAL_WORLD_SIZE": here, "WORLD_SIZE": all_}.items():
        monkeypatch.setenv(name, str(value))


# In the words of the machine


def test_servers_of_several_shared_gpus_are_dropped_with_one_of_them(gpus):
    gpus(4, "7,6,5,4")
    split = split_machine(config_with("hardware.rollout_gpus=shared", "rollout.tensor_parallel=2"))
    assert split is not None and split.num_processes == 4
    config = config_with()
    assert place(config, split, [0, 1, 2, 3]).gpus == ("7,6", "5,4")
    assert place(config, split, [0, 1, 3]).gpus == ("7,6",)
    assert place(config, split, [1, 3]).gpus == ()  # a run is not restarted like this


def test_servers_get_the_names_of_their_gpus(gpus):
    gpus(4, "7,GPU-a,5,4")
    config = config_with("hardware.processes=auto", "hardware.rollout_gpus=2", "rollout.tensor_parallel=2")
    split = split_machine(config)
    assert split is not None
    assert place(config, split, [0, 1]).gpus == ("5,4",)


def test_one_named_gpu_is_shared(gpus):
    gpus(4)
    config = config_with("hardware.device=cuda:2")
    split = split_machine(config)
    assert split is not None
    placed = place(config, split, [0])
    assert (placed.gpus, placed.shared) == (("2",), True)


def test_on_cpu_servers_have_none(gpus):
    gpus(4)
    assert server_placement(config_with("hardware.device=cpu", "rollout.servers=2")).gpus == ("", "")


def test_no_servers_no_split(gpus):
    gpus(4)
    assert split_machine(config_with(engine="local")) is None
    assert split_machine(config_with("rollout.urls=[http://a:1]")) is None


def test_it_reads_back_what_it_told(gpus, monkeypatch):
    gpus(0)
    told = Placement(gpus=("6,7", "8"), shared=False, keeps_base=True, reason="so")
    for name, value in told.environment().items():
        monkeypatch.setenv(name, value)
    assert server_placement(config_with()) == told


def test_a_gpu_that_does_not_exist(gpus):
    gpus(2)
    with pytest.raises(UserError, match=r"hardware.device: 'cuda:2': this machine has 2 CUDA devices"):
        split_machine(config_with("hardware.device=cuda:2"))


SECOND = Ranks(rank=2, world_size=3, local_rank=1)  # of its machine


@pytest.mark.parametrize(
    ("device", "ranks", "expected"),
    [("auto", SINGLE_PROCESS, 0), ("cuda", SINGLE_PROCESS, 0), ("cuda:1", SINGLE_PROCESS, 1), ("auto", SECOND, 1)],
)
def test_every_ranks_gpu_has_an_index(gpus, monkeypatch: pytest.MonkeyPatch, device: str, ranks: Ranks, expected: int):
    """Threads and other libraries would take the first one where none is named, or refuse."""
    gpus(2)
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", print)
    found = rank_device(config_with(f"hardware.device={device}", engine="local"), ranks)
    assert found == torch.device("cuda", expected) and current == [found]


# What the processes of `cohort train` see


def environment_of_a_start(
    config: Config, slots: list[int], split: GpuSplit | None, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    """What the launcher's processes would find in their environment."""
    seen: dict[str, str] = {}

    def launch(*_: object) -> object:
        def run(*_: str) -> None:
            seen.update(os.environ)
            ExitStatus(kind="finished").write(Path(os.environ[EXIT_STATUS_FILE]))

        return run

    monkeypatch.setattr(local, "elastic_launch", launch)
    local._start(config, slots, split, resume=False, attempt=0)
    return seen


@pytest.mark.parametrize(
    ("rollout_gpus", "visible", "slots", "ranks", "servers"),
    [
        ("1", "7,6,5,4", [0, 1, 2], "7,6,5", ["4"]),
        ("1", "7,6,5,4", [0, 2], "7,5", ["4"]),  # a rank that is left out gives its GPU to nobody
        ("shared", "0,1,2", [0, 2], "0,2", ["0", "2"]),  # no rank would put the server of the second one to sleep
        (None, "0,1,2,3", [0, 1], "0,1", None),  # ranks that sample themselves
    ],
)
def test_ranks_do_not_see_the_servers_gpus(gpus, monkeypatch, tmp_path, rollout_gpus, visible, slots, ranks, servers):
    gpus(visible.count(",") + 1, visible)
    keys = ["hardware.processes=2"] if servers is None else [f"hardware.rollout_gpus={rollout_gpus}"]
    config = config_with(*keys, folder=str(tmp_path), engine="local" if servers is None else "vllm")
    seen = environment_of_a_start(config, slots, split_machine(config), monkeypatch)
    assert seen["CUDA_VISIBLE_DEVICES"] == ranks
    assert (json.loads(seen[PLACEMENT])["gpus"] if PLACEMENT in seen else None) == servers
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible and PLACEMENT not in os.environ


def test_one_process_learns_it_too(gpus, monkeypatch, tmp_path):
    gpus(3)
    found = []
    monkeypatch.setattr("cohort.trainer.run.train", lambda config, **_: found.append(server_placement(config)))
    start.train(config_with("hardware.processes=1", folder=str(tmp_path)))
    assert [p.gpus for p in found] == [("1", "2")]
    assert PLACEMENT not in os.environ


def test_the_split_gives_the_number_of_processes(gpus, monkeypatch, tmp_path):
    gpus(8)
    asked = []

    def run(config: Config, *, num_processes: int, **_: object) -> None:
        asked.append(num_processes)
        (tmp_path / "summary.json").write_text("{}")

    monkeypatch.setattr(start, "run_processes", run)
    start.train(config_with("hardware.processes=auto", "hardware.rollout_gpus=2", folder=str(tmp_path)))
    assert asked == [6]


# Under another launcher


@pytest.mark.parametrize(
    ("num", "here", "all_", "servers", "shared"),
    [
        (8, 6, 6, ("6", "7"), False),
        (2, 2, 2, ("0", "1"), True),
        (8, 7, 14, ("7",), False),  # what is left of the first machine
    ],
)
def test_servers_take_what_the_ranks_leave_or_share(gpus, monkeypatch, num, here, all_, servers, shared):
    gpus(num)
    under_torchrun(monkeypatch, here=here, all_=all_)
    placed = server_placement(config_with("hardware.processes=auto"))
    assert (placed.gpus, placed.shared) == (servers, shared)


@pytest.mark.parametrize("wanted", ["auto", "shared"])
def test_several_machines_without_a_gpu_left(gpus, monkeypatch, wanted):
    gpus(8)
    under_torchrun(monkeypatch, here=8, all_=16)
    with pytest.raises(UserError) as caught:
        server_placement(config_with(f"hardware.rollout_gpus={wanted}"))
    assert str(caught.value) == (
        f"hardware.rollout_gpus: {wanted} on several machines: servers run on the machine of rank 0, where the "
        "launcher has started 8 processes on 8 GPUs; use rollout.urls with servers on other machines (`cohort "
        "serve` starts one, `cohort launch slurm --rollout-nodes 1` a node of them), or --nproc-per-node 7"
    )


# What `auto` looks at


def test_auto_knows_the_model_and_the_gpus(gpus, monkeypatch, tmp_path):
    gpus(4)
    inputs = changed(make_inputs(tmp_path), rollout={"engine": "vllm"}, hardware={"processes": "auto"})
    monkeypatch.setattr(placement, "_query_gpu", lambda: ("NVIDIA H100 80GB HBM3", 1_000))
    shape = placement.model_shape(inputs["model"]["path"])
    assert shape is not None
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(inputs["model"]["path"])
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    with pytest.raises(UserError, match="nothing fits 4 GPUs"):
        split_machine(config_from_dict(inputs))


def test_auto_without_a_driver_or_a_model(gpus, monkeypatch):
    gpus(4)
    monkeypatch.setattr(placement, "_query_gpu", lambda: None)
    found = split_machine(config_with("hardware.processes=auto"))
    assert found is not None and "memory was not checked" in found.reason


def test_looking_at_the_gpu_fails_softly():
    if not torch.cuda.is_available():
        assert placement._query_gpu() is None


def test_servers_keep_the_base_of_an_adapter_that_fits_beside_training(gpus, monkeypatch):
    """Unless a rank was dropped, and the others have its share of the weights to hold."""
    gpus(2)
    monkeypatch.setattr(placement, "_query_gpu", lambda: ("NVIDIA H100 80GB HBM3", 80 * 10**9))
    told = ("hardware.processes=2", "hardware.rollout_gpus=shared", "model.adapter={}")
    config = config_with(*told, "model.path=Qwen/Qwen2.5-1.5B")
    split = split_machine(config)
    assert split is not None and split.keeps_base
    assert place(config, split, [0, 1]).keeps_base and not place(config, split, [1]).keeps_base
    unknown = split_machine(config_with(*told, "model.path=m"))
    assert unknown is not None and not unknown.keeps_base


# The engine that is chosen


def chosen(config: Config) -> tuple[str, list[str]]:
    notes: list[str] = []
    return choose_engine(config, notes.append).rollout.engine, notes


@pytest.fixture
def vllm(monkeypatch):
    """A machine on which vLLM is or is not installed."""

    def make(version: str | None) -> None:
        def look(python: str) -> str:
            if version is None:
                raise UserError(f"{python}: has no vLLM")
            return version

        monkeypatch.setattr("cohort.rollout.engines.vllm.setup.check_vllm", look)

    return make


def test_vllm_samples_where_it_is_installed_beside_gpus(gpus, vllm, tmp_path, monkeypatch):
    config = config_with(folder=str(tmp_path), engine="auto")
    vllm("0.32.1")
    gpus(0)
    assert chosen(config) == ("local", [])
    gpus(4)
    assert chosen(config) == ("vllm", ["rollout.engine: auto: vllm, since vLLM 0.32.1 is installed"])
    engine, (note,) = chosen(config_with("model.adapter={rank: 8, dora: true}", folder=str(tmp_path), engine="auto"))
    assert engine == "local" and note.endswith("adapter.dora: true: vLLM supports plain LoRA only; use dora: false")
    under_torchrun(monkeypatch, here=4, all_=8)
    engine, (note,) = chosen(config)
    assert engine == "local" and "on several machines" in note
    monkeypatch.undo()
    gpus(4)
    vllm(None)
    engine, (note,) = chosen(config)
    assert engine == "local" and "set COHORT_VLLM_PYTHON" in note
    with pytest.raises(UserError, match="has no vLLM"):
        chosen(config_with("hardware.rollout_gpus=1", folder=str(tmp_path), engine="auto"))
    vllm("0.32.1")
    for named in ("local", "vllm"):
        assert chosen(config_with(folder=str(tmp_path), engine=named)) == (named, [])


@pytest.mark.parametrize(
    ("num", "overrides", "gigabytes", "expected"),
    [
        (1, (), 80, "local"),  # 7 billion weights with float32 moments
        (1, ("model.adapter={rank: 8}", "model.dtype=bfloat16"), 80, "vllm"),
        (1, ("model.adapter={rank: 8}", "model.dtype=bfloat16"), 24, "local"),  # which trains, without a server
        (1, ("model.adapter={rank: 8}", "model.dtype=bfloat16", "hardware.rollout_gpus=shared"), 24, "vllm"),
        (4, (), 80, "vllm"),
        (4, (), 24, "local"),
        (4, ("hardware.processes=4",), 40, "local"),  # shares all of them
    ],
)
def test_vllm_samples_where_it_fits_by_the_plan(gpus, vllm, tmp_path, monkeypatch, num, overrides, gigabytes, expected):
    gpus(num)
    vllm("0.32.1")
    gpu = "NVIDIA H100 80GB HBM3"
    monkeypatch.setattr(placement, "_query_gpu", lambda: (gpu, gigabytes * 10**9))
    config = config_with("model.path=Qwen/Qwen2.5-7B", *overrides, folder=str(tmp_path), engine="auto")
    engine, (note,) = chosen(config)
    assert engine == expected and note.startswith(f"rollout.engine: auto: {expected}, since ")
    if engine == "local":
        assert "vLLM does not fit alongside training: " in note and f"{gigabytes} GB" in note
    # which a plan of such a machine takes too
    machines = hardware(gpu="h100", gpus=num, nodes=1, gpu_memory=f"{gigabytes}GB")
    assert plan_engine(config, preset_shape("qwen2.5-7b"), machines)[0].rollout.engine == expected


def test_another_launcher_decides_how_many_train(gpus, vllm, tmp_path, monkeypatch):
    """Three of four GPUs would have room for training; the two that the launcher has started ranks on have not."""
    gpus(4)
    vllm("0.32.1")
    monkeypatch.setattr(placement, "_query_gpu", lambda: ("NVIDIA H100 80GB HBM3", 58 * 10**9))
    config = config_with("model.path=Qwen/Qwen2.5-7B", folder=str(tmp_path), engine="auto")
    assert chosen(config)[0] == "vllm"
    under_torchrun(monkeypatch, here=2, all_=2)
    assert chosen(config)[0] == "local"


@pytest.mark.parametrize("begun", ["local", "vllm"])
def test_a_run_goes_on_with_the_engine_that_it_has_begun_with(gpus, vllm, tmp_path, begun):
    (tmp_path / "config.yaml").write_text(to_yaml(config_with(folder=str(tmp_path), engine=begun)))
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    config = config_with(folder=str(tmp_path), engine="auto")
    gpus(2)
    vllm("0.32.1" if begun == "local" else None)
    assert chosen(config) == (begun, [f"rollout.engine: auto: {begun}, as when the run started"])
    gpus(0)
    assert chosen(config) == (begun, [])


def test_the_engine_and_the_gpus_are_told_at_the_start(gpus, vllm, monkeypatch, tmp_path, capsys):
    gpus(4)
    vllm(None)
    started: list[Config] = []

    def run(config: Config, **_: object) -> None:
        started.append(config)
        (tmp_path / "summary.json").write_text("{}")

    monkeypatch.setattr(start, "run_processes", run)
    start.train(config_with(folder=str(tmp_path), engine="auto"))
    told = capsys.readouterr().err
    assert "rollout.engine: auto: local, since " in told
    assert "4 of 4 GPUs train and sample (hardware.processes: auto)" in told
    assert [c.rollout.engine for c in started] == ["local"]


def test_a_display_on_several_gpus_needs_one_process(gpus, vllm, monkeypatch, tmp_path):
    gpus(4)
    vllm(None)
    monkeypatch.setattr("cohort.trainer.run.train", lambda *_, display, **__: display)
    display = Display()
    with pytest.raises(UserError) as caught:
        start.train(config_with(folder=str(tmp_path), engine="auto"), display=display)
    assert str(caught.value) == (
        "display: only works with a run in this process, but this one has 4 processes and 0 restarts; use "
        "hardware.processes: 1 and hardware.max_restarts: 0, or no display"
    )
    one = config_with("hardware.processes=1", folder=str(tmp_path), engine="auto")
    assert start.train(one, display=display) is display


@pytest.mark.parametrize(
    "more",
    ["optim.name=adafactor", "model={path: m, quantization: nf4, adapter: {rank: 8}}", "reference={device: cpu}"],
)
def test_what_works_in_one_process_gets_one(more: str):
    beta = ("algorithm.beta=0.1",) if "reference" in more else ()
    assert config_with(more, *beta, engine="auto").hardware.processes == 1
    assert config_with(engine="auto").hardware.processes == "auto"


# How memory of GPUs is allocated


@pytest.mark.parametrize("said", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_grow_in_training_processes_unless_the_environment_decides(gpus, monkeypatch, tmp_path, said):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if said is not None:
        monkeypatch.setenv(said, "max_split_size_mb:512")
    settings: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    monkeypatch.setattr(torch.cuda, "set_device", print)
    gpus(1)
    assert rank_device(config_with("hardware.device=cuda", folder=str(tmp_path)), SINGLE_PROCESS).type == "cuda"
    assert settings == ([] if said else ["expandable_segments:True"])
    assert rank_device(config_with("hardware.device=cpu", folder=str(tmp_path)), SINGLE_PROCESS).type == "cpu"
    assert len(settings) == (said is None)
