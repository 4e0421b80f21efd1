"""`cohort plan` as a command, and what a run does with its plan."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from subprocess import run
from typing import Any

import pytest
from typer.testing import CliRunner

from cohort.cli.app import app
from cohort.cli.plan import plan_hardware, plan_run
from cohort.config import load_config
from cohort.config.model import AdapterConfig
from cohort.errors import UserError
from cohort.plan.adapter import adapter_shape
from cohort.plan.dataset import count_prompts
from cohort.plan.memory import MemoryPlan
from cohort.plan.schedule import plan_micro_batches
from cohort.plan.shape import PRESETS, preset_shape
from cohort.trainer.preflight import compare_memory, preflight_on
from plans import EIGHT, config, on_gpus, planned, without_advice
from selection import slow


def test_prompts_are_counted_where_that_is_cheap(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n')
    assert count_prompts(str(tmp_path / "a.jsonl")) == 2
    (tmp_path / "a.csv").write_text("a\n1\n")
    assert count_prompts(str(tmp_path / "a.csv")) is None
    (tmp_path / "broken.parquet").write_text("no")
    assert count_prompts(str(tmp_path / "broken.parquet")) is None
    assert count_prompts(str(tmp_path / "missing.jsonl")) is None


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(PRESETS["qwen2.5-7b"]))
    (tmp_path / "data.jsonl").write_text('{"prompt": "1"}\n' * 100)
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: {{path: {model}}}\ndata: {{path: {tmp_path / 'data.jsonl'}}}\nrewards: [{{use: math}}]\n"
        "rollout: {engine: local, max_prompt_tokens: 512, max_completion_tokens: 4096}\nhardware: {processes: auto}\n"
    )
    return file


def test_prompts_of_sources_are_counted_as_the_run_reads_them(run_file: Path) -> None:
    data = run_file.with_name("data.jsonl")
    data.write_text("".join(json.dumps({"prompt": str(i), "level": i % 2}) + "\n" for i in range(100)))

    def prompts(*overrides: str) -> Any:
        machines = plan_hardware(load_config(run_file, overrides), gpu=None, gpus=1, nodes=1, gpu_memory="80GB")
        found, notes = plan_run(load_config(run_file, overrides), machines, run_file.parent, model=None)
        return found.num_prompts, [note for note in notes if "will not start" in note]

    assert prompts() == (100, [])
    assert prompts("data.where=level == 0", "data.rows=0.5", "eval.rows=5") == (20, [])
    assert prompts(f"data=[{{path: {data}}}, {{path: {data}, source: b, where: level == 1}}]") == (150, [])
    number, (note,) = prompts(f"data=[{{path: {data}, where: levle == 1}}]")
    assert number is None and "there is no column levle; did you mean level?; `cohort train` will" in note


def test_the_command(run_file: Path) -> None:
    plan = planned(str(run_file), "--gpu-memory", "80GB", "--max", "length")
    assert plan["model"]["parameters"] == 7_615_616_512
    assert plan["layout"]["num_steps"] == 7
    assert plan["memory"]["fits"]
    assert plan["max"]["length"] > 4096
    backward = plan["memory"]["phases"]["backward"]
    assert backward["total"] == sum(backward["parts"].values())
    assert {number["origin"] for number in plan["timing"].values()} <= {"measured", "assumed", "derived"}
    does_not = CliRunner().invoke(app, ["plan", str(run_file), "--gpu", "4090"])
    assert does_not.exit_code == 1
    assert "does not fit" in does_not.output


def test_the_first_line_says_which_gpus_were_assumed(run_file: Path) -> None:
    def first_line(*arguments: str) -> str:
        with without_advice():
            return CliRunner().invoke(app, ["plan", str(run_file), *arguments]).output.splitlines()[0]

    others = "(for others: --gpus 1 --gpu 4090; for this machine's CPU: hardware.device=cpu)"
    assert first_line() == f"assumed: 8 x NVIDIA H100 80GB HBM3 {others}"
    assert first_line("--gpus", "2") == f"assumed: 2 x NVIDIA H100 80GB HBM3 {others}"
    for named in (["--gpu", "h200"], ["--gpu-memory", "80GB"], ["hardware.device=cpu"]):
        assert first_line(*named).startswith(("fits", "does not fit")), named


@slow("proposals of other runs")
def test_vllm_is_not_proposed_to_a_run_that_has_it(run_file: Path) -> None:
    """On a GPU of 4 GB nothing that is known fits."""
    small = ["plan", str(run_file), "--gpu-memory", "4GB", "--gpus", "1"]
    local, served = (CliRunner().invoke(app, [*small, *more]).output for more in ([], ["rollout={engine: vllm}"]))
    assert "or rollout.engine: vllm" in local and "no known change" in served
    assert "or rollout.engine: vllm" not in served


def test_targets_that_the_shape_cannot_tell_are_noted_and_not_refused(run_file: Path) -> None:
    shape = preset_shape("7b")
    unknown = adapter_shape(AdapterConfig(targets=("qkv_proj",)), shape)
    everywhere = adapter_shape(AdapterConfig(), shape)
    assert unknown.layer_parameters == everywhere.layer_parameters
    assert "qkv_proj" in str(unknown.warning) and everywhere.warning is None
    arguments = ["plan", str(run_file), "model.adapter={targets: [qkv_proj]}"]
    with without_advice():
        assert "qkv_proj not found in the shape" in CliRunner().invoke(app, arguments).output
    assert "qkv_proj" in planned(*arguments[1:])["notes"][0]


@pytest.mark.parametrize(
    "options", [["--max", "everything"], ["--gpus", "0"], ["--model-shape", "9t"], ["--price", "-3"]]
)
def test_mistakes_exit_with_2(run_file: Path, options: list[str]) -> None:
    assert CliRunner().invoke(app, ["plan", str(run_file), *options]).exit_code == 2


def test_no_torch_is_imported(run_file: Path) -> None:
    code = (
        "import sys; from cohort.cli.app import app\n"
        f"app(['plan', {str(run_file)!r}, '--json'], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_a_run_that_cannot_fit_is_refused_unless_told_otherwise(run_file: Path) -> None:
    notes: list[str] = []
    wanted = config(f"model.path={run_file.parent / 'model'}")
    about: dict[str, Any] = {"shared": False, "longest_prompt_tokens": 100, "num_prompts": 100, "notify": notes.append}
    fitting = preflight_on(wanted, EIGHT, **about)
    assert fitting is not None and fitting.fits
    assert fitting.as_json()["layout"]["micro_batch_tokens"] == wanted.train.micro_batch_tokens  # as the run has it
    assert fitting.as_json()["hardware"]["on_gpu"]
    small = on_gpus(1, "4090")
    with pytest.raises(UserError, match=r"needs .* GB per GPU during .* run\.ignore_plan: true"):
        preflight_on(wanted, small, **about)
    assert not notes
    told = wanted.model_copy(update={"run": wanted.run.model_copy(update={"ignore_plan": True})})
    assert preflight_on(told, small, **about) is not None
    assert "continuing because of run.ignore_plan" in notes[0]
    assert compare_memory(fitting, {}, {}) is None
    assert "20.00 GB" in (compare_memory(fitting, {1: 19e9, 2: 20e9}, {}) or "")
    told = compare_memory(fitting, {1: 19e9, 2: 20e9}, {1: 22e9, 2: 23e9}) or ""
    assert "20.00 GB (23.00 GB with fragments of PyTorch's allocator); predicted" in told


def test_what_servers_keep_on_the_gpu_is_not_in_pytorchs_memory() -> None:
    told = ("rollout.engine=vllm", "model.path=Qwen/Qwen2.5-1.5B", "model.adapter={}", "train.micro_batch_tokens=16384")
    about: dict[str, Any] = {"longest_prompt_tokens": 100, "num_prompts": 100, "notify": print}
    plans = [preflight_on(config(*told), EIGHT, shared=True, keeps_base=keeps, **about) for keeps in (True, False)]
    kept, asleep = (plan for plan in plans if plan is not None)
    assert kept.memory.total("backward") - asleep.memory.total("backward") > 4e9
    said = set()
    for plan in (kept, asleep):
        backward = MemoryPlan(phases={"backward": plan.memory.phases["backward"]})
        said.add(compare_memory(replace(plan, memory=backward), {1: 2e10}, {}))
    assert len(said) == 1 and None not in said


def test_groups_of_one(run_file: Path) -> None:
    """A prompt of 512 tokens and 4,095 of its completion are one sequence: no prompt is kept for others."""
    for budget in (4608, 1000):  # at the cap, and over it by itself
        plan = plan_micro_batches(config("algorithm.name=ppo", "rollout.num_generations=1"), 8, budget)
        assert (plan.packed_tokens, plan.completions_per_micro_batch) == (4608, 1)
        assert (plan.shared_prefix_tokens, plan.num_micro_batches) == (0, 2)
    command = ["plan", str(run_file), "algorithm.name=ppo", "rollout.num_generations=1"]
    with without_advice():
        told = " ".join(CliRunner().invoke(app, command, env={"COLUMNS": "200"}).output.split())
    assert "prompts per step and process 2, with one completion each" in told
    assert "completions per step" not in told
    assert "critic 7.07 billion parameters" in told
