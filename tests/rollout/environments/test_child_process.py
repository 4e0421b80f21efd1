"""Child processes for user code: results, exceptions, and every way in which one can fail."""

import asyncio
import gc
import os
import signal
from collections.abc import Callable, Coroutine
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cohort.chat import Reply
from cohort.processes import child_start
from cohort.records import ModelCall
from cohort.rollout import RolloutCollector
from cohort.rollout.environments import child_main
from cohort.rollout.environments.child_process import ChildError, ChildPool, ChildProcess, UserCode
from cohort.rollout.environments.handle import DeadlineMissed
from cohort.rollout.environments.model import EnvironmentFailure, TrajectoryEnded
from cohort.rollout.environments.tools import result_text
from engines import ScriptedEngine
from tiny import make_tokenizer
from waiting import PATIENCE_S, is_running, until

CODE = '''
import asyncio, ctypes, decimal, os, signal, subprocess, sys, threading, time
import numpy as np

class Box:
    """A counter."""

    def __init__(self, start=0):
        self.value = start
        self.lock = threading.Lock()
        self.rows = np.arange(2)
        self._hidden = 1

    @property
    def double(self): return 2 * self.value
    def add(self, number): self.value += number; return self.value
    async def wait(self, seconds): await asyncio.sleep(seconds); return self.value
    def thread(self): return threading.current_thread() is threading.main_thread()
    def give(self, what):
        return {"tuple": (1, "a"), "decimal": decimal.Decimal("1.5"), "number": np.float32(0.5), "bytes": b"x",
                "set": {1}, "none": None}[what]
    def fail(self): raise KeyError("no such thing")
    def leave(self): sys.exit(4)
    def hang(self): time.sleep(600)
    def hold(self): ctypes.PyDLL(None).sleep(600)  # with the interpreter's lock
    def exit(self): print("last words", file=sys.stderr); os._exit(3)
    def segfault(self): ctypes.string_at(0)
    def flood(self, megabytes): return "x" * (megabytes << 20)
    def speak(self): print("hello"); sys.stdout.write("x" * 100)
    def garbage(self):
        os.write(int(sys.argv[1]), (3).to_bytes(4, "big") + b"abc"); time.sleep(600)
    def unknown(self): os.write(int(sys.argv[1]), (2).to_bytes(4, "big") + b"{}"); time.sleep(600)
    def request(self):
        message = b'{"request": [], "method": "chat", "arguments": {}}'
        os.write(int(sys.argv[1]), len(message).to_bytes(4, "big") + message); time.sleep(600)
    def spawn(self):
        child = subprocess.Popen(["sleep", "600"])
        return [os.getpid(), child.pid]
    def fork(self):
        pid = os.fork()
        if pid == 0: time.sleep(600)
        os._exit(5)
    def environment(self): return dict(os.environ)
    def modules(self): return [name for name in ("torch", "transformers") if name in sys.modules]
    def packages(self):
        before = "cohort.config.schema" in sys.modules
        exec("from cohort.rewards import *", names := {})
        from cohort.config import Config
        import cohort.rollout
        found = [Config.__module__, cohort.rollout.RolloutCollector.__name__, sys.argv[0]]
        return [before, callable(names["build_rewards"]), *found]
    def close(self):
        open("closed", "w").close()

def one(): return 1
def close(): open("closed", "w").close()
def draw(): import random; return [random.random(), np.random.rand()]
def pid(): return os.getpid()
'''


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UserCode:
    (tmp_path / "box.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return UserCode(name="Box", key="rollout.environment", use="box.py:Box", args={"start": 5})


def run(*coroutines: Coroutine[Any, Any, Any]) -> list[Any]:
    """Run coroutines as the training loop does, and return their results."""
    with closing(RolloutCollector(ScriptedEngine(lambda: 1), make_tokenizer())) as collector:
        tasks = [collector.start(coroutine) for coroutine in coroutines]
        collector.wait(tasks, count=len(tasks))
        return [task.result() for task in tasks]


def in_child(code: UserCode, use: Callable[[ChildProcess], Coroutine[Any, Any, Any]]) -> Any:
    """The result of `use`, whose child is killed at the end."""

    async def work() -> Any:
        child = await ChildProcess.start(code)
        try:
            return await use(child)
        finally:
            child.kill()

    return run(work())[0]


def failure(code: UserCode, method: str, error: type[Exception], *, timeout_s: float = PATIENCE_S, **arguments) -> str:
    """The message of the error that ends a child."""

    async def use(child: ChildProcess) -> str:
        with pytest.raises(error) as caught:
            await child.call(method, arguments, timeout_s=timeout_s)
        assert child.process.poll() is not None  # it was ended and reaped
        with pytest.raises(EnvironmentFailure):
            await child.call("add", {"number": 1}, timeout_s=PATIENCE_S)
        return str(caught.value)

    return str(in_child(code, use))


def test_one_instance_keeps_its_state_and_its_thread(code: UserCode):
    async def use(child: ChildProcess) -> Any:
        first = await child.call("add", {"number": 2}, timeout_s=PATIENCE_S)
        concurrent = await asyncio.gather(
            child.call("wait", {"seconds": 0.01}, timeout_s=PATIENCE_S), child.call("add", {"number": 1}, timeout_s=9e9)
        )
        main = await child.call("thread", {}, timeout_s=PATIENCE_S)
        modules = await child.call("modules", {}, timeout_s=PATIENCE_S)
        await child.refresh(timeout_s=PATIENCE_S)
        return first, concurrent, main, modules, child.instance

    first, concurrent, main, modules, instance = in_child(code, use)
    assert (first, concurrent, main, modules) == (7, [7, 8], True, [])
    assert (instance.value, instance.double, instance.rows) == (8, 16, [0, 1])
    with pytest.raises(AttributeError, match=r"'lock': with rollout\.isolate, rewards only see"):
        _ = instance.lock


def test_attributes_are_copied_up_to_a_total_size(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(child_main, "_MAX_ATTRIBUTES_BYTES", 10)
    assert child_main._attributes(SimpleNamespace(a="x" * 6, b="y" * 6, c=1)) == {"a": "x" * 6, "c": 1}


def test_packages_are_whole_when_user_code_imports_them(code: UserCode):
    async def use(child: ChildProcess) -> Any:
        return await child.call("packages", {}, timeout_s=PATIENCE_S)

    assert in_child(code, use) == [False, True, "cohort.config.schema", "RolloutCollector", child_start.__file__]


def test_environments_of_libraries_are_loaded_as_in_the_parent(code: UserCode):
    """By `find_source`, which knows the libraries, and files too."""

    async def use(child: ChildProcess) -> Any:
        modules = await child.call("modules", {}, timeout_s=PATIENCE_S)
        return await child.call("add", {"number": 2}, timeout_s=PATIENCE_S), modules

    assert in_child(replace(code, of_library=True), use) == (7, [])


def test_results_that_are_not_json_keep_their_type_and_text(code: UserCode):
    async def use(child: ChildProcess) -> dict[str, Any]:
        names = ("tuple", "decimal", "number", "bytes", "set", "none")
        return {name: await child.call("give", {"what": name}, timeout_s=PATIENCE_S) for name in names}

    results = in_child(code, use)
    assert (results["tuple"], results["none"]) == ([1, "a"], None)
    assert (type(results["decimal"]).__name__, str(results["decimal"])) == ("Decimal", "1.5")
    assert (result_text(results["decimal"], where=""), result_text(results["set"], where="")) == ("1.5", "{1}")
    assert results["number"].item() == 0.5
    with pytest.raises(EnvironmentFailure, match="returned bytes; only text is supported"):
        result_text(results["bytes"], where="tool")


def test_exceptions_keep_their_name_and_the_child_lives_on(code: UserCode):
    async def use(child: ChildProcess) -> list[Any]:
        errors = []
        for method in ("fail", "leave", "missing"):
            with pytest.raises(ChildError) as caught:
                await child.call(method, {}, timeout_s=PATIENCE_S)
            errors.append(caught.value)
        return [*errors, await child.call("add", {"number": 1}, timeout_s=PATIENCE_S)]

    error, left, missing, value = in_child(code, use)
    assert (type(error).__name__, str(error), value) == ("KeyError", "'no such thing'", 6)
    assert 'box.py", line' in error.__notes__[0]
    assert (type(left).__name__, str(left)) == ("SystemExit", "4")
    assert "'Box' object has no attribute 'missing'" in str(missing)


def test_a_child_that_ends_says_how_and_shows_its_last_output(code: UserCode):
    text = failure(code, "exit", EnvironmentFailure)
    assert text == "the process of Box ended with exit code 3. Its last output:\nlast words"
    text = failure(code, "segfault", EnvironmentFailure)
    assert text.startswith("the process of Box was killed by SIGSEGV. Its last output:\nFatal Python error")
    assert "in segfault" in text
    # a process that it has forked keeps no connection open
    assert failure(code, "fork", EnvironmentFailure) == "the process of Box ended with exit code 5"


@pytest.mark.parametrize("method", ["hang", "hold"])
def test_a_call_that_hangs_is_killed(code: UserCode, method: str):
    assert failure(code, method, DeadlineMissed, timeout_s=0.2) == "did not return within 0.2 s"


@pytest.mark.parametrize("method", ["garbage", "unknown", "request"])
def test_a_child_without_a_valid_answer_is_killed(code: UserCode, method: str):
    assert "sent an invalid message" in failure(code, method, EnvironmentFailure)


def test_megabytes_arrive_up_to_the_limit(code: UserCode):
    async def use(child: ChildProcess) -> tuple[int, str]:
        many = await child.call("flood", {"megabytes": 8}, timeout_s=PATIENCE_S)
        with pytest.raises(ChildError) as caught:
            await child.call("flood", {"megabytes": 64}, timeout_s=PATIENCE_S)
        with pytest.raises(EnvironmentFailure, match="an argument cannot be passed to a process"):
            await child.call("add", {"number": lambda: 1}, timeout_s=PATIENCE_S)
        assert await child.call("add", {"number": 0}, timeout_s=PATIENCE_S) == 5
        return len(many), str(caught.value)

    length, text = in_child(code, use)
    assert (length, text) == (8 << 20, "67108878 bytes are too many for one message; at most 67108864")


def test_code_that_does_not_load_is_a_failure(code: UserCode, tmp_path: Path):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)\n")
    slow = UserCode(name="Slow", key="rollout.environment", use="slow.py:Slow")

    async def start(code: UserCode, timeout_s: float) -> str:
        with pytest.raises((EnvironmentFailure, ChildError)) as caught:
            await ChildProcess.start(code, timeout_s=timeout_s)
        return str(caught.value)

    wrong = UserCode(name="Box", key="rollout.environment", use="box.py:Box", args={"stop": 1})
    texts = run(start(slow, 0.5), start(wrong, PATIENCE_S))
    assert texts[0] == "the process of Slow was not ready within 0.5 s"
    assert "unexpected keyword argument 'stop'" in texts[1]


def test_cancelling_a_call_kills_the_child_and_what_it_started(code: UserCode):
    async def use(child: ChildProcess) -> list[int]:
        pids: list[int] = await child.call("spawn", {}, timeout_s=PATIENCE_S)
        assert all(map(is_running, pids))
        task = asyncio.ensure_future(child.call("hang", {}, timeout_s=PATIENCE_S))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return pids

    pids = in_child(code, use)
    until(lambda: not any(map(is_running, pids)))


def test_close_closes_the_instance_and_ends_the_process(code: UserCode, tmp_path: Path):
    async def use(child: ChildProcess) -> None:
        child.close()
        child.join(PATIENCE_S)
        assert child.process.poll() is not None

    in_child(code, use)
    assert (tmp_path / "closed").exists()


def test_a_function_named_close_is_only_called_as_a_tool(code: UserCode, tmp_path: Path):
    pool = ChildPool(
        UserCode(name="tools", key="rollout.tools", functions={"close": "box.py:close", "one": "box.py:one"})
    )
    assert run(pool.call("one", {}, timeout_s=PATIENCE_S)) == [1]
    pool.close()
    pool.join(PATIENCE_S)
    assert not (tmp_path / "closed").exists()


def test_a_forgotten_child_ends(code: UserCode):
    async def start() -> int:
        return (await ChildProcess.start(code)).process.pid

    (pid,) = run(start())
    gc.collect()
    until(lambda: not is_running(pid))


def test_secrets_are_not_in_its_environment(code: UserCode, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COHORT_SECRET_FILE", "/secret")
    monkeypatch.setenv("SEARCH_API_KEY", "of the user")

    async def use(child: ChildProcess) -> Any:
        return await child.call("environment", {}, timeout_s=PATIENCE_S)

    environment = in_child(code, use)
    assert "COHORT_SECRET_FILE" not in environment
    assert environment["SEARCH_API_KEY"] == "of the user"


def test_many_children_at_once_and_each_is_reused(code: UserCode):
    pool = ChildPool(UserCode(name="tools", key="rollout.tools", functions={"one": "box.py:one", "pid": "box.py:pid"}))

    async def use() -> tuple[set[int], int, list[int]]:
        first = await asyncio.gather(*(pool.call("pid", {}, timeout_s=PATIENCE_S) for _ in range(6)))
        second = await asyncio.gather(*(pool.call("pid", {}, timeout_s=PATIENCE_S) for _ in range(6)))
        return set(first), len(set(first)), [pid for pid in second if pid not in first]

    pids, number, others = run(use())[0]
    assert (number, others) == (6, [])
    pool.close()
    pool.join(PATIENCE_S)
    assert not any(map(is_running, pids))


def test_global_random_generators_are_seeded(code: UserCode):
    draw = UserCode(name="draw", key="rollout.tools", functions={"draw": "box.py:draw"})

    async def use() -> list[Any]:
        children = [await ChildProcess.start(draw) for _ in range(2)]
        return [
            await child.call("draw", {}, timeout_s=PATIENCE_S, seed=seed)
            for child, seed in ((children[0], 1), (children[1], 1), (children[0], 1), (children[0], 2))
        ]

    first, second, third, other = run(use())[0]
    assert first == second == third != other


def test_idle_children_that_have_died_are_not_used(code: UserCode):
    pool = ChildPool(UserCode(name="tools", key="rollout.tools", functions={"pid": "box.py:pid"}))

    async def use() -> tuple[int, int]:
        first = await pool.call("pid", {}, timeout_s=PATIENCE_S)
        os.kill(first, signal.SIGKILL)
        until(lambda: not any(child.is_alive for child in pool._pool._idle))
        return first, await pool.call("pid", {}, timeout_s=PATIENCE_S)

    first, second = run(use())[0]
    assert first != second
    pool.close()
    pool.join(PATIENCE_S)


# Programs, which reach the model of the parent

PROGRAM = """
import asyncio
import numpy as np

async def play(row, model):
    reply = await model.chat([{"role": "user", "content": row["q"]}])
    left = model.turns_left
    calls = await asyncio.gather(model.generate(np.array([1, 2])), model.generate([3], train=False))
    unwanted = asyncio.create_task(model.generate([99]))
    await model.generate([1])
    unwanted.cancel()
    await asyncio.wait([unwanted])
    cancelled = (await model.generate([98])).token_ids.tolist()
    try:
        await model.chat("again")
    except Exception as error:
        results = [call.token_ids.tolist() for call in calls]
        return [reply.content, left, *results, cancelled, type(error).__name__, error.end]
"""


class FakeModel:
    """Answers like the model of a trajectory, until its limit."""

    turns_left = 8
    cancelled = 0

    async def chat(self, messages: Any, **options: Any) -> Reply:
        if messages == "again":
            raise TrajectoryEnded("max_turns")
        self.turns_left -= 1
        return Reply(content=f"{messages[0]['content']}!", reasoning=None, tool_calls=(), errors=())

    async def generate(self, token_ids: list[int], *, train: bool, **options: Any) -> ModelCall:
        if token_ids == [99]:
            try:
                await asyncio.sleep(PATIENCE_S)
            finally:
                self.cancelled = 1
        token_ids = [self.cancelled] if token_ids == [98] else token_ids
        return ModelCall(
            context_ids=np.array(token_ids),
            token_ids=np.array([*token_ids, int(train)]),
            sampling_logprobs=np.zeros(len(token_ids) + 1),
            finish_reason="stop",
            policy_version=0,
        )


def test_a_program_samples_from_the_parents_model(tmp_path: Path):
    (tmp_path / "p.py").write_text(PROGRAM)
    code = UserCode(name="play", key="rollout.environment", functions={"run": f"{tmp_path}/p.py:play"})
    pool = ChildPool(code)
    model = FakeModel()
    play = pool.call("run", {}, positional=[{"q": "Hello"}], timeout_s=PATIENCE_S, model=model)  # type: ignore[arg-type]
    (result,) = run(play)
    assert result == ["Hello!", 7, [1, 2, 1], [3, 0], [1, 1], "TrajectoryEnded", "max_turns"]
    pool.close()
    pool.join(PATIENCE_S)
