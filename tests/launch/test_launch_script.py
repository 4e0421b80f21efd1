"""`cohort launch local`: a script with `cohort.Trainer` on several processes of this machine."""

import signal
import subprocess
from pathlib import Path

import pytest

from commands import assert_refused, start_command
from runs import assert_same_weights, make_inputs, metric
from waiting import PATIENCE_S, num_lines, until

SCRIPT = """
import sys

import cohort

def digits(completions, **kwargs):
    return [sum(c.isdigit() for c in completion) / 16 for completion in completions]

_, model, run, steps, *others = sys.argv
assert others == ["--processes", "7"], "the script's own"
trainer = cohort.Trainer(
    model,
    [{"prompt": f"{n} 1"} for n in range(8)],
    [digits],
    rollout={"num_generations": 4, "max_completion_tokens": 8},
    train={"steps": int(steps), "prompts_per_step": 3, "learning_rate": 1e-2, "micro_batch_tokens": 256},
    run={"dir": run, "checkpoint_every": 1},
    hardware={"device": "cpu"},
    callbacks=[lambda step: print("called", step.steps_done)],
)
trainer.train()
print("rank ends", file=sys.stderr)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path / "script.py"


def launch(script: Path, model: str, run: Path, steps: int) -> subprocess.Popen[str]:
    return start_command("launch", "local", "--processes", 2, script, model, run, steps, "--processes", 7)


@pytest.mark.slow("the launcher with ranks of `cohort train`, and scripts on one process")
def test_two_processes_train_and_an_interrupted_command_goes_on(tmp_path: Path, script: Path):
    model = make_inputs(tmp_path)["model"]["path"]
    whole = launch(script, model, tmp_path / "whole", 6)
    out, err = whole.communicate(timeout=PATIENCE_S)
    assert whole.returncode == 0, err
    assert [line for line in out.splitlines() if line.startswith("called")] == [f"called {n + 1}" for n in range(6)]
    assert err.count("rank ends") == 1, "of rank 0 alone"
    assert metric(tmp_path / "whole", "processes") == [2] * 6
    stopped = launch(script, model, tmp_path / "stopped", 6)
    until(lambda: num_lines(tmp_path / "stopped" / "metrics.jsonl") >= 2)
    stopped.send_signal(signal.SIGINT)
    _, err = stopped.communicate(timeout=PATIENCE_S)
    assert stopped.returncode == 128 + signal.SIGINT, err
    assert len(metric(tmp_path / "stopped", "reward")) < 6
    again = launch(script, model, tmp_path / "stopped", 6)
    _, err = again.communicate(timeout=PATIENCE_S)
    assert again.returncode == 0, err
    assert len(metric(tmp_path / "stopped", "reward")) == 6
    assert_same_weights(tmp_path / "stopped" / "final", tmp_path / "whole" / "final")


def test_a_script_that_fails_is_reported(tmp_path: Path):
    (tmp_path / "fails.py").write_text("import os\nassert os.environ['RANK'] != '1', 'no second rank'\n")
    process = start_command("launch", "local", "--processes", 2, tmp_path / "fails.py")
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1, err
    assert "error: rank 1 failed with exit code 1; the last lines of its stderr:" in err
    assert "AssertionError: no second rank" in err
    assert Path(err[err.rindex("(") + 1 : err.rindex(")")]).is_file(), "its log is kept"


def test_what_is_no_script_is_refused(tmp_path: Path, cohort):
    (tmp_path / "run.yaml").write_text("model: {path: m}\n")
    for given, message in (
        ("nowhere.py", "nowhere.py': no such file; give a Python script that calls trainer.train()"),
        ("run.yaml", "run.yaml' is a configuration; start it with `cohort train "),
    ):
        assert_refused(cohort("launch", "local", "--processes", 2, tmp_path / given), message)
