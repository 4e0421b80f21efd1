"""What the page reads of a run folder, in any state."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort_view import config_info, series
from cohort_view import now as now_module
from cohort_view.run import ViewedRun
from cohort_view.server.runs import looks_like_run
from completions_files import answering
from selection import examples

now, runs, log = (answering(function) for function in (now_module.now, now_module.runs, now_module.log))
marks, messages = answering(series.marks), answering(series.messages)
provenance, differences = answering(config_info.config_info), answering(config_info.differences)

CONFIG = (
    "# Written by cohort\nmodel: {path: /models/tiny}\ntrain: {steps: 50}\neval: {every: 5}\nalgorithm: {name: grpo}\n"
)


def write(folder: Path, **files: Any) -> ViewedRun:
    """Write files (`metrics_jsonl` as a list of rows) and return the run, read."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        path = folder / name.replace("_", ".")
        if isinstance(content, list):
            content = "".join(json.dumps(row) + "\n" for row in content)
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    run = ViewedRun(folder, "a")
    run.refresh()
    return run


def status(**values: Any) -> dict[str, Any]:
    return {
        "timestamp": time.time(),
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "phase": "train",
        "step": 3,
        "steps": 50,
        **values,
    }


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


def test_a_run_whose_process_is_alive_runs(tmp_path: Path):
    assert write(tmp_path, status_json=status()).state == "running"
    assert write(tmp_path, status_json=status(phase="starting")).state == "starting"


def test_a_run_whose_process_is_dead_stopped(tmp_path: Path):
    assert write(tmp_path, status_json=status(pid=dead_process())).state == "stopped"
    assert write(tmp_path, status_json=status(phase="stopped")).state == "stopped"


def test_a_process_that_got_the_number_later_is_not_the_run(tmp_path: Path):
    assert write(tmp_path, status_json=status(timestamp=1_000_000.0)).state == "stopped"


def test_a_run_of_another_machine_runs_if_it_wrote_lately(tmp_path: Path):
    assert write(tmp_path, status_json=status(host="elsewhere", pid=1)).state == "running"
    assert write(tmp_path, status_json=status(host="elsewhere", timestamp=time.time() - 61)).state == "stopped"


def test_a_finished_run(tmp_path: Path):
    assert write(tmp_path, summary_json={"steps": 5}).state == "finished"
    assert write(tmp_path, status_json=status(phase="finished")).state == "finished"


def test_a_process_that_dies_changes_the_run(tmp_path: Path):
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:
        time.sleep(0.02)  # its start is known to the hundredth of a second
        run = write(tmp_path, status_json=status(pid=process.pid))
        assert (run.state, run.refresh()) == ("running", set())
        process.kill()
        process.wait()
        assert (run.refresh(), run.state) == ({"status"}, "stopped")


def test_what_changed_is_told(tmp_path: Path):
    run = write(tmp_path, config_yaml=CONFIG, metrics_jsonl=[{"step": 1, "kind": "train", "reward": 0.5}])
    assert run.refresh() == set()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "kind": "train", "reward": 1}\n')
    assert run.refresh() == {"metrics"}
    assert run.metrics.column("reward").tolist() == [0.5, 1.0]
    (tmp_path / "events.jsonl").write_text('{"event": "end", "step": 2, "timestamp": 1.0}\n')
    (tmp_path / "completions").mkdir()
    assert run.refresh() == {"events", "completions"}
    assert run.events[0].event == "end"


def health(text: str, **values: object) -> dict[str, Any]:
    finding = {"rule": "unclear", "level": "info", "text": text, "advice": None, "step": 3, "evidence": ["reward"]}
    return {"timestamp": 1.0, "step": 3, "event": "health", "findings": [{**finding, **values}, {"rule": "cut"}]}


def test_the_last_findings_that_a_run_recorded_are_shown(tmp_path: Path):
    row = {"step": 3, "kind": "train", "reward": 0.5}
    run = write(tmp_path, metrics_jsonl=[row], events_jsonl=[health("first"), health("second", level="good")])
    assert [(f.text, f.level, f.step, f.evidence) for f in now(run).banners] == [("second", "good", 3, ["reward"])]
    assert runs([run]).runs[0].banner == now(run).banners[0]
    assert run.events == []  # they are many
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(json.dumps(health("third")) + "\n")
    assert (run.refresh(), [f.text for f in now(run).banners]) == ({"events"}, ["third"])
    write(tmp_path, metrics_jsonl="")  # it starts over
    run.refresh()
    assert list(now(run).banners) == []


def test_a_resumed_run_whose_metrics_were_cut(tmp_path: Path):
    rows = [{"step": step, "kind": "train", "reward": 0.1 * step} for step in (1, 2, 3)]
    run = write(tmp_path, metrics_jsonl=rows)
    write(tmp_path, metrics_jsonl=rows[:1])
    assert run.refresh() == {"metrics"}
    assert run.metrics.steps.tolist() == [1]


def test_the_list_of_runs_reads_the_end_of_long_runs_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cohort_view.run._READ_AT_ONCE_BYTES", 1000)
    monkeypatch.setattr("cohort_view.run._TAIL_BYTES", 500)
    rows = [{"step": step, "kind": "train", "reward": step / 100} for step in range(1, 101)]
    run = write(tmp_path, config_yaml=CONFIG, plan_json={}, metrics_jsonl=rows)
    (entry,) = runs([run]).runs
    assert (entry.step, entry.reward, entry.banner, entry.has_all_metrics) == (100, 1.0, None, False)
    write(tmp_path, events_jsonl=[health("said")])
    run.refresh()
    assert [entry.banner and entry.banner.text for entry in runs([run]).runs] == ["said"]
    (tmp_path / "events.jsonl").unlink()
    run.refresh()
    assert 1 < len(run.last_metrics.steps) < 20
    assert run.refresh() == set()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 101, "kind": "train", "reward": 0}\n')
    assert (run.refresh(), runs([run]).runs[0].step) == ({"metrics"}, 101)
    assert run.metrics.steps.tolist() == list(range(1, 102))  # opened
    (entry,) = runs([run]).runs
    assert entry.has_all_metrics
    assert run.problems == []


def test_now_of_a_running_run(tmp_path: Path):
    start = time.time() - 1000
    rows: list[dict[str, Any]] = [
        {"step": 0, "kind": "eval", "timestamp": start + 5, "eval/accuracy": 0.1, "eval/time_s": 5.0}
    ]
    at = start + 5
    for step in range(1, 41):
        at += 10.0
        rows.append({"step": step, "kind": "train", "timestamp": at, "reward": step / 100, "tokens_per_second": 7.0})
        rows[-1] |= {"entropy": 0.5 - step / 10} if step < 3 else {"entropy": None}
        if step % 5 == 0:
            at += 5.0
            accuracy = 0.5 + step / 100
            rows.append({"step": step, "kind": "eval", "timestamp": at, "eval/accuracy": accuracy, "eval/time_s": 5.0})
    shift = time.time() - rows[-1]["timestamp"]
    rows = [{**row, "timestamp": row["timestamp"] + shift} for row in rows]
    events = [
        {"timestamp": start + shift, "step": 0, "event": "start", "steps_done": 0},
        *({"timestamp": start + shift, "step": 1, "event": "warning", "text": f"warning: {i}"} for i in range(150)),
        {"timestamp": start + shift, "step": 2, "event": "warning", "text": "warning: rewards are equal"},
        {"timestamp": start + shift + 1, "step": 3, "event": "warning", "text": "warning: rewards are equal"},
        {"timestamp": start + shift, "step": 2, "event": "warning", "text": "verifying step-1 (3 GB)"},
    ]
    run = write(
        tmp_path,
        config_yaml=CONFIG,
        metrics_jsonl=rows,
        events_jsonl=events,
        status_json=status(step=40, done=3, total=10),
    )
    answer = now(run)
    assert (answer.state, answer.step, answer.steps, answer.phase) == ("running", 40, 50, "train")
    assert answer.seconds_per_step == pytest.approx(10.0)
    # 10 steps, evaluations after 45 and 50, less the 5 s since step 40 was written
    assert answer.seconds_left == pytest.approx(105.0, abs=2.0)
    assert answer.elapsed_s == pytest.approx(445.0, abs=2.0)
    assert answer.progress is not None
    assert (answer.progress.done, answer.progress.total, answer.tokens_per_second) == (3, 10, 7)
    last = answer.warnings[-1]
    assert (last.level, last.text, last.step, last.num) == ("warning", "rewards are equal", 3, 2)
    assert (answer.num_warnings, len(answer.warnings), answer.warnings[0].text) == (151, 100, "51")


def test_a_pause_between_two_starts_is_no_step(tmp_path: Path):
    rows = [{"step": step, "kind": "train", "timestamp": 100.0 + step + 5000 * (step > 2)} for step in range(1, 4)]
    starts = [{"timestamp": at, "event": "start", "step": done} for at, done in ((100.0, 0), (5000.0, 2))]
    assert now(write(tmp_path, metrics_jsonl=rows, events_jsonl=starts)).seconds_per_step == 1.0


def test_memory_against_the_plan(tmp_path: Path):
    phases = {
        "sampling": {"total": 60, "parts": {"weights": 10, "framework": 50}},
        "backward": {"total": 90, "parts": {"weights": 10, "activations": 30, "framework": 50, "gradients": 0}},
    }
    plan: dict[str, Any] = {"hardware": {"gpu_memory_bytes": 200}, "memory": {"phases": phases}}
    assert now(write(tmp_path, plan_json=plan)).memory.verdict is None
    plan["memory"]["peak_phase"] = "backward"
    rows = [{"step": step, "kind": "train", "memory/peak_bytes": 43 + step, "step_time": 1.0} for step in (1, 2)]
    verdict = "50% below the plan; on CPU the peak is that of the whole process"
    memory = now(write(tmp_path, plan_json=plan, metrics_jsonl=rows)).memory
    assert memory == {"peak_bytes": 45, "predicted_bytes": 90, "capacity_bytes": 200, "verdict": verdict}
    plan["hardware"]["on_gpu"] = True  # measured is what PyTorch allocates, without the framework's own memory
    memory = now(write(tmp_path, plan_json=plan)).memory
    assert (memory.predicted_bytes, memory.verdict) == (40, "12% above the plan")


def test_why_a_run_stopped(tmp_path: Path):
    events: list[dict[str, Any]] = [{"timestamp": 1.0, "step": 0, "event": "start"}]
    rows = [{"step": step, "kind": "train"} for step in (1, 2)]
    run = write(tmp_path, status_json=status(pid=dead_process()), metrics_jsonl=rows, events_jsonl=events)
    over = "There is no checkpoint to resume from: the same command starts over"

    def said(run: ViewedRun) -> tuple[list[str], str | None]:
        answer = now(run)
        return [f"{finding.text}. {finding.advice}" for finding in answer.banners], answer.stopped

    killed = "Died after step 2 without saying why: its process was killed, or the machine went down"
    assert said(run) == ([f"{killed}. {over}"], None)
    events.append({"timestamp": 2.0, "step": 2, "event": "stop", "reason": "ValueError: http://me:pw@host is down"})
    run = write(tmp_path, events_jsonl=events)
    assert said(run) == ([f"Died after step 2: ValueError: http://***@host is down. {over}"], None)
    events.append({**events.pop(), "reason": "SIGINT"})
    banners, stopped = said(write(tmp_path, events_jsonl=events))
    assert (banners, stopped) == ([], f"Stopped after step 2 by SIGINT. {over}")
    assert said(write(tmp_path, summary_json={"steps": 2}))[1] is None
    assert said(write(tmp_path / "old", metrics_jsonl=rows))[1] is None


def test_an_evaluation_done_again_after_a_restart_has_one_mark(tmp_path: Path):
    run = write(
        tmp_path,
        events_jsonl=[
            {"timestamp": 1.0, "step": 0, "event": "start"},
            {"timestamp": 2.0, "step": 5, "event": "evaluation"},
            {"timestamp": 3.0, "step": 4, "event": "start", "steps_done": 4},
            {"timestamp": 4.0, "step": 5, "event": "evaluation"},
        ],
    )
    assert [(mark.x, mark.kind) for mark in marks(run, "step")] == [(4.0, "restart"), (5.0, "evaluation")]


def test_marks(tmp_path: Path):
    events = [
        {"timestamp": 100.0, "step": 0, "event": "start", "steps_done": 0},
        {"timestamp": 101.0, "step": 1, "event": "checkpoint", "path": "checkpoints/step-1"},
        {"timestamp": 102.0, "step": 2, "event": "warning", "text": "server 0 failed\nrestarting in 2 s"},
        {"timestamp": 103.0, "step": 2, "event": "stop", "reason": "SIGTERM"},
        {"timestamp": 110.0, "step": 1, "event": "start", "steps_done": 1},
        {"timestamp": 111.0, "step": 1, "event": "warning", "text": "a note"},
    ]
    rows = [{"step": step, "kind": "train", "timestamp": 100.0 + step, "out_of_memory": step // 2} for step in (1, 2)]
    run = write(tmp_path, events_jsonl=events, metrics_jsonl=rows)
    assert [(mark.x, mark.kind) for mark in marks(run, "time")] == [
        (1.0, "checkpoint"),
        (2.0, "fault"),
        (2.0, "fault"),
        (3.0, "warning"),
        (10.0, "restart"),
    ]
    assert [mark.x for mark in marks(run, "step")] == [1.0, 1.0, 2.0, 2.0, 2.0]
    assert [message.level for message in messages(run)] == ["fault", "note"]


def test_phases_add_up_to_the_time_of_the_run(tmp_path: Path):
    """Two starts: 13 and 9 seconds, without the pause between them."""
    rows: list[dict[str, Any]] = [
        {"step": 0, "kind": "eval", "timestamp": 103.0, "eval/time_s": 2.0},
        *(
            {"step": s, "kind": "train", "timestamp": at, "time/rollout_s": 3.0, "time/move_s": 1.0}
            for s, at in ((1, 106.0), (2, 204.0))
        ),
        {"step": 2, "kind": "eval", "timestamp": 207.0, "eval/time_s": 2.5},
    ]
    events = [
        {"timestamp": 100.0, "step": 0, "event": "start"},
        {"timestamp": 107.0, "step": 1, "event": "checkpoint", "path": "checkpoints/step-1", "seconds": 0.75},
        {"timestamp": 113.0, "step": 1, "event": "stop", "reason": "SIGINT"},
        {"timestamp": 200.0, "step": 1, "event": "start"},
        {"timestamp": 209.0, "step": 2, "event": "end"},
    ]
    run = write(tmp_path, metrics_jsonl=rows, events_jsonl=events, status_json=status(phase="finished"))
    assert now(run).elapsed_s == 22.0
    assert now(run).time == {"rollout": 6.0, "evaluation": 4.5, "checkpoint": 0.75, "other": 10.75}
    run = write(tmp_path, summary_json={"steps": 2, "seconds": 20.5})
    assert sum(now(run).time.values()) == now(run).elapsed_s == 20.5


def test_provenance_without_secrets(tmp_path: Path):
    config = {
        "model": {"path": "m"},
        "rewards": [{"use": "judge", "weight": 1.0, "args": {"url": "http://u:S3CR3T@h", "api_key": "S3CR3T"}}],
        "rollout": {"engine": "vllm", "urls": ["http://h/?token=S3CR3T"], "num_generations": 16, "tensor_parallel": 1},
        "algorithm": {"name": "dapo", "beta": 0.04},
        "train": {"steps": 5, "learning_rate": 0.001},
    }
    start = {
        "event": "start",
        "timestamp": 1.0,
        "command": "cohort train a.yaml rewards.0.args.api_key=S3CR3T",
        "commit": "abc",
        "versions": {"torch": "2.13"},
    }
    run = write(tmp_path, config_yaml=json.dumps(config), events_jsonl=[start], plan_json={})
    answer = provenance(run)
    changed = {change.key: (change.value, change.default) for change in answer.changed}
    assert changed == {
        "model.path": ("m", None),
        "rewards.0.use": ("judge", None),
        "rewards.0.args": ({"url": "http://***@h", "api_key": "***"}, {}),
        "rollout.urls": (["http://h/?token=***"], []),
        "rollout.num_generations": (16, 8),
        "algorithm.name": ("dapo", "grpo"),
        "algorithm.beta": (0.04, 0.0),
        "train.steps": (5, None),
        "train.learning_rate": (0.001, 1e-6),
    }
    assert (answer.commit, answer.versions, answer.command) == (
        "abc",
        {"torch": "2.13"},
        "cohort train a.yaml rewards.0.args.api_key=***",
    )
    assert "S3CR3T" not in json.dumps(answer)
    assert "api_key" in answer.yaml


def test_differences_between_runs(tmp_path: Path):
    both = {"model": {"path": "m"}, "run": {"dir": "x"}, "rewards": [{"args": {"api_key": "1"}}]}
    one = {**both, "train": {"learning_rate": 0.1, "warmup_steps": 0, "seed": 1}}
    two = {**both, "train": {"learning_rate": 0.2}, "run": {"dir": "y"}, "rewards": [{"args": {"api_key": "2"}}]}
    a, b = write(tmp_path / "a", config_yaml=json.dumps(one)), write(tmp_path / "b", config_yaml=json.dumps(two))
    b.id = "b"
    broken = write(tmp_path / "broken", config_yaml="model: [")
    broken.id = "broken"
    answer = differences([a, broken, b])
    assert answer.unknown == ["broken"]
    found = {difference["key"]: difference["values"] for difference in answer["keys"]}
    assert found == {
        "rewards.0.args.api_key": {"a": "***", "b": "***"},
        "train.learning_rate": {"a": 0.1, "b": 0.2},
        "train.seed": {"a": 1},  # the other run's version does not know it, and it is set
    }


def test_logs(tmp_path: Path):
    run = write(tmp_path)
    assert log(run) == {"files": [], "name": None, "lines": [], "problems": []}
    folder = tmp_path / "logs" / "rank-0"
    folder.mkdir(parents=True)
    (folder / "out.log").write_text("".join(f"line {i} of http://me:hunter2@host\n" for i in range(500)))
    (folder / "empty.log").touch()
    os.mkfifo(folder / "pipe.log")
    (tmp_path / "config.yaml").write_text("secret")
    (folder / "other.log").symlink_to(tmp_path / "config.yaml")
    (tmp_path / "logs" / "new.log").write_bytes(b"\xffnew")
    os.utime(folder / "out.log", (1e9, 1e9))
    os.utime(tmp_path / "config.yaml", (1e9, 1e9))
    newest = log(run)
    assert [file.name for file in newest.files] == ["new.log", "rank-0/other.log", "rank-0/out.log"]
    assert (newest.name, newest.lines) == ("new.log", ["\ufffdnew"])
    old = log(run, "rank-0/out.log")
    assert (len(old.lines), old.lines[-1]) == (400, "line 499 of http://***@host")
    long = "x" * (256 << 10)
    (folder / "out.log").write_text(f"sk-ant-{long[8:]}\nlast\n")
    assert log(run, "rank-0/out.log").lines == ["last"]  # the rest of a line could begin within a secret
    assert log(run, "../config.yaml").problems == ["logs/../config.yaml cannot be read: there is no such log."]


def answers(run: ViewedRun) -> list[str]:
    """JSON of everything that the page asks for."""
    names = [metric["name"] for metric in series.metrics_list(run)["metrics"]]
    values = (
        now(run),
        runs([run]),
        answering(series.curves)([run], names),
        answering(series.curves)([run], names, "time"),
        provenance(run),
        log(run),
        differences([run, run]),
    )
    return [json.dumps(value) for value in values]


def test_what_cannot_be_read_is_told(tmp_path: Path):
    run = write(tmp_path, config_yaml="model: [", plan_json='{"memory": ', summary_json="[]", status_json="3")
    with (tmp_path / "metrics.jsonl").open("wb") as file:
        file.write(b'{"step": 1, "kind": "train", "reward": 1}\n\xff\n{"step": 2}\n{"step"')
    run.refresh()
    assert run.problems == [
        "config.yaml cannot be read: line 1, column 9: expected the node content, but found '<stream end>', while "
        "parsing a flow node",
        "plan.json cannot be read: Expecting value: line 1 column 12 (char 11)",
        "summary.json cannot be read: not a mapping of keys",
        "status.json cannot be read: not a mapping of keys",
        "metrics.jsonl: line 2 cannot be read and left out",
    ]
    write(tmp_path, config_yaml=CONFIG, plan_json={}, summary_json={"steps": 2}, metrics_jsonl=[])
    (tmp_path / "status.json").unlink()
    run.refresh()
    assert run.problems == []


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_regular_file_is_told(tmp_path: Path, make: Callable[[Path], None]):
    names = ["config.yaml", "plan.json", "summary.json", "status.json", "metrics.jsonl", "events.jsonl"]
    for name in names:
        make(tmp_path / name)
    assert not looks_like_run(tmp_path)
    run = write(tmp_path)
    assert run.problems == [f"{name} cannot be read: not a regular file" for name in names]
    assert [json.loads(answer) for answer in answers(run)]


def test_links_that_lead_out_of_the_folder_are_not_followed(tmp_path: Path):
    other = write(tmp_path / "other", config_yaml=CONFIG, metrics_jsonl=[{"step": 1, "kind": "train"}])
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("config.yaml", "metrics.jsonl", "events.jsonl", "status.json"):
        (folder / name).symlink_to(other.path / name)
    (other.path / "events.jsonl").write_text('{"event": "end"}\n')
    run = ViewedRun(folder, "b")
    run.refresh()
    assert (run.config, len(run.metrics.steps), run.events) == (None, 0, [])
    reason = "cannot be read: a link that leads outside of the run folder"
    linked = {problem.partition(" ")[0] for problem in run.problems if problem.endswith(reason)}
    assert linked == {"config.yaml", "metrics.jsonl", "events.jsonl"}


def test_a_folder_that_is_gone_or_emptied_is_told(tmp_path: Path):
    run = write(tmp_path / "run", config_yaml=CONFIG, metrics_jsonl=[{"step": 1, "reward": 0.5}])
    assert run.gone is None
    metrics = (run.path / "metrics.jsonl").read_text()
    for path in run.path.iterdir():
        path.unlink()
    assert "status" in run.refresh()
    assert run.gone.startswith(f"The folder {run.path} has no files of a run any more")
    run.path.rmdir()
    run.refresh()
    assert runs([run]).runs[0].gone == f"The folder {run.path} is gone or cannot be reached."
    assert now(run).problems == [run.gone]
    run.path.mkdir()
    (run.path / "metrics.jsonl").write_text(metrics)
    run.refresh()
    assert (run.gone, now(run).step) == (None, 1)


def test_a_folder_without_files_yet_is_not_gone(tmp_path: Path):
    assert write(tmp_path / "run").gone is None


def test_metrics_that_are_deleted_are_told(tmp_path: Path):
    run = write(tmp_path / "run", config_yaml=CONFIG, metrics_jsonl=[{"step": 1, "reward": 0.5}])
    (run.path / "metrics.jsonl").unlink()
    run.refresh()
    assert "metrics.jsonl is missing" in run.problems


def test_missing_files_are_told(tmp_path: Path):
    (tmp_path / "completions").mkdir()
    assert write(tmp_path).problems == ["config.yaml is missing", "metrics.jsonl is missing"]
    assert ViewedRun(tmp_path / "nowhere", "b").refresh() == {"status"}  # its folder is gone
    run = write(tmp_path, config_yaml=CONFIG, plan_json={}, metrics_jsonl=[{"step": 1, "kind": "train"}])
    assert run.problems == []
    (tmp_path / "metrics.jsonl").unlink()
    run.refresh()
    assert (run.problems, len(run.metrics.steps)) == (["metrics.jsonl is missing"], 0)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = ["step", "kind", "timestamp", "event", "phase", "pid", "host", "steps", "memory", "phases", "parts", "hardware"]
KEYS += ["train", "rollout", "algorithm", "name", "rewards", "eval", "every", "reward", "step_time", "text", "versions"]
FILE = st.binary(max_size=40) | st.lists(
    st.dictionaries(st.sampled_from(KEYS), JUNK, max_size=6).map(lambda row: json.dumps(row).encode()), max_size=5
).map(b"\n".join)
NAMES = ["config.yaml", "plan.json", "summary.json", "status.json", "metrics.jsonl", "events.jsonl"]


@examples(200, quick=20)
@given(st.lists(st.fixed_dictionaries(dict.fromkeys(NAMES, FILE)), min_size=1, max_size=2))
def test_any_folder_is_shown(tmp_path_factory, contents: list[dict[str, bytes]]):
    folder = tmp_path_factory.mktemp("run")
    run = ViewedRun(folder, "a")
    for files in contents:
        for name, content in files.items():
            (folder / name).write_bytes(content + b"\n")
        run.refresh()
        for answer in answers(run):
            json.loads(answer)
