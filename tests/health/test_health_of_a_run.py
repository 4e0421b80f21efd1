"""A run's console, its events, its trackers and the page say the same about how it goes."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import cohort
from cohort.display import ConsoleDisplay
from cohort_view.now import now
from cohort_view.run import ViewedRun
from runs import Notes, changed, make_inputs, stop_after

TEXT = "All rewards are 0.5 in the last 3 steps: there is nothing to learn from"
ADVICE = "Check that the reward can tell completions apart; see docs/rewards.md#writing-a-reward"


def constant_reward(folder: Path, *, steps: int) -> dict[str, Any]:
    (folder / "constant.py").write_text("def constant(completions):\n    return [0.5] * len(completions)\n")
    config = changed(make_inputs(folder), train={"steps": steps})
    return {**config, "rewards": [{"use": f"{folder}/constant.py:constant"}], "eval": None}


def events(run: Path, name: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event for event in lines if event["event"] == name]


def viewed(run: Path) -> ViewedRun:
    found = ViewedRun(run, "run")
    found.refresh()
    return found


def test_everyone_says_the_same(tmp_path: Path):
    config = changed(constant_reward(tmp_path, steps=3), run={"log": ["tensorboard"]})
    out = StringIO()
    cohort.train(config, display=ConsoleDisplay(console=Console(file=out, highlight=False)))
    run = tmp_path / "run"
    assert out.getvalue().count(f"warning: step 3: {TEXT}. {ADVICE}\n") == 1
    last = events(run, "health")[-1]
    assert last["step"] == 3
    found = {finding["rule"]: finding for finding in last["findings"]}
    assert found["all_equal"] == {
        "rule": "all_equal",
        "level": "warning",
        "text": TEXT,
        "advice": ADVICE,
        "step": 3,
        "evidence": ["reward", "frac_reward_zero_std"],
    }
    answer = now(viewed(run))
    assert [finding.as_json() for finding in answer["banners"]] == last["findings"]
    assert [w["step"] for w in answer["warnings"] if w["text"] == f"{TEXT}. {ADVICE}"] == [3]
    (file,) = (run / "tensorboard").glob("events.*")
    assert f"{TEXT}. {ADVICE}".encode() in file.read_bytes()


def test_a_resumed_run_warns_of_nothing_twice(tmp_path: Path):
    config = constant_reward(tmp_path, steps=5)
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        cohort.train(config, display=stop_after(5))
    display = Notes()
    cohort.train(config, display=display, resume=True)
    assert [e["step"] for e in events(run, "start")] == [0, 4]
    assert not any(TEXT[:20] in note for note in display.told)
    assert sum(TEXT in event["text"] for event in events(run, "warning")) == 1
    assert TEXT.replace("3", "5") in [finding.text for finding in now(viewed(run))["banners"]]
