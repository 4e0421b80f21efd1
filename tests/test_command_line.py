"""The command line itself: usage, tracebacks, exit codes, and a real Ctrl-C."""

import signal
import subprocess
import sys

import pytest

from cohort.checkpoint import checkpoints, load_trainer_state
from commands import ENVIRONMENT, Ended, set_up
from waiting import until


def test_debug_shows_the_traceback(tmp_path, cohort):
    ended = cohort("train", tmp_path / "no.yaml", "--debug")
    assert ended.code == 2
    assert ended.err.startswith("Traceback (most recent call last):\n")
    assert ended.err.endswith(f"UserError: {tmp_path}/no.yaml: no such configuration file\n")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["train", "x.yaml", "--resmue"], "No such option"),
        (["train"], "Missing argument"),
        (["eval", "model"], "Missing option"),
        (["trian"], "No such command"),
        (["eval", "m", "--data", "d", "--reward", "exact", "--seed", "x"], "Invalid value"),
    ],
)
def test_usage_errors_are_typers_own(cohort, arguments, part):
    ended = cohort(*arguments)
    assert ended.code == 2
    assert part in ended.err
    assert "Usage: " in ended.err
    assert "Traceback" not in ended.err


def test_a_bug_of_ours_is_not_dressed_up(tmp_path, cohort, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("cohort.trainer.run.build_run", fail)
    with pytest.raises(ZeroDivisionError):
        cohort("train", set_up(tmp_path))


def test_interrupted(tmp_path, cohort, monkeypatch):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cohort.trainer.run.build_run", interrupt)
    monkeypatch.setattr("cohort.trainer.evaluate_model.load_policy", interrupt)
    path = set_up(tmp_path)
    assert cohort("train", path) == Ended(
        code=130, out="", err="interrupted; the same command goes on from the last checkpoint\n"
    )
    ended = cohort(
        *("eval", tmp_path / "model", "--data", tmp_path / "data.jsonl", "--prompt", "question", "--reward", "exact")
    )
    assert ended == Ended(code=130, out="", err="interrupted\n")


def test_a_real_process_exits_with_the_code_and_the_message(tmp_path):
    path = set_up(tmp_path, data={"prompt": "questoin"})
    result = subprocess.run(
        [sys.executable, "-m", "cohort", "train", str(path)], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "error: data.prompt='questoin': the data has no such column. Did you mean 'question'? "
        "Columns: question, answer, level.\n"
    )


def interrupted(process: subprocess.Popen[str]) -> str:
    """Press Ctrl-C as a person does; its stderr. One that arrives where an extension drops errors is lost."""
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        try:
            return process.communicate(timeout=30)[1]
        except subprocess.TimeoutExpired:
            pass
    process.kill()
    raise AssertionError("it goes on after three interrupts")


def test_a_real_interrupt_and_going_on(tmp_path, cohort):
    path = set_up(tmp_path, train={"steps": 100_000}, run={"completions_every": 0})
    command = [sys.executable, "-m", "cohort", "train", str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT) as process:
        until(lambda: (tmp_path / "run" / "checkpoints" / "step-2").exists() or process.poll() is not None)
        err = interrupted(process)
    assert (process.returncode, err) == (130, "interrupted; the same command goes on from the last checkpoint\n")
    done = load_trainer_state(checkpoints(tmp_path / "run" / "checkpoints")[-1]).steps_done
    assert done >= 2
    ended = cohort("train", path, f"train.steps={done + 1}")
    assert ended.code == 0
    assert f"going on after step {done}\n" in ended.out
