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
import pyarrow.parquet as pq
import pytest

import cohort
from cohort.config import config_from_dict
from cohort.errors import TrainingError, UserError
from cohort.records import RolloutGroup
from cohort.trainer.parts import Parts
from cohort.trainer.rollout_workers import choose_workers
from json_server import serving
from playing import call, turns_tokenizer
from runs import Notes, changed, make_inputs, metric
from selection import slow
from stub_engine.server import serving as stub_serving
from third_engine import known_engine
from tiny import make_tokenizer
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


AGENT = """
import json
from urllib.error import HTTPError
from urllib.request import Request, urlopen

def ask(base_url, api_key, content):
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    body = {"model": "m", "temperature": 0.5, "messages": [{"role": "user", "content": content}]}
    with urlopen(Request(f"{base_url}/chat/completions", json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

def solve(row, base_url, api_key):
    try:
        ask(base_url, "wrong", "?")
    except HTTPError:
        pass
    first = ask(base_url, api_key, row["prompt"])
    return {"reward": 1.0, "length": len(ask(base_url, api_key, first))}
"""

PROGRAM = """
running = 0

async def run(row, model):
    global running
    running += 1
    most = running
    for _ in range(3):
        await model.chat(row["prompt"])
        most = max(most, running)
    running -= 1
    return {"reward": 1.0, "running": most}
"""

TALK = """
import os, time
from pathlib import Path

FOLDER = Path(__file__).parent

class Talk:
    async def run(self, row, model):
        reply = await model.chat(row["prompt"])
        return {"reward": float(len(reply.content))}

    def release(self, trajectory):
        with (FOLDER / "released").open("a") as file:
            file.write(f"{os.getpid()} {len(trajectory.calls)}\\n")

    def close(self):
        time.sleep(2)
        with (FOLDER / "closed").open("a") as file:
            file.write("in time\\n")
"""


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
        one |= {k: v.tolist() for k, v in one.items() if isinstance(v, np.ndarray)}
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


@slow("that of tools, and their reuse, are tested")
def test_law_environments_do_not_depend_on_the_number_of_workers(tmp_path: Path):
    (tmp_path / "game.py").write_text(GAME)
    rollout = {"environment": "game.py:Game", "max_turns": 4}
    groups = in_one_and_in_three(tmp_path, MESSAGES, looks, **rollout)
    trajectories = [t for group in groups for t in group.trajectories]
    assert {t.observation for t in trajectories} and all(t.rewards["Game"] > 0 for t in trajectories)


def test_agents_do_not_depend_on_the_number_of_workers(tmp_path: Path):
    (tmp_path / "agent.py").write_text(AGENT)
    notes: dict[int, list[str]] = {1: [], 2: []}
    found, counts = {}, {}
    for num_workers, told in notes.items():
        options: dict[str, Any] = {"num_workers": num_workers, "notes": told, "agent": "agent.py:solve"}
        with serving(replying(letters)) as server, collecting(tmp_path, [server.url], **options) as (collector, _):
            found[num_workers] = collect(collector, ROWS[:2])
            counts[num_workers] = collector.counts()
    assert_same(found[2], found[1])
    assert {len(t.calls) for group in found[2] for t in group.trajectories} == {2}
    assert counts[1] == {"unauthorized_requests": 6, "refused_requests": 0}
    assert counts[2] == {**counts[1], "lost_workers": 0}
    assert sum("sends 'temperature', which is ignored" in note for note in notes[2]) == 1


@pytest.mark.parametrize("num_workers", [1, 2])
def test_max_concurrent_bounds_the_trajectories_of_each_process(tmp_path: Path, num_workers: int):
    (tmp_path / "program.py").write_text(PROGRAM)
    options: dict[str, Any] = {"num_workers": num_workers, "environment": "program.py:run", "max_concurrent": 2}
    with serving(replying(letters)) as server, collecting(tmp_path, [server.url], **options) as (collector, _):
        groups = collect(collector, ROWS[:4])
    assert [len(group.trajectories) for group in groups] == [3] * 4
    assert max(t.metrics["running"] for group in groups for t in group.trajectories) == 2


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


def test_programs_are_told_of_each_trajectory_that_is_released_and_may_take_time_to_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "talks_elsewhere.py").write_text(TALK)
    monkeypatch.syspath_prepend(tmp_path / "lib")  # as the folder of a script
    options: dict[str, Any] = {"num_workers": 2, "environment": "talks_elsewhere:Talk"}
    with serving(replying(letters)) as server, collecting(tmp_path, [server.url], **options) as (collector, _):
        groups = collect(collector, ROWS[:4])
        collector.release(groups[:3])
    released = [line.split() for line in (tmp_path / "lib" / "released").read_text().splitlines()]
    assert len(released) == 9 and len({pid for pid, _ in released}) == 2
    assert (tmp_path / "lib" / "closed").read_text().count("in time") == 2


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


@slow("one worker that is killed is tested")
def test_a_run_whose_workers_end_again_and_again_ends(tmp_path: Path):
    (tmp_path / "tools.py").write_text(TOOLS.replace("    if key", "    os._exit(3)\n    if key"))
    with (
        serving(replying(lambda context, seed: call("look", '{"key": "a"}'))) as server,
        collecting(tmp_path, [server.url], num_workers=2, tools=["tools.py:look"]) as (collector, _),
        pytest.raises(TrainingError, match=r"3 rollout workers ended while they sampled prompt \d; the last ended"),
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


def test_a_run_with_workers_is_that_of_one_event_loop(tmp_path: Path):
    inputs, completions, shown = make_inputs(tmp_path), {}, {}
    with known_engine(), stub_serving(len(make_tokenizer())) as server:
        for num_workers in (1, 2):
            folder = tmp_path / f"run{num_workers}"
            rollout = {"engine": "stub", "urls": [server.url], "parity_every": 0, "workers": num_workers}
            display = Notes()
            run = changed(inputs, rollout=rollout, train={"steps": 2}, run={"dir": str(folder)})
            cohort.train(run, display=display)
            files = sorted(folder.glob("completions/step-*.parquet"))
            completions[num_workers] = [pq.read_table(file).to_pylist() for file in files]
            shown[num_workers] = [note for note in display.told if "rollout.workers" in note]
    assert len(completions[1]) == 2 and completions[2] == completions[1]
    assert shown == {1: [], 2: ["trajectories run in 2 processes (rollout.workers)"]}


@slow("a run with workers is tested, and sampling ahead without")
def test_workers_sample_ahead_of_training(tmp_path: Path):
    with known_engine(), stub_serving(len(make_tokenizer())) as server:
        rollout = {"engine": "stub", "urls": [server.url], "max_staleness": 1, "parity_every": 0, "workers": 2}
        cohort.train(changed(make_inputs(tmp_path), rollout=rollout, train={"steps": 4}), display=Notes())
    assert server.versions == [0, 1, 2, 3, 4]
    assert max(metric(tmp_path / "run", "rollout/staleness_max")) <= 1  # 0 if a busy machine samples later
    assert metric(tmp_path / "run", "rollout/lost_workers") == [0, 0, 0, 0]


def servers_config(**sections: Any) -> Any:
    raw = {
        "model": {"path": "m"},
        "data": {"path": "d.jsonl"},
        "rewards": [{"use": "math"}],
        "rollout": {"engine": "vllm", "urls": ["http://here"], "num_generations": 16, **sections.pop("rollout", {})},
        "train": {"prompts_per_step": 128},
    }
    return config_from_dict({**raw, **sections})


def chosen(config: Any, free: dict[int, int], notes: list[str] | None = None) -> dict[int, int]:
    """How many workers run on each node, of a run that leaves some cores of them free."""
    parts, notify = Parts(config, tokenizer=turns_tokenizer()), (notes if notes is not None else []).append
    return choose_workers(config, parts, free_cores=free, notify=notify)


@pytest.mark.parametrize(
    ("free", "rollout", "expected"),
    [
        ([15], {}, [4]),  # 2,048 trajectories
        ([15], {"max_staleness": 1}, [8]),
        ([3], {}, [3]),
        ([1], {}, []),
        ([15], {"num_generations": 7}, []),  # 896 trajectories
        ([63], {"max_staleness": 9}, [16]),
        ([1], {"workers": 3}, [3]),
        ([15], {"workers": 1}, []),
        ([15, 15], {}, [2, 2]),
        ([15, 1, 0], {}, [2, 1]),
        ([0, 15], {}, [1, 2]),  # one on rank 0's node in any case
        ([63, 63], {"max_staleness": 15}, [16, 16]),
        ([15, 15], {"num_generations": 7}, []),
        ([1, 1], {"workers": 3}, [3, 3]),  # on each node
        ([15, 15], {"urls": ["http://here", "http://localhost:8000"]}, [4]),  # only this node reaches the second
        ([15, 15], {"urls": []}, [4]),
    ],
)
def test_workers_are_as_many_as_pay(free: list[int], rollout: dict[str, Any], expected: list[int]):
    by_rank = {8 * node: cores for node, cores in enumerate(free)}
    assert chosen(servers_config(rollout=rollout), by_rank) == {8 * node: n for node, n in enumerate(expected)}


def test_how_many_workers_there_are_on_which_nodes_is_said():
    notes: list[str] = []
    for free, rollout in ([{0: 9}, {}], [{0: 9, 8: 9}, {}], [{0: 1, 8: 9}, {}], [{0: 9, 8: 9}, {"urls": []}]):
        chosen(servers_config(rollout=rollout), free, notes)
    assert notes == [
        "trajectories run in 4 processes (rollout.workers)",
        "trajectories run in 4 processes on 2 nodes, 2 each (rollout.workers)",
        "trajectories run in 3 processes on 2 nodes, 1 to 2 each (rollout.workers)",
        "trajectories run in 4 processes on rank 0's node, whose servers other nodes do not reach (rollout.workers)",
    ]


def test_what_another_process_cannot_load_stays_in_this_one(tmp_path: Path):
    def look(key: str) -> str:
        """Look.

        Args:
            key: where
        """
        return key

    (tmp_path / "rewards.py").write_text("def counted(completions, environments): return [1.0 for _ in completions]")
    (tmp_path / "game.py").write_text(GAME)
    notes: list[str] = []
    assert chosen(servers_config(rollout={"workers": 2, "tools": [look]}), {0: 9}, notes) == {}
    reads = {"rewards": [{"use": f"{tmp_path}/rewards.py:counted"}]}
    for wanted in ({"workers": 2}, {}):
        rollout = {**wanted, "environment": f"{tmp_path}/game.py:Game"}
        assert chosen(servers_config(rollout=rollout, **reads), {0: 9}, notes) == {}
    stays = "rollout.workers: 2: all trajectories run in this process: "
    assert notes == [
        f"{stays}rollout.tools.0.use (object:look) exists in it only; define it at the top level of a file",
        f"{stays}a reward function takes `trajectories` or `environments`, which exist in it only",
    ]
