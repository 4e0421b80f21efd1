"""`rollout.isolate`: tools, environment classes and programs in child processes, over a scripted model."""

import os
from pathlib import Path
from typing import Any

import pytest

from cohort.errors import UserError
from playing import call, load, play, replies

CODE = '''
import ctypes, os, signal, time

def where() -> int:
    """Return the process id."""
    return os.getpid()

def crash(how: str) -> str:
    """Crash.

    Args:
        how: segfault, exit or hang
    """
    if how == "segfault":
        ctypes.string_at(0)
    if how == "exit":
        os._exit(7)
    time.sleep(600)

class Counter:
    def __init__(self, start: int = 0):
        self.value = start
        self.pid = os.getpid()

    def reset(self, broken=None, **row):
        self.value = 0
        self.broken = broken
        self.marker = row.get("marker")
        return " Count!"

    def increment(self, by: int) -> int:
        """Count up.

        Args:
            by: step
        """
        if self.broken and (os.path.isdir(self.broken) or self._is_first()):
            ctypes.string_at(0)
        self.value += by
        return self.value

    def _is_first(self):
        try:
            os.remove(self.broken)
        except FileNotFoundError:
            return False
        return True

    def get_reward(self):
        return self.value

    def close(self):
        open(f"closed{os.getpid()}", "w").close()

def factory(**options):
    open(f"made{os.getpid()}", "w").close()
    return Counter(**options)

def crashing_factory():
    ctypes.string_at(0)

def hidden_factory():
    class Hidden(Counter):
        pass
    return Hidden()

class Program:
    def __init__(self, question="Q"):
        self.question = question

    async def run(self, row, model):
        if row.get("broken"):
            os.kill(os.getpid(), signal.SIGKILL)
        reply = await model.chat(self.question)
        judge = await model.chat(f"Is {reply.content} right?", train=False)
        return {"reward": len(reply.content), "pid": os.getpid(), "judge": len(judge.content)}
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "t.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def isolated(folder: Path, script: Any, rows: list[dict[str, Any]], **rollout: Any) -> list[Any]:
    groups = play(folder, script, rows, isolate=True, **rollout)
    return [trajectory for group in groups for trajectory in group.trajectories]


def test_tools_run_in_other_processes_whose_end_is_an_error_message(folder: Path):
    calls = [call("where"), *(call("crash", f'{{"how": "{how}"}}') for how in ("segfault", "exit", "hang"))]
    (trajectory, _) = isolated(
        folder,
        replies("".join(calls), "Done."),
        [{"prompt": "Go"}],
        tools=["t.py:where", "t.py:crash"],
        tool_timeout_s=2,
    )
    where, segfault, left, hang = (message["content"] for message in trajectory.messages[1:5])
    assert int(where) != os.getpid()
    assert segfault.startswith("Error: tool 'crash': the process of tools was killed by SIGSEGV. Its last output:")
    assert left == "Error: tool 'crash': the process of tools ended with exit code 7"
    assert hang == "Error: tool 'crash': did not return within 2 s"
    assert (trajectory.end, trajectory.stats.tool_errors) == ("answer", 3)


def test_an_environment_that_crashes_is_repeated_with_a_fresh_one(folder: Path):
    (folder / "flag").touch()
    script = replies(call("increment", '{"by": 2}'), call("increment", '{"by": 3}'), "Done.")
    rows = [{"prompt": "Go", "broken": "flag", "marker": [1]}]
    (folder / "r.py").write_text("def score(completions, environments, **rest):\n    return [1.0] * len(completions)\n")
    rewards = [{"use": "r.py:score"}]
    trajectories = isolated(folder, script, rows, environment="t.py:Counter", rewards=rewards)
    assert [trajectory.rewards for trajectory in trajectories] == [{"Counter": 5.0}] * 2
    assert sorted(trajectory.stats.attempts for trajectory in trajectories) == [1, 2]
    first, second = (trajectory.environment for trajectory in trajectories)
    assert [(one.value, one.marker) for one in (first, second)] == [(5, [1])] * 2
    assert len({first.pid, second.pid, os.getpid()}) == 3
    # the one that crashed could not be closed
    assert {path.name for path in folder.glob("closed*")} == {f"closed{first.pid}", f"closed{second.pid}"}


@pytest.mark.parametrize(("parameter", "is_copied"), [("environments", True), ("trajectories", True), ("kind", False)])
def test_attributes_are_copied_if_a_reward_reads_them(folder: Path, parameter: str, is_copied: bool):
    (folder / "r.py").write_text(f"def score(completions, {parameter}, **rest):\n    return [1.0] * len(completions)\n")
    trajectories = isolated(
        folder, replies("Done."), [{"prompt": "Go"}], environment="t.py:Counter", rewards=[{"use": "r.py:score"}]
    )
    assert [hasattr(one.environment, "value") for one in trajectories] == [is_copied] * 2


def test_an_environment_that_always_crashes_is_masked(folder: Path):
    (folder / "flag").mkdir()
    rows = [{"prompt": "Go", "broken": "flag"}]
    script = replies(call("increment", '{"by": 2}'), "Done.")
    for trajectory in isolated(folder, script, rows, environment="t.py:Counter", environment_retries=0):
        assert (trajectory.end, trajectory.rewards) == ("environment_error", {})
        assert "Counter" in trajectory.error
        assert "was killed by SIGSEGV" in trajectory.error


def test_programs_run_in_other_processes(folder: Path):
    rows = [{"prompt": "Go"}, {"prompt": "Go", "broken": True}]
    environment = {"use": "t.py:Program", "args": {"question": "Why?"}}
    one, two, *broken = isolated(
        folder, lambda context, key: "abc" if "Why?" in context else "no", rows, environment=environment
    )
    assert (one.rewards, one.metrics["judge"]) == ({"Program": 3.0}, 2.0)
    assert [trained.trained for trained in one.calls] == [True, False]
    assert one.metrics["pid"] != two.metrics["pid"]
    assert {trajectory.end for trajectory in broken} == {"environment_error"}
    assert all("the process of Program was killed by SIGKILL" in trajectory.error for trajectory in broken)


def test_what_a_factory_makes_is_only_made_in_other_processes(folder: Path):
    environments = load(folder, environment={"use": "t.py:factory", "args": {"start": 1}}, isolate=True)
    assert environments.rewards == ("Counter",)
    (made,) = folder.glob("made*")
    assert made.name != f"made{os.getpid()}"
    for name, said in (
        ("crashing_factory", "the process of crashing_factory was killed by SIGSEGV"),
        ("hidden_factory", "define the class at the top of its module"),
    ):
        with pytest.raises(UserError, match=rf"^rollout\.environment\.use: '.*t\.py:{name}'.*{said}"):
            load(folder, environment=f"t.py:{name}", isolate=True)
