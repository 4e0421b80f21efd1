"""Attempts to escape, the code of `probe`'s table. Each runs in the sandbox, in an interpreter of its own.

A function returns what it achieved, "" if nothing; one that raises or is killed achieved nothing. The module needs only
the standard library and imports nothing of Cohort.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import resource
import signal
import socket
import stat
import sys
import time

TYPE_CHECKING = False  # of `typing`, without its import
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

_held: list[Any] = []  # so that it is not closed


def run() -> str:
    """Say that code runs: the control."""
    return "runs"


def tried(act: Callable[..., Any], *arguments: Any) -> str:
    """Return what an act returned, or its name, "" if it raised."""
    try:
        result = act(*arguments)
    except BaseException:
        return ""
    return f"{act.__name__} " if result is None else f"{result!r} "


def read(path: str) -> str:
    """Return the content of a file, at most 100 kB."""
    with open(path, errors="replace") as file:
        return file.read(100_000)


def read_files(paths: Iterable[str]) -> str:
    """Read files, and list folders."""
    return " ".join(path for path in paths if tried(read, path) or tried(os.listdir, path))


def write_files(folder: str) -> str:
    """Write a file, and read by links, truncate, change and rename another one."""

    def write(path: str) -> int:
        with open(path, "w") as file:
            return file.write("x")

    def read_by_link(make: Callable[[str, str], None], path: str) -> str:
        make(secret, path)
        return read(path)

    secret = f"{folder}/secret"
    done = tried(write, f"{folder}/written")
    done += tried(read_by_link, os.symlink, "symlink") + tried(read_by_link, os.link, "hardlink")
    return done + tried(os.truncate, secret, 0) + tried(os.chmod, secret, 0) + tried(os.rename, secret, "taken")


def read_environment() -> str:
    """Return all variables that can be read, of this process and others."""
    found = repr(dict(os.environ))
    for name in ("self", "1", str(os.getppid())):
        with contextlib.suppress(OSError):
            found += read(f"/proc/{name}/environ")
    return found


def connect(port: int, name: str, path: str) -> str:
    """Connect to servers outside, and make a pair of sockets that could send to any address."""

    def connect_to(family: int, address: Any) -> None:
        with socket.socket(family) as client:
            client.settimeout(2)
            client.connect(address)

    done = tried(connect_to, socket.AF_INET, ("127.0.0.1", port))
    done += tried(connect_to, socket.AF_UNIX, f"\0{name}") + tried(connect_to, socket.AF_UNIX, path)
    return done + tried(socket.socketpair, socket.AF_UNIX, socket.SOCK_DGRAM)


def signal_process(pid: int) -> str:
    """Read and set limits of a process outside, and kill it."""
    done = tried(resource.prlimit, pid, resource.RLIMIT_CPU)
    done += tried(resource.prlimit, pid, resource.RLIMIT_CORE, (0, 0))
    return done + tried(os.kill, pid, signal.SIGKILL) + tried(os.killpg, pid, signal.SIGKILL)


def trace(pid: int) -> str:
    """Attach to a process outside."""
    return "attached" if ctypes.CDLL(None).ptrace(16, pid, 0, 0) == 0 else ""


def allocate(size: int) -> str:
    """Fill the memory of one process."""
    filled = bytearray(size)
    for i in range(0, size, 4096):
        filled[i] = 1
    time.sleep(1)
    return "allocated"


def share_memory(size: int) -> str:
    """Fill memory that processes could share."""

    def fill() -> None:
        shared = mmap.mmap(-1, size // 4)
        for i in range(0, size // 4, 4096):
            shared[i] = 1
        _held.append(shared)

    return _in_four_processes(fill)


def fill_files_in_memory(size: int, file_size: int) -> str:
    """Fill files in memory, half of them held by a mapping alone."""

    def fill() -> None:
        for i in range(size // 4 // file_size):
            file = os.memfd_create("x")
            os.write(file, bytes(file_size))
            if i % 2:
                _held.append(mmap.mmap(file, 4096))
                os.close(file)

    return _in_four_processes(fill)


def fill_sockets(number: int) -> str:
    """Fill the buffers of sockets."""

    def fill() -> None:
        for _ in range(number // 2):
            pair = socket.socketpair()
            _held.append(pair)
            for end in pair:
                end.setblocking(False)
                try:
                    while True:
                        end.send(bytes(1 << 16))
                except BlockingIOError:
                    pass

    return _in_four_processes(fill)


def _in_four_processes(fill: Callable[[], None]) -> str:
    ends = []
    for _ in range(4):
        read, write = os.pipe()
        if os.fork() == 0:
            try:
                fill()
                os.write(write, b"x")
                time.sleep(3)
            finally:
                os._exit(0)
        os.close(write)
        ends.append(read)
    done = sum(os.read(end, 1) == b"x" for end in ends)
    time.sleep(1)
    return "allocated" if done == 4 else ""


def fork(limit: int) -> str:
    """Start more processes than the limit."""
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


def write_a_large_file(limit: int) -> str:
    """Write more than the limit into one file."""
    with open("big", "wb") as file:
        return f"{file.write(bytes(limit + 1))} bytes"


def fill_disk(limit: int) -> str:
    """Write more than the limit into the private folder, or anything elsewhere."""
    library = os.path.dirname(os.__file__)
    folders = [".", f"{library}/site-packages", f"{library}/dist-packages", "/usr/lib/python3/dist-packages"]
    for folder in (*folders, "/dev/shm", "/var/tmp", "/run", "/proc"):
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


def fill_deleted_files(limit: int, file_size: int) -> str:
    """Fill files without a name, half of them held by a mapping alone."""
    total = 0
    try:
        for i in range(6 * limit // file_size):
            file = os.open(f"deleted{i}", os.O_RDWR | os.O_CREAT)
            total += os.write(file, bytes(file_size))
            os.unlink(f"deleted{i}")
            if i % 2:
                _held.append(mmap.mmap(file, 4096))
                os.close(file)
    except OSError:
        pass
    time.sleep(1)
    return f"{total} bytes" if total > 2.5 * limit else ""


def set_attributes() -> str:
    """Set times, modes and extended attributes of files outside to what they are."""

    def allowed(act: Callable[..., None], *arguments: Any, **options: Any) -> str:
        try:
            act(*arguments, **options)
        except OSError as error:
            refused = errno.EPERM, errno.EACCES, errno.EROFS, errno.ENOSYS, errno.ENOTSUP
            return "" if error.errno in refused else repr(error)
        return f"{act.__name__} "

    done = ""
    for path in (os.__file__, sys.executable, sys.argv[0]):
        status = os.stat(path)
        times = {"ns": (status.st_atime_ns, status.st_mtime_ns)}
        file = os.open(path, os.O_RDONLY)
        for target in (path, file):
            done += allowed(os.utime, target, **times) + allowed(os.chmod, target, stat.S_IMODE(status.st_mode))
            done += allowed(os.setxattr, target, "user.cohort", b"", os.XATTR_REPLACE)
        os.close(file)
    return done


def use_keyrings(add_key: int) -> str:
    """List the kernel's keys, and add one."""
    found = "".join(tried(read, path).strip("' ") for path in ("/proc/keys", "/proc/key-users"))
    key = ctypes.CDLL(None).syscall(add_key, b"user", b"cohort-canary", b"x", 1, -3)
    return found + ("a key" if key >= 0 else "")


def call_kernel(numbers: Mapping[str, int]) -> str:
    """Make system calls that should be refused before the kernel looks at their arguments."""
    library = ctypes.CDLL(None, use_errno=True)
    through = []
    for name, number in numbers.items():
        result = library.syscall(number, *[ctypes.c_long(-1)] * 6)
        if result != -1 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
            through.append(name)
    return " ".join(through)


def call_kernel_as_another_machine() -> str:
    """Make system calls of 32 bits and of x32."""

    def by_interrupt() -> int:
        code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        code.write(bytes.fromhex("b814000000cd80c3"))  # getpid of 32 bits
        return int(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))())

    def of_x32() -> int:
        return int(ctypes.CDLL(None).syscall((1 << 30) + 39))

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


def outlive(marker: str) -> str:
    """Leave a process behind that ignores signals."""
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(60)", marker])
        os._exit(0)
    time.sleep(0.2)
    return ""
