"""Connections that do not show a key: they take neither memory nor files for long, and agents work meanwhile."""

import itertools
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import httpx2
import psutil
import pytest

from agents import LIMITS, ask, play
from cohort.rollout.endpoint import http_server as connections
from cohort.rollout.endpoint.http_server import MAX_WITHOUT_KEY
from selection import mostly_slow
from waiting import until

MB = 2**20


def connect(base_url: str) -> socket.socket:
    url = httpx2.URL(base_url)
    return socket.create_connection((url.host, url.port))


def is_closed(client: socket.socket) -> bool:
    """Whether the server has closed a connection to which it sends nothing."""
    client.settimeout(0)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


# A body whose last part never comes, and one without an end.
UNFINISHED = f"Content-Length: {32 * MB}\r\n\r\n", bytes(MB)
ENDLESS = "Transfer-Encoding: chunked\r\n\r\n", b"%x\r\n%s\r\n" % (MB, bytes(MB))
BODIES = [*itertools.product((UNFINISHED, ENDLESS), ("", "Authorization: Bearer wrong\r\n"))]


@pytest.mark.parametrize(("body", "key"), mostly_slow(BODIES, BODIES[1], BODIES[2], reason="each body and each key"))
def test_bodies_of_requests_without_a_key_are_not_kept(key: str, body: tuple[str, bytes]):
    kind, part = body
    grown: list[int] = []

    def solve(row: Any, base_url: str, api_key: str) -> None:
        ask(base_url, api_key)
        before = psutil.Process().memory_info().rss

        def upload(number: int) -> socket.socket:
            client = connect(base_url)
            client.sendall(f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n{key}{kind}".encode())
            for _ in range(31):
                client.sendall(part)
            return client

        with ThreadPoolExecutor(12) as pool, ExitStack() as stack:
            for client in pool.map(upload, range(12)):
                stack.enter_context(client)
            ask(base_url, api_key)
            grown.append(psutil.Process().memory_info().rss - before)

    trajectory = play(solve, "ok").trajectory
    assert len(trajectory.calls) == 2 and grown[0] < 100 * MB


def test_a_request_with_a_wrong_key_gets_its_answer_after_its_body():
    def solve(row: Any, base_url: str, api_key: str) -> None:
        body = httpx2.post(f"{base_url}/completions", content=bytes(20 * MB), trust_env=False)
        assert body.status_code == 401 and body.json()["error"]["code"] == "invalid_api_key"
        ask(base_url, api_key)

    played = play(solve, "ok")
    assert played.trajectory.error is None and played.counts == {"unauthorized_requests": 1, "refused_requests": 0}


def test_silent_connections_make_room_for_agents(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "KEY_TIMEOUT_S", 3600.0)
    num_clients = 2 * MAX_WITHOUT_KEY + 10
    files: list[int] = []

    def solve(row: Any, base_url: str, api_key: str) -> None:
        ask(base_url, api_key)
        before = psutil.Process().num_fds()
        with ExitStack() as stack:
            clients = [stack.enter_context(connect(base_url)) for _ in range(num_clients)]
            clients[0].sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")  # neither a key nor an end
            with ThreadPoolExecutor(20) as pool:  # connections of their own
                assert len(list(pool.map(lambda _: ask(base_url, api_key), range(20)))) == 20
            files.append(psutil.Process().num_fds() - before - num_clients)
            assert sum(map(is_closed, clients)) >= num_clients - MAX_WITHOUT_KEY

    trajectory = play(solve, "ok", limits=replace(LIMITS, max_turns=100)).trajectory
    assert trajectory.error is None and len(trajectory.calls) == 21
    assert files[0] <= MAX_WITHOUT_KEY + 25


def test_a_connection_without_a_key_is_closed_at_its_deadline(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "KEY_TIMEOUT_S", 0.2)

    def solve(row: Any, base_url: str, api_key: str) -> None:
        with connect(base_url) as silent, connect(base_url) as slow, httpx2.Client(trust_env=False) as agent:
            request = {"headers": {"Authorization": f"Bearer {api_key}"}, "timeout": None}
            assert agent.get(f"{base_url}/models", **request).status_code == 200
            sending = threading.Event()

            def send() -> None:
                slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
                sending.set()
                with suppress(OSError):
                    while True:
                        slow.sendall(b"x")

            thread = threading.Thread(target=send)
            thread.start()
            until(lambda: is_closed(silent))
            thread.join()
            pool = agent._transport._pool  # type: ignore[attr-defined]
            (kept,) = pool.connections
            assert agent.get(f"{base_url}/models", **request).status_code == 200
            assert pool.connections == [kept]  # the same one: it has shown a key
        ask(base_url, api_key)

    assert play(solve, "ok").trajectory.error is None
