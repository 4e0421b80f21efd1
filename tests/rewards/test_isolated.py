"""`isolate: true`: reward functions in a child process that may crash, hang or return anything."""

import asyncio
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cohort.config import RewardConfig
from cohort.errors import UserError
from cohort.rewards import RewardRunner, build_rewards
from reward_samples import group
from selection import slow
from waiting import until

MODULE = """
import asyncio, ctypes, os, sys, time

calls = 0

def score(completions, answer, factor=1.0):
    global calls
    calls += 1
    print("scoring", completions, file=sys.stderr, flush=True)
    word = completions[0]
    if word == "segfault":
        ctypes.string_at(0)
    if word == "exit":
        os._exit(3)
    if word == "sys.exit":
        sys.exit(4)
    if word == "hang":
        time.sleep(1000)
    if word == "raise":
        raise LookupError("no such word")
    if word == "number":
        return 1.0
    if word == "short":
        return [1.0, 2.0, 3.0]
    if word == "text":
        return [1.0, "two"]
    if word == "none":
        return [None, 0.5]
    return [factor * calls, float(os.getpid())]

async def later(completions):
    await asyncio.sleep(0)
    return [len(c) for c in completions]

def environment(completions, secret=0):
    with open("/proc/self/oom_score_adj") as file:
        return [float("COHORT_SECRET_FILE" in os.environ), float(file.read())]

def of_trajectories(trajectories):
    return [1.0 for _ in trajectories]

class Checked:
    def required_columns(self):
        return ()
    def __call__(self, completions):
        return [1.0 for _ in completions]

checked = Checked()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(MODULE)
    return tmp_path / "own.py"


def runner_of(path: Path, name: str = "score", **keys) -> RewardRunner:
    config = RewardConfig(use=f"{path}:{name}", isolate=True, **keys)
    return RewardRunner(build_rewards([config], columns=["answer"], max_completion_tokens=8), columns=["answer"])


def values(runner: RewardRunner, *texts: str) -> list[float | None]:
    (scored,) = runner.score([group("q", texts, answer="a")], require_scores=False, during="step 3")
    (part,) = scored.reward_parts.values()
    return [None if math.isnan(value) else value for value in part.tolist()]


def test_a_crash_is_not_judged_and_the_next_batch_has_a_new_process(path: Path):
    runner = runner_of(path, args={"factor": 10.0})
    shown: list[str] = []
    runner.notify = shown.append
    (first, process) = values(runner, "good", "b")
    assert first == 10.0 and process != os.getpid()
    assert values(runner, "good", "b") == [20.0, process]  # one process for all batches
    assert values(runner, "segfault", "b") == [None, None]
    assert runner.counts() == {"score/not_judged": 2}
    (warning,) = shown
    assert "did not judge 2 completions: the process of reward" in warning and "was killed by SIGSEGV" in warning
    assert "scoring ['segfault', 'b']" in warning and warning.endswith("(step 3)")
    assert runner.warnings() == [warning.removesuffix(" (step 3)")]
    first, another = values(runner, "good", "b")
    assert first == 10.0 and another != process and runner.counts() == {}


@slow("each needs a process")
@pytest.mark.parametrize(
    ("word", "expected", "why"),
    [
        ("exit", [None, None], "ended with exit code 3"),
        ("sys.exit", [None, None], "it called SystemExit: 4"),
        (
            "hang",
            [None, None],
            "its deadline of 2 s (at {path}:{line}), reading completion 1 of 2, 'hang'",
        ),
        ("none", [None, 0.5], None),
    ],
)
def test_what_is_not_judged(path: Path, word: str, expected: list[float | None], why: str | None):
    runner = runner_of(path, timeout_s=2)
    shown: list[str] = []
    runner.notify = shown.append
    assert values(runner, word, "b") == expected
    assert runner.counts() == ({} if why is None else {"score/not_judged": 2})
    assert all(f"scoring ['{word}', 'b']" in text for text in shown)
    line = MODULE.splitlines().index("        time.sleep(1000)") + 1
    assert [why.format(path=path, line=line) in text for text in shown] == [True] * (why is not None)


@slow("each needs a process")
@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("number", "reward 'score' returned 1.0 (float); it must return a list"),
        ("short", "reward 'score' returned 3 values for 2 completions"),
        ("text", "reward 'score' returned 'two' (str) at position 1"),
    ],
)
def test_values_that_are_no_numbers_are_errors_as_without_isolate(path: Path, word: str, message: str):
    with pytest.raises(UserError) as raised:
        values(runner_of(path), word, "b")
    assert str(raised.value).startswith(message)


@slow("each needs a process")
def test_an_exception_ends_the_run_and_names_the_line_of_the_function(path: Path):
    runner = runner_of(path)
    runner.log_folder = path.parent / "logs"
    with pytest.raises(UserError) as raised:
        values(runner, "raise", "b")
    text = str(raised.value)
    assert text.startswith(f"reward 'score': raised LookupError: no such word (at {path}:")
    assert "reading completion 1 of 2, 'raise'" in text
    saved = (path.parent / "logs" / "reward-score.txt").read_text()
    assert "in the child process:" in saved and 'raise LookupError("no such word")' in saved


@slow("each needs a process")
def test_asynchronous_functions_and_the_environment_of_the_process(path: Path, monkeypatch: pytest.MonkeyPatch):
    assert values(runner_of(path, "later"), "abc", "b") == [3.0, 1.0]
    monkeypatch.setenv("COHORT_SECRET_FILE", "/nowhere")
    assert values(runner_of(path, "environment"), "a", "b") == [0.0, 1000.0]


@slow("each needs a process")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("of_trajectories", "rewards[0].isolate: reward '{path}:of_trajectories' takes 'trajectories', which stay in"),
        ("checked", "rewards[0].isolate: reward '{path}:checked' has required_columns"),
        ("scored", "rewards[0].use: '{path}:scored': {path} has no 'scored'; did you mean"),
    ],
)
def test_what_cannot_be_isolated_is_refused_at_the_start(path: Path, name: str, message: str):
    with pytest.raises(UserError) as raised:
        runner_of(path, name)
    assert str(raised.value).startswith(message.format(path=path)[:-14])


def test_only_own_functions_can_be_isolated():
    with pytest.raises(ValueError, match="isolate: true is for functions of your own, such as"):
        RewardConfig(use="math", isolate=True)


@slow("a process of its own that is killed")
def test_the_process_dies_with_a_killed_run(path: Path):
    program = (
        "import os, signal, sys\n"
        "from cohort.config import RewardConfig\n"
        "from cohort.rewards import build_rewards\n"
        f"config = RewardConfig(use={str(path) + ':later'!r}, isolate=True)\n"
        "(reward,) = build_rewards([config], columns=[], max_completion_tokens=8)\n"
        "print(reward.function._child.process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    until(lambda: not Path(f"/proc/{done.stdout.strip()}").exists())


@slow("starts a process")
def test_it_can_be_built_where_an_event_loop_runs(path: Path):
    """As in a notebook."""

    async def build() -> RewardRunner:
        return runner_of(path)

    runner = asyncio.run(build())
    assert values(runner, "good", "b")[0] == 1.0
