"""A reward function that ends the process: the next start says which."""

import os
import signal
import time
from pathlib import Path

import pytest

import cohort as library
from cohort.ranks import stopping
from cohort.rewards import RewardCrashMarker
from commands import set_up
from forked import fork
from runs import Notes
from waiting import PATIENCE_S

ENDS = """
import ctypes, os, pathlib

def judge(completions, **kw):
    seen = pathlib.Path(__file__).with_name("calls")
    calls = int(seen.read_text()) + 1 if seen.exists() else 1
    seen.write_text(str(calls))
    rewards = []
    for completion in completions:
        rewards.append(float(len(completion)))
        if calls == 2 and len(rewards) == 3:
            {end}
    return rewards
"""


def _train(path: Path) -> None:
    library.train(path, display=Notes())


@pytest.mark.parametrize(
    ("end", "code"),
    [("os._exit(3)", 3), ("ctypes.string_at(0)", -signal.SIGSEGV), ("os.abort()", -signal.SIGABRT)],
)
def test_the_next_start_says_where_the_process_ended(tmp_path: Path, end: str, code: int):
    path = set_up(
        tmp_path, files={"r.py": ENDS.format(end=end)}, rewards=[{"use": f"{tmp_path}/r.py:judge", "name": "mine"}]
    )
    process = fork(_train, path, out=tmp_path / "said")
    process.join(PATIENCE_S)
    assert process.exitcode == code
    for told in (True, False):  # once
        notes = Notes()
        library.train(path, display=notes)
        expected = "the last process died inside reward 'mine' in step 2; with rewards[i].isolate: true, only a process"
        assert any(note.startswith(expected) for note in notes.told) == told, notes.told
        assert not (tmp_path / "run" / ".reward").exists()


def _end_inside(file: Path) -> None:
    stopping.dedicate_process()
    with (
        stopping.handle_signals("run", grace_s=PATIENCE_S, resume_hint=lambda: "nothing to go on from"),
        RewardCrashMarker(file).mark("reward 'mine'"),
    ):
        assert file.exists()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(PATIENCE_S)


def test_a_signal_that_ends_the_process_in_a_function_is_not_the_functions_doing(tmp_path: Path):
    process = fork(_end_inside, tmp_path / ".reward", out=tmp_path / "said")
    process.join(PATIENCE_S)
    said = (tmp_path / "said").read_text()
    assert process.exitcode == 128 + signal.SIGTERM, said
    assert "stopped by SIGTERM, with nothing new to save; nothing to go on from" in said
    assert not (tmp_path / ".reward").exists()


def test_a_disk_without_room_is_no_matter(tmp_path: Path):
    with RewardCrashMarker(tmp_path / "gone" / "marker").mark("reward 'r'"):
        pass
    assert os.listdir(tmp_path) == []
