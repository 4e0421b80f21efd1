"""Environments and programs that fail in every way: one trajectory is masked with the reason, and the others go on."""

from pathlib import Path
from typing import Any

import psutil
import pytest

from cohort.records import Trajectory
from playing import call, play
from selection import mostly_slow, slow
from waiting import until

CODE = '''
import asyncio, os, sys, time

FAULTS = {
    "exit": lambda: sys.exit(3),
    "interrupt": lambda: exec("raise KeyboardInterrupt"),
    "stop": lambda: next(iter(())),
    "flood": lambda: "xyz " * 50_000,
    "type": lambda: {"image": 1},
    "hang": lambda: time.sleep(600),
    "kill": lambda: os._exit(7),
}

class Faulty:
    """Fails where and how its row says."""

    def reset(self, where, how):
        self.where, self.how = where, how
        return self.at("reset", "Go!")

    def at(self, where: str, value: str) -> str:
        """Do it.

        Args:
            where: the place
            value: the value
        """
        return FAULTS[self.how]() if where == self.where else value

    def get_reward(self):
        return self.at("get_reward", 1.0)

class Names:
    def reset(self, **row):
        pass

    def list_files(self) -> str:
        """List files, one of which has a name that is not UTF-8."""
        return "a.txt b\\udce9.txt"

CALLS = {
    "no tokens": lambda model: model.generate([]),
    "negative tokens": lambda model: model.generate([3, -1]),
    "unknown tokens": lambda model: model.generate([3, 10**6]),
    "no integers": lambda model: model.generate([3, 1.5]),
    "batch": lambda model: model.generate([[3], [4]]),
    "no messages": lambda model: model.chat([]),
    "an image": lambda model: model.chat([{"role": "user", "content": [{"type": "image", "image": 1}]}]),
    "surrogate": lambda model: model.chat("b\\udce9"),
    "no end": lambda model: asyncio.Event().wait(),
    "too long": lambda model: model.generate([3] * 5000, train=False),
}

async def program(row, model):
    if row["how"] in CALLS:
        await CALLS[row["how"]](model)
    await model.chat("hello")
    if row["how"] == "cancel":
        raise asyncio.CancelledError
    return 1.0 if row["how"] == "" else FAULTS[row["how"]]()
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "e.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def played(folder: Path, environment: str, rows: list[dict[str, Any]], **rollout: Any) -> list[Trajectory]:
    """The first trajectory of each row; the model calls a tool once."""
    script = lambda context, key: call("at", '{"where": "tool", "value": "5"}') if key.turn == 0 else "Done."  # noqa: E731
    options = {"environment_retries": 0, "tool_timeout_s": 20.0, **rollout}
    groups = play(folder, script, rows, environment=f"e.py:{environment}", **options)
    for group in groups:
        assert len({t.end for t in group.trajectories}) == 1
    return [group.trajectories[0] for group in groups]


FAULTS = {  # how -> what the error says
    "exit": "SystemExit: 3",
    "interrupt": "KeyboardInterrupt",
    "stop": "StopIteration",
    "type": "returned {'image': 1} (dict)",
}


@pytest.mark.parametrize(
    "isolate", mostly_slow([False, True], False, reason="tests of child processes have such functions")
)
def test_an_environment_that_fails_is_masked_and_the_others_go_on(folder: Path, isolate: bool):
    cases = [(where, how) for where in ("reset", "get_reward") for how in FAULTS]
    cases += [("reset", "flood"), ("get_reward", "flood"), ("nowhere", "exit"), ("tool", "flood")]
    expected = {**FAULTS, "flood": "more than rollout.max_prompt_tokens: 2000; use a shorter prompt"}
    rows = [{"prompt": "p", "where": where, "how": how} for where, how in cases]
    # get_reward's flood is a wrong type, shown in part
    *broken, wrong, right, cut = played(folder, "Faulty", rows, **({"isolate": True} if isolate else {}))
    for (where, how), trajectory in zip(cases, broken, strict=False):
        assert (trajectory.end, trajectory.rewards) == ("environment_error", {}), (where, how)
        assert trajectory.error is not None and expected[how] in trajectory.error, (where, how, trajectory.error)
    assert wrong.error is not None and "returned 'xyz xyz" in wrong.error and len(wrong.error) < 10_000
    assert (right.end, right.rewards) == ("answer", {"Faulty": 1.0})
    assert (cut.end, cut.rewards) == ("answer", {"Faulty": 1.0})
    assert "more characters were cut]" in cut.messages[1]["content"] and len(cut.messages[1]["content"]) < 10_000


@slow("tests of child processes have functions that hang and exit")
def test_an_environment_that_hangs_or_exits_in_a_process_of_its_own_is_masked_and_gone(folder: Path):
    cases = [(where, how) for where in ("reset", "get_reward", "tool") for how in ("hang", "kill")]
    rows = [{"prompt": "p", "where": where, "how": how} for where, how in [*cases, ("nowhere", "exit")]]
    before = set(psutil.Process().children(recursive=True))
    *broken, right = played(folder, "Faulty", rows, isolate=True, tool_timeout_s=3.0)
    for (where, how), trajectory in zip(cases, broken, strict=True):
        said = "did not return within 3 s" if how == "hang" else "the process of Faulty ended with exit code 7"
        assert trajectory.end == "environment_error" and said in str(trajectory.error), (where, how, trajectory.error)
    assert (right.end, right.rewards) == ("answer", {"Faulty": 1.0})
    until(lambda: set(psutil.Process().children(recursive=True)) <= before)


PROGRAMS = {  # how -> what the error says
    **dict.fromkeys(("no tokens", "negative tokens"), "token_ids must be one or more token ids from 0 to "),
    **dict.fromkeys(("unknown tokens", "no integers", "batch"), "token_ids must be one or more token ids from 0 to "),
    "no messages": "the chat template rejected the messages",
    "too long": "a limit (length) was reached before a model call to train on had finished",
    "an image": "its content has a part of type 'image'; only text is supported",
    "surrogate": "surrogates not allowed",
    "exit": "SystemExit: 3",
    "interrupt": "KeyboardInterrupt",
    "stop": "StopIteration",
    "cancel": "CancelledError",
    "flood": "program returned 'xyz xyz",
}


@pytest.mark.parametrize(
    "isolate", mostly_slow([False, True], False, reason="tests of child processes have such functions")
)
def test_a_program_that_fails_is_masked_and_the_others_go_on(folder: Path, isolate: bool):
    rows = [{"prompt": "p", "how": how} for how in [*PROGRAMS, ""]]
    *broken, right = played(folder, "program", rows, **({"isolate": True} if isolate else {}))
    for (how, said), trajectory in zip(PROGRAMS.items(), broken, strict=True):
        assert (trajectory.end, trajectory.rewards) == ("environment_error", {}), how
        assert trajectory.error is not None and said in trajectory.error, (how, trajectory.error)
        assert len(trajectory.error) < 10_000
    assert (right.end, right.rewards) == ("answer", {"program": 1.0})


@slow("a hanging agent is a timeout too")
def test_a_program_that_does_not_end_is_a_timeout(folder: Path):
    """One that waits; and one that blocks or exits, which only a process of its own survives."""
    (waits, right) = played(folder, "program", [{"how": "no end"}, {"how": ""}], trajectory_timeout_s=1.0)
    assert waits.end == "timeout" and "rollout.trajectory_timeout_s: 1 seconds" in str(waits.error)
    assert right.rewards == {"program": 1.0}
    rows = [{"how": "hang"}, {"how": "kill"}, {"how": ""}]
    blocks, exits, right = played(folder, "program", rows, isolate=True, trajectory_timeout_s=5.0)
    assert blocks.end == "timeout"
    assert exits.end == "environment_error" and "ended with exit code 7" in str(exits.error)
    assert right.rewards == {"program": 1.0}


def test_results_that_are_not_valid_unicode_reach_the_model(folder: Path):
    script = lambda context, key: call("list_files") if key.turn == 0 else "Done."  # noqa: E731
    (group,) = play(folder, script, [{"prompt": "p"}], environment="e.py:Names")
    (trajectory, _) = group.trajectories
    assert trajectory.error is None
    assert trajectory.messages[1]["content"] == "a.txt b\N{REPLACEMENT CHARACTER}.txt"
