"""Files of large steps are written while the run goes on: the same files, before any checkpoint; errors end the run."""

import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import cohort
import cohort.run.folder
from cohort.display import Display
from cohort.errors import TrainingError, UserError
from cohort.records import ForwardOnlyOutputs, ModelCall, Prompt, ScoredGroup, TrainSequence, Trajectory
from cohort.run import completions
from run_folders import open_folder
from runs import changed, make_inputs, train

NUM_TOKENS = 64
PROMPT = Prompt(id=1, epoch=0, content="say ½", token_ids=np.array([1, 2]), columns={})
CALL = ModelCall(
    context_ids=PROMPT.token_ids,
    token_ids=np.arange(NUM_TOKENS),
    sampling_logprobs=np.linspace(-3, -0.1, NUM_TOKENS),
    finish_reason="stop",
    policy_version=0,
)
REWARDS = np.array([1.0, 0.0])
GROUP = ScoredGroup(
    prompt=PROMPT,
    trajectories=(Trajectory.single_turn(CALL, text="½"),) * 2,
    rewards=REWARDS,
    reward_parts={"math": REWARDS},
)
SEQUENCES = [
    TrainSequence.single_turn(PROMPT.token_ids, CALL.token_ids, advantages=a, index=n, group=0)
    for n, a in enumerate((0.5, -0.5))
]


def write(folder, step: int) -> None:
    folder.write_completions("step", step, [GROUP], SEQUENCES)
    folder.write_tokens(step, [GROUP], SEQUENCES, ForwardOnlyOutputs(logprobs={0: SEQUENCES[0].sampling_logprobs}))


def files(folder) -> dict[str, bytes]:
    return {str(p.relative_to(folder.path)): p.read_bytes() for p in folder.path.rglob("*.parquet*")}


@pytest.fixture
def in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cohort.run.folder, "_MANY_TOKENS", NUM_TOKENS)


def test_a_large_step_is_written_while_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    small = open_folder(tmp_path / "small")
    write(small, 1)
    written = files(small)
    small.close()
    assert len(written) == 2
    monkeypatch.setattr(cohort.run.folder, "_MANY_TOKENS", NUM_TOKENS)
    folder, goes_on = open_folder(tmp_path / "large"), threading.Event()
    folder._writer.submit(goes_on.wait)
    write(folder, 1)
    assert files(folder) == {}
    goes_on.set()
    folder.wait_for_files()
    assert files(folder) == written
    write(folder, 2)
    folder.close()
    assert len(files(folder)) == 4


def test_the_next_step_waits_for_the_files_of_the_last(tmp_path: Path, in_a_thread):
    folder, goes_on = open_folder(tmp_path), threading.Event()
    folder._writer.submit(goes_on.wait)
    write(folder, 1)
    second = threading.Thread(target=write, args=(folder, 2))
    second.start()
    second.join(0.2)
    assert second.is_alive() and len(folder._unwritten) == 0  # of step 1; of step 2 nothing is kept in memory yet
    goes_on.set()
    second.join()
    folder.close()
    assert len(files(folder)) == 4


@contextmanager
def full_disk() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("then", [lambda folder: folder.wait_for_files(), lambda folder: write(folder, 2)])
def test_a_full_disk_is_reported_before_the_next_file(tmp_path: Path, in_a_thread, then):
    folder = open_folder(tmp_path)
    with full_disk():
        write(folder, 1)
        with pytest.raises(TrainingError, match="file too large"):
            then(folder)
    assert files(folder) == {}
    folder.close()  # it has been reported


def test_closing_reports_a_full_disk(tmp_path: Path, in_a_thread):
    folder = open_folder(tmp_path)
    with full_disk():
        write(folder, 1)
        with pytest.raises(TrainingError, match="file too large"):
            folder.close()
    with pytest.raises(OSError):  # the lock is free
        os.fstat(folder._lock)


def test_a_full_disk_does_not_replace_why_a_run_ends(tmp_path: Path, in_a_thread):
    folder = open_folder(tmp_path)
    with full_disk(), pytest.raises(UserError, match="a reward raised") as raised, closing(folder):
        write(folder, 1)
        raise UserError("a reward raised")
    assert len(raised.value.__notes__) == 1 and "file too large" in raised.value.__notes__[0]


class _Expects(Display):
    """Checks at each checkpoint that the files of the steps so far are there."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.seen: list[int] = []

    def saved(self, step: int) -> None:
        self.seen.append(step)
        for n in range(1, step + 1):
            assert pq.read_table(self.folder / f"completions/step-{n:06d}.parquet").num_rows
            assert pq.read_table(self.folder / f"tokens/step-{n:06d}.parquet").num_rows


def test_a_checkpoint_and_the_end_of_a_run_wait_for_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = changed(make_inputs(tmp_path), train={"steps": 3}, run={"checkpoint_every": 2})
    expected = {p.name: pq.read_table(p) for p in (train(config).run_dir / "completions").iterdir()}
    monkeypatch.setattr(cohort.run.folder, "_MANY_TOKENS", 1)
    write = completions._write
    monkeypatch.setattr(completions, "_write", lambda *args: (time.sleep(0.3), write(*args)))
    config = changed(config, run={"dir": str(tmp_path / "again")})
    run = cohort.train(config, display=(display := _Expects(tmp_path / "again"))).run_dir
    assert display.seen == [2, 3]
    actual = {p.name: pq.read_table(p) for p in (run / "completions").iterdir()}
    assert actual == expected


def test_a_run_ends_with_a_file_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cohort.run.folder, "_MANY_TOKENS", 1)

    def fail(file: Path, *_: object) -> None:
        raise TrainingError(f"{file}: no space left on device")

    monkeypatch.setattr(completions, "_write", fail)
    config = changed(make_inputs(tmp_path), train={"steps": 3}, run={"checkpoint_every": 1})
    with pytest.raises(TrainingError, match=r"00000\d\.parquet: no space left"):
        train(config)
    assert not (tmp_path / "run" / "checkpoints" / "step-1").exists()
