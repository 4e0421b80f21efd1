"""Rollout workers of other nodes: their groups, their ends, how they meet rank 0, and the servers of their own node."""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from cohort.errors import TrainingError, UserError
from cohort.processes.child import Child
from cohort.rollout.engines.servers.fleet import Fleet
from cohort.rollout.engines.servers.handles import FleetLimits, RemoteServer
from cohort.rollout.workers.nodes import Place, host_workers
from json_server import serving
from selection import slow
from test_rollout_workers import MESSAGES, TOOLS, assert_same, looks
from turn_servers import collect, collecting, replying
from waiting import PATIENCE_S, is_running, until


@contextmanager
def other_node(number: int) -> Iterator[tuple[list[Place], Child]]:
    """Places of workers that run as on another node, and the process that runs them."""
    with socket.create_server(("127.0.0.1", 0)) as rendezvous, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("MASTER_PORT", str(rendezvous.getsockname()[1]))
        host, node = host_workers(b"the key", timeout_s=PATIENCE_S)
    try:
        yield [Place(index=index, names=node.names, node=node) for index in range(number)], host
    finally:
        host.kill()


def workers_of(host: Child) -> list[int]:
    """Process ids of the workers that run."""
    return [child.pid for child in psutil.Process(host.process.pid).children() if is_running(child.pid)]


def test_groups_of_another_nodes_workers_are_those_of_one_event_loop_whatever_ends(tmp_path: Path):
    (tmp_path / "tools.py").write_text(TOOLS)
    rollout: dict[str, Any] = {"tools": ["tools.py:look"], "max_turns": 4}
    with (
        serving(replying(looks)) as server,
        collecting(tmp_path, [server.url], num_workers=1, **rollout) as (collector, _),
    ):
        expected = collect(collector, MESSAGES)
    (tmp_path / "pids").unlink()
    asked, killed = threading.Event(), threading.Event()

    def holding(body: Any) -> Any:
        """Answers once the workers are killed."""
        asked.set()
        until(killed.is_set)
        return replying(looks)(body)

    notes: list[str] = []
    with (
        other_node(2) as (places, host),
        serving(holding) as server,
        collecting(tmp_path, [server.url], num_workers=1, elsewhere=places, notes=notes, **rollout) as (collector, _),
    ):
        until(lambda: len(workers_of(host)) == 2)
        first, where = workers_of(host), f"on {socket.gethostname()}"

        def kill() -> None:
            until(asked.is_set)
            for pid in first:
                os.kill(pid, signal.SIGKILL)
            until(lambda: not any(map(is_running, first)))
            killed.set()

        threading.Thread(target=kill).start()
        assert_same(collect(collector, MESSAGES), expected)
        assert collector.counts()["lost_workers"] == 2
        assert sum(f"a rollout worker {where} was killed by SIGKILL; its" in note for note in notes) == 2
        assert_same(collect(collector, MESSAGES), expected)
        second = workers_of(host)
        assert len(second) == 2 and not {*first} & {*second}, "others have taken their places"
        assert {*second} <= {int(line) for line in (tmp_path / "pids").read_text().split()}

        os.kill(host.process.pid, signal.SIGKILL)
        until(lambda: not any(map(is_running, second)))
        assert_same(collect(collector, MESSAGES), expected)
        assert_same(collect(collector, MESSAGES), expected)
        assert sum(f"a rollout worker {where} closed its connection" in note for note in notes) == 2
        assert sum(f"cannot start a rollout worker {where}" in note for note in notes) == 1, "the node is given up"


@slow("the end of workers of another node, and of the node, is tested")
def test_the_end_of_a_node_with_all_groups_costs_them_one_retry_on_this_one(tmp_path: Path):
    (tmp_path / "tools.py").write_text(TOOLS)
    asked, ended = threading.Event(), threading.Event()

    def holding(body: Any) -> Any:
        """Answers once the node has ended."""
        asked.set()
        until(ended.is_set)
        return replying(looks)(body)

    options: dict[str, Any] = {"num_workers": 1, "tools": ["tools.py:look"], "max_turns": 4}
    with (
        other_node(6) as (places, host),
        serving(holding) as server,
        collecting(tmp_path, [server.url], elsewhere=places, **options) as (collector, _),
    ):
        until(lambda: len(workers_of(host)) == 6)
        workers = workers_of(host)

        def end() -> None:
            until(asked.is_set)
            os.kill(host.process.pid, signal.SIGKILL)
            until(lambda: not any(map(is_running, workers)))
            ended.set()

        threading.Thread(target=end).start()
        assert [len(group.trajectories) for group in collect(collector, MESSAGES)] == [3] * 5
        assert collector.counts()["lost_workers"] == 6


@slow("workers of another node that end once are tested")
def test_a_worker_of_another_node_that_always_ends_loses_its_place_and_ends_no_run(tmp_path: Path):
    own = "    if os.getppid() != PARENT:\n        os._exit(3)\n".replace("PARENT", str(os.getpid()))
    (tmp_path / "tools.py").write_text(TOOLS.replace("    if key", f"{own}    if key"))
    notes: list[str] = []
    options: dict[str, Any] = {"num_workers": 1, "notes": notes, "tools": ["tools.py:look"], "max_turns": 4}
    with (
        other_node(1) as (places, host),
        serving(replying(looks)) as server,
        collecting(tmp_path, [server.url], elsewhere=places, **options) as (collector, _),
    ):
        for _ in range(5):
            assert [len(group.trajectories) for group in collect(collector, MESSAGES)] == [3] * 5
        assert workers_of(host) == []
        assert collector.counts()["lost_workers"] == 3
    assert "exit code 3" in notes[-1] and notes[-1].endswith("; it is not replaced")


def test_workers_of_another_node_end_with_the_collector_and_with_their_host(tmp_path: Path):
    (tmp_path / "tools.py").write_text(TOOLS)
    options: dict[str, Any] = {"num_workers": 1, "tools": ["tools.py:look"]}
    with other_node(2) as (places, host):
        with (
            serving(replying(looks)) as server,
            collecting(tmp_path, [server.url], elsewhere=places, **options) as (collector, _),
        ):
            collect(collector, MESSAGES)
            pids = workers_of(host)
        assert len(pids) == 2 and not any(map(is_running, pids)) and workers_of(host) == []
    assert not is_running(host.process.pid)


def test_code_that_another_node_cannot_load_is_an_error_with_its_name(tmp_path: Path):
    (tmp_path / "tools.py").write_text(f"import os\nassert os.getppid() == {os.getpid()}, 'only there'\n{TOOLS}")
    with (
        other_node(1) as (places, _),
        serving(replying(looks)) as server,
        collecting(tmp_path, [server.url], num_workers=1, elsewhere=places, tools=["tools.py:look"]) as (collector, _),
        pytest.raises(UserError, match=rf"rollout\.tools\[0\].*only there.* on {socket.gethostname()}$"),
    ):
        collect(collector, MESSAGES)


def test_connections_without_the_key_start_no_worker():
    with other_node(1) as ([place], host):
        node = place.node
        assert node is not None and node.name == socket.gethostname() and node.name in node.names
        assert repr(node.key) not in repr(node) and not {"127.0.0.1", "localhost", "::1"} & node.names
        for _ in range(2):
            with pytest.raises(TrainingError, match=rf"cannot start .* on {node.name} \(127\.0\.0\.1:{node.port}: "):
                replace(node, key=b"another").start_worker()
        with socket.create_connection(("127.0.0.1", node.port)) as stranger, suppress(ConnectionError):
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            until(lambda: not stranger.recv(1024))
        with socket.create_connection(("127.0.0.1", node.port)):  # says nothing, and keeps nobody waiting
            assert workers_of(host) == []
            worker = replace(node, hosts=("no-such-host.invalid", "127.0.0.1")).start_worker()
            until(lambda: len(workers_of(host)) == 1)
        worker.hang_up()
        until(lambda: not workers_of(host))


def test_a_node_that_cannot_be_reached_is_named():
    with other_node(1) as ([place], host):
        host.kill()
        with pytest.raises(TrainingError, match=rf"on {socket.gethostname()} \(127\.0\.0\.1:\d+: .*refused"):
            place.start()


class Waiting:
    """A client whose requests wait until they may be answered."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.may_answer = threading.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None: ...

    async def healthy(self, url: str) -> bool:
        return True

    async def max_model_len(self, url: str) -> int:
        return 4096


@dataclass(frozen=True)
class OfNode:
    """A request of a worker of some node."""

    node_names: frozenset[str]
    num_completions: int = 1
    prompt_id: int = 0
    num_tokens: int = 1
    max_completion_tokens: int = 1
    urgent: bool = False

    async def send(self, client: Any, url: str, *, allows: Any) -> list[Any]:
        client.sent.append(url)
        while not client.may_answer.is_set():
            await asyncio.sleep(0.01)
        return []


def leased(nodes: Sequence[str], *, room: int) -> list[str]:
    """Letters of the servers that get requests of these nodes, in order: of a, b and c."""
    client = Waiting()
    limits = FleetLimits(max_num_seqs=room, start_timeout_s=60, request_timeout_s=60, max_server_failures=1)
    fleet = Fleet([RemoteServer(f"http://{host}:80") for host in "abc"], lambda: client, limits, server_name="server")
    with closing(fleet):
        until(lambda: len(fleet.running()) == 3)
        for server in fleet.running():
            fleet.set_version(server, 0)
        fleet.set_policy_version(0)
        futures: list[Future[Any]] = [Future() for _ in nodes]
        fleet.submit((OfNode(frozenset({node} if node else ())), f) for node, f in zip(nodes, futures, strict=True))
        until(lambda: len(client.sent) == min(len(nodes), 3 * room))
        first = len(client.sent)
        client.may_answer.set()
        assert [future.result(PATIENCE_S) for future in futures] == [[]] * len(nodes)
        return [url.removeprefix("http://")[0] for url in client.sent[:first]]


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (["c", "b", "a"], "cba"),
        (["", "", ""], "abc"),  # the emptiest
        (["b", "b", "b"], "bac"),  # none is idle
        (["elsewhere"] * 4, "abca"),
        (["b"] * 8, "bacbbacb"),  # its own has at most twice as much as the emptiest
        (["a", "b", "c"] * 4, "abc" * 4),
    ],
)
def test_requests_prefer_the_servers_of_their_own_node(nodes: list[str], expected: str):
    assert "".join(leased(nodes, room=16)) == expected


def test_the_preference_leaves_no_server_idle_and_no_room_unused():
    urls = leased(["a"] * 20, room=4)
    assert {url: urls.count(url) for url in "abc"} == {"a": 4, "b": 4, "c": 4}
    for number in range(3, len(urls)):
        counts = [urls[:number].count(url) for url in "abc"]
        assert min(counts) > 0 and max(counts) <= 2 * min(counts) + 1
