"""What this machine can do: measured once, kept, and used by later plans."""

import json
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cohort.cli import plan_calibrate
from cohort.cli.app import app
from cohort.cli.plan_calibrate import BenchmarkSize, calibrate, collective_bandwidth
from cohort.errors import TrainingError, UserError
from cohort.plan.calibration import (
    VERSION,
    calibration_file,
    cpu_name,
    find_calibration,
    local_calibration,
    save_calibration,
)
from cohort.plan.hardware import GPUS, hardware
from cohort.plan.predict import predict_run
from cohort.plan.shape import PRESETS, preset_shape
from plans import MEASURED, config
from selection import slow

H100 = GPUS["h100"][0]
TINY = BenchmarkSize(matrix=64, copied_bytes=1 << 16, seconds=0.01)


def test_a_file_of_one_machine(tmp_path: Path) -> None:
    file = tmp_path / "cache" / "cohort" / "calibration.json"
    assert calibration_file() == file
    assert find_calibration(H100) is None and local_calibration() is None
    file.parent.mkdir(parents=True)
    file.write_text(
        '{"version": 1, "measured": [{"device": "NVIDIA H100 80GB HBM3", "on_gpu": true, "machine": "elsewhere", '
        '"date": "2026-11-01T00:00:00+00:00", "torch_version": "2.13.0", "flops": {"float32": 5e13, "bfloat16": 6e14}, '
        '"memory_bandwidth": 2.5e12, "host_bandwidth": 5e10, "collective_bandwidth": 3e11, '
        '"memory_bytes": 84000000000, "framework_bytes": 700000000}]}'
    )
    assert find_calibration(H100) == MEASURED
    assert find_calibration("NVIDIA L4") is None
    assert local_calibration() is None


def test_the_latest_of_this_machine_comes_first() -> None:
    here = replace(MEASURED, machine=platform.node(), date="2026-10-01T00:00:00+00:00", memory_bandwidth=2.0e12)
    cpu = replace(here, device=cpu_name(), on_gpu=False, date="2026-12-01T00:00:00+00:00")
    for measured in (here, MEASURED, cpu):
        save_calibration(measured)
    assert find_calibration(H100) == here
    assert local_calibration() == here  # the GPU, though the CPU was measured later
    later = replace(here, date="2026-11-02T00:00:00+00:00")
    save_calibration(later)
    assert find_calibration(H100) == later
    assert len(json.loads(calibration_file().read_text())["measured"]) == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content | {"version": VERSION + 1},
        lambda content: {"version": VERSION},
        lambda content: [],
        lambda content: content | {"measured": [{"device": H100}]},
    ],
)
def test_what_cannot_be_used_counts_as_none(change: Any) -> None:
    file = save_calibration(MEASURED)
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    assert find_calibration(H100) is None
    file.write_text("{")
    assert find_calibration(H100) is None
    save_calibration(MEASURED)  # and is written anew
    assert find_calibration(H100) == MEASURED


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match="cannot write"):
        save_calibration(MEASURED)


def test_plans_of_measured_hardware_use_it_and_say_so() -> None:
    settings, shape = config(), preset_shape("7b")
    before = predict_run(settings, shape, hardware(gpu="h100", gpus=8, nodes=1, gpu_memory=None))
    assert before.timing["products_tflops"].origin == "assumed"
    assert before.memory_origins["framework"].origin == before.memory_origins["there"].origin == "assumed"
    save_calibration(MEASURED)
    after = predict_run(settings, shape, hardware(gpu="h100", gpus=8, nodes=1, gpu_memory=None))
    assert after.timing["products_tflops"].origin == "measured"
    assert after.timing["products_tflops"].value == pytest.approx(600)
    # 40 % of the maker's 989.4 against 60 % of what was measured
    ratio = after.timing["training_s"].value / before.timing["training_s"].value
    assert ratio == pytest.approx(0.4 * 989.4 / (0.6 * 600))
    assert after.hardware.gpu_memory_bytes == 84_000_000_000
    assert after.memory_origins["there"].origin == "measured"
    assert after.memory.phases["optimizer"]["framework"] == 700_000_000 + 500_000_000
    assert "0.7 GB for a process" in after.memory_origins["framework"].how
    gathered = (2 * 2 + 4) * shape.num_parameters * after.micro_batches.num_micro_batches
    assert after.timing["gathering_s"].value == pytest.approx(gathered / 300e9)
    said = hardware(gpu="h100", gpus=8, nodes=1, gpu_memory="80GB")
    assert said.gpu_memory_bytes == 80_000_000_000 and not said.memory_is_measured
    other = hardware(gpu="a100", gpus=8, nodes=1, gpu_memory=None)
    assert other.calibration is None


def test_processes_share_a_cpu() -> None:
    with pytest.raises(UserError, match="cohort plan --calibrate"):
        hardware(gpu="here", gpus=2, nodes=1, gpu_memory=None)
    cpu = replace(MEASURED, device="a CPU, 8 cores", on_gpu=False, machine=platform.node(), host_bandwidth=None)
    save_calibration(cpu)
    two = hardware(gpu="here", gpus=2, nodes=1, gpu_memory=None)
    assert not two.on_gpu and two.gpu_memory_bytes == 42_000_000_000
    plan = predict_run(config("hardware.processes=2"), preset_shape("0.5b"), two)
    assert plan.workload.compute_bytes == plan.workload.weight_bytes == 4
    assert plan.memory.phases["optimizer"]["framework"] == 700_000_000
    one = predict_run(config(), preset_shape("0.5b"), hardware(gpu="here", gpus=1, nodes=1, gpu_memory=None))
    assert plan.timing["training_s"].value == pytest.approx(one.timing["training_s"].value)


@slow("it measures for seconds")
def test_a_real_measurement_of_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that are possible, and a plan with them; by the command, which keeps them."""
    monkeypatch.setattr(BenchmarkSize, "default_for", classmethod(lambda cls, device: TINY))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(app, ["plan", "--calibrate", "--json"])
    assert done.exit_code == 0, done.output
    measured = local_calibration()
    assert measured is not None
    assert json.loads(done.output)["device"] == measured.device == cpu_name()
    assert all(1e6 < flops < 1e15 for flops in measured.flops.values())
    assert 1e6 < measured.memory_bandwidth < 1e13
    assert (measured.host_bandwidth, measured.collective_bandwidth) == (None, None)
    assert 100e6 < measured.framework_bytes < measured.memory_bytes  # torch is loaded
    assert hardware(gpu="here", gpus=1, nodes=1, gpu_memory=None).calibration == measured


@slow("it measures for seconds")
def test_a_plan_with_a_measurement_is_one_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(BenchmarkSize, "default_for", classmethod(lambda cls, device: TINY))
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["qwen2.5-0.5b"]))
    (tmp_path / "run.yaml").write_text(f"model: {{path: {tmp_path}}}\ndata: {{path: d}}\nrewards: [{{use: math}}]\n")
    done = CliRunner().invoke(app, ["plan", str(tmp_path / "run.yaml"), "--calibrate", "--json"])
    assert json.loads(done.output)["model"]["parameters"] == 494_032_768
    assert local_calibration() is not None


@slow("it measures for seconds")
def test_a_real_gather_of_two_processes() -> None:
    assert 1e3 < collective_bandwidth("cpu", 2, TINY) < 1e13


def test_a_process_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_calibrate, "_CPU_PROCESS", "raise SystemExit(3)")
    with pytest.raises(TrainingError, match="a process that imports the trainer failed"):
        calibrate(torch.device("cpu"), TINY)


def test_neither_file_nor_calibrate_is_a_mistake() -> None:
    done = CliRunner().invoke(app, ["plan"])
    assert done.exit_code == 2
    assert "--calibrate" in done.output
