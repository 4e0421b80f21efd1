"""`cohort plan --like`: times at the pace of an earlier run."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.json
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

import cohort
from cohort.cli.app import app
from cohort.config import load_config
from cohort.display import Display
from cohort.errors import UserError
from cohort.plan.like import compare_run, read_pace
from cohort.plan.predict import predict_run
from cohort.plan.shape import PRESETS, read_shape
from plans import on_gpus, planned, without_advice
from runs import changed, make_inputs

CONFIG = """
model: {path: FOLDER}
data: {path: d.jsonl}
rewards: [{use: math}]
rollout: {engine: local, max_prompt_tokens: 512, max_completion_tokens: 512}
train: {steps: 10}
hardware: {processes: 1}
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run on one H100 whose steps took 1.5 times the predicted training, and twice the predicted sampling."""
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["qwen2.5-0.5b"]))
    (tmp_path / "config.yaml").write_text(CONFIG.replace("FOLDER", str(tmp_path)))
    plan = predicted(tmp_path)
    (tmp_path / "plan.json").write_text(json.dumps(plan.as_json()))
    training, sampling = plan.timing["training_s"].value, plan.timing["sampling_s"].value
    parts = {"forward_only": 0.25, "pack": 0.0, "train": 1.0, "optim": 0.125, "publish": 0.125}
    usual = {f"time/{phase}_s": share * training for phase, share in parts.items()}
    rows = [
        {name: 100 * seconds for name, seconds in usual.items()} | {"time/rollout_s": 100 * sampling},
        *[{**usual, "time/rollout_s": factor * sampling, "time/reward_s": 0.5} for factor in (1, 2, 9)],
    ]
    lines = [{"step": 0, "eval/time_s": 7.0}, *({**row, "step_time": 1.0} for row in rows)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def predicted(folder: Path) -> Any:
    config = load_config(folder / "config.yaml", ())
    return predict_run(config, read_shape(config.model.path), on_gpus())


def test_phases_take_as_much_longer_as_they_did(run: Path) -> None:
    """The median, without the first step: 1.5 and 2 times. Another length of the completions takes both along."""
    for more in ((), ("rollout.max_completion_tokens=2048",)):
        plain, like = (planned(str(run / "config.yaml"), *more, *o)["timing"] for o in ((), ("--like", str(run))))
        ratios = {name: like[name]["value"] / plain[name]["value"] for name in ("training_s", "sampling_s")}
        assert ratios == pytest.approx({"training_s": 1.5, "sampling_s": 2.0})
        assert like["step_s"]["value"] == pytest.approx(like["training_s"]["value"] + like["sampling_s"]["value"])
        assert like["run_hours"]["value"] == pytest.approx(10 * like["step_s"]["value"] / 3600)
        assert like["sampling_s"]["origin"] == "measured"
        assert like["sampling_s"]["how"].startswith(f"in {run}: 2x of the data sheet's time")


def test_the_times_are_those_of_completions_as_long_as_they_were(run: Path) -> None:
    """The pace is relative to the plan with the run's lengths, and the plan has these, or those of --length."""
    file, rows = run / "metrics.jsonl", (run / "metrics.jsonl").read_text().splitlines()
    lengths = [(512, 512), (80, 300), (100, 400), (500, 500)]  # the first step does not count
    found = [
        json.loads(row) | {"completions/mean_length": mean, "completions/max_length": longest}
        for row, (mean, longest) in zip(rows[1:], lengths, strict=True)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in found))
    config = str(run / "config.yaml")
    full = planned(config)["timing"]["sampling_s"]["value"]
    for more, expected in (((), "100:400"), (("--length", "200"), "200")):
        like = planned(config, "--like", str(run), *more)["timing"]["sampling_s"]["value"]
        at_real, here = (
            planned(config, "--length", text)["timing"]["sampling_s"]["value"] for text in ("100:400", expected)
        )
        assert like == pytest.approx(2 * full * here / at_real)  # it took twice the plan with the maximum length
    with without_advice():
        output = CliRunner().invoke(app, ["plan", config, "--like", str(run)], env={"COLUMNS": "400"}).output
    told = " ".join(output.split())
    assert f"expected tokens after a prompt mean 100, longest 400 (of {run})" in told
    (row,) = [row for row in compare_run(run) if row.what == "mean completion, of the limit"]
    assert (row.predicted, row.measured) == (512, 100)


def test_reference_solutions_give_lengths(run: Path) -> None:
    data, config = run / "d.jsonl", str(run / "config.yaml")
    data.write_text("".join(json.dumps({"solution": "x" * 4 * n, "answer": n}) + "\n" for n in range(1, 102)))
    for path in (data, data.with_suffix(".parquet")):
        if path != data:
            pq.write_table(pa.json.read_json(data), path)
        given = (config, f"data.path={path}")
        found, expected = (planned(*given, "--length", text)["timing"] for text in ("solution", "51:100"))
        assert {name: n["value"] for name, n in found.items()} == {name: n["value"] for name, n in expected.items()}
        for column, problem in (("answer", "has no text in 'answer'; its columns are solution, answer"), ("x", "'x'")):
            refused = CliRunner().invoke(app, ["plan", *given, "--length", column])
            assert refused.exit_code == 2 and problem in refused.output
    refused = CliRunner().invoke(app, ["plan", config, "data.path=someone/rows", "--length", "solution"])
    assert refused.exit_code == 2 and "needs data.path to be a .jsonl or .parquet file" in refused.output


def test_what_differs_is_a_note(run: Path) -> None:
    arguments = (str(run / "config.yaml"), "--like", str(run))
    (rewards,) = planned(*arguments)["notes"][-1:]
    assert rewards == f"--like: rewards took 0.5 s of a step of {run}; the plan leaves them out"
    refused = CliRunner().invoke(app, ["plan", *arguments, "--length", "100"])
    assert refused.exit_code == 2 and "whose metrics do not give the lengths" in refused.output
    other = planned(*arguments, "--gpu", "a100", "--gpus", "2", "rollout.engine=vllm", "hardware.processes=auto")
    assert [note for note in other["notes"] if "another" in note] == [
        f"--like: {run} had another device than is planned: NVIDIA H100 80GB HBM3, not NVIDIA A100-SXM4-80GB",
        f"--like: {run} had another engine than is planned: local, not vllm",
    ]


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "plan.json"])
def test_a_missing_file_is_named(run: Path, name: str) -> None:
    (run / name).unlink()
    with pytest.raises(UserError, match=name):
        read_pace(run)


def test_runs_that_do_not_say_it(run: Path) -> None:
    rows = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(rows[:2]))
    with pytest.raises(UserError, match=r"metrics.jsonl has 1 steps; 2 are needed"):
        read_pace(run)
    (run / "metrics.jsonl").write_text("\n".join([rows[0], "{", *rows[1:]]))
    with pytest.raises(UserError, match=r"metrics.jsonl, line 2 is no JSON"):
        read_pace(run)
    (run / "metrics.jsonl").write_text("\n".join([*rows, '{"step": 9']))  # cut by a kill
    read_pace(run)
    (run / "metrics.jsonl").write_text("\n".join(rows).replace("time/rollout_s", "time/other_s"))
    with pytest.raises(UserError, match=r"has steps without 'time/rollout_s'"):
        read_pace(run)
    (run / "metrics.jsonl").write_text("\n".join(rows))
    text = (run / "config.yaml").read_text().replace("engine: local", "engine: vllm, max_staleness: 1")
    (run / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=r"samples ahead \(rollout.max_staleness\)"):
        read_pace(run)


def test_a_real_run_gives_a_cpu_times(tmp_path: Path) -> None:
    """The plan of the same configuration says what the run took, and twice the prompts take twice as long."""
    with torch.compiler.set_stance("force_eager"):
        config = changed(make_inputs(tmp_path), train={"steps": 3}, hardware={"device": "cpu"})
        run = cohort.train(config, display=Display()).run_dir
    file = str(run / "config.yaml")
    assert planned(file)["timing"] == {}
    timing = planned(file, "--like", str(run))["timing"]
    rows = [row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "step_time" in row]
    sampled = [row["time/rollout_s"] for row in rows[1:]]
    assert timing["sampling_s"]["value"] == pytest.approx(sum(sampled) / 2)  # of two steps, the median is the mean
    assert 0 < timing["training_s"]["value"] < sum(row["step_time"] for row in rows[1:])
    twice = planned(file, "train.prompts_per_step=6", "--like", str(run))["timing"]
    assert twice["training_s"]["value"] == pytest.approx(2 * timing["training_s"]["value"])


def test_a_run_is_shown_against_its_plan(run: Path) -> None:
    """Training and sampling took 1.5 and 2 times the predicted time; a peak of 1 GB was measured in training."""
    file = run / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps({**row, "memory/train_peak_bytes": 1e9}) + "\n" for row in rows))
    found = {row.what: row for row in compare_run(run)}
    plan = predicted(run)
    assert found["training"].measured == pytest.approx(1.375 * (found["training"].predicted or 0))
    assert found["sampling"].measured == pytest.approx(2 * plan.timing["sampling_s"].value)
    assert (found["step"].measured, found["step"].predicted) == (1.0, plan.timing["step_s"].value)
    memory = found["memory in forward and backward"]
    parts = plan.memory.phases["backward"]
    assert (memory.measured, memory.predicted) == (1.0, (sum(parts.values()) - parts["framework"]) / 1e9)
    told = CliRunner().invoke(app, ["plan", "--against", str(run)]).output
    assert ["sampling,", "s"] in [line.split()[:2] for line in told.splitlines()] and "2.00" in told
    file.unlink()
    with pytest.raises(UserError, match=r"--against: .* cannot be read"):
        compare_run(run)
