"""The plan of a run on the CPU: kept, compared with what was measured, and never in the way."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import cohort
from cohort.cli.app import app
from cohort.display import Display
from cohort.plan.hardware import Hardware, cpu_name
from cohort.plan.predict import Plan
from cohort.trainer.preflight import compare_memory, preflight_on
from plans import config
from runs import changed, make_inputs

GB = 10**9
CPU = Hardware(gpu_name="a CPU", gpu_memory_bytes=GB, gpus_per_node=1, nodes=1, on_gpu=False, resident_bytes=GB // 2)


class Notes(Display):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def notify(self, text: str) -> None:
        self.notes.append(text)


def one_step(folder: Path, **sections: Any) -> tuple[Path, list[str]]:
    display = Notes()
    with torch.compiler.set_stance("force_eager"):
        done = cohort.train(changed(make_inputs(folder), train={"steps": 1}, **sections), display=display)
    return done.run_dir, display.notes


def planned(on: Hardware, *overrides: str) -> Plan:
    notes: list[str] = []
    wanted = config("model.path=Qwen/Qwen2.5-7B", "hardware.processes=1", *overrides)
    plan = preflight_on(wanted, on, shared=False, longest_prompt_tokens=100, num_prompts=100, notify=notes.append)
    assert plan is not None and notes == []
    return plan


def test_a_run_keeps_its_plan_and_compares_resident_memory(tmp_path: Path) -> None:
    run, notes = one_step(tmp_path)
    plan = json.loads((run / "plan.json").read_text())
    assert plan["hardware"]["gpu"] == cpu_name()
    assert plan["timing"] == {}
    assert plan["layout"]["micro_batch_tokens"] == 256  # as the run has it
    origins = plan["memory"]["origins"]
    assert origins["framework"]["origin"] == origins["there"]["origin"] == "measured"
    (told,) = (note for note in notes if note.startswith("peak memory per process"))
    measured, before, predicted = (float(number) for number in re.findall(r"([\d.]+) GB", told))
    assert 0 < before <= predicted and before <= 1.05 * measured
    # a tiny model is next to nothing beside the process that trains it
    assert predicted == pytest.approx(before, rel=0.1)


def test_nothing_is_refused_and_nothing_said_on_a_cpu() -> None:
    """7 billion weights in 1 GB."""
    plan = planned(CPU)
    assert not plan.fits and plan.timing == {}
    assert plan.memory.phases["publish"]["framework"] == GB // 2
    told = compare_memory(plan, {1: 100e9}, {}) or ""
    assert "100.00 GB (0.50 GB before loading the model)" in told
    assert f"predicted {plan.memory.peak_bytes / 1e9:.2f} GB" in told
    on_gpu = replace(CPU, on_gpu=True, gpu_memory_bytes=1000 * GB, resident_bytes=None)
    assert "before loading the model" not in (compare_memory(planned(on_gpu), {1: 100e9}, {}) or "")


def test_advice_for_a_cpu_that_nobody_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    file = tmp_path / "run.yaml"
    file.write_text("model: {path: m}\ndata: {path: d.jsonl}\nrewards: [{use: math}]\nhardware: {device: cpu}\n")
    arguments = ["plan", str(file), "--model-shape", "7b", "--gpu-memory", "16GB"]
    said = CliRunner().invoke(app, arguments).stdout
    assert "does not fit" in said and "time not predicted on 1 GPU: " in said


def test_a_model_whose_shape_is_not_known_has_no_plan_and_no_note(tmp_path: Path) -> None:
    notes: list[str] = []
    wanted = config(f"model.path={tmp_path / 'nothing'}")
    about: dict[str, Any] = {"shared": False, "longest_prompt_tokens": 1, "num_prompts": 1, "notify": notes.append}
    assert preflight_on(wanted, CPU, **about) is None
    assert notes == []
    assert preflight_on(wanted, replace(CPU, on_gpu=True), **about) is None
    assert "no memory plan" in notes[0]
