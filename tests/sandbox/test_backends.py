"""Which backend is chosen, what is said when none works, containers and SandboxFusion by their interfaces."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from builtin_rewards import Builtin
from cohort.config.hardware import SandboxConfig
from cohort.errors import UserError
from cohort.sandbox import Job, Sandbox, SharedSandbox, open_sandbox
from cohort.sandbox import choose as choosing
from cohort.sandbox import fork_server as launching
from cohort.sandbox.backends import Container, Unconfined
from cohort.sandbox.fork_server import ForkedChild, ForkServer
from cohort.sandbox.interpreter import _verdicts_read, find_interpreter, new_folder
from cohort.sandbox.probe import probe, set_out
from cohort.sandbox.process import Limits, ProcessResult
from sandboxes import BACKENDS, LIMITS, graded, sandbox_or_skip
from selection import slow
from waiting import until

CALLS = ["assert f(1) == 2", "assert f(2) == 3"]
HONEST = "def f(x):\n    return x + 1\n"


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setattr(choosing.Bubblewrap, "missing", lambda self: "bubblewrap is not installed")
    monkeypatch.setattr(choosing.Sandlock, "missing", lambda self: "sandlock is not installed")
    monkeypatch.setattr(choosing.Container, "missing", lambda self: "docker is not installed")


def test_no_backend_is_an_error_that_says_what_to_install(nothing_installed):
    with pytest.raises(
        UserError, match=r"no backend works here \(bubblewrap: .*; sandlock: .*; container: .*\). Install"
    ):
        open_sandbox(SandboxConfig())


def test_without_a_sandbox_only_when_asked_for(nothing_installed):
    sandbox = open_sandbox(SandboxConfig(confinement="none", **LIMITS))
    assert (sandbox.backend.name, sandbox.protections) == ("none", ())
    assert graded(sandbox, HONEST, CALLS) == 1.0
    assert graded(sandbox, "while True: pass", CALLS) == 0.0


@pytest.mark.parametrize(("confinement", "chosen"), [("full", None), ("partial", "bubblewrap"), ("none", "bubblewrap")])
def test_a_backend_that_holds_less_is_the_users_decision(monkeypatch, confinement, chosen):
    monkeypatch.setattr(choosing, "_BACKENDS", {"sandlock": named("sandlock"), "bubblewrap": named("bubblewrap")})
    failed = {"sandlock": {"disk": "full", "network": "connected"}, "bubblewrap": {"disk": "full", "network": ""}}
    monkeypatch.setattr(choosing, "probe", lambda sandbox: failed[sandbox.backend.name])
    shared = SharedSandbox(SandboxConfig(confinement=confinement))
    if chosen is None:
        with pytest.raises(UserError, match=r"bubblewrap: does not hold disk \(full\)\).*sandbox.confinement: partial"):
            shared.open()
        return
    sandbox = shared.open()
    assert (sandbox.backend.name, sandbox.protections, sandbox.lacks) == (chosen, ("network",), ("disk",))
    warning = f"warning: sandbox.confinement: {confinement}: the sandbox does not hold disk"
    assert shared.notes == ["sandbox: bubblewrap, holds network; does not hold disk", warning]


def named(name):
    """A backend of that name."""

    def make(interpreter, config):
        backend = Unconfined(interpreter)
        backend.name = name
        return backend

    return make


def test_a_sandbox_that_starts_and_runs_no_code_holds_nothing(monkeypatch):
    started = ProcessResult(output=b'{"ready": true}\n', errors=b"", ending="exited", exit_code=0, wall_s=0.0)
    backend = Unconfined(find_interpreter((), new_folder()))
    monkeypatch.setattr(backend, "run", lambda *arguments, **options: started)
    with pytest.raises(OSError, match="it runs no code"):
        probe(Sandbox(backend=backend, limits=Limits.of(SandboxConfig()), max_concurrent=1))


@slow("tries all escapes; the probe of each real backend is in the extras")
def test_the_probe_finds_that_no_sandbox_holds_nothing():
    interpreter = find_interpreter((), new_folder())
    sandbox = Sandbox(backend=Unconfined(interpreter), limits=Limits.of(SandboxConfig()), max_concurrent=2)
    failed = probe(sandbox)
    broken = {name for name, how in failed.items() if how}
    assert broken >= {"reading files", "writing files", "network", "signals", "disk", "system calls"}
    assert not broken & {"memory", "shared memory", "files in memory", "socket buffers", "deleted files", "file size"}


@slow("test_the_probe_finds_that_no_sandbox_holds_nothing has the probe; this one its message")
def test_a_backend_that_does_not_hold_is_refused(monkeypatch):
    monkeypatch.setitem(choosing._BACKENDS, "bubblewrap", lambda interpreter, config: Unconfined(interpreter))
    with pytest.raises(UserError, match=r"bubblewrap: does not hold .*reading files \(.*network"):
        open_sandbox(SandboxConfig(backend="bubblewrap"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_protection_is_probed_and_held(backend):
    sandbox = sandbox_or_skip(backend)
    assert len(sandbox.protections) == 19
    assert "network" in sandbox.protections


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("compiler", ["gcc", "cc"])  # Debian's cc is a link into /etc/alternatives
def test_programs_of_another_language(backend, compiler):
    sandbox = sandbox_or_skip(backend)
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    c = {"c": {"compile": f"{compiler} -o main main.c", "run": "./main"}}
    code = '```c\n#include <stdio.h>\nint main() { int a; scanf("%d", &a); printf("%d\\n", 2 * a); }\n```'
    tests = {"inputs": ["1", "21"], "outputs": ["2", "42"]}
    assert graded(sandbox, code, tests, language=c) == 1.0
    assert graded(sandbox, code.replace("2 * a", "3 * a"), tests, language=c) == 0.0
    reward = Builtin("code", sandbox=sandbox)
    assert reward(["```c\nint main() {\n```"], tests=[tests], language=c) == [0.0]
    assert "error" in reward.last_details[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_packages_are_importable_only_if_asked_for(backend):
    sandbox = sandbox_or_skip(backend)
    code = (
        "def f(name):\n    try:\n        __import__(name)\n"
        "    except ImportError:\n        return False\n    return True\n"
    )
    tests = [{"call": "f('pytest')", "expected": True}, {"call": "f('numpy')", "expected": False}]
    assert graded(sandbox, code, tests) == 1.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_setup_of_pytest_files_that_fails_is_not_judged(backend):
    sandbox = sandbox_or_skip(backend)
    tests = "from solution import f\ndef test_one():\n    assert f(1) == 2\n"
    assert graded(sandbox, HONEST, tests, test_setup_code="import math") == 1.0
    assert graded(sandbox, HONEST, tests, test_setup_code="import no_such") is None


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "container"])
def test_packages_in_a_folder_that_is_hidden(backend):
    """As in Python without a virtual environment, where they are below the standard library."""
    sandbox_or_skip(backend)
    folder, site = new_folder(), new_folder()
    interpreter = find_interpreter((), folder)
    for name in ("asked", "other"):
        (site / f"{name}.py").write_text("value = 5")
    (folder / "packages").mkdir()
    (folder / "packages" / "asked.py").symlink_to(site / "asked.py")
    readable = (*interpreter.readable, str(site), str(site / "asked.py"), str(folder / "packages"))
    interpreter = replace(interpreter, hidden=(str(site),), readable=readable, packages=str(folder / "packages"))
    config = SandboxConfig(backend=backend, **LIMITS)
    sandbox = choosing._with_backend(choosing._BACKENDS[backend](interpreter, config), config, interpreter)
    code = f"import sys\nsys.path.append({str(site)!r})\ndef f(name):\n    return __import__(name).value\n"
    reward = Builtin("code", sandbox=sandbox)
    tests = ["assert f('asked') == 5", "assert f('other') == 5"]
    assert reward([code], tests=[tests], score="fraction") == [0.5], reward.last_details
    fill = f"def f():\n    open({str(site / 'new')!r}, 'wb').write(bytes(100_000))\n    return 1\n"
    assert graded(sandbox, fill, ["assert f() == 1"]) == 0.0


def test_a_package_that_cannot_be_imported_in_the_sandbox_is_an_error(monkeypatch):
    interpreter = find_interpreter(("pytest",), new_folder())
    assert interpreter.modules == {"pytest": ("py", "pytest")}
    config = SandboxConfig(**LIMITS)
    sandbox = choosing._with_backend(Unconfined(interpreter), config, interpreter)
    assert choosing._import_problem(sandbox, interpreter.modules) is None
    monkeypatch.setattr(choosing, "probe", lambda sandbox: {})
    hidden = replace(sandbox, packages=str(new_folder()))
    why = r"cannot import py of sandbox.packages: pytest \(ModuleNotFoundError: No module named 'py'\)"
    with pytest.raises(OSError, match=why):
        choosing._check(hidden, interpreter)


def test_what_only_root_can_read_is_copied_for_verdicts(monkeypatch):
    monkeypatch.setattr("cohort.sandbox.interpreter._verdicts_read", lambda path: False)
    interpreter = find_interpreter(("iniconfig",), new_folder())
    copy = Path(interpreter.executable).parents[1]
    assert copy != Path(sys.base_prefix)
    for path in (path for folder in (copy, Path(interpreter.packages)) for path in folder.rglob("*")):
        assert path.stat().st_mode & 0o004, path
    limits = Limits.of(SandboxConfig(**LIMITS))
    backend = Unconfined(interpreter)
    sandbox = Sandbox(backend=backend, limits=limits, max_concurrent=1, packages=interpreter.packages)
    code = "import ctypes, iniconfig, ssl, sys\ndef f():\n    return sys.base_prefix, iniconfig.__name__"
    assert graded(sandbox, code, [{"call": "f()", "expected": (str(copy), "iniconfig")}]) == 1.0


@pytest.mark.skipif(os.geteuid() != 0, reason="verdicts of others run under their own user id")
def test_verdicts_of_root_read_what_everybody_can():
    folder = new_folder() / "home"
    folder.mkdir()
    (file := folder / "file").touch()
    folder.chmod(0o755)
    file.chmod(0o644)
    assert _verdicts_read(file) and _verdicts_read(folder)
    file.chmod(0o640)
    assert not _verdicts_read(file) and _verdicts_read(folder)
    file.chmod(0o644)
    folder.chmod(0o700)
    assert not _verdicts_read(file) and not _verdicts_read(folder)


def test_a_package_that_is_not_installed():
    with pytest.raises(UserError, match=r"sandbox.packages: 'no-such-thing' is not installed; run `pip install"):
        find_interpreter(("no-such-thing",), new_folder())


def test_output_and_many_verdicts(tmp_path):
    interpreter = find_interpreter((), new_folder())
    sandbox = Sandbox(backend=Unconfined(interpreter), limits=Limits.of(SandboxConfig(**LIMITS)), max_concurrent=3)
    cases = [{"function": "f", "arguments": [i]} for i in range(3)]
    parts = {"before": "", "code": HONEST, "after": ""}
    job = Job(request={"kind": "functions", "token": "t", "parts": parts, "cases": cases})
    outcomes = sandbox.run_all([job] * 7, budget_s=100.0)
    assert [[r["value"] for r in o.records[1:]] for o in outcomes] == [[1, 2, 3]] * 7
    assert sandbox.run_all([job], budget_s=0.0) == [None]
    flood = {**parts, "code": "import os\nwhile True: os.write(3, b'x' * 1000)"}
    outcome = sandbox.run(Job(request={"kind": "functions", "token": "t", "parts": flood, "cases": cases}))
    assert outcome.ending == "output limit"


def test_the_server_has_nothing_of_the_environment(monkeypatch):
    monkeypatch.setenv("COHORT_TEST_SECRET", "57005")
    server = ForkServer()
    channel = server._running()
    try:
        of_server = Path(f"/proc/{server._process.pid}/environ")
        until(of_server.read_bytes)  # empty while it starts
        environment = of_server.read_bytes()
        assert environment.startswith(b"PYTHONPATH=") and b"57005" not in environment
    finally:
        channel.close()
        server._process.kill()
        server._process.wait()


def test_a_supervisor_that_hangs_is_killed(monkeypatch):
    monkeypatch.setattr(launching, "_END_S", 0.05)
    (ended, end_write), (life, lifeline) = os.pipe(), os.pipe()
    command = [sys.executable, "-S", "-c", "import time; time.sleep(300)"]
    supervisor = subprocess.Popen(command, pass_fds=[end_write])
    os.close(end_write)
    child = ForkedChild(supervisor.pid, -1, -1, -1, ended, lifeline)
    assert child.end() is None
    assert supervisor.wait() == -signal.SIGKILL
    for fd in (ended, life):
        os.close(fd)


# as in test_serve: the path of an interpreter in a #! line has no spaces
FAKE_DOCKER = """#!/bin/sh
'''exec' "{python}" "$0" "$@"
' '''
import json, subprocess, sys
open({log!r}, "a").write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[1] == "run":
    guest = next(a for a in sys.argv if a.endswith(":/guest.py:ro")).partition(":")[0]
    sys.exit(subprocess.run([sys.executable, "-S", guest, sys.argv[-1]]).returncode)
"""


@slow("starts the stand-in of a container for each attempt to escape")
def test_containers_by_their_command_line(tmp_path):
    docker, log = tmp_path / "docker", tmp_path / "log"
    docker.write_text(FAKE_DOCKER.format(python=sys.executable, log=str(log)))
    docker.chmod(0o755)
    config = SandboxConfig(
        backend="container", container=f"{docker} run", image="an-image", **(LIMITS | {"wall_s": 5.0})
    )
    backend = Container(find_interpreter((), new_folder()), config)
    sandbox = Sandbox(backend=backend, limits=Limits.of(config), max_concurrent=1)
    assert graded(sandbox, HONEST, CALLS) == 1.0
    assert graded(sandbox, "import time\ntime.sleep(60)", CALLS) == 0.0
    first, second, removal = map(json.loads, log.read_text().splitlines())
    text = " ".join(first)
    for option in (
        "run --rm --interactive",
        "--network none --read-only --cap-drop ALL",
        "--security-opt no-new-privileges --user 65534:65534",
        "--tmpfs /tmp:rw,exec,size=8000000 --pids-limit 33 --memory 300000000 --memory-swap 300000000",
        "an-image python3",
    ):
        assert option in text
    assert removal == ["rm", "--force", second[second.index("--name") + 1]]


def test_files_of_an_image_are_not_those_of_the_run():
    with set_out() as here, set_out(has_image=True) as image:
        assert {"/etc/passwd", "/etc/hosts", "/etc/hostname", str(here.folder / "secret")} <= set(here.private_files())
        assert set(map(os.path.dirname, image.private_files())).isdisjoint({"/etc"})
        assert str(image.folder / "secret") in image.private_files()


@slow("probes a sandbox twice; test_files_of_an_image_are_not_those_of_the_run has the difference")
def test_a_sandbox_with_an_image_holds(monkeypatch):
    sandbox = sandbox_or_skip("bubblewrap")
    options_of = sandbox.backend._options

    def with_image(limits, *, toolchain):
        options = options_of(limits, toolchain=toolchain)
        at = options.index("--size")
        return [*options[:at], "--ro-bind", "/etc/passwd", "/etc/passwd", *options[at:]]

    monkeypatch.setattr(sandbox.backend, "_options", with_image)
    assert probe(sandbox)["reading files"] == "/etc/passwd"
    monkeypatch.setattr(sandbox.backend, "name", "container")
    assert probe(sandbox)["reading files"] == ""


def test_packages_exclude_containers_from_auto():
    config = SandboxConfig(packages=("pytest",), **LIMITS)
    interpreter = find_interpreter(("pytest",), new_folder())
    backend = Container(interpreter, config.model_copy(update={"container": "true run"}))
    sandbox = choosing._with_backend(backend, config, interpreter)
    with pytest.raises(OSError, match=r"sandbox.packages has no effect"):
        choosing._check(sandbox, interpreter)


class Fusion(BaseHTTPRequestHandler):
    """SandboxFusion's `/run_code`, without the sandbox."""

    status = "Success"

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/run_code" and request["language"] == "python"
        ran = subprocess.run(
            [sys.executable, "-S", "-c", request["code"]], input=request["stdin"], text=True, capture_output=True
        )
        result = {"status": "Finished", "return_code": ran.returncode, "stdout": ran.stdout, "stderr": ran.stderr}
        body = json.dumps({"status": self.status, "message": "no disk", "run_result": result}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def fusion():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Fusion)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_sandbox_fusion(fusion, monkeypatch):
    sandbox = open_sandbox(SandboxConfig(backend="sandbox_fusion", url=fusion))
    assert graded(sandbox, HONEST, CALLS) == 1.0
    assert graded(sandbox, "import os\nos._exit(0)", CALLS) == 0.0
    monkeypatch.setattr(Fusion, "status", "SandboxError")
    assert graded(sandbox, HONEST, CALLS) is None  # its failure, not the code's


def test_a_server_that_does_not_answer_judges_nothing():
    sandbox = open_sandbox(SandboxConfig(backend="sandbox_fusion", url="http://127.0.0.1:9"))
    assert graded(sandbox, HONEST, CALLS) is None
