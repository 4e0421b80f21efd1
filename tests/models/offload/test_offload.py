"""Weights and optimizer state in host memory: the same steps, whenever copies arrive, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

from cohort.config import AdamwConfig, Config, ModelConfig, config_from_dict
from cohort.errors import RankDesyncError, UserError
from cohort.learner.optimizer import Optimizers
from cohort.learner.optimizer_offload import OffloadedUpdates
from cohort.models import fsdp, load_tokenizer, save_policy
from cohort.models.fsdp import CollectiveCounter, Sharding
from cohort.models.host_memory import MasterWeights
from cohort.plan.layout import check_cpu_offload, check_replicas, check_resharding
from cohort.ranks.collectives import SINGLE_PROCESS
from cohort.ranks.join import init_single_process_group
from fake_cuda import fake_cuda
from rank_engine import OPTIMIZERS
from rank_offload import make_engine, run_resumed, run_saved, run_trajectory, update
from selection import mostly_slow
from test_optimizers import Model, train, weights_of
from tiny import save_model_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model_folder(tmp_path_factory.mktemp("offload") / "model"))


def test_a_torch_without_recovery_of_shards_is_named_at_the_start(folder: str, monkeypatch: pytest.MonkeyPatch):
    policy = make_engine(folder, SINGLE_PROCESS, "parameters").policy
    assert policy.sharding is not None
    if policy.sharding.can_recover:  # torch 2.13 or newer
        assert policy.notes() == []
        monkeypatch.delattr(FSDPModule, "reset_iter_state")
    [note] = policy.notes()
    assert note.startswith(
        f"with torch {torch.__version__}, running out of memory ends a run whose weights are sharded"
    )
    with pytest.raises(RankDesyncError, match="needs torch 2"):
        policy.sharding.reset()


class Scaled(nn.Module):
    """A layer, and two buffers of which one is saved."""

    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.zeros(3))
        self.register_buffer("table", torch.zeros(2), persistent=False)


def test_a_whole_model_is_loaded_to_the_host_and_its_buffers_to_the_device(monkeypatch: pytest.MonkeyPatch):
    """On a GPU, torch raises "Multiple devices found" if saved buffers are elsewhere than shards while it loads."""
    cpu = torch.device("cpu")
    init_single_process_group(cpu)
    whole = Scaled()
    whole.scale += 7
    with torch.device("meta"):
        layer = Scaled().layer
    model = Scaled()
    model.layer = layer
    loaded = {}

    def load(model: nn.Module, *args: Any, **options: Any) -> None:
        loaded["devices"] = {tensor.device for tensor in model.state_dict().values()}
        set_model_state_dict(model, *args, **options)
        loaded["scale"] = model.scale.tolist()

    monkeypatch.setattr(fsdp, "set_model_state_dict", load)
    broadcast = dist.broadcast
    monkeypatch.setattr(  # there is no NCCL
        dist, "broadcast", lambda tensor, *a, **k: broadcast(tensor, *a, **k) if tensor.device == cpu else None
    )
    with fake_cuda():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
        device = torch.device("cuda:0")
        sharding = Sharding(
            model, CollectiveCounter(), mesh=mesh, device=device, compute_dtype=torch.float32, on_host=True
        )
        sharding.allocate()
        on_device = {buffer.device for buffer in model.buffers()}
        sharding.load(whole.state_dict(), dict(whole.named_buffers()))
        assert cpu not in on_device and {buffer.device for buffer in model.buffers()} == on_device
    assert loaded == {"devices": {cpu}, "scale": [7] * 3}
    assert torch.equal(model.layer.weight.full_tensor(), whole.layer.weight)


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "adafactor", "sgd"])
def test_fifty_steps_are_the_same_bit_for_bit(name: str):
    if name == "adamw_8bit":
        pytest.importorskip("torchao", reason="in the extra `torchao`, which `dev` has")
    groups = ({"match": "head.*", "learning_rate_factor": 0.5, "weight_decay": 0.2},)
    config = type(OPTIMIZERS[name]).model_validate({**dict(OPTIMIZERS[name]), "groups": groups})
    plain, moved = Model(width=64), Model(width=64)
    masters = MasterWeights(moved, torch.float32)
    with torch.compiler.set_stance("force_eager"):
        expected = train(plain, Optimizers(plain, config), 50)
        assert train(moved, Optimizers(moved, config, master_weights=masters), 50) == expected
    assert expected[-1] < 0.5 * expected[0]
    for name, weight, master in masters.pairs():
        assert torch.equal(weight, weights_of(plain)[name]) and torch.equal(master, weight), name


def test_bfloat16_copies_of_float32_masters_follow_float32():
    """Fifty steps: the loss to 2 %, the weights to a tenth of their way. Negative control: bfloat16 without masters."""
    ends, losses = {}, {}
    for way, dtype in (("float32", torch.float32), ("masters", torch.float32), ("neither", torch.bfloat16)):
        model = Model(width=64, dtype=dtype)
        masters = MasterWeights(model, torch.bfloat16) if way == "masters" else None
        losses[way] = train(model, Optimizers(model, AdamwConfig(), master_weights=masters), 50, learning_rate=3e-4)
        ends[way] = weights_of(masters.tree if masters else model)["body.weight"].float()
    gone = (ends["float32"] - weights_of(Model(width=64))["body.weight"]).norm()
    error = {way: ((end - ends["float32"]).norm() / gone).item() for way, end in ends.items()}
    assert losses["masters"] == pytest.approx(losses["float32"], rel=0.02)
    assert error["masters"] < 0.1 < 0.5 < error["neither"]


class Late:
    """The slowest possible copy stream: nothing is copied until somebody waits, and then all that was asked for."""

    def __init__(self, device: torch.device, *, waits: bool = True):
        self._asked: list[tuple[Tensor, Tensor]] = []
        self._waits = waits

    def begin(self) -> None:
        self._asked.clear()

    def copy(self, into: Tensor, source: Tensor) -> Callable[[], object]:
        self._asked.append((into, source))
        return self.end if self._waits else bool

    def end(self) -> None:
        for into, source in self._asked:
            into.copy_(source)
        self._asked.clear()


@pytest.mark.parametrize(("waits", "is_right"), [(True, True), (False, False)])
def test_copies_may_be_as_late_as_they_like(monkeypatch: pytest.MonkeyPatch, waits: bool, is_right: bool):
    """A stand-in for streams, which only GPUs have. Negative control: updates that do not wait for gradients."""
    plain, moved = Model(width=16), Model(width=16)
    masters = MasterWeights(moved, torch.float32)
    optimizers = Optimizers(moved, AdamwConfig(), master_weights=masters)
    pairs = [(weight, master) for _, weight, master in masters.pairs()]
    late = OffloadedUpdates(pairs, make_stream=lambda device: Late(device, waits=waits))
    for slot in (*late._gradients, *late._copies):
        slot.fill_(63)  # what lay there before
    monkeypatch.setattr(optimizers, "_offload", late)
    train(plain, Optimizers(plain, AdamwConfig()), 5)
    train(moved, optimizers, 5)
    same = [torch.equal(weight, weights_of(plain)[name]) for name, weight, _ in masters.pairs()]
    assert all(same) is is_right


@pytest.mark.parametrize("mode", ["offloaded", "sgd, offloaded", "parameters"])
def test_a_run_of_updates_is_that_without_offload(folder: str, mode: str):
    """Clipped gradients of micro-batches, several in an update. FSDP2 adds up in another order, to rounding."""
    expected = run_trajectory(SINGLE_PROCESS, folder, "sgd" if mode.startswith("sgd") else "adamw", 4)
    actual = run_trajectory(SINGLE_PROCESS, folder, mode, 4)
    near = {"rtol": 0, "atol": 0 if mode != "parameters" else 1e-6}
    torch.testing.assert_close(actual["norms"], expected["norms"], rtol=1e-6 * (mode == "parameters"), atol=0)
    for name, weight in actual["weights"].items():
        torch.testing.assert_close(weight, expected["weights"][name], **near, msg=name)


@pytest.mark.parametrize("mode", ["offloaded", "parameters", "8 bits", "8 bits, offloaded"])
def test_law_one(folder: str, mode: str):
    """The gradient's norm is the same in micro-batches of one sequence and in one of all, update by update."""
    if mode.startswith("8"):
        pytest.importorskip("torchao", reason="in the extra `torchao`, which `dev` has")
    with torch.compiler.set_stance("force_eager"):
        small, large = (run_trajectory(SINGLE_PROCESS, folder, mode, 2, budget) for budget in (1, 10_000))
    assert small["norms"] == pytest.approx(large["norms"], rel=1e-5)


@pytest.mark.parametrize(
    "mode",
    mostly_slow(
        [
            *("offloaded", "mixed, offloaded", "parameters", "8 bits", "8 bits, offloaded", "at random"),
            *("at random, 8 bits", "bfloat16", "bfloat16, parameters"),
        ],
        "mixed, offloaded",
        "bfloat16",
        "at random, 8 bits",
        reason="parts of these",
    ),
)
def test_it_goes_on_exactly_from_a_checkpoint(folder: str, tmp_path: Path, mode: str):
    if "8 bits" in mode:
        pytest.importorskip("torchao", reason="in the extra `torchao`, which `dev` has")
    with torch.compiler.set_stance("force_eager"):
        expected = run_saved(SINGLE_PROCESS, folder, mode, str(tmp_path))["weights"]
        actual = run_resumed(SINGLE_PROCESS, folder, mode, str(tmp_path))["weights"]
    assert all(torch.equal(actual[name], weight) for name, weight in expected.items())


def test_the_masters_are_what_is_saved(folder: str, tmp_path: Path):
    engine = make_engine(folder, SINGLE_PROCESS, "mixed, offloaded")
    update(engine, SINGLE_PROCESS, 0)
    weight = engine.policy.model.model.layers[0].mlp.up_proj.weight
    assert weight.dtype == torch.bfloat16 and weight.grad_dtype == torch.float32
    save_policy(engine.policy, load_tokenizer(ModelConfig(path=folder)), tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path).model.layers[0].mlp.up_proj.weight  # dtype of config.json
    assert saved.dtype == torch.float32 and torch.equal(saved.bfloat16(), weight)
    assert not torch.equal(saved, weight.float())  # which are rounded
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"


def parsed(**sections: Any) -> Config:
    raw = {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": [{"use": "math"}]}
    return config_from_dict({**raw, **{k: {**raw.get(k, {}), **v} for k, v in sections.items()}})


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"optim": {"offload": True}, "model": {"adapter": {"rank": 4}}}, "only the adapter has optimizer state"),
        (
            {"model": {"adapter": {"rank": 4}, "parameter_offload": True}},
            "copy the frozen weights from host memory twice",
        ),
        ({"optim": {"offload": True, "stochastic_rounding": True}}, "remove stochastic_rounding, and use model.dtype"),
        ({"optim": {"offload": True, "name": "muon"}}, "15 matrix products per weight"),
        ({"optim": {"name": "muon"}, "model": {"parameter_offload": True}}, "15 matrix products per weight"),
        ({"optim": {"offload": True}, "model": {"parameter_offload": True}}, "optim.offload has no effect with"),
        ({"hardware": {"reshard_after_forward": 1}}, "must be auto, true, false or a whole number of at least 2"),
    ],
)
def test_contradictions_are_refused(sections: dict[str, Any], expected: str):
    with pytest.raises(UserError) as caught:
        parsed(**sections)
    assert expected in str(caught.value)


@pytest.mark.parametrize("section", ["optim", "model"])
def test_without_a_gpu_there_is_nothing_to_offload(section: str):
    config = parsed(**{section: {"offload" if section == "optim" else "parameter_offload": True}})
    check_cpu_offload(config, on_gpu=True, processes=2)
    with pytest.raises(UserError, match=rf"{section}\..*offload: true has no effect on CPU"):
        check_cpu_offload(config, on_gpu=False, processes=1)


def test_resharding_is_compared_with_the_processes():
    for wanted, processes in ((False, 2), (True, 3), (2, 4), (3, 6)):
        check_resharding(parsed(hardware={"reshard_after_forward": wanted}), processes)
    with pytest.raises(UserError, match="false has no effect on one process"):
        check_resharding(parsed(hardware={"reshard_after_forward": False}), 1)
    with pytest.raises(
        UserError, match=r"4 must be a proper divisor of the 6 training processes; use 2, 3, true or false"
    ):
        check_resharding(parsed(hardware={"reshard_after_forward": 4}), 6)
    check_resharding(parsed(hardware={"reshard_after_forward": 4, "dp_replicate": 2}), 16)
    with pytest.raises(UserError, match=r"4 must be a proper divisor of the 4 training processes that share a copy"):
        check_resharding(parsed(hardware={"reshard_after_forward": 4, "dp_replicate": 2}), 8)


def test_copies_of_the_model_are_compared_with_the_processes():
    for wanted, processes in ((1, 1), (2, 2), (2, 6), (3, 6)):
        check_replicas(parsed(hardware={"dp_replicate": wanted}), processes)
    with pytest.raises(UserError, match=r"dp_replicate: 4 must divide the 6 training processes; use 3 or 6"):
        check_replicas(parsed(hardware={"dp_replicate": 4}), 6)
    with pytest.raises(UserError, match=r"dp_replicate: 2 must divide the 1 training process; use 1"):
        check_replicas(parsed(hardware={"dp_replicate": 2}), 1)
    with pytest.raises(UserError, match="sync_each_micro_batch: false has no effect on one process"):
        check_replicas(parsed(hardware={"sync_each_micro_batch": False}), 1)
