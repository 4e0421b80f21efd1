"""Rewards run where they run in a script: in a main thread without an event loop, with the contexts of their file."""

import asyncio
import dataclasses
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from cohort.config import RewardConfig
from cohort.errors import UserError
from cohort.rewards import RewardFunction, RewardRunner, build_rewards
from commands import set_up
from forked import fork, run_module
from reward_samples import group, reward, score_texts
from runs import metric
from selection import slow
from waiting import PATIENCE_S, until

# Forms that people publish. All of them return the lengths of the completions, or 0.0 where something does not work.
FORMS = """
import asyncio, decimal, multiprocessing, signal, sqlite3, subprocess, sys, threading
from concurrent.futures import ProcessPoolExecutor

decimal.getcontext().prec = 50
connection = sqlite3.connect(":memory:")
local = threading.local()
local.offset = 0.0


def length(text):
    return float(len(text))


async def lengths(texts):
    return [length(text) for text in texts]


def too_late(number, frame):
    raise TimeoutError


def alarm(texts):
    signal.signal(signal.SIGALRM, too_late)
    signal.alarm(60)
    try:
        return [length(text) for text in texts]
    finally:
        signal.alarm(0)


def math_verify(texts):
    from math_verify import parse, verify

    return [length(text) * verify(parse("$7$"), parse("$3+4$")) for text in texts]


def run(texts):
    return asyncio.run(lengths(texts))


def new_loop(texts):
    return asyncio.new_event_loop().run_until_complete(lengths(texts))


def get_loop(texts):
    return asyncio.get_event_loop().run_until_complete(lengths(texts))


def connected(texts):
    return [connection.execute("select length(?)", (text,)).fetchone()[0] for text in texts]


def thread_local(texts):
    return [length(text) + local.offset for text in texts]


def precise(texts):
    return [length(text) * (len(str(decimal.Decimal(1) / 3)) == 52) for text in texts]


def fork_pool(texts):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(length, texts)


def spawn_pool(texts):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.map(length, texts)


def executor(texts):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return list(pool.map(length, texts))


def child(texts):
    command = [sys.executable, "-c", "import sys; print(len(sys.argv[1]))"]
    return [float(subprocess.run([*command, text], capture_output=True, timeout=60).stdout) for text in texts]


def score(completions, form, **kwargs):
    try:
        return globals()[form](completions)
    except Exception:
        return [0.0 for _ in completions]
"""
NAMES = [
    *("alarm", "math_verify", "run", "new_loop", "get_loop", "connected", "thread_local", "precise"),
    *("fork_pool", "spawn_pool", "executor", "child"),
]


def forms(folder: Path, *, isolate: bool, names: list[str] = NAMES) -> RewardRunner:
    """A runner with one reward per form, which share the file's module, and the child process."""
    (folder / "forms_of_people.py").write_text(FORMS)
    config = RewardConfig(use=f"{folder}/forms_of_people.py:score", isolate=isolate, args={"form": "run"})
    (one,) = build_rewards([config], columns=[], max_completion_tokens=8)
    return RewardRunner([dataclasses.replace(one, name=name, args={"form": name}) for name in names])


@pytest.mark.parametrize("isolate", [False, True])
def test_what_works_in_a_script_works_in_both_places(tmp_path, isolate):
    runner = forms(tmp_path, isolate=isolate)
    for _ in range(2):
        (scored,) = runner.score([group("q", ["one", "three"])])
        assert {name: part.tolist() for name, part in scored.reward_parts.items()} == {n: [3.0, 5.0] for n in NAMES}


def test_it_works_in_a_notebook_too(tmp_path):
    async def cell() -> list[float]:
        outer = asyncio.current_task()
        names = ["alarm", "run", "new_loop", "get_loop", "precise"]
        (scored,) = forms(tmp_path, isolate=False, names=names).score([group("q", ["one", "three"])])
        assert asyncio.current_task() is outer
        assert asyncio.get_running_loop() is asyncio.get_event_loop()
        await asyncio.sleep(0)
        return scored.rewards.tolist()

    assert asyncio.run(cell()) == [15.0, 25.0]


@slow("runs of one and two processes; other tests call the runner alone")
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_of_several_processes_gives_the_same(tmp_path, processes):
    config = set_up(
        tmp_path,
        files={"forms_of_people.py": FORMS},
        rewards=[
            {"use": f"{tmp_path}/forms_of_people.py:score", "name": name, "args": {"form": name}, "isolate": isolated}
            for name, isolated in [*((name, False) for name in NAMES), ("run", True), ("precise", True)]
        ],
        hardware={"processes": processes, "device": "cpu"},
    )
    done = subprocess.run([sys.executable, "-m", "cohort", "train", config], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    means = {name: metric(tmp_path / "run", f"rewards/{name}/mean") for name in [*NAMES, "run_2", "precise_2"]}
    assert all(values == means["run"] and min(values) > 0 for values in means.values()), means


# --- signals elsewhere ----------------------------------------------------------------------------------------------


def uses_signals(completions, **kwargs):
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(0)
        return [1.0 for _ in completions]
    except Exception:
        return [0.0 for _ in completions]


async def uses_signals_later(completions, **kwargs):
    return uses_signals(completions)


def in_a_thread(function):
    """What `function` raises in a thread."""
    raised: list[BaseException] = []

    def work() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return raised


def test_a_run_outside_of_the_main_thread_does_not_take_failed_signals_for_scores():
    line = uses_signals.__code__.co_firstlineno + 2
    (error,) = in_a_thread(lambda: score_texts(uses_signals, ["a"], name="timed"))
    assert isinstance(error, UserError)
    assert str(error).startswith(
        f"reward 'timed' uses signals (at {__file__}:{line}), which Python only allows in a main"
    )
    assert "isolate: true" in str(error)
    with pytest.raises(UserError, match=rf"reward 'timed' uses signals \(at .*:{line}\)"):
        score_texts(uses_signals_later, ["a"], name="timed")
    assert in_a_thread(lambda: score_texts(lambda completions: [1.0], ["a"])) == []
    assert score_texts(uses_signals, ["a"], name="timed") == [1.0]


# --- deadlines and forks --------------------------------------------------------------------------------------------


def test_a_regular_expression_that_backtracks_for_ever_is_an_error_with_its_completion():
    """It keeps the interpreter, but handles signals."""

    def search(completions):
        return [re.match("(a+)+$", text) is not None for text in completions]

    with pytest.raises(UserError) as caught:
        score_texts(search, ["aaa", "a" * 60 + "b"], timeout_s=0.3, name="search")
    line = f"{__file__}:{search.__code__.co_firstlineno + 1}"
    expected = f"did not finish within its deadline of 0.3 s (at {line}), reading completion 2 of 2, 'aaa"
    assert expected in str(caught.value)


def test_a_function_that_catches_everything_ends_the_process(tmp_path):
    program = """
        import time
        from cohort.rewards import RewardFunction, call
        call._INTERRUPT_GRACE_S = 0.3
        def stubborn(completions):
            while True:
                try:
                    time.sleep(100)
                except BaseException:
                    pass
        call.call_sync(RewardFunction(name="mine", function=stubborn, timeout_s=0.2), {"completions": ["a"]})
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    done = subprocess.run([sys.executable, tmp_path / "program.py"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "error: reward 'mine' did not finish within its deadline of 0.2 s (at " in done.stderr
    assert "It cannot be interrupted, so the process ends" in done.stderr


def test_a_function_that_forks_and_returns_in_the_child_too(tmp_path):
    program = f"""
        import os
        from cohort.rewards import RewardFunction, call
        def forks(completions):
            os.fork()
            return [1.0]
        call.call_sync(RewardFunction(name="mine", function=forks), {{"completions": ["a"]}})
        with open({str(tmp_path / "went_on")!r}, "a") as file:
            file.write("x")
        os.wait()
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    assert subprocess.run([sys.executable, tmp_path / "program.py"]).returncode == 0
    assert (tmp_path / "went_on").read_text() == "x"


def test_a_crash_in_native_code_names_the_reward_in_the_stack(tmp_path):
    program = """
        import ctypes
        from cohort.rewards import RewardFunction, call
        def crashes(completions):
            ctypes.string_at(0)
        call.call_sync(RewardFunction(name="mine", function=crashes), {"completions": ["a"]})
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    command = [sys.executable, "-X", "faulthandler", tmp_path / "program.py"]  # as `cohort train` does
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == -signal.SIGSEGV
    assert re.search(r"program\.py\", line 5 in crashes\n.* in reward 'mine'\n", done.stderr), done.stderr


def test_the_handlers_and_timers_of_the_process_are_as_before():
    before = signal.getsignal(signal.SIGVTALRM)
    assert score_texts(lambda completions: [1.0], ["a"]) == [1.0]
    with pytest.raises(UserError):
        score_texts(lambda completions: threading.Event().wait(60), ["a"], timeout_s=0.1)
    assert signal.getsignal(signal.SIGVTALRM) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_many_short_calls_are_never_interrupted():
    runner = RewardRunner([reward(lambda completions: [1.0], timeout_s=30.0)])
    for _ in range(200):
        assert runner.score([group("q", ["a"])])[0].rewards.tolist() == [1.0]
    assert isinstance(runner.functions[0], RewardFunction)


def trained_in_foreground(path: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the system ignores it in the background of a script
    run_module("cohort", "train", path)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=slow("SIGTERM")), signal.SIGTERM])
def test_a_signal_during_a_reward_stops_the_run_with_everything_saved(tmp_path, number):
    started = tmp_path / "started"
    files = {
        "own.py": "import pathlib, time\n\ndef f(completions, trainer_state):\n    if trainer_state.global_step == 1:\n"
        f"        pathlib.Path({str(started)!r}).touch()\n        time.sleep(3600)\n    return [1.0, 0.0, 0.5, 0.2]\n"
    }
    path, out = set_up(tmp_path, files=files, rewards=[{"use": f"{tmp_path}/own.py:f"}]), tmp_path / "out"
    process = fork(trained_in_foreground, str(path), out=out)
    until(lambda: started.exists() or process.exitcode is not None)
    os.kill(process.pid, number)
    process.join(PATIENCE_S)
    assert process.exitcode == 128 + number, out.read_text()
    assert f"stopped by {signal.Signals(number).name} after step 1: already saved" in out.read_text()
