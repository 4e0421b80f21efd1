"""GPUs that a plan was asked for and that the configuration leaves idle."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cohort.cli.app import app
from cohort.config import config_from_dict
from cohort.plan.advice import advise, replan
from cohort.plan.hardware import cpu_name
from cohort.plan.predict import predict_run
from cohort.plan.shape import preset_shape
from plans import on_gpus, planned, without_advice


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    (tmp_path / "data.jsonl").write_text('{"prompt": "1"}\n' * 100)
    file.write_text(
        f"model: {{path: Qwen/Qwen2.5-7B}}\ndata: {{path: {tmp_path / 'data.jsonl'}}}\nrewards: [{{use: math}}]\n"
        "rollout: {engine: local}\ntrain: {prompts_per_step: 10, updates_per_rollout: 2, micro_batch_tokens: auto}\n"
    )
    return file


def shown(*arguments: str) -> str:
    with without_advice():
        return " ".join(CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "200"}).output.split())


def test_by_default_every_gpu_is_used(run_file: Path) -> None:
    for arguments, used in (((), 8), (("--gpus", "8"), 8), (("--gpus", "1"), 1), (("hardware.processes=2",), 2)):
        plan = planned(str(run_file), *arguments)
        assert (plan["layout"]["training_gpus"], plan["layout"]["idle_gpus"], plan["notes"]) == (used, 0, [])
    assert planned(str(run_file), "--nodes", "2")["layout"]["training_gpus"] == 16
    apart = ("rollout={engine: vllm}", "hardware.processes=3", "hardware.rollout_gpus=1")
    layout = planned(str(run_file), *apart)["layout"]
    assert (layout["training_gpus"], layout["sampling_gpus"], layout["idle_gpus"]) == (3, 1, 0)


def test_the_engine_that_a_run_would_take_is_planned(run_file: Path) -> None:
    plan = planned(str(run_file), "--gpus", "4", "rollout={}", "--model-shape", "1.5b")
    assert plan["layout"]["training_gpus"] + plan["layout"]["sampling_gpus"] == 4 and not plan["layout"]["shared"]
    assert plan["notes"] == ["rollout.engine: auto is planned as vllm, if it is installed"]
    plan = planned(str(run_file), "rollout={}", "model.adapter={rank: 8, dora: true}")
    assert plan["layout"]["shared"]
    (note,) = plan["notes"]
    assert note.startswith("rollout.engine: auto is planned as local, since model.adapter.dora: true")


def test_an_engine_that_does_not_fit_is_not_planned(run_file: Path) -> None:
    """An adapter of 7 billion weights trains on 24 GB, and not beside a server with as many."""
    adapter = ("rollout={}", "model.adapter={rank: 8}", "model.dtype=bfloat16", "--gpus", "1")
    plan = planned(str(run_file), *adapter, "--gpu", "4090")
    (note,) = plan["notes"]
    assert note.startswith("rollout.engine: auto is planned as local, since vLLM does not fit alongside training: ")
    assert "rollout server's share" not in plan["memory"]["phases"]["sampling"]["parts"]
    plan = planned(str(run_file), *adapter, "--gpu", "h100")
    assert plan["notes"] == ["rollout.engine: auto is planned as vllm, if it is installed"]
    assert "rollout server's share" in plan["memory"]["phases"]["sampling"]["parts"]


def test_several_nodes_take_vllm_on_nodes_of_their_own(run_file: Path) -> None:
    (note,) = planned(str(run_file), "rollout={}", "--nodes", "2")["notes"]
    assert note.endswith(
        "as vllm, as with `cohort launch slurm --rollout-nodes`; without it, training processes sample"
    )
    (note,) = planned(str(run_file), "rollout={}", "--nodes", "2", "--gpu-memory", "8GB")["notes"]
    assert "is planned as local, since vLLM does not fit alongside training: training on 8 GPUs needs" in note


def test_a_run_on_the_cpu_is_planned_for_the_cpu(run_file: Path) -> None:
    cpu = (str(run_file), "hardware.device=cpu", "--model-shape", "0.5b", "model.dtype=bfloat16")
    plan = planned(*cpu)
    assert (plan["hardware"]["gpu"], plan["layout"]["training_gpus"], plan["timing"]) == (cpu_name(), 1, {})
    assert plan["memory"]["origins"]["there"]["how"] == "this machine's, per process"
    several = planned(*cpu, "hardware.processes=2", "--gpu-memory", "16GB")
    assert several["layout"]["training_gpus"] == 2
    assert several["hardware"]["gpu_memory_bytes"] == 16 * 10**9
    assert planned(*cpu, "rollout={}")["notes"] == []  # as a run without GPUs, it samples itself
    served = planned(*cpu, "rollout={engine: vllm}", "hardware.processes=3")
    assert (served["layout"]["training_gpus"], served["layout"]["sampling_gpus"]) == (3, 1)
    refused = CliRunner().invoke(app, ["plan", *cpu, "--gpu", "h100"])
    assert refused.exit_code == 2
    assert "--gpu: h100 has no effect with hardware.device: cpu" in " ".join(refused.output.split())


def test_processes_that_are_set_are_kept_and_the_rest_stands_idle(run_file: Path) -> None:
    arguments = (str(run_file), "--gpus", "8", "hardware.processes=1")
    plan = planned(*arguments, advised=True)
    assert (plan["layout"]["training_gpus"], plan["layout"]["idle_gpus"], plan["notes"]) == (1, 7, [])
    first = plan["advice"][0]
    assert first["changes"] == {"hardware.processes": "auto"}
    assert first["costs"].startswith("same gradient")
    told = shown(*arguments)
    assert "idle GPUs 7 of 8" in told
    assert "(training processes sample; hardware.processes: 1)" in told


@pytest.mark.parametrize("memory", ["80GB", "600GB"])
def test_idle_gpus_are_the_first_advice_whether_it_fits_or_not(memory: str) -> None:
    wanted = config_from_dict(
        {
            "model": {"path": "m"},
            "data": {"path": "d.jsonl"},
            "rewards": [{"use": "math"}],
            "hardware": {"processes": 1},
        }
    )
    machines = on_gpus(8, memory=memory)
    plan = predict_run(wanted, preset_shape("7b"), machines)
    assert plan.fits is (memory == "600GB") and plan.num_idle == 7
    advice = advise(plan)
    assert advice[0].changes == {"hardware.processes": "auto"} and advice[0].saved_seconds > 0
    better = replan(plan, advice[0].changes)
    assert better.num_idle == 0
    assert not [a for a in advise(better) if "hardware.processes" in a.changes]


def test_a_step_and_its_updates_are_told(run_file: Path) -> None:
    """100 prompts, 10 a step with 8 completions each, and two updates of each step."""
    layout = planned(str(run_file))["layout"]
    expected = {
        "prompts_per_step": 10,
        "completions_per_step": 80,
        "updates_per_step": 2,
        "steps_per_epoch": 10.0,
        "num_steps": 10,
        "num_updates": 20,
    }
    assert {key: layout[key] for key in expected} == expected
    told = shown(str(run_file))
    assert "10 prompts x 8 = 80 completions, 2 optimizer steps" in told
    assert "steps, optimizer steps of the run 10, 20" in told


def test_options_that_would_say_nothing_are_told(run_file: Path) -> None:
    priced = planned(str(run_file), "--price", "2")
    assert priced["cost"] == pytest.approx(2 * priced["timing"]["gpu_hours"]["value"])
    unknown = planned(str(run_file), "--price", "2", "data.path=somewhere.csv")
    missing, price = unknown["notes"][:2]
    somewhere = str(run_file.parent / "somewhere.csv")
    assert missing == f"data.path: {somewhere!r}: no such file; `cohort train` will not start"
    assert "cost" not in unknown and price.startswith("--price: the number of steps is unknown")


def test_a_sweep_plans_every_value(run_file: Path) -> None:
    command = [str(run_file), "train.micro_batch_tokens=auto", "--gpu", "h100"]
    found = planned(*command, "--sweep", "gpus=4..20", "--price", "2")["sweep"]
    assert [row["value"] for row in found] == ["4", "8", "16"]
    for row, more in zip(found, (["--gpus", "4"], ["--gpus", "8"], ["--gpus", "8", "--nodes", "2"]), strict=True):
        assert row["step_s"] == planned(*command, *more)["timing"]["step_s"]["value"]
        assert row["cost_per_step"] == pytest.approx(row["step_s"] * int(row["value"]) * 2 / 3600)
    told = shown(*command, "--gpus", "8", "--sweep", "model.gradient_checkpointing=true,never")
    assert "gradient_checkpointing fits GPUs step per step" in told and "must be auto, true, false or selective" in told
    for sweep, problem in (
        ("gpus=2,x", "gpus=x is not a number of GPUs"),
        ("gpus=3..12", "gpus=12 is"),
        ("a.b=1,2", "a: "),
    ):
        refused = CliRunner().invoke(app, ["plan", *command, "--sweep", sweep])
        assert refused.exit_code == 2 and problem in refused.output
    refused = CliRunner().invoke(app, ["plan", *command, "--sweep", "gpus=64..1"])
    assert refused.exit_code == 2 and "--sweep: 'gpus=64..1' is neither a list" in refused.output


def test_a_narrow_terminal_cuts_no_number(run_file: Path) -> None:
    command = ["plan", str(run_file), "--price", "2", "--sweep", "gpus=1,64"]
    lines = CliRunner().invoke(app, command, env={"COLUMNS": "80"}).output.splitlines()
    one, many = planned(*command[1:])["sweep"]
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    assert lines[1].split() == ["gpus", "fits", "GPUs", "step", "per", "step", "per", "step"]
    for line, row in zip(lines[2:], (one, many), strict=True):
        assert line.split()[0] == row["value"] and f"{row['cost_per_step']:.3f}" in line


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("FILE", "--sweep", "gpus=1,2", "--max", "length"), "--max has no effect with --sweep"),
        (("FILE", "--sweep", "gpus=1,2", "--why"), "--why has no effect with --sweep"),
        (("FILE", "--sweep", "gpus=1,2", "--nodes", "2"), "--nodes has no effect with --sweep gpus"),
        (("FILE", "--sweep", "gpus=1,2", "--plot", "picture.bmp"), "ends with .png, .svg, .pdf"),
        (("FILE", "--sweep", "gpus=1,2", "--plot", "nowhere/a.png"), "the folder does not exist"),
        (("FILE", "--plot", "a.png"), "--plot has no effect without --sweep"),
        (("FILE", "--against", "run"), "CONFIG has no effect with --against"),
        (("train.steps=2", "--against", "run"), "train.steps=2 has no effect with --against"),
        (("--against", "run", "--price", "2"), "--price has no effect with --against"),
    ],
)
def test_an_option_without_effect_is_refused(run_file: Path, arguments: tuple[str, ...], problem: str) -> None:
    refused = CliRunner().invoke(app, ["plan", *(str(run_file) if a == "FILE" else a for a in arguments)])
    assert refused.exit_code == 2 and problem in refused.output


def test_a_sweep_is_drawn_only_with_matplotlib(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused = CliRunner().invoke(app, ["plan", str(run_file), "--sweep", "gpus=1,2", "--plot", "a.png"])
    assert refused.exit_code == 2 and "--plot: needs the package matplotlib; install it with" in refused.output


@pytest.mark.extras
def test_a_sweep_is_drawn(run_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, begin in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml")):
        command = ["plan", str(run_file), "--sweep", "gpus=1,8", "--plot", str(tmp_path / name)]
        assert "gpus" in CliRunner().invoke(app, command).output
        assert (tmp_path / name).read_bytes().startswith(begin)
