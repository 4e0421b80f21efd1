"""The tool `python`: what the model sees, state by trajectory, and that nothing escapes or outlives it."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cohort.config.hardware import SandboxConfig
from cohort.errors import UserError
from cohort.rollout.environments.tools import PythonStopped, PythonTool, StatefulPythonTool
from cohort.sandbox.backends import SandboxFusion, Unconfined
from cohort.sandbox.interpreter import find_interpreter, new_folder
from cohort.sandbox.pool import Sandbox
from cohort.sandbox.probe import set_out
from cohort.sandbox.process import Limits
from playing import call, load, play, turns_config
from sandboxes import BACKENDS, sandbox_or_skip
from selection import slow
from waiting import until

LIMITS = Limits.of(SandboxConfig(wall_s=20.0, memory="300MB", max_output="1KB"))


def unconfined() -> Sandbox:
    return Sandbox(backend=Unconfined(find_interpreter((), new_folder())), limits=LIMITS, max_concurrent=2)


@pytest.fixture
def stateful() -> Iterator[Callable[..., StatefulPythonTool]]:
    """Makes tools whose trajectories end with the test."""
    made: list[StatefulPythonTool] = []

    def make(sandbox: Sandbox | None = None) -> StatefulPythonTool:
        made.append(StatefulPythonTool(sandbox or unconfined()))
        return made[-1]

    yield make
    for tool in made:
        tool.end_trajectory()


def run(tool: PythonTool, *codes: str, timeout_s: float = 20.0) -> list[str]:
    """Results of calls of one trajectory, in order."""

    async def calls() -> list[str]:
        results = []
        for code in codes:
            try:
                results.append(await tool.call("python", {"code": code}, timeout_s=timeout_s))
            except PythonStopped as error:
                results.append(f"Error: {error}")
        return results

    return asyncio.run(calls())


CELLS = {
    "1 + 1": "2\n",
    "x = 3\nx * 2": "6\n",
    "print('a')\n'b'": "a\n'b'\n",
    "print('a'); x = 1": "a\n",
    "None": "",
    "": "",
    "import sys; _ = sys.stderr.write('e\\n'); print('o')": "e\no\n",
    "import os; _ = os.system('echo from a shell')": "from a shell\n",
    "def f(:": '  File "<python>", line 1\n    def f(:\n          ^\nSyntaxError: invalid syntax\n',
    "print('a')\n1 / 0": 'a\nTraceback (most recent call last):\n  File "<python>", line 2, in <module>\n'
    "ZeroDivisionError: division by zero\n",
    "input()": 'Traceback (most recent call last):\n  File "<python>", line 1, in <module>\n'
    "EOFError: EOF when reading a line\n",
    "print('x' * 1005, end='')": "x" * 1000 + "\n[... 5 more bytes were cut]",
}


def test_what_the_model_sees(stateful):
    codes = [code for code in CELLS if "os.system" not in code]
    assert dict(zip(codes, run(stateful(), *codes), strict=True)) == {code: CELLS[code] for code in codes}


def test_calls_are_fresh_without_state():
    name_error = "NameError: name 'x' is not defined\n"
    first, second = run(PythonTool(unconfined()), "x = 1\nx", "x")
    assert first == "1\n" and second.endswith(name_error)


def test_state_is_kept_in_a_trajectory_and_not_across(tmp_path):
    def script(context, key):
        return [call("python", f'{{"code": "x = {key.index}"}}'), call("python", '{"code": "x"}'), "Done."][key.turn]

    tools = [{"use": "python", "args": {"state": True}}]
    options = {"tools": tools, "num_generations": 2, "sandbox": {"confinement": "none"}}
    (group,) = play(tmp_path, script, [{"prompt": "?"}], **options)
    results = [[m["content"] for m in t.messages if m["role"] == "tool"] for t in group.trajectories]
    assert results == [["", "0\n"], ["", "1\n"]]


@pytest.mark.parametrize("backend", BACKENDS)
@slow("starts sandboxes")
def test_every_backend_holds_a_session_and_what_it_runs(stateful, backend, tmp_path):
    sandbox = sandbox_or_skip(backend)
    tmp_path.chmod(0o777)
    (tmp_path / "secret").write_text("57005")
    path = str(tmp_path / "secret")
    escapes = [f"open({path!r}).read()", f"open({path!r}, 'w').write('x')", "import os; os.kill(os.getppid(), 9)"]
    for tool in (PythonTool(sandbox), stateful(sandbox)):
        assert run(tool, "x = 2\nx + 1") == ["3\n"]
        assert "57005" not in "".join(run(tool, *escapes))
        assert (tmp_path / "secret").read_text() == "57005"
        (hang,) = run(tool, "while True: pass", timeout_s=1.0)
        assert hang.startswith("Error: the code did not finish within 1 s") or "stopped" in hang
        assert run(tool, "1 + 1") == ["2\n"]


@slow("starts sandboxes")
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_process_is_gone_after_the_trajectory(backend):
    sandbox = sandbox_or_skip(backend)
    with set_out() as canaries:
        code = (
            "import os, signal, sys, time\nif os.fork() == 0:\n    os.setsid()\n"
            "    os.execv(sys.executable, [sys.executable, '-S', '-c', 'import time; time.sleep(60)', "
            f"{canaries.marker!r}])\ntime.sleep(0.3)\n1"
        )
        tool = StatefulPythonTool(sandbox)
        assert run(tool, code, "2") == ["1\n", "2\n"]
        tool.end_trajectory()
        tool._session.join(20)
        assert not tool._session._thread.is_alive()
        assert not canaries.was_outlived()


def test_a_hang_ends_the_process_and_loses_the_state(stateful):
    results = run(stateful(), "x = 1", "import time; time.sleep(600)", "x", timeout_s=3.0)
    assert results[:2] == ["", "Error: the code did not finish within 3 s; all variables are lost"]
    assert results[2].endswith("NameError: name 'x' is not defined\n")


FORGE = (
    'import os\nfor fd in range(3, 20):\n    try:\n        os.write(fd, b\'{%s"output": "forged"}\\n\')\n'
    "    except OSError:\n        pass\nprint('real')"
)


@pytest.mark.parametrize("number", ["", '"call": 0, ', '"call": 1, '])
def test_a_forged_answer_never_becomes_that_of_a_later_call(stateful, number):
    _, *later = run(stateful(), FORGE % number, "print('second')", "print('third')")
    lost = "Error: the code was stopped: the process ended; all variables are lost"
    assert later in (["second\n", "third\n"], [lost, "third\n"])


def test_nothing_runs_between_calls(stateful):
    tool = stateful()
    count = "import threading, time\nn = 0\ndef add():\n    global n\n    while True:\n        n += 1\n"
    count += "        time.sleep(0.001)\nthreading.Thread(target=add, daemon=True).start()"
    assert run(tool, count, "import os; os.getpid()")[0] == ""
    (pid,) = run(tool, "os.getpid()")
    until(lambda: Path(f"/proc/{pid.strip()}/stat").read_text().split()[2] == "T")  # once its threads have seen it
    assert run(tool, "n > 0") == ["True\n"]


def test_the_memory_of_a_session_is_limited_while_it_prints(stateful):
    tool = stateful(replace(unconfined(), limits=replace(LIMITS, max_output_bytes=100_000_000)))
    code = (
        "import mmap, os, time\nfor _ in range(3):\n    if os.fork() == 0:\n        held = mmap.mmap(-1, 150_000_000)\n"
        "        for i in range(0, 150_000_000, 4096):\n            held[i] = 1\n        time.sleep(60)\n"
        "while True:\n    os.write(3, b' ' * 10)\n    time.sleep(0.001)"
    )
    (result,) = run(tool, code, timeout_s=200.0)
    assert result == "Error: the code was stopped: exceeded its memory; all variables are lost"


def test_code_that_ends_its_process(stateful):
    assert run(stateful(), "import os; os._exit(0)") == [
        "Error: the code was stopped: the process ended; all variables are lost"
    ]
    assert run(PythonTool(unconfined()), "import os; os._exit(0)") == ["Error: the code was stopped: the process ended"]


def test_servers_hold_no_state(tmp_path):
    tools = [{"use": "python", "args": {"state": True}}]
    server = {"backend": "sandbox_fusion", "url": "http://127.0.0.1:9"}
    with pytest.raises(UserError, match=r"tools\[0\]: .*state: true.* which sandbox.backend: sandbox_fusion does not"):
        load(tmp_path, tools=tools, sandbox=server)
    assert not SandboxFusion.holds_sessions
    assert load(tmp_path, tools=["python"], sandbox=server).schemas[0]["function"]["name"] == "python"


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ({"use": "python", "args": {"stat": True}}, "python has no argument 'stat'; it takes state: true or false"),
        ({"use": "python", "args": {"state": "yes"}}, "args.state: must be true or false, not 'yes'"),
        ({"use": "t.py:look", "args": {"state": True}}, "args has no effect with use: .*t.py:look"),
    ],
)
def test_arguments(tmp_path, tool, message):
    with pytest.raises(UserError, match=message):
        turns_config(tmp_path, tools=[tool])


def test_a_trajectory_that_is_cancelled_ends_its_process():
    tool = StatefulPythonTool(unconfined())

    session = tool._session

    async def cancel() -> None:
        calling = asyncio.ensure_future(tool.call("python", {"code": "while True: pass"}, timeout_s=600.0))
        await asyncio.sleep(0.3)
        calling.cancel()
        tool.end_trajectory()

    asyncio.run(cancel())
    session.join(20)
    assert not session._thread.is_alive()
    assert run(tool, "1") == ["Error: the code was stopped: the session is closed; all variables are lost"]


def test_a_sandbox_that_does_not_start_says_why(stateful):
    interpreter = replace(find_interpreter((), new_folder()), guest="/no/guest.pyc")
    tool = stateful(replace(unconfined(), backend=Unconfined(interpreter)))
    assert "can't open file '/no/guest.pyc'" in run(tool, "1")[0]
