"""The escape suite: with every backend of this machine, hostile code is contained and judged right.

`HONEST` is the control: the same tests pass for code that is right.
"""

import copy
import inspect
import os
import signal
import struct
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from builtin_rewards import Builtin
from cohort.sandbox import Job
from cohort.sandbox.probe import probe, set_out
from cohort.sandbox.process import descendants
from cohort.sandbox.system_calls import refused
from escape_attempts import ATTEMPTS, PRELUDE
from sandboxes import BACKENDS, graded, sandbox_or_skip
from selection import slow

HONEST = "def f(x):\n    return x + 1\n"
CALLS = ["assert f(1) == 2", "assert f(2) == 3", "assert f(3) == 4"]
SHARED = ["assert f(1) != 1 and f(1) == 2", "assert all(f(i) == i + 1 for i in range(5))"]
PYTEST = "from solution import f\n\ndef test_one():\n    assert f(1) == 2\n\ndef test_two():\n    assert f(2) == 3\n"
STDIN = {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "3\n"]}


@pytest.fixture(params=BACKENDS)
def sandbox(request):
    return sandbox_or_skip(request.param)


HARMFUL = {
    "fork bomb": "import os\nwhile True:\n    os.fork()\n",
    "memory bomb": "x = []\nwhile True:\n    x.append(bytearray(10_000_000))\n",
    "infinite loop": "while True:\n    pass\n",
    "output flood": "while True:\n    print('x' * 10_000)\n",
    "flood of the channel": "import os\nwhile True:\n    for fd in range(3, 20):\n        try:\n"
    "            os.write(fd, b'x' * 100_000)\n        except OSError:\n            pass\n",
    "ignoring signals": "import signal\nfor number in (signal.SIGTERM, signal.SIGXCPU, signal.SIGINT):\n"
    "    signal.signal(number, signal.SIG_IGN)\nwhile True:\n    pass\n",
    "exit before the tests": "import os\nos._exit(0)\n",
    "sys.exit": "import sys\nsys.exit(0)\n",
    "killing everything": "import os, signal\nos.kill(-1, signal.SIGKILL)\n",
    "deep recursion": "def f(x):\n    return f(x)\n",
    "closing all files": "import os\nos.closerange(0, 1000)\n",
}


@pytest.mark.parametrize("code", HARMFUL.values(), ids=HARMFUL)
def test_harmful_code_is_worth_nothing_and_honest_code_still_passes(sandbox, code):
    assert graded(sandbox, code, CALLS) == 0.0
    assert graded(sandbox, HONEST, CALLS) == 1.0


FORGERIES = {
    "forged output": "print('all passed')\nimport os\nos.write(1, b'3 passed in 0.01s\\n')\n",
    "forged records": "import os, json\nfor fd in range(3, 30):\n    for i in range(3):\n        try:\n"
    "            os.write(fd, json.dumps({'token': '', 'case': i, 'passed': True, 'value': 2}).encode() + b'\\n')\n"
    "        except OSError:\n            pass\nos._exit(0)\n",
    "an object equal to everything": "class Same(int):\n    def __eq__(self, other):\n        return True\n"
    "    def __ne__(self, other):\n        return False\n    __hash__ = None\ndef f(x):\n    return Same(x)\n",
    "no plain value": "class Same:\n    def __eq__(self, other):\n        return True\ndef f(x):\n    return Same()\n",
    "builtins": "import builtins, sys\nsys.exit = print = builtins.print = lambda *a, **k: None\n"
    "builtins.abs = builtins.all = builtins.isinstance = lambda *a: True\ndef f(x):\n    return x\n",
    "json": 'import json\njson.dumps = lambda record: \'{"case": 0, "value": 2}\'\ndef f(x):\n    return x\n',
}


@pytest.mark.parametrize("code", FORGERIES.values(), ids=FORGERIES)
def test_calls_cannot_be_forged(sandbox, code):
    assert graded(sandbox, code, CALLS) == 0.0


SHARED_FORGERIES = {
    "exit before the tests": "import os\nos._exit(0)\n",
    "exit in the first test": "import os\ndef f(x):\n    os._exit(0)\n",
    "exit by exception": "def f(x):\n    raise SystemExit(0)\n",
    "forged output": "def f(x):\n    print('2 passed')\n    return 0\n",
    "forged records": FORGERIES["forged records"],
    "unittest and print": "import builtins, unittest, sys\nbuiltins.print = sys.exit = lambda *a: None\n"
    "unittest.TestCase.assertEqual = lambda *a: None\ndef f(x):\n    return 0\n",
}


@pytest.mark.parametrize("code", SHARED_FORGERIES.values(), ids=SHARED_FORGERIES)
@pytest.mark.parametrize("tests", [SHARED, PYTEST], ids=["asserts", "pytest"])
def test_early_exits_and_forged_output_fail_in_a_shared_interpreter(sandbox, code, tests):
    assert graded(sandbox, code, tests) == 0.0


def test_the_shared_interpreter_is_named_in_the_results(sandbox):
    reward = Builtin("code", sandbox=sandbox)
    assert reward([HONEST, HONEST, HONEST], tests=[SHARED, PYTEST, CALLS]) == [1.0, 1.0, 1.0]
    assert reward.last_counts == {"shared_interpreter": 2}
    assert reward.last_details == [
        '{"tests": ["passed", "passed"], "shared_interpreter": true}',
        '{"tests": ["passed", "passed"], "shared_interpreter": true}',
        '{"tests": ["passed", "passed", "passed"]}',
    ]


def test_programs_that_misbehave(sandbox):
    assert graded(sandbox, "print(int(input()) + 1)", STDIN) == 1.0
    for code in ("while True: print('2')", "import os\nos.kill(os.getppid(), 9)", "print(2); raise SystemExit(3)"):
        assert graded(sandbox, code, STDIN, case_s=2.0) == 0.0


SEARCH = """
import gc, os, sys
def f(x):
    seen = repr([o for o in gc.get_objects() if isinstance(o, (str, list, dict, tuple))])
    frame = sys._getframe()
    while frame:
        seen += repr(frame.f_locals) + repr(frame.f_globals)
        frame = frame.f_back
    for path in ("/proc/self/environ", "/proc/self/cmdline", "/proc/1/environ", "/proc/1/cmdline"):
        try:
            seen += open(path).read()
        except OSError:
            pass
    return str(57004 + x) in seen
"""


def test_expected_values_are_not_in_the_sandbox(sandbox):
    tests = [{"call": "f(1)", "expected": False}, {"call": "str(1)", "expected": "57005"}]
    reward = Builtin("code", sandbox=sandbox)
    assert reward([SEARCH], tests=[tests], score="fraction") == [0.5]
    control = [{"call": "f(1)", "expected": True}, {"call": "str(57005)", "expected": "57005"}]
    assert graded(sandbox, SEARCH, control) == 1.0


READER = """
def f(path):
    try:
        return open(path).read(10)
    except OSError:
        return "denied"
"""
LINKS = """
import os
def f(path):
    for make in (os.symlink, os.link):
        try:
            make(path, make.__name__)
            open(make.__name__, "a").write("x")
            return open(make.__name__).read()
        except OSError:
            pass
    return "denied"
"""
CONNECT = """
import socket
def f(address):
    try:
        with socket.socket(socket.AF_INET if isinstance(address, tuple) else socket.AF_UNIX) as client:
            client.settimeout(2)
            client.connect(address)
    except OSError:
        return "denied"
    return "connected"
"""
KILL = """
import ctypes, os, signal
def f(pid):
    try:
        os.kill(pid, signal.SIGKILL)
        return "killed"
    except OSError:
        return "denied" if ctypes.CDLL(None).ptrace(16, pid, 0, 0) == -1 else "traced"
"""
# name -> code, and what it tries to reach
OUT_OF_REACH = {
    "files": (
        READER,
        lambda out: [str(out.folder / "secret"), "/etc/passwd", inspect.getfile(Job), f"/proc/{os.getpid()}/environ"],
    ),
    "links": (LINKS, lambda out: [str(out.folder / "secret")]),
    "network": (CONNECT, lambda out: [("127.0.0.1", out.port)]),
    "local sockets": (CONNECT, lambda out: [f"\0{out.socket_name}", out.socket_path]),
    "processes": (KILL, lambda out: [out.victim.pid, os.getpid()]),
}


@pytest.mark.parametrize("name", OUT_OF_REACH)
def test_what_is_outside_is_out_of_reach(sandbox, name):
    code, targets = OUT_OF_REACH[name]
    with set_out() as outside:
        tests = [{"call": f"f({target!r})", "expected": "denied"} for target in targets(outside)]
        assert graded(sandbox, code, tests) == 1.0
        assert not (outside.was_written() or outside.was_killed())


@pytest.mark.parametrize("name", OUT_OF_REACH)
def test_without_a_sandbox_it_is_in_reach(tmp_path, monkeypatch, name):
    """The control."""
    monkeypatch.chdir(tmp_path)
    code, targets = OUT_OF_REACH[name]
    with set_out() as outside:
        namespace = {}
        exec(code, namespace)
        assert namespace["f"](targets(outside)[0]) != "denied"


def test_our_environment_is_not_passed_on(sandbox, monkeypatch):
    monkeypatch.setenv("COHORT_TEST_SECRET", "57005")
    code = (
        "import os\ndef f():\n    found = repr(dict(os.environ))\n    for pid in ('self', '1', '2', os.getppid()):\n"
        "        try:\n            found += open(f'/proc/{pid}/environ').read()\n        except OSError:\n"
        "            pass\n    return '57005' in found\n"
    )
    assert graded(sandbox, code, [{"call": "f()", "expected": False}]) == 1.0


WRITER = """
import os
def f(folder, others):
    new, old = f"{folder}/written", f"{folder}/secret"
    acts = [lambda path=path: open(path, "a").write("x") for path in (*others, new, old)]
    acts += [lambda: os.truncate(old, 0), lambda: os.mkdir(f"{folder}/made"), lambda: os.chmod(old, 0)]
    acts += [lambda: os.utime(old, (0, 0)), lambda: os.rename(old, new), lambda: os.remove(new)]
    done = []
    for i, act in enumerate(acts):
        try:
            act()
            done.append(i)
        except OSError:
            pass
    return done
"""


def test_nothing_outside_can_be_written(sandbox, tmp_path):
    tmp_path.chmod(0o777)
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o666)
    before = (secret.stat().st_mode, secret.stat().st_mtime)
    name = f"cohort-escape-{os.getpid()}"
    folders = ("", "/usr/lib", "/var/tmp", "/dev/shm", "/proc", os.path.dirname(os.__file__))
    others = [f"{folder}/{name}" for folder in folders]
    try:
        assert graded(sandbox, WRITER, [{"call": f"f({str(tmp_path)!r}, {others})", "expected": []}]) == 1.0
        # under sandlock nobody sets times, and only code of root sets modes
        refused_here = {5} | ({4} if os.geteuid() else set()) if sandbox.backend.name == "sandlock" else set()
        here = [i for i in range(8) if i not in refused_here]
        assert graded(sandbox, WRITER, [{"call": "f('.', [])", "expected": here}]) == 1.0  # the control
    finally:
        assert not [path for path in others if os.path.exists(path)]
    assert secret.read_text() == "secret"
    assert (secret.stat().st_mode, secret.stat().st_mtime) == before
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_open_files_are_limited(sandbox):
    code = (
        "held = []\ndef f(number):\n    try:\n        held.extend(open('/dev/null') for _ in range(number))\n"
        "    except OSError:\n        return 'refused'\n"
    )
    tests = [{"call": "f(40)", "expected": None}, {"call": "f(1000)", "expected": "refused"}]
    assert graded(sandbox, code, tests) == 1.0


def test_nothing_outlives_the_verdict(sandbox):
    with set_out() as canaries:
        code = (
            "import os, signal, sys\nif os.fork() == 0:\n    os.setsid()\n"
            "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "    if os.fork() == 0:\n        os.execv(sys.executable, [sys.executable, '-S', '-c', "
            f"'import time; time.sleep(60)', {canaries.marker!r}])\n    os._exit(0)\n"
            "import time\ntime.sleep(0.3)\ndef f(x):\n    return x + 1\n"
        )
        assert graded(sandbox, code, CALLS) == 1.0
        assert not canaries.was_outlived()


def test_the_disk_cannot_be_filled(sandbox):
    code = (
        "def f():\n    total = 0\n    try:\n        for i in range(100):\n"
        "            with open(f'{i}', 'wb', buffering=0) as file:\n"
        "                total += file.write(bytes(1_000_000))\n    except OSError:\n        pass\n"
        "    return total < 10_000_000\n"
    )
    assert graded(sandbox, code, [{"call": "f()", "expected": True}]) == 1.0
    big = (
        "def f():\n    try:\n        open('x', 'wb').write(bytes(5_000_000))\n"
        "    except OSError:\n        return 'full'\n"
    )
    assert graded(sandbox, big, [{"call": "f()", "expected": "full"}]) == 1.0


def test_a_run_leaves_nothing_for_the_next(sandbox):
    code = "import os\ndef f():\n    seen = os.path.exists('left')\n    open('left', 'w').close()\n    return seen\n"
    for _ in range(2):
        assert graded(sandbox, code, [{"call": "f()", "expected": False}]) == 1.0


@slow("the memory of one process is limited in every run")
def test_the_memory_of_all_processes_together_is_limited(sandbox):
    code = (
        "import os, time\nfor i in range(8):\n    if os.fork() == 0:\n        try:\n"
        "            held = bytearray(b'x' * 100_000_000)\n            open(f'held{i}', 'w').close()\n"
        "            time.sleep(30)\n        finally:\n            os._exit(0)\ntime.sleep(3)\n"
        "if sum(name.startswith('held') for name in os.listdir('.')) > 4:\n    def f(x):\n        return x + 1\n"
    )
    assert graded(sandbox, code, CALLS) == 0.0


OTHER_CALLS = {"x86_64": {"clone": 56, "sendto": 44}, "aarch64": {"clone": 220, "sendto": 206}}


def achieved(sandbox, attempts):
    """What attempts achieved: title -> value."""
    numbers = refused(attributes=True, owners=True) | OTHER_CALLS[os.uname().machine]
    with set_out() as canaries:
        outside = {
            "pid": canaries.victim.pid,
            "folder": str(canaries.folder),
            "port": canaries.port,
            "path": canaries.socket_path,
            "name": canaries.socket_name,
        }
        case = {"function": "f", "arguments": [numbers, outside, attempts]}
        parts = {"before": "", "code": PRELUDE, "after": ""}
        outcome = sandbox.run(Job(request={"kind": "functions", "token": "", "parts": parts, "cases": [case]}))
        assert not (canaries.was_written() or canaries.was_killed() or canaries.was_outlived())
    (result,) = (record for record in outcome.records if "case" in record)
    return dict(result["value"]["d"])


@pytest.mark.parametrize("family", ATTEMPTS)
def test_attempts(sandbox, family):
    assert achieved(sandbox, ATTEMPTS[family]) == {}


@pytest.mark.extras
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="some of the attempts are for x86-64")
def test_the_filter_is_what_refuses_many_attempts():
    sandbox = sandbox_or_skip("bubblewrap")
    backend = copy.copy(sandbox.backend)
    backend._filter = struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000)  # allow all
    sandbox = replace(sandbox, backend=backend)
    titles = [title for family in ATTEMPTS.values() for title in achieved(sandbox, family)]
    assert len(titles) > 50
    assert {"key in keyring -3", "by interrupt: getpid", "socket of inet, type 1", "watch by inotify"} <= set(titles)
    failed = {name for name, how in probe(sandbox).items() if how}
    assert failed >= {"keyrings", "system calls", "foreign system calls", "network"}


HOLDING = """
import ctypes, mmap, os, socket, threading, time
held = []

def anonymous(size):
    held.append(bytearray(b"x" * size))

def files_in_memory(size):
    for i in range(size // 4_000_000):
        held.append(os.memfd_create("x"))
        os.write(held[-1], bytes(4_000_000))

def mapped_files_in_memory(size):
    for i in range(size // 4_000_000):
        file = os.memfd_create("x")
        os.write(file, bytes(4_000_000))
        held.append(mmap.mmap(file, 4096))
        os.close(file)

def shared(size):
    for i in range(size // 16_000_000):
        held.append(mmap.mmap(-1, 16_000_000))
        for at in range(0, 16_000_000, 4096):
            held[-1][at] = 1
        held[-1].resize(4096)  # the rest stays in memory

def in_a_thread(size):
    done = threading.Event()
    def fill():
        anonymous(size)
        done.set()
        time.sleep(60)
    threading.Thread(target=fill).start()
    done.wait()

def f(way, size):
    for i in range(5):
        read, write = os.pipe()
        if os.fork() == 0:
            globals()[way](size // 5)
            os.write(write, b"x")
            if way == "in_a_thread":
                ctypes.CDLL(None).syscall(EXIT, 0)  # of the first thread
            time.sleep(60)
            os._exit(0)
        os.close(write)
        if not os.read(read, 1):
            return "refused"
    time.sleep(1)
    return "held"
""".replace("EXIT", "60" if os.uname().machine == "x86_64" else "93")


@pytest.mark.parametrize("way", ["anonymous", "files_in_memory", "mapped_files_in_memory", "shared", "in_a_thread"])
def test_memory_cannot_be_hidden(sandbox, way):
    assert graded(sandbox, HOLDING, [{"call": f"f({way!r}, 600_000_000)", "expected": "held"}]) == 0.0
    assert graded(sandbox, HOLDING, [{"call": f"f({way!r}, 100_000_000)", "expected": "held"}]) == 1.0  # the control


DELETED = """
import mmap, os, time
held = []

def f(size, number, mapped):
    for i in range(number):
        file = os.open("x", os.O_RDWR | os.O_CREAT)
        try:
            os.write(file, bytes(size))
        except OSError:
            return "full"
        os.unlink("x")
        held.append(file)
        if mapped:
            held.append(mmap.mmap(file, 4096))
            os.close(file)
    time.sleep(1)
    return "held"
"""


@pytest.mark.parametrize("mapped", [False, True])
def test_deleted_files_count(sandbox, mapped):
    assert graded(sandbox, DELETED, [{"call": f"f(1_000_000, 40, {mapped})", "expected": "held"}]) == 0.0
    assert graded(sandbox, DELETED, [{"call": f"f(1_000_000, 1, {mapped})", "expected": "held"}]) == 1.0  # the control


TRAINER = """
import sys
from cohort.config.hardware import SandboxConfig
from cohort.sandbox import Job, Sandbox
from cohort.sandbox.choose import _BACKENDS, _with_backend
from cohort.sandbox.interpreter import find_interpreter, new_folder

config = SandboxConfig(backend=sys.argv[1])
interpreter = find_interpreter((), new_folder())
sandbox = _with_backend(_BACKENDS[sys.argv[1]](interpreter, config), config, interpreter)
parts = {"before": "", "code": sys.argv[2], "after": ""}
sandbox.run(Job(request={"kind": "functions", "token": "", "parts": parts, "cases": []}))
"""
LEAVING = (
    "import os, sys, time\nfor i in range(3):\n    if os.fork() == 0:\n        os.setsid()\n"
    "        os.execv(sys.executable, [sys.executable, '-S', '-c', "
    "'import os, time; os.dup2(0, 9); time.sleep(60)', {!r}])\n"
    "time.sleep(60)\n"
)


@pytest.mark.parametrize("victim", ["trainer", "supervisor"])
def test_nothing_outlives_a_death(sandbox, victim):
    """The supervisor is the process that confines: sandlock's, or the outer one of bubblewrap."""
    with set_out() as canaries:
        command = [sys.executable, "-c", TRAINER, sandbox.backend.name, LEAVING.format(canaries.marker)]
        with subprocess.Popen(command) as trainer:
            try:
                wait_until(lambda: sum(os.path.lexists(f"/proc/{pid}/fd/9") for pid in canaries.marked()) == 3)
                (first,) = descendants(trainer.pid)[1:2]
                died = {"trainer": trainer.pid, "supervisor": first}[victim]
                if victim == "supervisor" and sandbox.backend.name == "sandlock":  # the fork server is the first
                    died = descendants(first)[1]
                os.kill(died, signal.SIGKILL)
                wait_until(lambda: not canaries.marked())
            finally:
                trainer.kill()


def wait_until(is_so, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)
