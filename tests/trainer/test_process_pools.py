"""Runs whose rewards start pools of forked processes, and keep them or not."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from commands import ENVIRONMENT, set_up
from runs import assert_same_weights
from selection import slow
from waiting import until

# `mapped` computes in this process, or in those of a pool that is closed each time, or kept for the run.
CODE = """
import multiprocessing
import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

KIND = "plain"
CONTEXT = multiprocessing.get_context("fork")
make = {
    "kept pool": lambda: CONTEXT.Pool(2, note),
    "executor": lambda: ProcessPoolExecutor(2, mp_context=CONTEXT, initializer=note),
}
kept = {}

def note():
    with open(Path(__file__).with_name("pids"), "a") as file:
        print(os.getpid(), file=file)

def length(text):
    return float(len(text))

def mapped(texts):
    if KIND == "plain":
        return list(map(length, texts))
    if KIND == "pool":
        with CONTEXT.Pool(2, note) as pool:
            return pool.map(length, texts)
    if KIND not in kept:
        kept[KIND] = make[KIND]()
    return list(kept[KIND].map(length, texts))

calls = []

def score(completions, **kwargs):
    calls.append(1)
    scores = mapped([str(completion) for completion in completions])
    kill = Path(__file__).with_name("kill")
    if len(calls) == 3 and kill.exists():
        kill.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return scores

class Lengths:
    def reset(self, question):
        [self.length] = mapped([question])
        return "It has %d letters." % self.length

    def get_reward(self):
        return self.length + sum(mapped(["a", "bc"]))
"""


def with_kind(kind: str) -> str:
    return CODE.replace('KIND = "plain"', f'KIND = "{kind}"')


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """With an end to the processes of pools that a run has left."""
    yield tmp_path
    for pid in (tmp_path / "pids").read_text().split() if (tmp_path / "pids").exists() else ():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def num_alive(folder: Path) -> int:
    return sum(psutil.pid_exists(int(pid)) for pid in (folder / "pids").read_text().split())


def start(folder: Path, kind: str, *, isolate: bool = False, **sections: Any) -> subprocess.Popen[bytes]:
    """Start `cohort train` with `score`; it prints to `said`."""
    reward = {"use": f"{folder}/r.py:score", "isolate": isolate}
    path = set_up(folder, files={"r.py": with_kind(kind)}, rewards=[reward], **sections)
    with (folder / "said").open("wb") as out:
        command = [sys.executable, "-m", "cohort", "train", str(path)]
        return subprocess.Popen(command, stdout=out, stderr=out, env={**ENVIRONMENT, "OMP_NUM_THREADS": "1"})


def ended(process: subprocess.Popen[bytes]) -> int:
    """The exit code. A run that hangs fails the test."""
    try:
        return process.wait(120)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of a run without pools."""
    folder = tmp_path_factory.mktemp("plain")
    assert ended(start(folder, "plain")) == 0, (folder / "said").read_text()
    return folder / "run" / "final"


@slow("tests of what a forked process keeps, in test_stopping, test_run_folder and test_startup")
@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("kind", ["pool", "kept pool", "executor"])
def test_rewards_with_pools_train_the_same_model(folder: Path, plain: Path, kind: str, isolate: bool):
    assert ended(start(folder, kind, isolate=isolate)) == 0, (folder / "said").read_text()
    assert_same_weights(folder / "run" / "final", plain)
    until(lambda: num_alive(folder) == 0)


@slow("the same")
def test_environments_with_pools_train_the_same_model(tmp_path: Path):
    for kind in ("plain", "pool", "kept pool", "executor"):
        folder = tmp_path / kind
        folder.mkdir()
        rollout = {"environment": {"use": f"{folder}/r.py:Lengths"}, "max_prompt_tokens": 200, "max_turns": 1}
        assert ended(start(folder, kind, rollout=rollout)) == 0, (folder / "said").read_text()
        assert_same_weights(folder / "run" / "final", tmp_path / "plain" / "run" / "final")


@slow("the same")
@pytest.mark.parametrize("kind", ["kept pool", "executor"])
def test_a_run_with_a_pool_saves_and_ends_when_it_is_terminated(folder: Path, kind: str):
    process = start(folder, kind, train={"steps": 100_000})
    until(lambda: "/100000  sampled reward" in (folder / "said").read_text() or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    assert ended(process) == 128 + signal.SIGTERM
    said = (folder / "said").read_text()
    assert said.count("stopped by SIGTERM") == 1 and "Traceback" not in said, said
    assert num_alive(folder) == 0


@slow("the same")
def test_a_run_that_was_killed_resumes_although_its_pool_lives_on(folder: Path, plain: Path):
    (folder / "kill").touch()
    assert ended(start(folder, "executor")) == -signal.SIGKILL
    assert num_alive(folder) > 0
    assert ended(start(folder, "executor")) == 0, (folder / "said").read_text()
    assert_same_weights(folder / "run" / "final", plain)
