"""Runs of several processes through the front door: the same run, and every way in which a process can fail.

Starting a process takes longer than all that it does here, so that a test starts as few as show what it is about.
"""

import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import torch
import yaml

import cohort
from cohort.config import config_from_dict
from cohort.demo.run import demo_config, write_data
from cohort.demo.tasks import TOOLS, WORDS, DemoTask
from cohort.display import Display
from cohort.plan.split import count_processes
from cohort.rollout.engines.servers.placement import num_gpus
from cohort.run.files import checkpoints
from cohort.trainer.checkpoint import load_trainer_state
from commands import start_command
from runs import assert_same_weights, changed, make_inputs, metric, train, weights
from selection import slow
from waiting import PATIENCE_S, until


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In every process, and in this one: the order of additions is the same however many processes share the cores."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


Start = Callable[[Path, dict[str, Any]], subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts `cohort train` as a command, which does not outlive the test, nor does what it has started."""
    started = []

    def begin(folder: Path, config: dict[str, Any]) -> subprocess.Popen[str]:
        file = folder / "config.yaml"
        file.write_text(yaml.safe_dump(config))
        started.append(start_command("train", file))
        return started[-1]

    yield begin
    for process in started:
        if process.poll() is None:
            of_command = psutil.Process(process.pid)
            for member in [*of_command.children(recursive=True), of_command]:
                with suppress(psutil.NoSuchProcess):
                    member.kill()
            process.wait()


def inputs(folder: Path, processes: int, **sections: dict[str, Any]) -> dict[str, Any]:
    """As `make_inputs`, on the CPU."""
    config = changed(make_inputs(folder), hardware={"processes": processes, "timeout_s": 120})
    return changed(config, **sections)


def ranks_of(process: subprocess.Popen[str]) -> dict[int, psutil.Process]:
    """The rank processes that a `cohort train` has started, by rank."""
    found = {}
    try:
        for child in psutil.Process(process.pid).children(recursive=True):
            if "-m cohort train" in " ".join(child.cmdline()):
                found[int(child.environ()["RANK"])] = child
    except (psutil.NoSuchProcess, psutil.AccessDenied, KeyError):
        return {}
    return found


# The same run


@slow("many steps of demos with three numbers of processes; test_launched_ranks has three and one")
@pytest.mark.parametrize(("task", "steps", "numbers"), [(WORDS, 20, (1, 2, 3)), (TOOLS, 8, (1, 3))])
def test_a_run_is_the_same_for_any_number_of_processes(
    tmp_path: Path, task: DemoTask, steps: int, numbers: tuple[int, ...]
):
    """A demo with 1, 2 and 3 processes: the same prompts and trajectories throughout, the same losses.

    In float64: in float32 the order of a sum differs with the number of processes, which in one of many thousand
    draws changes the token.
    """
    runs = {}
    for processes in numbers:
        folder = tmp_path / f"run-{processes}"
        config = demo_config(folder, task=task, seed=0, processes=processes)
        model = config.model.model_copy(update={"dtype": "float64"})
        of_steps = config.train.model_copy(update={"steps": steps})
        config = config.model_copy(update={"model": model, "train": of_steps})
        write_data(folder, config, task=task, seed=0)
        runs[processes] = cohort.train(config).run_dir
    for processes in numbers[1:]:
        for step in range(1, steps + 1):
            one, several = (
                pq.read_table(run / "completions" / f"step-{step:06d}.parquet") for run in (runs[1], runs[processes])
            )
            columns = ["prompt_id", "completion_token_ids", "reward", "advantage"]
            for column in [*columns, *(["sequence_token_ids", "loss_mask"] if task is TOOLS else [])]:
                assert one[column].to_pylist() == several[column].to_pylist(), (processes, step, column)
        np.testing.assert_allclose(metric(runs[processes], "loss"), metric(runs[1], "loss"), atol=1e-9)
        np.testing.assert_allclose(metric(runs[processes], "grad_norm"), metric(runs[1], "grad_norm"), rtol=1e-6)
        assert metric(runs[processes], "eval/accuracy") == metric(runs[1], "eval/accuracy")
        assert metric(runs[processes], "processes") == [processes] * steps
        for name, weight in weights(runs[processes] / "final").items():
            torch.testing.assert_close(weight, weights(runs[1] / "final")[name], rtol=1e-5, atol=1e-7)


def of_one_prompt(folder: Path, num_generations: int, steps: int) -> dict[str, Any]:
    """A shape that is refused elsewhere, and an evaluation of two completions."""
    config = inputs(folder, 1, rollout={"num_generations": num_generations}, model={"dtype": "float64"})
    train = {"prompts_per_step": 1, "learning_rate": 1e-3, "steps": steps}
    return changed(config, train=train, eval={"max_prompts": 2})


@slow("three runs of several processes; test_ranks resumes on other numbers")
def test_eight_generations_of_one_prompt_on_changing_numbers_of_processes(tmp_path: Path):
    """Interrupted with 3, gone on with 1, and then with 2 copies: the run of one process that was never interrupted."""
    config = of_one_prompt(tmp_path, 8, 6)
    expected = train(changed(config, run={"dir": str(tmp_path / "whole")}))
    for processes, steps in ((3, 2), (1, 4), (2, 6)):
        copies = {"dp_replicate": 2, "sync_each_micro_batch": False} if processes == 2 else {}
        result = cohort.train(changed(config, hardware={"processes": processes, **copies}, train={"steps": steps}))
    assert metric(result.run_dir, "processes") == [3, 3, 1, 1, 2, 2]
    np.testing.assert_allclose(metric(result.run_dir, "loss"), metric(expected.run_dir, "loss"), rtol=1e-5, atol=1e-8)
    for name, weight in weights(result.final_dir).items():
        torch.testing.assert_close(weight, weights(expected.final_dir)[name], rtol=1e-5, atol=1e-7)


@slow("test_ranks has ranks with nothing to do")
def test_more_processes_than_completions(tmp_path: Path):
    config = of_one_prompt(tmp_path, 3, 2)
    expected = train(changed(config, run={"dir": str(tmp_path / "whole")}))
    result = cohort.train(changed(config, hardware={"processes": 4, "dp_replicate": 2}))
    for name, weight in weights(result.final_dir).items():
        torch.testing.assert_close(weight, weights(expected.final_dir)[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("processes", "device", "gpus", "expected"),
    [
        (1, "auto", 8, 1),
        (3, "auto", 8, 3),
        ("auto", "auto", 8, 8),
        ("auto", "auto", 0, 1),
        ("auto", "cpu", 8, 1),
        (3, "auto", 0, 3),
        (12, "cpu", 8, 12),
        (
            9,
            "auto",
            8,
            "hardware.processes: 9 exceeds the machine's 8 GPUs (one per process); use at most 8, or auto",
        ),
        (2, "cuda", 0, "hardware.device: 'cuda': this machine has 0 CUDA devices; use auto or cpu"),
    ],
)
def test_how_many_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes, device, gpus, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    config = config_from_dict(changed(make_inputs(tmp_path), hardware={"processes": processes, "device": device}))
    if isinstance(expected, str):
        with pytest.raises(cohort.UserError, match=re.escape(expected)):
            count_processes(config, num_gpus(config))
    else:
        assert count_processes(config, num_gpus(config)) == expected


# Failures


@slow("twenty kills; test_launched_ranks has one")
def test_killed_ranks_end_in_a_resumed_run(tmp_path: Path, start: Start):
    """SIGKILL of a random rank, in the midst of a checkpoint and at random moments in turn, and the run ends by itself.

    It ends as the run of the same processes that were not killed, bit for bit. Every checkpoint that is there at any
    moment is whole, and what was done is never done by halves.
    """
    num_kills = 20
    config = inputs(tmp_path, 2, train={"steps": 60}, eval={"every": 0}, hardware={"max_restarts": 30})
    expected = cohort.train(changed(config, run={"dir": str(tmp_path / "whole"), "checkpoint_every": 0}))
    process = start(tmp_path, changed(config, run={"checkpoint_every": 1}))
    run, chance, kills, last_step = tmp_path / "run", random.Random(0), 0, 0
    deadline = time.monotonic() + PATIENCE_S
    steps_before = 0
    while process.poll() is None and time.monotonic() < deadline:
        ranks = ranks_of(process) if kills < num_kills and _steps(run) > steps_before else {}
        # a kill in every start but the first steps: a rank that fails twice before any step would be left out
        if len(ranks) == 2 and not _is_writing(run):
            if kills % 2 == 0:
                until(lambda: _is_writing(run) or process.poll() is not None)
            else:
                time.sleep(0.3 * chance.random())
            ranks[chance.randrange(2)].kill()
            kills += 1
            time.sleep(0.05)  # for what was on its way to the disk
            steps_before = _steps(run)
            newest = max((load_trainer_state(c).steps_done for c in checkpoints(run / "checkpoints")), default=0)
            assert newest >= last_step  # none is ever lost
            last_step = newest
            until(lambda gone=set(ranks.values()): not any(p.is_running() for p in gone))
        time.sleep(0.02)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    assert kills == num_kills
    assert errors.count("was killed by SIGKILL") == errors.count("restarting") == num_kills
    assert metric(run, "loss") == metric(expected.run_dir, "loss")
    assert_same_weights(run / "final", expected.final_dir)


def sabotage(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Run `code` at the start of every rank."""
    (folder / "sitecustomize.py").write_text(f"import os\nif 'RANK' in os.environ:\n    exec({code!r})\n")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


BROKEN_GPU = """
import os

if os.environ["RANK"] == "2":
    os.write(2, b"this GPU has fallen off the bus\\n")
    os._exit(3)
"""


@slow("three starts of three processes")
def test_a_rank_that_fails_again_and_again_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A rank whose start fails every time, as on a broken GPU: after two failures the run goes on without it."""
    sabotage(tmp_path, monkeypatch, BROKEN_GPU)
    config = inputs(tmp_path, 3, train={"steps": 1}, eval={"every": 0}, hardware={"max_restarts": 3})
    run = cohort.train(config).run_dir
    said = capsys.readouterr().err
    assert said.count("rank 2 failed with exit code 3; the last lines of its stderr:\n  this GPU") == 2
    assert "restarting with 2 processes: rank 2 failed twice without a step in between" in said
    assert metric(run, "processes") == [2]


@slow("it waits for deadlines; test_workers has one that passes")
def test_a_rank_that_hangs_is_named_within_the_deadline(tmp_path: Path, start: Start):
    config = inputs(tmp_path, 3, train={"steps": 1000}, eval={"every": 0}, hardware={"timeout_s": 30})
    process = start(tmp_path, config)
    until(lambda: _steps(tmp_path / "run") > 0 or process.poll() is not None)
    ranks_of(process)[1].send_signal(signal.SIGSTOP)
    # 30 s, a few for the roll call, 30 until a stopped process is killed; the rest is a busy machine's
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert re.search(r"error: rank 1 did not answer its peers within hardware.timeout_s", errors), errors
    assert not re.search(r"rank [02] did not answer", errors), errors
    assert ", or set hardware.max_restarts" in errors


EXITING = """
import os
from pathlib import Path

calls = []

def score(completions, **kwargs):
    calls.append(1)
    if len(calls) == 2:
        with Path(__file__).with_name("exits").open("a") as file:
            file.write("x")
        os._exit(0)
    return [float(len(str(completion))) for completion in completions]
"""


@slow("two starts of one process, and one of two")
@pytest.mark.parametrize(("processes", "restarts"), [(1, 1), (2, 0)])
def test_a_reward_that_exits_with_code_0_is_a_failure(tmp_path: Path, start: Start, processes: int, restarts: int):
    (tmp_path / "r.py").write_text(EXITING)
    config = inputs(tmp_path, processes, eval={"every": 0}, hardware={"max_restarts": restarts})
    config["rewards"] = [{"use": f"{tmp_path}/r.py:score"}]
    process = start(tmp_path, config)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1 and not (tmp_path / "run" / "final").exists()
    assert (
        len((tmp_path / "exits").read_text())
        == errors.count("exited with code 0 before the run had ended")
        == 1 + restarts
    )
    assert errors.count("restarting from") == restarts
    assert re.search("error: rank 0 .*exited with code 0 .*as by os._exit in a reward or tool", errors), errors


RAISING = """
import os
from cohort.learner import TrainEngine

real = TrainEngine.optim_step

def optim_step(self):
    if os.environ["RANK"] == "1" and self.updates_done == 2:
        raise ZeroDivisionError("a bug on rank 1")
    return real(self)

TrainEngine.optim_step = optim_step
"""


NOT_FINITE = """
from cohort.learner import TrainEngine

real = TrainEngine.optim_step

def optim_step(self):
    if self.updates_done == 2:
        for parameter in self.policy.model.parameters():
            parameter.grad.fill_(float("nan"))
    return real(self)

TrainEngine.optim_step = optim_step
"""


@slow("two real processes; test_launched_ranks has three")
def test_a_rank_that_raises_is_named_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sabotage(tmp_path, monkeypatch, RAISING)
    with pytest.raises(cohort.TrainingError) as error:
        cohort.train(inputs(tmp_path, 2))
    assert "rank 1 failed with exit code 70; the last lines of its stderr:" in str(error.value)
    assert "ZeroDivisionError: a bug on rank 1" in str(error.value)
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]


@slow("two real processes; the next one that fails has them too")
def test_a_mistake_of_the_user_that_rank_0_finds_costs_no_restart(tmp_path: Path):
    config = inputs(tmp_path, 2, hardware={"max_restarts": 2}, rollout={"max_completion_tokens": 1000})
    with pytest.raises(cohort.UserError, match=r"rollout.max_completion_tokens: 1000 plus the longest prompt"):
        cohort.train(config)
    assert num_starts(tmp_path) == 1


@slow("as a mistake of the user that rank 0 finds")
def test_a_gradient_that_is_not_finite_ends_all_ranks_in_good_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sabotage(tmp_path, monkeypatch, NOT_FINITE)
    message = "gradient norm is nan at optimizer step 3; weights are unchanged"
    with pytest.raises(cohort.TrainingError, match=message):
        cohort.train(inputs(tmp_path, 2, hardware={"max_restarts": 2}))
    assert num_starts(tmp_path) == 1


@slow("test_rewards has it in one process, and a mistake of the user ends all ranks below")
def test_a_reward_that_is_no_number_ends_all_ranks_in_good_order(tmp_path: Path):
    config = inputs(tmp_path, 2, hardware={"max_restarts": 2})
    (tmp_path / "my_rewards.py").write_text("def digit(completions, **kwargs): return ['one' for _ in completions]\n")
    with pytest.raises((cohort.UserError, cohort.TrainingError), match="digit"):
        cohort.train({**config, "rewards": config["rewards"][:1]})
    assert num_starts(tmp_path) == 1


def test_a_display_of_ones_own_needs_one_process(tmp_path: Path):
    with pytest.raises(cohort.UserError, match="display: only works with a run in this process"):
        cohort.train(inputs(tmp_path, 2), display=Display())


@slow("test_ranks resumes three ranks bit for bit")
def test_resumed_on_the_same_number_is_bit_for_bit(tmp_path: Path):
    config = inputs(tmp_path, 2)
    expected = cohort.train(changed(config, run={"dir": str(tmp_path / "whole")}))
    cohort.train(changed(config, train={"steps": 4}))
    assert_same_weights(cohort.train(config).final_dir, expected.final_dir)


def num_starts(folder: Path) -> int:
    """Each start has a folder of logs."""
    return len(list((folder / "run" / "logs").iterdir()))


def _is_writing(run: Path) -> bool:
    return any((run / "checkpoints").glob(".writing-*"))


def _steps(run: Path) -> int:
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return 0
    return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=0)
