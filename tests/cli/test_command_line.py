"""The command line itself: usage, tracebacks, exit codes, and a real Ctrl-C."""

import os
import platform
import re
import signal
import subprocess
import sys
from contextlib import suppress
from importlib import metadata

import pytest

from cohort import __version__ as cohort_version
from cohort.cli import main
from cohort.run.files import checkpoints
from cohort.trainer.checkpoint import load_trainer_state
from commands import ENVIRONMENT, Ended, set_up, start_command
from selection import mostly_slow, slow
from waiting import PATIENCE_S, until


def test_debug_shows_the_traceback(tmp_path, cohort):
    ended = cohort("train", tmp_path / "no.yaml", "--debug")
    assert ended.code == 2
    assert ended.err.startswith("Traceback (most recent call last):\n")
    assert ended.err.endswith(f"UserError: {tmp_path}/no.yaml: no such configuration file\n")


def test_the_version_is_told_without_torch(cohort):
    ended = cohort("--version")
    found = {name: metadata.version(name) for name in ("torch", "transformers")}
    assert ended.code == 0
    assert ended.out.startswith(
        f"cohort {cohort_version} (Python {platform.python_version()}, torch {found['torch']}, "
        f"transformers {found['transformers']}"
    )
    light = "import sys, cohort.cli.app as a; sys.argv[1:] = ['--version']; "
    light += "import contextlib\nwith contextlib.suppress(SystemExit): a.app()\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", light], check=True, timeout=PATIENCE_S, env=ENVIRONMENT)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["train", "x.yaml", "--resmue"], "No such option"),
        (["train"], "Missing argument"),
        (["trian"], "No such command"),
        (["eval", "m", "--data", "d", "--reward", "exact", "--seed", "x"], "Invalid value"),
        (["plan", "x.yaml", "--gpus", "0"], "Invalid value for '--gpus'"),
        (["launch", "slurm", "x.yaml", "--rollout-nodes", "-1"], "Invalid value for '--rollout-nodes'"),
    ],
)
def test_usage_errors_are_typers_own(cohort, arguments, part):
    ended = cohort(*arguments)
    assert ended.code == 2
    assert part in ended.err
    assert "Usage: " in ended.err
    assert "Traceback" not in ended.err


def test_interrupted(tmp_path, cohort, monkeypatch):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cohort.trainer.run.build_run", interrupt)
    monkeypatch.setattr("cohort.trainer.open_run.load_policy", interrupt)
    path = set_up(tmp_path)
    assert cohort("train", path) == Ended(code=130, out="", err="interrupted\n")
    ended = cohort(
        *("eval", tmp_path / "model", "--data", tmp_path / "data.jsonl", "--prompt", "question", "--reward", "exact")
    )
    assert ended == Ended(code=130, out="", err="interrupted\n")


TRL = "model_name_or_path: m\nnum_generations: 8\nper_device_train_batch_size: 8\nreward_funcs: [accuracy]\n"
FRESH = {
    "algorithms": (["grpo"], "arXiv:2402.03300"),
    "check": (["trl.yaml"], "trl.yaml"),
    "convert": (["trl.yaml"], "num_generations: 8"),
    "plan": (["run.yaml"], "start it: cohort train run.yaml"),
    "launch": (["slurm", "run.yaml", "hardware.device=cpu"], "#SBATCH --nodes="),
    "eval": (["model", "--data", "data.jsonl", "--prompt", "question", "--reward", "exact"], "accuracy"),
    "rollout": (["run.yaml", "--rows", "1"], "turn 1, "),
    "merge": (["nowhere", "merged"], "nowhere"),
    "verify": (["nowhere"], "nowhere"),
}


@pytest.mark.parametrize(
    "command",
    mostly_slow(FRESH, "check", "plan", reason="one without torch and one that plans; the next tests train"),
)
def test_a_command_in_a_fresh_interpreter(tmp_path, command):
    """As a person starts it, with no module imported before; `train` is below, and `serve` in tests/real_vllm."""
    set_up(tmp_path)
    (tmp_path / "trl.yaml").write_text(TRL)
    arguments, shown = FRESH[command]
    done = subprocess.run(
        [sys.executable, "-m", "cohort", command, *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**ENVIRONMENT, "COLUMNS": "200"},
    )
    assert shown in done.stdout + done.stderr, done
    expected = 2 if "nowhere" in arguments else int(command == "convert")  # what the file leaves open is to decide
    assert "Traceback" not in done.stderr and done.returncode == expected, done


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["algorithms"], ["convert", "trl.yaml"], ["--help"]])
def test_an_answer_that_cannot_be_written_is_a_failure(tmp_path, monkeypatch, capsys, arguments):
    (tmp_path / "trl.yaml").write_text(TRL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cohort", *arguments])
    with suppress(OSError), open("/dev/full", "w") as full, pytest.raises(SystemExit) as ended:  # it is closed full
        monkeypatch.setattr(sys, "stdout", full)
        main()
    assert (ended.value.code, capsys.readouterr().err) == (1, "error: standard output: No space left on device\n")


def test_a_reward_may_ask_for_the_prompt_column(tmp_path, cohort):
    code = "def f(prompts, completions, question, **kw): return [float(len(q)) for q in question]\n"
    path = set_up(tmp_path, files={"r.py": code}, rewards=[{"use": f"{tmp_path}/r.py:f"}], train={"steps": 1})
    assert cohort("train", path).code == 0


@slow("test_stopping has the signals")
def test_a_real_interrupt_and_going_on(tmp_path, cohort):
    path = set_up(tmp_path, train={"steps": 100_000}, run={"completions_every": 0})
    with start_command("train", path) as process:
        try:
            until(lambda: (tmp_path / "run" / "checkpoints" / "step-2").exists() or process.poll() is not None)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 130, err
    done = load_trainer_state(checkpoints(tmp_path / "run" / "checkpoints")[-1]).steps_done
    assert done >= 2
    assert re.search(
        rf"stopped by SIGINT after step {done}: (already )?saved; run the same command to resume\n$", out
    ), out
    ended = cohort("train", path, f"train.steps={done + 1}")
    assert ended.code == 0
    assert f"resuming after step {done}\n" in ended.out


def test_what_nobody_foresaw_ends_with_one_message(tmp_path, cohort, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr("cohort.trainer.loop.TrainingLoop.run", fail)
    path = set_up(tmp_path)
    ended = cohort("train", path)
    assert ended.code == 70
    (file,) = (tmp_path / "run" / "logs").iterdir()
    assert ended.err == (
        "error: internal error: ZeroDivisionError: a mistake of ours\nThis is a bug in Cohort. "
        f"The traceback is in {file}. Please open an issue with the traceback, the command and the "
        "configuration\n"
    )
    written = file.read_text()
    assert "\ntorch 2." in written
    assert written.endswith("ZeroDivisionError: a mistake of ours\n")
    monkeypatch.setattr("cohort.cli.plan.load_config", fail)
    ended = cohort("plan", path)
    assert (ended.code, "Traceback" in ended.err) == (70, False)


@slow("a whole run, in a process that loses its console")
@pytest.mark.parametrize("stdout", ["closed", "full"])
def test_a_console_that_takes_nothing_ends_no_run(tmp_path, stdout):
    """As with `| head -1`, and on a full disk."""
    path = set_up(tmp_path)
    command = [sys.executable, "-m", "cohort", "train", str(path)]
    if stdout == "full":
        with open("/dev/full", "w") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
        assert (done.returncode, done.stderr) == (0, "")
    else:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, **pipes, text=True, env=ENVIRONMENT) as run:
            assert run.stdout is not None and run.stderr is not None
            run.stdout.readline()
            run.stdout.close()
            assert (run.wait(), run.stderr.read()) == (0, "")
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()
