"""The run folder: who may use it, what it refuses, and how a resumed run's files go on."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from cohort.config import load_config, to_yaml
from cohort.errors import UserError
from cohort.run.folder import check_folder, free_folder, is_run_folder
from forked import fork
from run_folders import config_for, hold_folder, hold_folder_and_fork, open_folder
from waiting import until


def started_run(path: Path, *overrides: str, steps: int = 1) -> None:
    """A folder as a run leaves it that was killed after `steps` steps and never saved a checkpoint."""
    folder = open_folder(path, *overrides)
    folder.rewind(0)
    write_metrics(path, range(1, steps + 1))
    folder.close()


def write_metrics(path: Path, steps: Any, end: str = "") -> None:
    lines = "".join(json.dumps({"step": step, "reward": step / 10}) + "\n" for step in steps)
    (path / "metrics.jsonl").write_text(lines + end)


def write_checkpoint(path: Path, steps_done: int) -> None:
    folder = path / "checkpoints" / f"step-{steps_done}"
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text("{}")


def refusal(path: Path, *overrides: str, resume: bool = False) -> str:
    with pytest.raises(UserError) as caught:
        open_folder(path, *overrides, resume=resume)
    return str(caught.value)


# Who may use it


def test_a_new_folder_is_made_and_gets_its_configuration_when_the_run_begins(tmp_path):
    path = tmp_path / "runs" / "a"
    folder = open_folder(path)
    assert [p.name for p in path.iterdir()] == [".lock"]
    folder.rewind(0)
    assert (path / "config.yaml").read_text() == to_yaml(config_for(path))
    assert is_run_folder(path)
    assert folder.summary() is None
    folder.close()


def test_an_attempt_that_never_began_does_not_block_the_next(tmp_path):
    open_folder(tmp_path / "a").close()
    (tmp_path / "a" / ".config.yaml.partial").touch()  # killed while writing it
    open_folder(tmp_path / "a", "train.seed=1").close()
    assert [p.name for p in (tmp_path / "a").iterdir()] == [".lock"]


def test_a_run_without_numbers_may_be_started_with_another_configuration(tmp_path):
    started_run(tmp_path / "a", steps=0)
    folder = open_folder(tmp_path / "a", "train.seed=1")
    folder.rewind(0)
    assert "seed: 1" in (tmp_path / "a" / "config.yaml").read_text()
    folder.close()


def test_a_folder_with_nothing_but_what_processes_printed_may_be_used(tmp_path):
    log = tmp_path / "logs" / "20250101-000000-0" / "1" / "stdout.log"  # the processes start before the run does
    log.parent.mkdir(parents=True)
    log.write_text("said")
    (tmp_path / ".secret").touch()  # of a Slurm job's servers
    folder = open_folder(tmp_path, "hardware.processes=2")
    folder.rewind(0)
    folder.close()
    assert log.read_text() == "said"
    assert "processes: 2" in (tmp_path / "config.yaml").read_text()


def test_files_that_are_no_run_are_refused_and_left(tmp_path):
    (tmp_path / "notes.txt").touch()
    (tmp_path / "final").mkdir()
    (tmp_path / "logs").mkdir()
    expected = f"run.dir: '{tmp_path}' is not empty and holds no run (final, notes.txt); use a new folder"
    assert refusal(tmp_path) == expected
    # a configuration that a person wrote is not a run's
    (tmp_path / "config.yaml").write_text("model: {path: m}  # mine\n")
    expected = f"run.dir: '{tmp_path}' is not empty and holds no run (config.yaml, final, notes.txt); use a new folder"
    assert refusal(tmp_path) == expected
    with pytest.raises(UserError, match="holds no run"):
        check_folder(tmp_path, resume=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.yaml", "final", "logs", "notes.txt"]


def test_places_where_no_folder_can_be(tmp_path):
    (tmp_path / "file").touch()
    assert refusal(tmp_path / "file") == f"run.dir: '{tmp_path}/file' is a file; use a folder"
    assert refusal(tmp_path / "file" / "a") == f"run.dir: '{tmp_path}/file/a' cannot be created: Not a directory"
    (tmp_path / "run" / ".lock").mkdir(parents=True)
    assert refusal(tmp_path / "run") == f"run.dir: '{tmp_path}/run' cannot be written to: Is a directory"


def test_resume_insists_on_a_run(tmp_path):
    expected = f"run.dir: '{tmp_path}/a' holds no run to resume; leave out --resume to start one"
    assert refusal(tmp_path / "a", resume=True) == expected
    assert not (tmp_path / "a").exists()
    started_run(tmp_path / "a")
    assert refusal(tmp_path / "a", resume=True) == (
        f"run.dir: '{tmp_path}/a' holds a run that has saved no checkpoint, so there is nothing to resume; leave out "
        f"--resume to start over in this folder, or use a new run.dir to keep what is in it"
    )
    write_checkpoint(tmp_path / "a", 1)
    open_folder(tmp_path / "a", resume=True).close()


def test_starting_over_says_what_it_replaces(tmp_path):
    started_run(tmp_path / "a")
    notes: list[str] = []
    folder = open_folder(tmp_path / "a")
    folder.rewind(0, notes.append)
    folder.close()
    assert notes == [f"no checkpoint in {tmp_path}/a: starting over, replacing 1 steps"]
    started_run(tmp_path / "b")


def test_the_next_free_folder(tmp_path):
    assert free_folder(tmp_path / "demo") == tmp_path / "demo"
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo-2").mkdir()
    assert free_folder(tmp_path / "demo") == tmp_path / "demo-3"


def test_another_run_is_refused_with_what_differs(tmp_path):
    path = tmp_path / "a"
    started_run(path)
    assert refusal(path, "train.seed=1", "rollout.temperature=0.5", "run.log=[wandb]") == (
        f"run.dir: '{path}' already holds another run. It differs in\n"
        f"  rollout.temperature: 1.0 there, 0.5 here\n"
        f"  train.seed: 0 there, 1 here\n"
        f"Use a new run.dir to start a new run, or the same configuration to resume that one"
    )
    open_folder(path).close()  # the same run
    assert json.loads((path / "metrics.jsonl").read_text())["step"] == 1


def test_a_judge_with_another_prompt_is_another_run(tmp_path):
    path, file = tmp_path / "a", tmp_path / "judge.txt"
    file.write_text("Is this good? {completion}")
    judge = f"rewards=[{{use: judge, args: {{url: 'http://a:1', model: m, prompt: {file}}}}}]"
    started_run(path, judge)
    open_folder(path, judge).close()
    file.write_text("Is this bad? {completion}")
    assert refusal(path, judge).splitlines()[1] == (
        "  rewards.0.args.prompt, the text of the file: 'sha256 e73cf86f96ff' there, 'sha256 9f6fc8242019' here"
    )
    file.write_text("Is this good? {completion}")
    open_folder(path, judge).close()


def test_a_run_goes_on_with_other_hardware_and_another_budget(tmp_path):
    path = tmp_path / "a"
    started_run(path, "hardware.processes=4", "train.micro_batch_tokens=auto")
    write_checkpoint(path, 1)
    settings = ["hardware.processes=1", "hardware.device=cpu", "hardware.timeout_s=5", "hardware.max_restarts=2"]
    folder = open_folder(path, *settings, "train.micro_batch_tokens=64", resume=True)
    folder.rewind(1)
    folder.close()
    saved = load_config(path / "config.yaml")
    assert (saved.hardware.processes, saved.hardware.max_restarts, saved.train.micro_batch_tokens) == (1, 2, 64)
    assert json.loads((path / "metrics.jsonl").read_text())["step"] == 1


def test_a_configuration_of_another_version_is_refused(tmp_path):
    started_run(tmp_path / "a")
    file = tmp_path / "a" / "config.yaml"
    file.write_text(file.read_text() + "flux: 1\n")
    text = refusal(tmp_path / "a")
    assert text.startswith(f"run.dir: '{tmp_path}/a' holds a run whose config.yaml this version cannot read;")
    assert "Error: flux: unknown key" in text


def test_a_run_without_checkpoints_can_be_started_again(tmp_path):
    started_run(tmp_path / "a", "run.checkpoint_every=0")
    open_folder(tmp_path / "a", "run.checkpoint_every=0").close()


def test_one_process_at_a_time(tmp_path):
    path = tmp_path / "a"
    said = tmp_path / "said"
    other = fork(hold_folder, path, out=said)
    until(lambda: said.exists() and said.read_text() == "locked\n")
    expected = f"run.dir: '{path}' is in use by process {other.pid}; wait for it, stop it, or use another folder"
    assert refusal(path) == expected
    other.kill()
    other.join()
    open_folder(path).close()  # the lock went with the process
    open_folder(path).close()


def test_a_forked_process_does_not_hold_the_folder(tmp_path):
    """Such as one of a reward's pool, which lives on when the run is killed."""
    path, said = tmp_path / "a", tmp_path / "said"
    other = fork(hold_folder_and_fork, path, out=said)
    until(lambda: said.exists() and said.read_text().count("\n") == 2)
    other.kill()
    other.join()
    child = int(said.read_text().split()[-1])
    try:
        open_folder(path).close()
    finally:
        os.kill(child, signal.SIGKILL)


def test_leftovers_of_a_kill_are_removed(tmp_path):
    started_run(tmp_path / "a")
    for name in (".writing-final/model.safetensors", "checkpoints/.writing-step-2/x", "checkpoints/.deleting-step-1/x"):
        (tmp_path / "a" / name).parent.mkdir(parents=True)
        (tmp_path / "a" / name).touch()
    (tmp_path / "a" / ".metrics.jsonl.partial").touch()
    (tmp_path / "a" / "completions").mkdir()
    (tmp_path / "a" / "completions" / ".step-000002.parquet.partial").touch()
    open_folder(tmp_path / "a").close()
    left = sorted(str(p.relative_to(tmp_path / "a")) for p in (tmp_path / "a").rglob("*"))
    assert left == [".lock", "checkpoints", "completions", "config.yaml", "metrics.jsonl"]


# Going on


def test_rewind_forgets_what_came_after_the_checkpoint(tmp_path):
    path = tmp_path / "a"
    started_run(path)
    write_metrics(path, [0, 1, 2, 2, 3, 4], end='{"step": 5, "rew')  # step 2 and an evaluation; the last half-written
    (path / "completions").mkdir()
    for name in ("eval-000000", "step-000001", "step-000002", "eval-000002", "step-000003", "eval-000004", "mine-a"):
        (path / "completions" / f"{name}.parquet").touch()
    write_checkpoint(path, 2)
    write_checkpoint(path, 10)
    (path / "final").mkdir()
    (path / "summary.json").write_text('{"steps": 4}')
    folder = open_folder(path)
    assert folder.summary() == {"steps": 4}
    folder.rewind(2)
    assert [json.loads(line)["step"] for line in (path / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2, 2]
    assert folder.metric_history("reward") == {0: 0.0, 1: 0.1, 2: 0.2}
    assert sorted(p.stem for p in (path / "completions").iterdir()) == [
        *("eval-000000", "eval-000002", "mine-a", "step-000001", "step-000002")
    ]
    assert folder.summary() is None
    assert not (path / "final").exists()
    folder.close()


def test_rewind_to_the_start_forgets_everything(tmp_path):
    path = tmp_path / "a"
    started_run(path, steps=3)
    (path / "completions").mkdir()
    (path / "completions" / "eval-000000.parquet").touch()
    folder = open_folder(path)
    folder.rewind(0)
    assert (path / "metrics.jsonl").read_text() == ""
    assert list((path / "completions").iterdir()) == []
    folder.close()


def test_a_finished_run_without_checkpoints_is_not_deleted(tmp_path):
    path = tmp_path / "a"
    started_run(path, steps=4)
    (path / "final").mkdir()
    (path / "summary.json").write_text('{"steps": 4}')
    folder = open_folder(path, "train.steps=9")
    with pytest.raises(UserError) as caught:
        folder.rewind(0)
    assert str(caught.value) == (
        f"run.dir: '{path}' holds a finished run of 4 steps and no checkpoint to resume from; use a new run.dir"
    )
    assert (path / "final").exists()
    assert len((path / "metrics.jsonl").read_text().splitlines()) == 4
    folder.close()


def test_summary_marks_the_run_as_finished(tmp_path):
    folder = open_folder(tmp_path / "a")
    assert folder.summary() is None
    folder.write_summary({"steps": 5, "seed": 0})
    assert folder.summary() == {"steps": 5, "seed": 0}
    assert folder.final_path == tmp_path / "a" / "final"
    folder.close()


def test_a_link_to_nowhere_is_named(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    link = tmp_path / "link"
    assert refusal(link / "run") == (
        f"run.dir: '{link}/run' cannot be created: {link} is a link to {tmp_path}/gone, which does not exist"
    )
