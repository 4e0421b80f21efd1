"""What is foreseen of weights in host memory: bytes on the device, bytes on the disk, dtypes, and what is refused."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from cohort import train
from cohort.config import ModelConfig
from cohort.display import Display
from cohort.errors import DoesNotFitError, UserError
from cohort.launch import local
from cohort.learner import TrainEngine
from cohort.learner.optimizer_offload import OffloadedUpdates
from cohort.models import LoadRequest, load_policy, load_tokenizer, save_policy, saved_bytes
from cohort.plan.layout import check_cpu_offload
from cohort.ranks.collectives import SINGLE_PROCESS
from cohort.ranks.stopping import NEVER_STOPPED
from cohort.trainer import run, setup
from rank_engine import CPU, STEPS, step_sequences
from rank_offload import make_engine
from test_offload import parsed
from tiny import save_model_folder

ON_HOST = ("offloaded", "mixed, offloaded", "parameters", "mixed, parameters")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model_folder(tmp_path_factory.mktemp("rules") / "model"))


@pytest.mark.parametrize("mode", ["adamw", *ON_HOST])
def test_a_state_on_the_host_takes_no_room_of_the_device(folder: str, mode: str, monkeypatch: pytest.MonkeyPatch):
    """Literal: two moments of float32. A state of an exabyte fits beside the device, and not on it."""
    engine = make_engine(folder, SINGLE_PROCESS, mode)
    moments = 2 * 4 * sum(p.numel() for p in engine.policy.model.parameters())
    assert engine.num_state_bytes == moments
    assert engine.num_device_state_bytes == (0 if mode in ON_HOST else moments)
    monkeypatch.setattr(TrainEngine, "num_state_bytes", 10**18)
    algorithm, sequences = step_sequences("dapo", *STEPS["uneven"])
    if mode in ON_HOST:
        assert engine.fits(sequences[:1], algorithm.policy_loss)
    else:
        with pytest.raises(DoesNotFitError, match=r"1000000000\.0 GB for the optimizer's state"):
            engine.fits(sequences[:1], algorithm.policy_loss)


def stored_bytes(folder: Path) -> int:
    return sum(tensor.nbytes for file in folder.glob("*.safetensors") for tensor in load_file(file).values())


@pytest.mark.parametrize(
    ("model", "offload"),
    [
        ({}, False),
        ({"compute_dtype": "bfloat16"}, True),
        ({"dtype": "bfloat16"}, False),
        ({"freeze": ("*.mlp.*",)}, False),
        ({"adapter": {"rank": 2}}, False),
    ],
)
def test_a_saved_folder_is_as_large_as_foreseen(folder: str, tmp_path: Path, model: dict[str, Any], offload: bool):
    config = ModelConfig(path=folder, **model)
    tokenizer = load_tokenizer(config)
    policy = load_policy(LoadRequest(config, device=CPU, tokenizer=tokenizer, offload_master_weights=offload))
    save_policy(policy, tokenizer, tmp_path)
    assert saved_bytes(policy) == stored_bytes(tmp_path) > 0


def test_the_disk_has_room_for_masters_and_their_moments(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Literal: three checkpoints of 12 bytes for each weight, and the final model of 4."""
    engine = make_engine(folder, SINGLE_PROCESS, "mixed, offloaded")
    worker: Any = SimpleNamespace(engines={"policy": engine}, policy=engine.policy, ranks=SINGLE_PROCESS)
    config = parsed(run={"checkpoint_every": 1, "keep_checkpoints": 2})
    needed = 40 * sum(p.numel() for p in engine.policy.model.parameters())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed))
    setup.check_disk_space(config, worker, tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed - 1))
    with pytest.raises(UserError, match="3 checkpoints and the final model"):
        setup.check_disk_space(config, worker, tmp_path)


def test_weights_of_several_dtypes_are_updated_each_in_its_own():
    """Literal: thirds that no narrower slot would keep, beside a weight that is narrower by itself."""
    pairs = []
    for copy, master in ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.float64), (torch.bfloat16, None)):
        weight = nn.Parameter(torch.ones(3, dtype=copy))
        weight.grad_dtype = master or torch.float32
        weight.grad = torch.full((3,), 1 / 3, dtype=weight.grad_dtype)
        pairs.append((weight, nn.Parameter(torch.ones(3, dtype=weight.grad_dtype))))

    def update(master: nn.Parameter) -> None:
        assert master.grad is not None
        master -= master.grad

    OffloadedUpdates(pairs).run(update)
    for weight, master in pairs:
        third = torch.full((3,), 1 / 3, dtype=master.dtype)
        assert torch.equal(master, 1 - third) and torch.equal(weight, master.to(weight.dtype))


def test_a_quantized_reference_does_not_wait_on_the_host():
    reference = {"algorithm": {"beta": 0.1}, "reference": {"quantization": "int8"}}
    parsed(**reference)
    with pytest.raises(UserError, match=r"reference\.quantization: int8 saves no GPU memory with model\.param"):
        parsed(**reference, model={"parameter_offload": True})


@pytest.mark.parametrize(
    ("reference", "model", "expected"),
    [
        ({"refresh_every": 2}, {}, r"reference\.mix: 0\.6 with optim\.offload: true .* bfloat16, .*compute_dtype: fl"),
        ({"refresh_every": 2, "mix": 0.25}, {"compute_dtype": "bfloat16"}, r"reference\.mix: 0\.25"),
        ({"refresh_every": 2, "mix": 1}, {}, None),  # a copy is not an average
        ({"refresh_every": 2}, {"compute_dtype": "float32"}, None),
        ({"refresh_every": 2}, {"dtype": "bfloat16"}, None),  # nothing is rounded that was not
        ({}, {}, None),
    ],
)
def test_an_average_is_not_kept_in_a_narrower_dtype(
    reference: dict[str, Any], model: dict[str, Any], expected: str | None
):
    config = parsed(algorithm={"beta": 0.1}, reference=reference, model=model, optim={"offload": True})
    if expected is None:
        check_cpu_offload(config, on_gpu=True, processes=1)
    else:
        with pytest.raises(UserError, match=expected):
            check_cpu_offload(config, on_gpu=True, processes=1)


def test_no_process_is_started_for_what_cannot_be_spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local, "elastic_launch", lambda *_: pytest.fail("processes were started"))
    hardware = {"processes": 2, "device": "cpu", "reshard_after_forward": 3}
    with pytest.raises(
        UserError, match=r"reshard_after_forward: 3 must be a proper divisor of the 2 training processes"
    ):
        train(parsed(hardware=hardware, run={"dir": str(tmp_path / "run")}))
    assert not (tmp_path / "run").exists()


def test_ranks_that_refuse_a_configuration_are_not_waited_for():
    """Every rank refuses it by itself, and none waits for a command then."""
    commands: list[Any] = []
    ranks: Any = SimpleNamespace(
        world_size=2, rank=0, local_rank=0, is_rank0=True, command=commands.append, stop=NEVER_STOPPED
    )
    with pytest.raises(UserError, match="parameter_offload: true has no effect on CPU"):
        run.train(
            parsed(model={"parameter_offload": True}, hardware={"device": "cpu", "processes": 2}),
            display=Display(),
            ranks=ranks,
        )
    assert commands == []
