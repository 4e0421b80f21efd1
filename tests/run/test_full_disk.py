"""A disk that gets full: one message, nothing lost, and the same command goes on once there is space."""

import errno
import json
import os
import re
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cohort import models
from cohort.errors import TrainingError
from cohort.run import log as loggers
from cohort.run.files import checkpoints
from cohort.trainer import checkpoint, setup
from cohort.trainer.checkpoint import load_trainer_state
from commands import Ended, assert_refused, set_up
from runs import changed, in_a_process, make_inputs, train


def test_too_little_space_is_found_before_the_first_step(tmp_path, cohort, monkeypatch):
    path = set_up(tmp_path)
    monkeypatch.setattr(setup.shutil, "disk_usage", lambda _: SimpleNamespace(free=50_000))
    ended = cohort("train", path)
    assert_refused(ended, f"run.dir: '{tmp_path}/run' has 0.1 MB free, but the run needs", "keep_checkpoints (now 3)")

    def find_a_damaged_one(root: Path, *_: Any) -> tuple[None, None]:
        (root / "damaged-step-1").mkdir(parents=True)
        (root / "damaged-step-1" / "model.safetensors").write_bytes(bytes(10_000_000))  # stays, and makes no room
        return None, None

    monkeypatch.setattr("cohort.trainer.run.find_checkpoint", find_a_damaged_one)
    assert_refused(cohort("train", path), "has 0.1 MB free, but the run needs")
    monkeypatch.undo()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


FILLS_THE_DISK_ONCE = """
from pathlib import Path

folder = Path(__file__).parent

def f(completions, **kwargs):
    if (folder / "run" / "checkpoints" / "step-1").exists() and not (folder / "was_full").exists():
        (folder / "was_full").touch()
        (folder / "run" / "completions" / ".step-000002.parquet.partial").symlink_to("/dev/full")
    return [float(i) for i in range(len(completions))]
"""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_disk_that_gets_full_while_completions_are_written(tmp_path, cohort):
    path = set_up(tmp_path, files={"r.py": FILLS_THE_DISK_ONCE}, rewards=[{"use": "r.py:f"}])
    assert_ends_with_a_full_disk_and_goes_on(cohort, path, f"{tmp_path}/run/completions/step-000002.parquet")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_disk_that_gets_full_while_the_optimizer_is_written(tmp_path, cohort, monkeypatch):
    path = set_up(tmp_path)
    real, calls = checkpoint.dcp.save, []

    def save(state: Any, *, storage_writer: Any, **arguments: Any) -> None:
        calls.append(storage_writer.path)
        if len(calls) == 2:
            storage_writer.path.mkdir()
            (storage_writer.path / "__0_0.distcp").symlink_to("/dev/full")
        real(state, storage_writer=storage_writer, **arguments)

    monkeypatch.setattr(checkpoint.dcp, "save", save)
    assert_ends_with_a_full_disk_and_goes_on(cohort, path, f"{tmp_path}/run/checkpoints/step-2")


def test_a_disk_that_gets_full_while_the_final_model_is_written(tmp_path, cohort, monkeypatch):
    path = set_up(tmp_path)
    real = models.save_policy

    def save_policy(policy: Any, tokenizer: Any, folder: Path, *how: Any) -> None:
        real(policy, tokenizer, folder, *how)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("cohort.trainer.worker.save_policy", save_policy)
        assert_refused(cohort("train", path), f"error: {tmp_path}/run/final: no space left on device.", code=1)
    assert not [p.name for p in (tmp_path / "run").iterdir() if "final" in p.name]
    assert cohort("train", path).code == 0
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()


def assert_ends_with_a_full_disk_and_goes_on(cohort: Callable[..., Ended], path: Path, written: str) -> None:
    run = path.parent / "run"
    assert_refused(
        cohort("train", path),
        f"error: {written}: no space left on device. Earlier checkpoints are intact: correct this, such as by freeing "
        "space, and run the same command again to resume from the last one\n",
        code=1,
    )
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-1"]
    assert load_trainer_state(run / "checkpoints" / "step-1").steps_done == 1
    ended = cohort("train", path)
    assert (ended.code, ended.err) == (0, "")
    assert "resuming after step 1" in ended.out
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
    assert [p.name for p in checkpoints(run / "checkpoints")] == ["step-1", "step-2", "step-3"]
    assert sorted(p.name for p in (run / "completions").iterdir()) == [f"step-{n:06d}.parquet" for n in (1, 2, 3)]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_disk_that_gets_full_while_metrics_are_written(tmp_path, cohort, monkeypatch):
    path = set_up(tmp_path)
    real = loggers.MetricsWriter.write

    def write(self: loggers.MetricsWriter, step: int, metrics: Any, **more: Any) -> None:
        if step == 2:
            self._file = Path("/dev/full").open("a")  # noqa: SIM115
        real(self, step, metrics, **more)

    with monkeypatch.context() as patch:
        patch.setattr(loggers.MetricsWriter, "write", write)
        ended = cohort("train", path)
    assert_refused(ended, f"error: {tmp_path}/run/metrics.jsonl: no space left on device.", code=1)
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-1"]
    assert cohort("train", path).code == 0


def _train_under_a_limit(config: dict[str, Any]) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
    try:
        train(config)
    except TrainingError as error:
        print(error, flush=True)
        raise SystemExit(1) from None


def test_files_may_not_be_larger(tmp_path):
    """`ulimit -f`: less than the weights of a checkpoint."""
    config = changed(make_inputs(tmp_path), eval={"every": 0})
    assert in_a_process(_train_under_a_limit, config) == 1
    said = (tmp_path / "said").read_text()
    assert re.search(r"step-2: file too large\. Earlier checkpoints are intact", said)


DELETES = """
import shutil
def judge(completions, **kw):
    shutil.rmtree("{run}")
    return [float(len(c)) for c in completions]
"""


def test_a_run_folder_that_is_deleted_under_the_run(tmp_path, cohort):
    reward = DELETES.format(run=tmp_path / "run")
    path = set_up(tmp_path, files={"r.py": reward}, rewards=[{"use": f"{tmp_path}/r.py:judge"}])
    assert_refused(cohort("train", path), "was deleted during the run", code=1)
    assert not (tmp_path / "run").exists()
