"""Events and status of a run in its folder: readable whenever it ends, and nothing that the run depends on."""

import importlib
import json
import os
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from cohort import train as run_training
from cohort.config import config_from_dict
from cohort.display import RunLog, StepReport
from cohort.errors import TrainingError
from cohort.processes.page import PageStartError
from cohort.trainer.parts import user_files
from commands import set_up
from configs import MINIMAL
from runs import changed, make_inputs, metric, stop_after, train
from waiting import PATIENCE_S, until


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def status(run: Path) -> dict[str, Any]:
    return json.loads((run / "status.json").read_text())


def test_what_happens_in_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python", "-m", "cohort", "train", "my run.yaml"])
    with RunLog(tmp_path, processes=2) as log:
        log.notify("before the folder is this run's")
        assert not [*tmp_path.iterdir()]
        log.begin(steps_done=3, num_steps=5)
        log.phase("evaluation")
        log.eval_progress(1, 4)
        log.reward_progress("math", 7, 9)  # of the evaluation
        log.step(StepReport(steps_done=4, metrics={}, groups=()))
        log.saved(4)
        log.evaluated(4, {}, ())
        log.notify("see https://user:password@host/x?token=abc&page=2")
    start, *others, end = events(tmp_path)
    assert (start["event"], start["step"], start["steps_done"], start["steps"], start["processes"]) == (
        "start",
        3,
        3,
        5,
        2,
    )
    assert start["pid"] == os.getpid() and {"cohort", "python", "torch", "transformers"} <= start["versions"].keys()
    assert start["command"] == "python -m cohort train 'my run.yaml'"
    assert start["commit"] is None or len(start["commit"]) == 40
    assert 0 <= others[1].pop("seconds") < PATIENCE_S
    assert [{k: v for k, v in event.items() if k != "timestamp"} for event in others] == [
        {"step": 3, "event": "warning", "text": "before the folder is this run's"},
        {"step": 4, "event": "checkpoint", "path": "checkpoints/step-4"},
        {"step": 4, "event": "evaluation"},
        {"step": 4, "event": "warning", "text": "see https://***@host/x?token=***"},
    ]
    assert (end["event"], end["step"]) == ("end", 4)
    assert start["timestamp"] <= end["timestamp"]
    found = status(tmp_path)
    assert found == {
        **found,
        "pid": os.getpid(),
        "step": 4,
        "steps": 5,
        "phase": "finished",
        "done": None,
        "total": None,
    }


def test_the_status_shows_the_phase_and_its_progress(tmp_path: Path):
    with RunLog(tmp_path, processes=1) as log:
        log.begin(steps_done=0, num_steps=5)
        log.phase("reward")
        log.reward_progress("math", 7, 9)
        until(lambda: shows(tmp_path, phase="reward", done=7, total=9))
        log.phase("train")
        until(lambda: shows(tmp_path, phase="train", done=None, total=None))


def shows(run: Path, **values: object) -> bool:
    return (run / "status.json").exists() and status(run) == {**status(run), **values}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_and_a_deleted_folder_are_no_reason_to_stop(tmp_path: Path):
    for name in ("events.jsonl", ".status.json.partial"):
        (tmp_path / name).symlink_to("/dev/full")
    with RunLog(tmp_path, processes=1) as log:
        log.begin(steps_done=0, num_steps=5)
        log.notify("lost")
    assert not (tmp_path / "status.json").exists()
    with RunLog(tmp_path / "deleted", processes=1) as log:
        log.begin(steps_done=0, num_steps=5)
    assert not (tmp_path / "deleted").exists()


def test_an_error_and_a_run_that_was_killed_while_writing(tmp_path: Path):
    (tmp_path / "events.jsonl").write_text('{"step": 1}\n{"timesta')
    with pytest.raises(TrainingError), RunLog(tmp_path, processes=1) as log:
        log.begin(steps_done=1, num_steps=5)
        raise TrainingError("no space left\nmore")
    first, cut, start, stop = (tmp_path / "events.jsonl").read_text().splitlines()
    assert (first, cut, json.loads(start)["event"]) == ('{"step": 1}', '{"timesta', "start")
    assert {**json.loads(stop), "event": "stop", "reason": "TrainingError: no space left"} == json.loads(stop)
    assert status(tmp_path)["phase"] == "stopped"


def test_a_run_that_did_not_begin_leaves_nothing(tmp_path: Path):
    with pytest.raises(TrainingError), RunLog(tmp_path, processes=1) as log:
        log.notify("x")
        raise TrainingError("no model")
    assert not [*tmp_path.iterdir()]


def test_a_resumed_run_has_two_starts(tmp_path: Path):
    config = changed(make_inputs(tmp_path), train={"steps": 4}, eval={"every": 2})
    with pytest.raises(KeyboardInterrupt):
        run_training(config, display=stop_after(3))
    train(config, resume=True)
    run = tmp_path / "run"
    assert [(e["event"], e["step"]) for e in events(run) if e["event"] not in ("warning", "health")] == [
        ("start", 0), ("evaluation", 0), ("evaluation", 2), ("checkpoint", 2), ("stop", 3),
        ("start", 2), ("evaluation", 4), ("checkpoint", 4), ("end", 4),
    ]  # fmt: skip
    assert [e["reason"] for e in events(run) if e["event"] == "stop"] == ["KeyboardInterrupt"]
    assert (status(run)["phase"], status(run)["step"]) == ("finished", 4)
    timestamps = metric(run, "timestamp")
    assert timestamps == sorted(timestamps) and len(timestamps) == 4 + 3  # of steps and evaluations


def test_a_reward_that_changed_is_named_when_the_run_resumes(tmp_path: Path):
    config = changed(make_inputs(tmp_path), train={"steps": 4}, eval={"every": 2})
    file = tmp_path / "my_rewards.py"
    for last in (2, 3):  # the second time it resumes with the same file
        with pytest.raises(KeyboardInterrupt):
            run_training(config, display=stop_after(last))
    assert "has changed" not in (tmp_path / "run" / "events.jsonl").read_text()
    file.write_text(file.read_text().replace("0.1", "0.2"))
    train(config, resume=True)
    starts = [event["files"] for event in events(tmp_path / "run") if event["event"] == "start"]
    hashes = [start[str(file)] for start in starts]
    assert hashes[0] == hashes[1] != hashes[2] == sha256(file.read_bytes()).hexdigest()
    texts = [event["text"] for event in events(tmp_path / "run") if event["event"] == "warning"]
    assert [text for text in texts if "has changed" in text] == [
        f"warning: {file} has changed since the run last started: from step 3 on, its functions may mean something "
        "else than in the steps before"
    ]


def test_files_of_all_kinds_of_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("r", "t", "e", "a"):
        (tmp_path / f"{name}.py").write_text(f"{name} = 1")
    (tmp_path / "loaded_module_of_mine.py").write_text("def f(): ...")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("loaded_module_of_mine")
    config = config_from_dict(
        {
            **MINIMAL,
            "rewards": [{"use": "r.py:f"}, {"use": "loaded_module_of_mine:f"}, {"use": "math"}, {"use": "json:loads"}],
            "rollout": {"tools": ["t.py:f", "python"], "environment": "e.py:E"},
            "algorithm": {"advantage": "a.py:f"},
        },
        base_dir=tmp_path,
    )
    names = ("r", "loaded_module_of_mine", "t", "e", "a")
    assert user_files(config) == {
        str(file): sha256(file.read_bytes()).hexdigest() for file in (tmp_path / f"{name}.py" for name in names)
    }


ADDRESS = "http://127.0.0.1:7600/?token=abcdef"


def test_the_address_of_the_page_is_printed_and_in_no_file(tmp_path: Path, cohort, monkeypatch: pytest.MonkeyPatch):
    page = f"page: {ADDRESS}"
    monkeypatch.setattr("cohort.trainer.run.start_page", lambda run: page if run == tmp_path / "run" else "")
    path = set_up(tmp_path, train={"steps": 1})
    assert f"page: {ADDRESS}\n" in cohort("train", path, "--view").out
    assert not [f for f in (tmp_path / "run").rglob("*") if f.is_file() and b"abcdef" in f.read_bytes()]


def test_a_run_goes_on_without_its_page(tmp_path: Path, cohort, monkeypatch: pytest.MonkeyPatch):
    def fail(run: Path) -> str:
        raise PageStartError("no free port")

    monkeypatch.setattr("cohort.trainer.run.start_page", fail)
    path = set_up(tmp_path, train={"steps": 1})
    assert "run.view: no free port\n" in cohort("train", path, "--view").out
