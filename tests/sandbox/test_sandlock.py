"""sandlock for users without root, and on kernels whose Landlock lacks protections: what stands in for them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cohort.config.hardware import SandboxConfig
from cohort.sandbox.backends import Sandlock
from cohort.sandbox.interpreter import find_interpreter, new_folder
from cohort.sandbox.pool import Sandbox
from cohort.sandbox.probe import probe
from cohort.sandbox.process import Limits
from sandboxes import graded, sandbox_or_skip

pytestmark = [pytest.mark.extras, pytest.mark.timeout(300)]

# Every interpreter imports it when it starts
OLD_KERNEL = """
import sandlock

missing = [sandlock.Protection[name] for name in {missing!r}]
real, sandlock.landlock_abi_version = sandlock.Sandbox, lambda: {abi}


def sandbox(*, allow_degraded, **settings):
    left = [protection for protection in allow_degraded if protection not in missing]
    return real(**settings, allow_degraded=left, disable=missing)


sandlock.Sandbox = sandbox
"""
AFTER_6_7 = ("FS_IOCTL_DEV", "SIGNAL_SCOPE", "ABSTRACT_UNIX_SOCKET_SCOPE")


def opened() -> Sandbox:
    sandbox_or_skip("sandlock")
    backend = Sandlock(find_interpreter((), new_folder()))
    return Sandbox(backend=backend, limits=Limits.of(SandboxConfig()), max_concurrent=2)


@pytest.fixture
def same_user(monkeypatch: pytest.MonkeyPatch):
    """The code runs as the user of the run, as it does for all but root."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Protections that the probe finds broken where Landlock lacks `missing`."""

    def find(*missing: str, abi: int) -> set[str]:
        sandbox = opened()
        (tmp_path / "sitecustomize.py").write_text(OLD_KERNEL.format(missing=missing, abi=abi))
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
        return {name for name, how in probe(sandbox).items() if how}

    return find


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give the code another user id")
def test_linux_6_7_holds_everything_for_root(broken):
    assert broken(*AFTER_6_7, abi=4) == set()


def test_linux_6_7_without_another_user_id_does_not_keep_signals_away(same_user, broken):
    assert broken(*AFTER_6_7, abi=4) == {"signals"}


@pytest.mark.parametrize(
    ("missing", "lost"),
    [
        ("ABSTRACT_UNIX_SOCKET_SCOPE", set()),  # the filter of system calls refuses all sockets
        ("NET_TCP", set()),
        ("FS_TRUNCATE", {"writing files"}),
    ],
)
def test_the_probe_notices_what_is_missing(broken, missing, lost):
    assert broken(missing, abi=6) == lost


def test_everything_holds_for_the_same_user(same_user):
    assert not any(probe(opened()).values())


OWNER = """
import os, resource
def f(path, pid):
    acts = [lambda: os.chmod(path, 0), lambda: os.utime(path), lambda: os.chown(path, 1, 1)]
    acts += [lambda: os.setxattr(path, "user.x", b""), lambda: os.sched_setaffinity(pid, {0})]
    acts += [lambda: resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1)), lambda: os.setpriority(0, pid, 19)]
    done = []
    for i, act in enumerate(acts):
        try:
            act()
            done.append(i)
        except OSError:
            pass
    resource.setrlimit(resource.RLIMIT_CPU, (1, 1))  # its own
    return done
"""


def test_the_same_users_files_and_processes_cannot_be_changed(same_user, tmp_path):
    """Landlock leaves these to the owner."""
    (tmp_path / "secret").write_text("secret")
    before = os.stat(tmp_path / "secret")
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(300)"]) as victim:
        try:
            call = f"f({str(tmp_path / 'secret')!r}, {victim.pid})"
            assert graded(opened(), OWNER, [{"call": call, "expected": []}]) == 1.0
            assert os.getpriority(os.PRIO_PROCESS, victim.pid) == os.getpriority(os.PRIO_PROCESS, 0)
        finally:
            victim.kill()
    after = os.stat(tmp_path / "secret")
    assert (after.st_mode, after.st_mtime, after.st_uid) == (before.st_mode, before.st_mtime, before.st_uid)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
def test_binaries_of_a_linker_that_may_not_make_them_executable(same_user):
    language = {"c": {"compile": "gcc -o main main.c", "run": "./main"}}
    code = '#include <stdio.h>\nint main() { puts("4"); return 0; }'
    assert graded(opened(), code, {"inputs": [""], "outputs": ["4"]}, language=language) == 1.0


def test_users_without_an_entry_in_the_password_file(tmp_path, monkeypatch):
    sandbox = opened()
    (tmp_path / "sitecustomize.py").write_text("import pwd\npwd.getpwuid = {}.__getitem__\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert graded(sandbox, "def f(x):\n    return x + 1\n", ["assert f(1) == 2"]) == 1.0
