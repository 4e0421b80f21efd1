"""Find out what a backend holds, by trying to escape. An import that works, or a version, proves nothing."""

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cohort.sandbox.backends import GUEST_ENV
from cohort.sandbox.pool import Job, JobResult, Sandbox
from cohort.sandbox.process import Limits
from cohort.sandbox.system_calls import refused

MB = 1_000_000
_DYING_S = 5.0
LIMITS = Limits(
    wall_s=20.0,
    cpu_s=5,
    memory_bytes=300 * MB,
    max_processes=16,
    max_file_bytes=4 * MB,
    tmp_bytes=8 * MB,
    max_open_files=64,
    max_output_bytes=MB,
)
_MANY_FILES = 512  # sockets of four processes with as many hold more than the memory
_HARMLESS = (*GUEST_ENV, "USER", "TERM", "PWD")  # set in the sandbox too, to values that tell nothing
_INSTALLED = str(importlib.util.find_spec("peft").origin)  # type: ignore[union-attr]  # some package of the run
# Each function tries one escape and returns what it achieved; "" if nothing.
_ATTEMPTS = """
import ctypes, errno, mmap, os, resource, signal, socket, stat, subprocess, sys, time

maps, pairs = [], []

def tried(act, *arguments):
    try:
        return repr(act(*arguments))
    except BaseException:
        return ""

def reads(paths):
    return " ".join(path for path in paths if tried(lambda: open(path).read(1)) or tried(os.listdir, path))

def writes(folder):
    def write(path):
        with open(path, "w") as file:
            return file.write("x")
    def truncate(path):
        os.truncate(path, 0)
        return "truncated"
    def mode(path):
        os.chmod(path, 0)
        return "changed its mode"
    def link(make, path):
        make(folder + "/secret", path)
        return open(path).read()
    secret = folder + "/secret"
    return (tried(write, folder + "/written") + tried(link, os.symlink, "symlink") + tried(link, os.link, "hardlink")
            + tried(truncate, secret) + tried(mode, secret) + tried(os.rename, secret, "taken"))

def environment():
    found = repr(dict(os.environ))
    for name in ("self", "1", str(os.getppid())):
        try:
            found += open(f"/proc/{name}/environ").read()
        except OSError:
            pass
    return found

def network(port, name, path):
    def connect(family, address):
        with socket.socket(family) as client:
            client.settimeout(2)
            return client.connect(address)
    return (tried(connect, socket.AF_INET, ("127.0.0.1", port)) + tried(connect, socket.AF_UNIX, "\\0" + name)
            + tried(connect, socket.AF_UNIX, path)
            + tried(socket.socketpair, socket.AF_UNIX, socket.SOCK_DGRAM))  # its ends could send to any address

def signals(pid):
    return (tried(resource.prlimit, pid, resource.RLIMIT_CPU)
            + tried(resource.prlimit, pid, resource.RLIMIT_CORE, (0, 0))
            + tried(os.kill, pid, signal.SIGKILL) + tried(os.killpg, pid, signal.SIGKILL))

def traces(pid):
    return "attached" if ctypes.CDLL(None).ptrace(16, pid, 0, 0) == 0 else ""

def memory(size):
    held = bytearray(size)
    for i in range(0, size, 4096):
        held[i] = 1
    time.sleep(1)
    return "allocated"

def in_four_processes(act, *arguments):
    ends = []
    for _ in range(4):
        read, write = os.pipe()
        if os.fork() == 0:
            try:
                act(*arguments)
                os.write(write, b"x")
                time.sleep(3)
            finally:
                os._exit(0)
        os.close(write)
        ends.append(read)
    done = sum(os.read(end, 1) == b"x" for end in ends)
    time.sleep(1)
    return "allocated" if done == 4 else ""

def map_shared(size):
    held = mmap.mmap(-1, size)
    for i in range(0, size, 4096):
        held[i] = 1

def shared_memory(size):
    return in_four_processes(map_shared, size // 4)

def fill_files(size, limit):
    for i in range(size // limit):
        file = os.memfd_create("x")
        os.write(file, bytes(limit))
        if i % 2:  # held by a mapping alone
            maps.append(mmap.mmap(file, 4096))
            os.close(file)

def memory_files(size, limit):
    return in_four_processes(fill_files, size // 4, limit)

def fill_sockets(number):
    for _ in range(number // 2):
        pairs.append(socket.socketpair())
        for end in pairs[-1]:
            end.setblocking(False)
            try:
                while True:
                    end.send(bytes(1 << 16))
            except BlockingIOError:
                pass

def socket_buffers(number):
    return in_four_processes(fill_sockets, number)

def deleted_files(limit, size):
    held = 0
    try:
        for i in range(6 * limit // size):
            file = os.open(f"deleted{i}", os.O_RDWR | os.O_CREAT)
            held += os.write(file, bytes(size))
            os.unlink(f"deleted{i}")
            if i % 2:
                maps.append(mmap.mmap(file, 4096))
                os.close(file)
    except OSError:
        pass
    time.sleep(1)
    return f"{held} bytes" if held > 2.5 * limit else ""

def attributes():
    def allowed(act, *arguments, **options):
        try:
            act(*arguments, **options)
        except OSError as error:
            refused = errno.EPERM, errno.EACCES, errno.EROFS, errno.ENOSYS, errno.ENOTSUP
            return "" if error.errno in refused else repr(error)
        return act.__name__ + " "
    done = ""
    for path in (os.__file__, sys.executable, sys.argv[0]):
        status = os.stat(path)
        times = {"ns": (status.st_atime_ns, status.st_mtime_ns)}
        file = os.open(path, os.O_RDONLY)
        for target in (path, file):  # changes nothing where it is allowed
            done += allowed(os.utime, target, **times) + allowed(os.chmod, target, stat.S_IMODE(status.st_mode))
            done += allowed(os.setxattr, target, "user.cohort", b"", os.XATTR_REPLACE)
        os.close(file)
    return done

def keyrings(add_key):
    library = ctypes.CDLL(None)
    found = "".join(tried(lambda: open(path).read(1) or 1 / 0) for path in ("/proc/keys", "/proc/key-users"))
    return found + ("a key" if library.syscall(add_key, b"user", b"cohort-canary", b"x", 1, -3) >= 0 else "")

def system_calls(table):
    library = ctypes.CDLL(None, use_errno=True)
    through = []
    for name, number in table:
        result = library.syscall(number, *[ctypes.c_long(-1)] * 6)
        if result != -1 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
            through.append(name)
    return " ".join(through)

def foreign_calls():
    def by_interrupt():
        code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        code.write(bytes.fromhex("b814000000cd80c3"))  # getpid of 32 bits
        return ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
    def of_x32():
        return ctypes.CDLL(None).syscall((1 << 30) + 39)
    done = ""
    for call in (by_interrupt, of_x32) if os.uname().machine == "x86_64" else ():
        read, write = os.pipe()
        if os.fork() == 0:  # it may be killed
            try:
                if call() > 0:
                    os.write(write, call.__name__.encode())
            finally:
                os._exit(0)
        os.close(write)
        done += os.read(read, 100).decode()
    return done

def processes(limit):
    made = 0
    try:
        while made < 2 * limit:
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)
            made += 1
    except OSError:
        pass
    return f"{made} processes" if made > limit else ""

def file_size(limit):
    with open("big", "wb") as file:
        return tried(lambda: [file.write(bytes(limit)), file.write(b"x"), file.flush()])

def disk(limit):
    library = os.path.dirname(os.__file__)
    folders = [".", library + "/site-packages", library + "/dist-packages", "/usr/lib/python3/dist-packages",
               "/dev/shm", "/var/tmp", "/run", "/proc"]
    for folder in folders:
        total = 0
        try:
            for i in range(40):
                with open(f"{folder}/part{i}", "wb", buffering=0) as file:
                    total += file.write(bytes(limit // 10))
        except OSError:
            pass
        if total > (1.5 * limit if folder == "." else 0):
            return f"{total} bytes in {folder}"
    return ""

def outlives(marker):
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(60)", marker])
        os._exit(0)
    time.sleep(0.2)
    return ""
"""


@dataclass(frozen=True, slots=True)
class Canaries:
    """What the code tries to reach, all of it outside of the sandbox."""

    folder: Path
    port: int
    socket_name: str  # in the abstract namespace
    socket_path: str
    victim: subprocess.Popen[bytes]
    marker: str

    def attempts(self, *, has_image: bool = False) -> dict[str, tuple[str, list[Any]]]:
        """Return protection -> function of `_ATTEMPTS` and its arguments.

        Args:
            has_image: whether the sandbox has system files of its own.
        """
        calls = refused()
        own = [str(self.folder), str(self.folder / "secret"), __file__, _INSTALLED]
        own += [] if has_image else ["/etc/passwd", "/etc/hosts", "/etc/hostname"]
        return {
            "reading files": ("reads", [own]),
            "writing files": ("writes", [str(self.folder)]),
            "environment": ("environment", []),
            "network": ("network", [self.port, self.socket_name, self.socket_path]),
            "signals": ("signals", [self.victim.pid]),
            "ptrace": ("traces", [self.victim.pid]),
            "memory": ("memory", [2 * LIMITS.memory_bytes]),
            "shared memory": ("shared_memory", [2 * LIMITS.memory_bytes]),
            "files in memory": ("memory_files", [2 * LIMITS.memory_bytes, LIMITS.max_file_bytes]),
            "socket buffers": ("socket_buffers", [_MANY_FILES - 32]),
            "processes": ("processes", [LIMITS.max_processes]),
            "file size": ("file_size", [LIMITS.max_file_bytes]),
            "disk": ("disk", [LIMITS.tmp_bytes]),
            "deleted files": ("deleted_files", [LIMITS.tmp_bytes, LIMITS.max_file_bytes]),
            "attributes of files": ("attributes", []),
            "keyrings": ("keyrings", [calls["add_key"]]),
            "system calls": ("system_calls", [[[name, number] for name, number in calls.items() if name != "msgget"]]),
            "foreign system calls": ("foreign_calls", []),
            "leftover processes": ("outlives", [self.marker]),
        }

    def escaped(self) -> dict[str, bool]:
        """Return protection -> whether the outside shows that it failed, whatever the code says."""
        return {
            "writing files": {p.name: p.read_bytes() for p in self.folder.iterdir()} != {"secret": b"secret"},
            "signals": self.victim.poll() is not None,
            "leftover processes": self._outlived(),
        }

    def marked(self) -> list[int]:
        """Return the processes that have the marker as an argument."""
        return [pid for pid, arguments in _command_lines() if self.marker.encode() in arguments]

    def _outlived(self) -> bool:
        """Whether a process that should be gone stays: the kernel may take a moment to end a namespace."""
        deadline = time.monotonic() + _DYING_S
        while self.marked():
            if time.monotonic() > deadline:
                return True
            time.sleep(0.02)
        return False


@contextlib.contextmanager
def set_out() -> Iterator[Canaries]:
    """Prepare a secret file, listening sockets and a process that must survive."""
    with (
        TemporaryDirectory(prefix="cohort-canary-") as folder,
        TemporaryDirectory(prefix="cohort-canary-") as another,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as local,
        socket.socket(socket.AF_UNIX) as named,
        subprocess.Popen(
            [sys.executable, "-S", "-c", "import time; time.sleep(300)"], start_new_session=True
        ) as victim,
    ):
        try:
            Path(folder).chmod(0o777)  # not the file system's permissions are on trial
            (Path(folder) / "secret").write_text("secret")
            (Path(folder) / "secret").chmod(0o666)
            name = f"cohort-canary-{uuid.uuid4().hex}"
            local.bind("\0" + name)
            local.listen()
            Path(another).chmod(0o777)
            path = f"{another}/socket"
            named.bind(path)
            Path(path).chmod(0o777)
            named.listen()
            yield Canaries(Path(folder), server.getsockname()[1], name, path, victim, uuid.uuid4().hex)
        finally:
            victim.kill()


def probe(sandbox: Sandbox) -> dict[str, str]:
    """Try to escape from a sandbox.

    Returns:
        Protection -> how it failed, "" if it holds.

    Raises:
        OSError: the sandbox does not start, or runs no code.
    """
    with set_out() as canaries:
        attempts = canaries.attempts(has_image=sandbox.backend.name == "container")
        first = _attempt(sandbox, "tried", [])
        if not first.started:
            lines = first.errors.splitlines() or ["it did not start"]
            raise OSError(lines[-1] if lines[0].startswith("Traceback") else lines[0])
        with ThreadPoolExecutor(4) as pool:
            outcomes = dict(zip(attempts, pool.map(lambda a: _attempt(sandbox, *a), attempts.values()), strict=True))
        failed = {name: _achieved(outcome) for name, outcome in outcomes.items()}
        failed["environment"] = _leaked(failed["environment"], os.environ)
        for name, escaped in canaries.escaped().items():
            if escaped:
                failed[name] = failed[name] or "seen from outside"
        return failed


def _attempt(sandbox: Sandbox, function: str, arguments: list[Any]) -> JobResult:
    case = {"function": function, "arguments": arguments}
    parts = {"before": "", "code": _ATTEMPTS, "after": ""}
    request = {"kind": "functions", "token": "", "parts": parts, "cases": [case]}
    limits = replace(LIMITS, max_open_files=_MANY_FILES) if function == "socket_buffers" else LIMITS
    return sandbox.run(Job(request=request, limits=limits))


def _achieved(outcome: JobResult) -> str:
    """Return what an attempt achieved. One that was killed or raised achieved nothing."""
    value = next((record["value"] for record in outcome.records if "value" in record), "")
    if outcome.started:
        return str(value)
    return "the sandbox did not start"


def _leaked(found: str, ours: Mapping[str, str]) -> str:
    """Return the names of our environment variables that the code has found with their values."""
    return " ".join(
        key
        for key, value in ours.items()
        if key not in _HARMLESS and (f"{key}={value}" in found or f"{key!r}: {value!r}" in found)
    )


def _command_lines() -> Iterator[tuple[int, list[bytes]]]:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            yield int(process.name), (process / "cmdline").read_bytes().split(b"\0")
