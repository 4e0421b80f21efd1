"""Trajectories in several processes are those of one event loop, and none is lost when a process ends."""

import os
import signal
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cohort.errors import TrainingError, UserError
from cohort.records import RolloutGroup
from json_server import serving
from playing import call
from turn_servers import collect, collecting, replying
from waiting import until

ROWS = [{"prompt": f"what is {n}?", "answer": str(n)} for n in range(5)]
MESSAGES = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in ROWS]
TIMES = ("model_s", "environment_s")

TOOLS = '''
import os
from pathlib import Path

def look(key: str) -> str:
    """Look up a value.

    Args:
        key: name of the value
    """
    with open(Path(__file__).parent / "pids", "a") as file:
        file.write(f"{os.getpid()}\\n")
    if key == "x":
        raise ValueError("no such value")
    return key * 3
'''

GAME = '''
import os
from pathlib import Path

class Game:
    """Counts looks."""

    made = 0

    def __init__(self):
        Game.made += 1
        self.name = f"{os.getpid()}.{Game.made}"

    def reset(self, answer: str, seed: int) -> str:
        self.looks = 0
        return f" (game {seed % 1000} about {answer})"

    def look(self, key: str) -> str:
        """Look.

        Args:
            key: where
        """
        self.looks += 1
        return f"{key}{self.looks}"

    def step_reward(self) -> float:
        return 0.25

    def get_reward(self) -> float:
        with open(Path(__file__).parent / "instances", "a") as file:
            file.write(f"{self.name}\\n")
        return float(self.looks)
'''


def letters(context: str, seed: int) -> str:
    """A reply of a few letters, which depends on what was asked and on the seed."""
    return "".join(chr(97 + n) for n in np.random.default_rng([seed, len(context)]).integers(26, size=4 + seed % 7))


def looks(context: str, seed: int) -> str:
    """One to three calls of `look`, or an answer."""
    draw = np.random.default_rng([seed, len(context)])
    if draw.random() < 0.3:
        return f"it is {letters(context, seed)}"
    return " ".join(call("look", f'{{"key": "{chr(97 + draw.integers(26))}"}}') for _ in range(draw.integers(1, 4)))


def plain(trajectory: Any) -> dict[str, Any]:
    """All that a trajectory has, but how long it took and its environment."""
    values = {f.name: getattr(trajectory, f.name) for f in fields(trajectory)}
    calls = [{f.name: getattr(one, f.name) for f in fields(one)} for one in trajectory.calls]
    for one in calls:
        one |= {k: (v.dtype, v.tolist()) for k, v in one.items() if isinstance(v, np.ndarray)}
    stats = trajectory.stats
    counted = None if stats is None else {f.name: getattr(stats, f.name) for f in fields(stats) if f.name not in TIMES}
    return values | {"calls": calls, "stats": counted, "environment": None}


def assert_same(found: Sequence[RolloutGroup], expected: Sequence[RolloutGroup]) -> None:
    assert [g.prompt.id for g in found] == [g.prompt.id for g in expected]
    for one, other in zip(found, expected, strict=True):
        assert [plain(t) for t in one.trajectories] == [plain(t) for t in other.trajectories]


def in_one_and_in_three(folder: Path, rows: Any, script: Any, **rollout: Any) -> list[RolloutGroup]:
    """Groups of three workers, which are those of one event loop."""
    found = {}
    for num_workers in (1, 3):
        with ExitStack() as stack:
            servers = [stack.enter_context(serving(replying(script))) for _ in range(2)]
            urls = [server.url for server in servers]
            collector, _ = stack.enter_context(collecting(folder, urls, num_workers=num_workers, **rollout))
            found[num_workers] = collect(collector, rows)
            collector.release(found[num_workers])
            if not rollout:
                assert sum(len(server.bodies) for server in servers) == len(rows), "a group is one request"
    assert_same(found[3], found[1])
    return found[3]


def test_law_single_completions_do_not_depend_on_the_number_of_workers(tmp_path: Path):
    groups = in_one_and_in_three(tmp_path, ROWS, letters)
    assert len({t.text for group in groups for t in group.trajectories}) == 15


def test_law_trajectories_with_tools_do_not_depend_on_the_number_of_workers(tmp_path: Path):
    (tmp_path / "tools.py").write_text(TOOLS)
    groups = in_one_and_in_three(tmp_path, MESSAGES, looks, tools=["tools.py:look"], max_turns=4)
    trajectories = [t for group in groups for t in group.trajectories]
    assert {len(t.calls) for t in trajectories} >= {1, 4}
    assert any(t.stats.tool_errors for t in trajectories), "one asked for x"
    pids = {int(line) for line in (tmp_path / "pids").read_text().split()}
    assert len(pids) == 4 and os.getpid() in pids


def test_law_environments_do_not_depend_on_the_number_of_workers(tmp_path: Path):
    (tmp_path / "game.py").write_text(GAME)
    rollout = {"environment": "game.py:Game", "max_turns": 4}
    groups = in_one_and_in_three(tmp_path, MESSAGES, looks, **rollout)
    trajectories = [t for group in groups for t in group.trajectories]
    assert {t.observation for t in trajectories} and all(t.rewards["Game"] > 0 for t in trajectories)


def test_environments_are_reused_once_their_trajectories_are_released(tmp_path: Path):
    (tmp_path / "game.py").write_text(GAME)
    with (
        serving(replying(looks)) as server,
        collecting(tmp_path, [server.url], num_workers=2, environment="game.py:Game") as (collector, _),
    ):
        for released in (False, True, True):
            groups = collect(collector, MESSAGES[:2])
            if released:
                collector.release(groups)
    names = (tmp_path / "instances").read_text().split()
    assert len(set(names[:12])) == 12, "those of the first groups are kept"
    assert sorted(names[12:]) == sorted(names[6:12]), "the last ones are those of the groups before"


def test_groups_of_a_worker_that_is_killed_are_sampled_again(tmp_path: Path):
    (tmp_path / "tools.py").write_text(TOOLS)
    rollout: dict[str, Any] = {"tools": ["tools.py:look"], "max_turns": 4}
    with (
        serving(replying(looks)) as server,
        collecting(tmp_path, [server.url], num_workers=1, **rollout) as (collector, _),
    ):
        expected = collect(collector, MESSAGES)
    held, killed = threading.Event(), threading.Event()

    def holding(body: Any) -> Any:
        """Answers once a worker is killed."""
        held.set()
        until(killed.is_set)
        return replying(looks)(body)

    notes: list[str] = []
    with (
        serving(holding) as server,
        collecting(tmp_path, [server.url], num_workers=2, notes=notes, **rollout) as (collector, engine),
    ):
        first = engine.workers.pids[0]

        def kill() -> None:
            until(held.is_set)
            os.kill(first, signal.SIGKILL)
            killed.set()

        threading.Thread(target=kill).start()
        found = collect(collector, MESSAGES)
        assert first not in engine.workers.pids and len(engine.workers.pids) == 2
        assert collector.counts()["lost_workers"] == 1
        assert_same(found, expected)
        assert_same(collect(collector, MESSAGES), expected)  # by the new one, too
    assert notes[2:] == ["warning: a rollout worker was killed by SIGKILL; its 3 groups are sampled again"]


def test_a_run_whose_workers_end_again_and_again_ends(tmp_path: Path):
    (tmp_path / "tools.py").write_text(TOOLS.replace("    if key", "    os._exit(3)\n    if key"))
    with (
        serving(replying(lambda context, seed: call("look", '{"key": "a"}'))) as server,
        collecting(tmp_path, [server.url], num_workers=2, tools=["tools.py:look"]) as (collector, _),
        pytest.raises(
            TrainingError, match=r"3 rollout workers ended while they sampled prompt \d; the last ended"
        ),
    ):
        collect(collector, MESSAGES[:1], generations=1)


def test_code_that_a_worker_cannot_load_is_the_users_error(tmp_path: Path):
    (tmp_path / "tools.py").write_text(f"import os\nassert os.getpid() == {os.getpid()}, 'only there'\n{TOOLS}")
    with (
        serving(replying(looks)) as server,
        collecting(tmp_path, [server.url], num_workers=2, tools=["tools.py:look"]) as (collector, _),
        pytest.raises(UserError, match=r"rollout\.tools\[0\].*does not import: .*only there"),
    ):
        collect(collector, MESSAGES)


def test_errors_of_the_engine_are_those_of_one_event_loop(tmp_path: Path):
    too_long = [{"prompt": [{"role": "user", "content": "x " * 4090}]}]
    messages = []
    for num_workers in (1, 2):
        (tmp_path / "tools.py").write_text(TOOLS)
        rollout = {"tools": ["tools.py:look"], "max_prompt_tokens": 9000}
        with (
            serving(replying(looks)) as server,
            collecting(tmp_path, [server.url], num_workers=num_workers, **rollout) as (collector, _),
            pytest.raises(UserError) as raised,
        ):
            collect(collector, too_long)
        messages.append(str(raised.value).replace(server.url, "URL"))
    assert messages[0] == messages[1] and "does not fit" in messages[0]


def test_rows_that_cannot_be_sent_are_named(tmp_path: Path):
    with (
        serving(replying(letters)) as server,
        collecting(tmp_path, [server.url], num_workers=2) as (collector, _),
        pytest.raises(UserError, match=r"the row of prompt 0 cannot be sent to another process .*rollout\.workers: 1"),
    ):
        collect(collector, [{"prompt": "what?", "answer": threading.Lock()}])
