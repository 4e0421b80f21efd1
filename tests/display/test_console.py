"""What a person sees: the console, the curve, `cohort eval`, and the demo from its first line to its last."""

import io
import itertools
import json
import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from cohort.cli import main
from cohort.config import config_from_dict, load_config
from cohort.demo import run as demo
from cohort.display import ConsoleDisplay, StepReport, on_one_line, render_curve
from cohort.plan import schedule_run
from cohort.records import Prompt, ScoredGroup, TurnStats
from commands import assert_refused
from configs import MINIMAL
from runs import changed, make_inputs, metric, train
from samples import answer
from selection import slow
from tiny import copy_task_rows, save_model_folder, write_jsonl


def test_a_curve():
    assert render_curve([0, 5, 10], [0.0, 0.5, 1.0], height=4) == "\n".join(
        [
            "  100% ┤      ██",
            "   75% ┤      ██",
            "   50% ┤   ██ ██",
            "   25% ┤   ██ ██",
            "    0% └─────────",
            "  step  0      10",
        ]
    )


def test_text_on_one_line():
    assert on_one_line(" a\nb ") == "a ⏎ b"
    assert on_one_line("x" * 300, limit=5) == "xxxxx…"


def group_of(rewards: list[float], texts: list[str]) -> ScoredGroup:
    prompt = Prompt(id=0, epoch=0, content="2 + 2?", token_ids=np.arange(4), columns={})
    trajectories = tuple(answer(prompt, range(3), text=text) for text in texts)
    return ScoredGroup(prompt=prompt, trajectories=trajectories, rewards=np.array(rewards), reward_parts={})


def test_the_best_and_the_worst_scored_completion_are_shown():
    out = io.StringIO()
    display = ConsoleDisplay(show_completions_every=1, console=Console(file=out, width=200))
    metrics = {
        "reward": 0.5,
        "completions/mean_length": 3.0,
        "completions/clipped_ratio": 0.25,
        "tokens_per_second": 1234.5,
    }
    groups = [
        group_of([np.nan, np.nan], ["unscored", "unscored"]),
        group_of([np.nan, 1.0, 0.0], ["never [scored]", "[bold]4[/bold]", "5"]),
    ]
    display.step(StepReport(steps_done=1, metrics=metrics, groups=groups))
    text = out.getvalue()
    assert "sampled reward  0.500" in text and "ended  75%" in text and "1,234 tokens/s" in text
    # text of a model is not markup
    assert re.findall(r"reward +(\S+) (.*)", text)[1:] == [("1.00", "[bold]4[/bold]"), ("0.00", "5")]


def test_data_that_take_long_have_a_bar_on_a_terminal_before_the_first_step(monkeypatch):
    now = 100.0
    monkeypatch.setattr("cohort.display.console.time.monotonic", lambda: now)
    shown = {}
    for is_terminal in (True, False):
        out = io.StringIO()
        display = ConsoleDisplay(console=Console(file=out, width=100, force_terminal=is_terminal))
        for at, done in ((100.0, 0), (101.0, 100), (103.0, 150), (104.0, 300), (200.0, 0), (201.0, 300)):
            now = at
            display.data_progress("converting [a].jsonl (MB)", done, 300)
            display._progress.refresh()
        display.close()
        shown[is_terminal] = out.getvalue()
    assert shown[False] == ""
    assert "converting [a].jsonl (MB)" in shown[True] and "150/300" in shown[True]
    assert "100/300" not in shown[True], "after one second"
    assert shown[True].count("\x1b[?25l") == shown[True].count("\x1b[?25h") == 1, "and what is quick has none"


@pytest.mark.parametrize(
    ("sections", "num_prompts", "first", "eval_line"),
    [
        ({}, 40, "40 prompts, 2.5 steps per epoch", "(1 held-out prompts, greedy)"),
        (
            {"eval": {"path": "d", "temperature": 0.6}},
            40,
            "40 prompts, 2.5 steps per epoch",
            "(1 held-out prompts, temperature 0.6)",
        ),
        (
            {"data": {}, "rollout": {"environment": "e.py:E"}, "rewards": []},
            1,
            "no data, only an environment",
            "(1 held-out prompts, greedy)",
        ),
    ],
)
def test_the_lines_say_what_data_there_is_and_how_rewards_were_sampled(sections, num_prompts, first, eval_line):
    out = io.StringIO()
    display = ConsoleDisplay(console=Console(file=out, width=200))
    config = config_from_dict({**MINIMAL, "train": {"steps": 8}, **sections})
    display.started(schedule_run(config, num_prompts=num_prompts), steps_done=0)
    display.close()
    metrics = {"eval/accuracy": 0.7, "eval/reward": 0.7, "eval/completions/mean_length": 3.0}
    display.evaluated(0, metrics, [group_of([1.0], ["4"])])
    start, evaluated = out.getvalue().splitlines()
    assert start == f"8 steps of 16 prompts × 8 generations = 128 completions; {first}"
    assert evaluated.startswith("eval accuracy 70.0% after step 0  ") and evaluated.endswith(eval_line)


def test_rewards_that_take_long_have_bars(monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    monkeypatch.setattr("cohort.display.console.time.monotonic", lambda: now)
    out = io.StringIO()
    display = ConsoleDisplay(console=Console(file=out, force_terminal=True, width=80))
    display.reward_progress("code", 0, 64)
    now = 101.0
    display.reward_progress("code", 20, 60)
    assert display._progress.tasks == []
    now = 103.0
    display.reward_progress("code", 30, 60)
    display.reward_progress("[judge]", 0, 64)
    now = 106.0
    display.reward_progress("[judge]", 1, 64)
    display._progress.refresh()
    display._progress.start()
    display._progress.stop()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert re.search(r"judging: code ━*[^\n]* 30/60", shown) and re.search(r"judging: \[judge\] ━*[^\n]* 1/64", shown)
    display.reward_progress("code", 64, 64)
    display.reward_progress("[judge]", 64, 64)
    assert display._progress.tasks == []


def test_turns_are_counted_and_shown_message_by_message():
    out = io.StringIO()
    display = ConsoleDisplay(show_completions_every=1, console=Console(file=out, width=200))
    metrics = {
        "reward": 0.5,
        "completions/mean_length": 3.0,
        "completions/clipped_ratio": 0.25,
        "tokens_per_second": 1234.5,
        "turns/mean": 1.5,
        "tools/call_frequency": 2.0,
    }
    group = group_of([1.0, 0.0], ["", "none"])
    call = {"function": {"name": "look", "arguments": {"key": "[bold]a"}}}
    messages = (
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "name": "look", "content": "4\n5"},
    )
    played = replace(group.trajectories[0], messages=messages, end="max_turns", stats=TurnStats(tool_calls=1))
    prompt = replace(group.prompt, content="")
    group = replace(group, prompt=prompt, trajectories=(played, group.trajectories[1]))
    display.step(StepReport(steps_done=1, metrics=metrics, groups=[group]))
    first, *lines = out.getvalue().splitlines()
    assert "reward  0.500  turns 1.5  tool calls 2.0  length   3.0" in first
    assert lines == [
        "  reward  1.00 end: max_turns; 1 turn, 3 trained tokens; 1 tool call; 0.00 s in the model, 0.00 s elsewhere",
        '    assistant: I look. → look(key="[bold]a")',
        "    tool look: 4 ⏎ 5",
        "  reward  0.00 none",
    ]


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["cohort", *map(str, arguments)])
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_eval_prints_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    model, data = save_model_folder(tmp_path / "base"), write_jsonl(tmp_path / "data.jsonl", copy_task_rows(5))
    arguments = ["eval", model, "--data", data, "--prompt", "question", "--reward", "exact", "--num-samples", 2]
    arguments += ["--reward-args", '{pattern: "([0-9])"}', "--max-completion-tokens", 8]
    assert run_command(monkeypatch, *arguments, "--json", "--out", tmp_path / "out.parquet") == 0
    metrics = json.loads(capsys.readouterr().out)
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert len(rows) == 10
    assert metrics["mean@2"] == metrics["accuracy"] == np.mean([row["reward"] for row in rows])
    assert run_command(monkeypatch, *arguments) == 0
    printed = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert printed["num_prompts"] == "5" and float(printed["mean@2"]) == pytest.approx(metrics["mean@2"], rel=1e-3)


def test_eval_of_a_run_takes_its_settings(tmp_path: Path, cohort):
    """Its held-out data, rewards and sampling; options change them."""
    config = make_inputs(tmp_path)
    refused = cohort("eval", tmp_path / "base")
    assert_refused(refused, "error: --data is missing; give held-out data")
    run = train(changed(config, train={"steps": 1}, eval={"num_samples": 2, "temperature": 0.7})).run_dir
    ended = cohort("eval", run, "--json")
    assert ended.code == 0, ended.err
    metrics = json.loads(ended.out)
    assert metrics["accuracy"] == metrics["mean@2"] == metric(run, "eval/accuracy")[-1]
    greedy = json.loads(cohort("eval", run, "--json", "--num-samples", "1", "--max-prompts", "3").out)
    assert "mean@1" in greedy and "mean@2" not in greedy
    shutil.rmtree(run / "final")
    assert_refused(cohort("eval", run), "error: MODEL: ", "is a run without a final model yet")


@pytest.mark.parametrize(
    "task",
    [
        "words",
        pytest.param("tools", marks=slow("a step of several turns")),
        pytest.param("code", marks=slow("tests/demo has the task; starts hundreds of processes")),
    ],
)
def test_a_short_demo_goes_on_and_ends(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    full = demo.demo_config

    def short(folder: Path, **options: Any):
        config = full(folder, **options)
        return config.model_copy(update={"train": config.train.model_copy(update={"steps": 2, "prompts_per_step": 4})})

    monkeypatch.setattr(demo, "demo_config", short)
    monkeypatch.setattr(demo, "NUM_HELDOUT", 16)
    command = ("demo", "--task", task, "--out", tmp_path / "run")
    assert run_command(monkeypatch, *command, "--seed", 3) == 0
    out = capsys.readouterr().out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert {"accuracy_before", "accuracy_after", "seconds", "steps", "seed"} <= summary.keys()
    assert (summary["steps"], summary["seed"]) == (2, 3)
    page = f"cohort view {os.path.relpath(tmp_path / 'run')}"
    for shown in (
        "step 1/2",
        "Accuracy on held-out problems",
        "before",
        "after",
        str(tmp_path / "run" / "final"),
        page,
    ):
        assert shown in out
    if task == "tools":
        assert "assistant: → look_up(name=" in out and "tool look_up: " in out
    if task == "code":
        assert "sandbox: " in out and "def " in out
    config = load_config(tmp_path / "run" / "config.yaml")  # the same run by `cohort train`
    assert schedule_run(config, num_prompts=demo.NUM_TRAIN).num_steps == 2
    assert run_command(monkeypatch, *command, "--seed", 3) == 0
    assert "already finished" in capsys.readouterr().out
    assert run_command(monkeypatch, *command, "--seed", 4) == 2


@slow("whole demos; make test has two steps of each")
@pytest.mark.parametrize(("task", "seed"), [*itertools.product(("words", "tools"), range(5)), ("code", 0)])
def test_the_demo_gains_at_least_55_points(task: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert run_command(monkeypatch, "demo", "--task", task, "--out", tmp_path / "run", "--seed", seed) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["accuracy_after"] - summary["accuracy_before"] >= 0.55
