"""Child processes: answers, deadlines, ends, and that nothing of them is left."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cohort.processes.child import PYTHON, Child, ChildFailed, ChildLate, end_group, start_in_group
from waiting import PATIENCE_S, group_of, is_running, until

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")

CHILD = """
import os, struct, subprocess, sys, time
from cohort.processes.child import serve

connection = int(sys.argv[-1])

def answer(message):
    what, *arguments = message
    if what == "echo":
        return arguments
    if what == "sleep":
        time.sleep(600)
    if what == "half a header":
        os.write(connection, b"\\0\\0"); time.sleep(600)
    if what == "half a message":
        os.write(connection, struct.pack("!i", 1000) + b"[1, "); time.sleep(600)
    if what == "2 GB":
        os.write(connection, struct.pack("!i", -1) + struct.pack("!Q", 2 << 30)); time.sleep(600)
    if what == "not JSON":
        os.write(connection, struct.pack("!i", 4) + b"\\x80\\x04N."); time.sleep(600)
    if what == "spawn":
        return [os.getpid(), subprocess.Popen(["sleep", "600"]).pid]
    if what == "fork and die":
        print("last words")
        if os.fork() == 0:
            time.sleep(600)
        os._exit(7)
    if what == "wait for children":
        try:
            os.wait()
        except ChildProcessError:
            return "none"
    if what == "print":
        print("x" * (20 << 20)); print("the end")
        return None

serve(answer)
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    (tmp_path / "child.py").write_text(CHILD)
    child = Child([*PYTHON, str(tmp_path / "child.py")])
    yield child
    child.kill()
    until(lambda: not group_of(child.process.pid))


def test_answers_are_data(child: Child):
    assert child.call(("echo", 1, (2.5, None), {"a": "\ud800 é"}), PATIENCE_S) == [1, [2.5, None], {"a": "\ud800 é"}]
    with pytest.raises(ChildFailed, match="sent an invalid message: UnicodeDecodeError"):
        child.call(("not JSON",), PATIENCE_S)  # a pickle


@pytest.mark.parametrize("what", ["sleep", "half a header", "half a message"])
def test_what_is_not_there_at_the_deadline_is_late(child: Child, what: str):
    child.call(("echo",), PATIENCE_S)
    start = time.monotonic()
    with pytest.raises(ChildLate, match=r"did not answer within 0\.3 s"):
        child.call((what,), 0.3)
    assert time.monotonic() - start < PATIENCE_S and not child.is_alive
    with pytest.raises(ChildFailed, match="was killed by SIGKILL"):
        child.call(("echo",), PATIENCE_S)


def test_a_large_message_to_a_child_that_does_not_read_is_late(child: Child):
    child.call(("echo",), PATIENCE_S)
    os.kill(child.process.pid, signal.SIGSTOP)
    with pytest.raises(ChildLate):
        child.call(("echo", "x" * (8 << 20)), 0.3)


def test_an_answer_that_is_announced_as_too_long_is_not_read(child: Child):
    with pytest.raises(ChildFailed, match=r"sent an invalid message: OSError\('bad message length'\)"):
        child.call(("2 GB",), PATIENCE_S)


def test_a_child_that_forks_and_dies(child: Child):
    with pytest.raises(ChildFailed) as caught:
        child.call(("fork and die",), PATIENCE_S)
    assert str(caught.value) == "ended with exit code 7. Its last output:\nlast words"
    until(lambda: not group_of(child.process.pid))


def test_the_end_of_its_output_is_kept(child: Child):
    child.call(("print",), PATIENCE_S)
    assert child.describe_output().endswith("xx\nthe end") and len(child.describe_output()) < 5000
    child.call(("echo",), PATIENCE_S)
    assert child.describe_output() == ""  # the file does not grow without end


def test_the_guard_is_none_of_its_children(child: Child):
    assert child.call(("wait for children",), PATIENCE_S) == "none"


def test_a_clusters_warning_does_not_end_it(child: Child):
    child.call(("echo",), PATIENCE_S)
    os.killpg(child.process.pid, signal.SIGUSR1)
    assert child.call(("echo", 1), PATIENCE_S) == [1]


def test_it_ends_when_its_parent_hangs_up(child: Child):
    child.call(("echo",), PATIENCE_S)
    child.hang_up()
    assert child.process.wait(PATIENCE_S) == 0


def test_it_outlives_the_thread_that_started_it(tmp_path: Path):
    (tmp_path / "child.py").write_text(CHILD)
    children: list[Child] = []
    thread = threading.Thread(target=lambda: children.append(Child([*PYTHON, str(tmp_path / "child.py")])))
    thread.start()
    thread.join()
    assert children[0].call(("echo", 1), PATIENCE_S) == [1]
    time.sleep(0.3)
    assert children[0].call(("echo", 2), PATIENCE_S) == [2]
    children[0].kill()


def test_a_fork_of_its_parent_does_not_end_it(tmp_path: Path):
    (tmp_path / "child.py").write_text(CHILD)
    program = """
import os, sys
from cohort.processes.child import PYTHON, Child
child = Child([*PYTHON, sys.argv[1]])
child.call(("echo",), 600)
if os.fork() == 0:
    sys.exit()
os.wait()
print(child.call(("echo", 1), 600))
"""
    command = [sys.executable, "-c", program, str(tmp_path / "child.py")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[1]\n"


PARENT = """
import sys, time
from cohort.processes.child import PYTHON, Child
child = Child([*PYTHON, sys.argv[1]])
print(*child.call(("spawn",), 60), flush=True)
child.call(("sleep",), 600)
"""


def test_nothing_outlives_a_killed_parent(tmp_path: Path):
    (tmp_path / "child.py").write_text(CHILD)
    with subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path / "child.py")], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        number, other = map(int, parent.stdout.readline().split())
        assert len(group_of(number)) == 3 and is_running(other)  # with the guard
        parent.kill()
    until(lambda: not group_of(number))


# of a command that knows nothing of its parent

SERVER = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("asked") or sys.exit(3))
print("up", flush=True)
time.sleep(600)
"""


def started(tmp_path: Path, code: str, **options: float) -> "subprocess.Popen[bytes]":
    with open(tmp_path / "log", "wb") as log:
        process = start_in_group([sys.executable, "-c", code], output=log, **options)  # type: ignore[arg-type]
    until(lambda: (tmp_path / "log").read_text() == "up\n")
    return process


def test_a_command_is_asked_to_end_before_it_is_killed(tmp_path: Path):
    process = started(tmp_path, SERVER)
    end_group(process, grace_s=PATIENCE_S)
    assert process.returncode == 3 and (tmp_path / "log").read_text() == "up\nasked\n"
    process = started(tmp_path, SERVER.replace("sys.exit(3)", "None"))  # which does not
    end_group(process, grace_s=0.3)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("has_pidfds", [True, False])
def test_a_guard_asks_the_command_of_a_killed_parent_to_end(tmp_path: Path, has_pidfds: bool):
    """Also where the kernel reports no ends of processes."""
    guard = "import os; from cohort.processes import guard\n"
    if not has_pidfds:
        guard += "del os.pidfd_open\n"
    (tmp_path / "guard.py").write_text(guard + "import sys; guard.main(int(sys.argv[1]), 60.0, sys.argv[2:])")
    (tmp_path / "server.py").write_text(SERVER)
    program = """
import os, subprocess, sys, time
command = [sys.executable, "guard.py", str(os.getpid()), sys.executable, "server.py"]
process = subprocess.Popen(command, stdout=open("log", "wb"), start_new_session=True)
print(process.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        number = int(parent.stdout.readline())
        until(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text() == "up\n")
        time.sleep(0.3)
        assert len(group_of(number)) == 2
        parent.kill()
    until(lambda: not group_of(number))
    assert (tmp_path / "log").read_text() == "up\nasked\n"


def test_a_command_that_does_not_exist_says_so(tmp_path: Path):
    with open(tmp_path / "log", "wb") as log:
        process = start_in_group([str(tmp_path / "nothing")], output=log)
    assert process.wait(PATIENCE_S) == 1
    assert (tmp_path / "log").read_text() == f"{tmp_path}/nothing: No such file or directory\n"
