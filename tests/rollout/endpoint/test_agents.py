"""Agents and their faults: keys, limits, parallel and abandoned calls, rewritten histories."""

import asyncio
import json
import re
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from agents import CALL, LIMITS, MESSAGES, TOOLS, ReplyingEngine, ask, decode, play, post
from cohort.errors import TrainingError, UserError
from cohort.records import ModelCall, Trajectory, join_calls
from cohort.rollout.endpoint.agent import AgentProgram
from cohort.rollout.endpoint.http_server import Endpoint
from cohort.rollout.endpoint.session import Batcher
from cohort.rollout.engines.base import PendingCall
from waiting import PATIENCE_S, until


def test_each_trajectory_has_its_own_key_until_its_agent_returns():
    seen: dict[int, tuple[str, str]] = {}
    all_there = threading.Barrier(3)

    def solve(row: Any, base_url: str, api_key: str) -> dict[str, float]:
        seen[row["number"]] = (base_url, api_key)
        all_there.wait(PATIENCE_S)
        assert row["question"] == "hi" and re.fullmatch("[0-9a-f]{32}", api_key)
        for wrong in ("none", "x", api_key[:-1], api_key.upper() + "0"):
            response = post(base_url, wrong, {"messages": MESSAGES})
            assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
        assert httpx2.get(f"{base_url}/models", trust_env=False).status_code == 401
        ask(base_url, api_key, [{"role": "user", "content": f"I am {row['number']}"}])
        return {"reward": row["number"], "guesses": 2}

    played = play(solve, "ok", num_rows=3)
    assert len({key for _, key in seen.values()}) == 3
    for trajectory, number in zip(played.trajectories, range(3), strict=True):
        assert trajectory.error is None
        assert f"I am {number}" in decode(trajectory.calls[0].context_ids)
        assert trajectory.rewards == {"solve": float(number)} and trajectory.metrics == {"guesses": 2}
    assert played.counts == {"unauthorized_requests": 15, "refused_requests": 0}


def test_agents_may_be_coroutine_functions():
    async def solve(row: Any, base_url: str, api_key: str) -> float:
        async with httpx2.AsyncClient(trust_env=False, headers={"Authorization": f"Bearer {api_key}"}) as client:
            for _ in range(2):
                response = await client.post(f"{base_url}/chat/completions", json={"messages": MESSAGES})
                assert response.status_code == 200
        return 1.0

    played = play(solve, "ok", num_rows=3)
    assert [len(trajectory.calls) for trajectory in played.trajectories] == [2, 2, 2]


@pytest.mark.parametrize("catches", [True, False])
def test_a_limit_is_an_error_that_clients_do_not_repeat(catches: bool):
    def solve(row: Any, base_url: str, api_key: str) -> float:
        for _ in range(2):
            ask(base_url, api_key, tools=TOOLS)
        response = post(base_url, api_key, {"messages": MESSAGES})
        assert response.status_code == 400 and response.json()["error"]["code"] == "trajectory_ended"
        if not catches:
            response.raise_for_status()
        return 1.0

    trajectory = play(solve, CALL, limits=replace(LIMITS, max_turns=2)).trajectory
    assert trajectory.end == "max_turns" and len(trajectory.calls) == 2 and trajectory.error is None
    assert trajectory.rewards == ({"solve": 1.0} if catches else {})
    assert trajectory.stats is not None and trajectory.stats.tool_calls == 2


def test_an_agent_that_never_calls_is_a_failure():
    trajectory = play(lambda row, base_url, api_key: 1.0, "ok").trajectory
    assert trajectory.end == "environment_error" and "without a model call" in str(trajectory.error)


@pytest.mark.parametrize(
    ("failure", "said"),
    [(ValueError("no luck"), "no luck"), (SystemExit(3), "SystemExit"), (KeyboardInterrupt(), "KeyboardInterrupt")],
)
@pytest.mark.parametrize("is_async", [True, False])
def test_an_agent_that_raises_or_exits_fails_alone(failure: BaseException, said: str, is_async: bool):
    def solve(row: Any, base_url: str, api_key: str) -> None:
        raise failure

    async def async_solve(row: Any, base_url: str, api_key: str) -> None:
        raise failure

    trajectory = play(async_solve if is_async else solve, "ok").trajectory
    assert trajectory.end == "environment_error" and said in str(trajectory.error)


def test_a_return_value_of_another_type_is_a_failure():
    def solve(row: Any, base_url: str, api_key: str) -> str:
        ask(base_url, api_key)
        return "very good"

    assert "'very good'" in str(play(solve, "ok").trajectory.error)


def test_parallel_calls_are_separate_sequences():
    def solve(row: Any, base_url: str, api_key: str) -> None:
        with ThreadPoolExecutor(3) as pool:
            [*pool.map(lambda text: ask(base_url, api_key, [{"role": "user", "content": text}]), "abc")]

    trajectory = play(solve, "one", "two", "three").trajectory
    asked = [decode(call.context_ids).partition("user\n")[2][0] for call in trajectory.calls]
    assert sorted(asked) == ["a", "b", "c"]
    assert len(join_calls(trajectory.trained_calls)) == 3


def test_requests_for_a_batch_continue_together_and_one_that_is_cancelled_stops_no_other():
    events: list[str] = []

    async def request(batcher: Batcher, name: str) -> None:
        events.append(name)
        await batcher.wait()
        events.append(name.upper())

    async def run() -> None:
        batcher = Batcher(quiet_s=0.02, max_s=1.0)
        tasks = [asyncio.create_task(request(batcher, name)) for name in "abc"]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.wait(tasks)
        await request(batcher, "d")
        await request(Batcher(quiet_s=0.0, max_s=0.0), "e")

    asyncio.run(run())
    assert "".join(events) == "abcACdDeE"


def test_agents_of_an_engine_that_samples_in_batches_get_the_same_answers():
    def solve(row: Any, base_url: str, api_key: str) -> None:
        for _ in range(2):
            ask(base_url, api_key)

    played = play(solve, "ok", num_rows=3, batches_requests=True)
    assert [len(trajectory.calls) for trajectory in played.trajectories] == [2, 2, 2]


def test_a_rewritten_history_starts_a_new_sequence():
    def solve(row: Any, base_url: str, api_key: str) -> None:
        message = ask(base_url, api_key)["choices"][0]["message"]
        more = {"role": "user", "content": "more"}
        ask(base_url, api_key, [*MESSAGES, message, more])
        ask(base_url, api_key, [*MESSAGES, {**message, "content": "never said"}, more])

    sequences = join_calls(play(solve, "ok").trajectory.trained_calls)
    assert len(sequences) == 2


def test_a_call_that_is_abandoned_is_not_recorded():
    """The agent returns while one of its requests is waiting for the model."""
    answered: list[httpx2.Response] = []
    engine = ReplyingEngine(lambda key: "ok" if key.turn == 0 else None)

    def solve(row: Any, base_url: str, api_key: str) -> float:
        ask(base_url, api_key)
        engine.asked.clear()
        request = lambda: answered.append(post(base_url, api_key, {"messages": MESSAGES}))  # noqa: E731
        thread = threading.Thread(target=request, daemon=True)
        threads.append(thread)
        thread.start()
        assert engine.asked.wait(PATIENCE_S)
        return 1.0

    threads: list[threading.Thread] = []
    trajectory = play(solve, engine=engine).trajectory
    threads[0].join(PATIENCE_S)
    assert len(trajectory.calls) == 1 and trajectory.end == "answer"
    assert [response.status_code for response in answered] == [401]


class HoldingEngine(ReplyingEngine):
    """Replies with a call's number as soon as it `may_answer`, and calls `on_answer` before the event loop goes on."""

    def __init__(self, *, may_answer: Callable[[int], bool] = lambda number: True, on_answer: Callable[[int], None]):
        super().__init__(lambda key: f"reply {key.turn}")
        self.held: list[PendingCall] = []
        self.loop: Any = None
        self._may_answer, self._on_answer = may_answer, on_answer

    async def generate(self, *arguments: Any) -> ModelCall:
        self.loop = asyncio.get_running_loop()
        return await super().generate(*arguments)

    def advance(self) -> bool:
        self.held += self._calls.take()
        ready = [call for call in self.held if self._may_answer(call.key.turn)]
        for call in ready:
            self.held.remove(call)
            self._calls._calls.append(call)
            super().advance()
            self._on_answer(call.key.turn)
        return bool(ready)


def contents(trajectory: Trajectory) -> list[tuple[str, str]]:
    """What each call was asked last, and its reply."""
    asked = [decode(call.context_ids).split("user\n")[-1].split("<|im_end|>")[0] for call in trajectory.calls]
    return list(zip(asked, [decode(call.token_ids[:-1]) for call in trajectory.calls], strict=True))


def test_calls_of_parallel_tasks_are_trained_in_the_order_of_their_answers():
    log: list[tuple[str, str]] = []
    second_is_there = threading.Event()
    engine = HoldingEngine(may_answer=lambda number: number > 0 or second_is_there.is_set(), on_answer=lambda n: None)

    def asked(base_url: str, api_key: str, text: str) -> None:
        answer = ask(base_url, api_key, [{"role": "user", "content": text}])
        log.append((text, answer["choices"][0]["message"]["content"]))

    def solve(row: Any, base_url: str, api_key: str) -> None:
        first = threading.Thread(target=asked, args=(base_url, api_key, "first"))
        first.start()
        assert engine.asked.wait(PATIENCE_S)
        asked(base_url, api_key, "second")
        second_is_there.set()
        first.join(PATIENCE_S)

    trajectory = play(solve, engine=engine).trajectory
    assert contents(trajectory) == log == [("second", "reply 1"), ("first", "reply 0")]


def test_a_thread_that_an_agent_left_behind_is_not_trained():
    """One of its calls is answered when the agent has returned but the event loop does not know that yet."""
    statuses: list[int] = []
    sampling, returning = threading.Event(), threading.Event()  # the event loop stands still while an engine samples
    threads: list[Any] = []

    def has_returned(number: int) -> bool:
        if number == 0:
            return True
        sampling.set()
        assert returning.wait(PATIENCE_S)
        until(lambda: sys._current_frames()[threads[0].ident].f_code.co_name == "_work")
        return True

    engine = HoldingEngine(may_answer=has_returned, on_answer=lambda number: None)

    def go_on(base_url: str, api_key: str) -> None:
        for _ in range(3):
            statuses.append(post(base_url, api_key, {"messages": MESSAGES}).status_code)

    def solve(row: Any, base_url: str, api_key: str) -> None:
        if row["number"] == 1:  # waits for the late calls of the other one
            until(lambda: len(statuses) == 3)
            ask(base_url, api_key)
            return
        ask(base_url, api_key)
        threads.append(threading.current_thread())
        threading.Thread(target=go_on, args=(base_url, api_key), daemon=True).start()
        assert sampling.wait(PATIENCE_S)
        returning.set()

    played = play(solve, engine=engine, num_rows=2)
    assert [len(trajectory.calls) for trajectory in played.trajectories] == [1, 1]
    assert statuses == [401, 401, 401] and played.counts["unauthorized_requests"] == 3


def test_calls_of_an_attempt_that_crashed_are_not_trained():
    log: list[tuple[str, str]] = []  # of the last attempt
    keys: list[str] = []
    statuses: list[int] = []

    def solve(row: Any, base_url: str, api_key: str) -> None:
        log.clear()
        keys.append(api_key)
        for number in range(2):
            text = f"{len(keys)} {number}"
            answer = ask(base_url, api_key, [{"role": "user", "content": text}])
            log.append((text, answer["choices"][0]["message"]["content"]))
        if len(keys) == 1:
            raise ValueError("too bad")
        statuses.append(post(base_url, keys[0], {"messages": MESSAGES}).status_code)

    played = play(solve, engine=HoldingEngine(on_answer=lambda number: None), retries=1)
    assert contents(played.trajectory) == log == [("2 0", "reply 0"), ("2 1", "reply 1")]
    assert statuses == [401] and keys[0] != keys[1] and played.counts["unauthorized_requests"] == 1


def sent(base_url: str, api_key: str, body: Any) -> socket.socket:
    """A connection on which a chat request waits for its answer."""
    url, content = httpx2.URL(base_url), json.dumps(body)
    connection = socket.create_connection((url.host, url.port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {api_key}\r\n"
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n{content}".encode())
    return connection


def test_a_call_whose_client_hung_up_before_the_answer_is_dropped():
    """The engine has its tokens, but the event loop has not seen them yet."""
    hang_up, connections = threading.Event(), []

    def on_answer(number: int) -> None:
        if number == 0:
            num_ready = len(engine.loop._ready)
            connections[0].close()
            hang_up.set()
            until(lambda: len(engine.loop._ready) > num_ready)  # the server's thread has noticed

    engine = HoldingEngine(may_answer=lambda number: bool(connections), on_answer=on_answer)

    def solve(row: Any, base_url: str, api_key: str) -> None:
        connections.append(sent(base_url, api_key, {"messages": MESSAGES}))
        assert hang_up.wait(PATIENCE_S)
        for number in range(LIMITS.max_turns):  # it gave its turn back
            ask(base_url, api_key, [{"role": "user", "content": f"{number}"}])

    trajectory = play(solve, engine=engine).trajectory
    assert [asked for asked, _ in contents(trajectory)] == ["0", "1", "2", "3"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_gives_its_turn_back(stream: bool):
    engine = ReplyingEngine(lambda key: None if key.turn == 0 else "ok")

    def solve(row: Any, base_url: str, api_key: str) -> float:
        with sent(base_url, api_key, {"messages": MESSAGES, "stream": stream}):
            assert engine.asked.wait(PATIENCE_S)
        for _ in range(LIMITS.max_turns):
            ask(base_url, api_key)
        return 1.0

    # the first of the calls may come before the connection's end is known, but the last does not
    trajectory = play(solve, engine=engine).trajectory
    assert len(trajectory.calls) == LIMITS.max_turns and trajectory.end == "answer"


def test_a_hanging_agent_ends_by_timeout_and_loses_its_key():
    late = threading.Event()
    statuses: list[int] = []
    done = threading.Event()

    def solve(row: Any, base_url: str, api_key: str) -> None:
        ask(base_url, api_key)
        late.wait(PATIENCE_S)
        try:
            statuses.append(post(base_url, api_key, {"messages": MESSAGES}).status_code)
        except httpx2.HTTPError:
            statuses.append(0)
        done.set()

    trajectory = play(solve, "ok", limits=replace(LIMITS, timeout_s=1.0)).trajectory
    assert trajectory.end == "timeout" and "trajectory_timeout_s" in str(trajectory.error)
    late.set()
    assert done.wait(PATIENCE_S) and statuses == [0]  # the endpoint is closed


def test_the_engines_failure_ends_the_run_and_not_the_trajectory():
    class Failing(ReplyingEngine):
        def advance(self) -> bool:
            calls = self._calls.take()
            for call in calls:
                call.fail(TrainingError("the server is gone"))
            return bool(calls)

    def solve(row: Any, base_url: str, api_key: str) -> None:
        while True:  # as an agent that repeats for ever
            post(base_url, api_key, {"messages": MESSAGES})

    with pytest.raises(TrainingError, match="the server is gone"):
        play(solve, engine=Failing(lambda key: None))


def test_a_first_context_that_is_too_long_is_explained():
    def solve(row: Any, base_url: str, api_key: str) -> None:
        response = post(base_url, api_key, {"messages": MESSAGES})
        assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"
        raise ValueError(response.text)

    error = play(solve, "ok", limits=replace(LIMITS, max_prompt_tokens=3)).trajectory.error
    assert "rollout.max_prompt_tokens: 3" in str(error)


def test_an_address_that_this_machine_does_not_have_is_refused():
    with pytest.raises(UserError, match=r"rollout.endpoint_host: '192.0.2.1'"):
        AgentProgram(lambda row, base_url, api_key: None, name="solve", host="192.0.2.1")


def test_the_endpoint_listens_on_loopback_unless_told_otherwise():
    for host, url in (("127.0.0.1", "http://127.0.0.1:"), ("0.0.0.0", "http://127.0.0.1:")):
        endpoint = Endpoint(host)
        assert endpoint.base_url.startswith(url)
        assert post(endpoint.base_url, "x", {}).status_code == 401
        endpoint.close()
        with pytest.raises(httpx2.ConnectError):
            post(endpoint.base_url, "x", {})
