"""Find out what a backend holds, by trying to escape. An import that works, or a version, proves nothing."""

import contextlib
import importlib.util
import inspect
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from cohort.sandbox import attempts
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
_MUCH_MEMORY = 2 * LIMITS.memory_bytes
_MANY_FILES = 512  # sockets of four processes with as many hold more than the memory
_HARMLESS = (*GUEST_ENV, "USER", "TERM", "PWD")  # set in the sandbox too, to values that tell nothing
_INSTALLED = str(importlib.util.find_spec("peft").origin)  # type: ignore[union-attr]  # some package of the run


@dataclass(frozen=True, slots=True)
class Canaries:
    """What the code tries to reach, all of it outside of the sandbox."""

    folder: Path
    port: int
    socket_name: str  # in the abstract namespace
    socket_path: str
    victim: subprocess.Popen[bytes]
    marker: str
    has_image: bool  # whether the sandbox has system files of its own

    def private_files(self) -> list[str]:
        """Return files and folders that must not be readable."""
        own = [str(self.folder), str(self.folder / "secret"), __file__, _INSTALLED]
        return own if self.has_image else [*own, "/etc/passwd", "/etc/hosts", "/etc/hostname"]

    def was_written(self) -> bool:
        """Whether a file outside is not what it was."""
        return {p.name: p.read_bytes() for p in self.folder.iterdir()} != {"secret": b"secret"}

    def was_killed(self) -> bool:
        """Whether the process outside has ended."""
        return self.victim.poll() is not None

    def marked(self) -> list[int]:
        """Return the processes that have the marker as an argument."""
        processes = psutil.process_iter(["cmdline"])
        return [process.pid for process in processes if self.marker in (process.info["cmdline"] or ())]

    def was_outlived(self) -> bool:
        """Whether a process that should be gone stays: the kernel may take a moment to end a namespace."""
        deadline = time.monotonic() + _DYING_S
        while self.marked():
            if time.monotonic() > deadline:
                return True
            time.sleep(0.02)
        return False


@contextlib.contextmanager
def set_out(*, has_image: bool = False) -> Iterator[Canaries]:
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
            yield Canaries(Path(folder), server.getsockname()[1], name, path, victim, uuid.uuid4().hex, has_image)
        finally:
            victim.kill()


def _leaked(answer: str, outside: Canaries) -> str:
    """Return the names of our environment variables that the code has found with their values."""
    return " ".join(
        key
        for key, value in os.environ.items()
        if key not in _HARMLESS and (f"{key}={value}" in answer or f"{key!r}: {value!r}" in answer)
    )


def _calls() -> dict[str, int]:
    """Return the numbers of refused system calls but `msgget`, which would leave a queue behind where it is allowed."""
    return {name: number for name, number in refused().items() if name != "msgget"}


def _or_seen(is_so: Callable[[Canaries], bool]) -> Callable[[str, Canaries], str]:
    """Return what the code says, or that the outside shows that it succeeded, whatever the code says."""
    return lambda answer, outside: answer or ("seen from outside" if is_so(outside) else "")


@dataclass(frozen=True, slots=True)
class Attempt:
    """A row of the table: how to break one protection."""

    protection: str
    code: Callable[..., str]  # of the module `attempts`; runs in the sandbox
    arguments: Callable[[Canaries], Sequence[Any]] = lambda outside: ()
    success: Callable[[str, Canaries], str] = lambda answer, outside: answer  # what it achieved, "" if nothing
    limits: Limits = LIMITS


_CONTROL = Attempt("", attempts.run)
ATTEMPTS = (
    Attempt("reading files", attempts.read_files, lambda out: [out.private_files()]),
    Attempt("writing files", attempts.write_files, lambda out: [str(out.folder)], _or_seen(Canaries.was_written)),
    Attempt("environment", attempts.read_environment, success=_leaked),
    Attempt("network", attempts.connect, lambda out: [out.port, out.socket_name, out.socket_path]),
    Attempt("signals", attempts.signal_process, lambda out: [out.victim.pid], _or_seen(Canaries.was_killed)),
    Attempt("ptrace", attempts.trace, lambda out: [out.victim.pid]),
    Attempt("memory", attempts.allocate, lambda out: [_MUCH_MEMORY]),
    Attempt("shared memory", attempts.share_memory, lambda out: [_MUCH_MEMORY]),
    Attempt("files in memory", attempts.fill_files_in_memory, lambda out: [_MUCH_MEMORY, LIMITS.max_file_bytes]),
    Attempt(
        "socket buffers",
        attempts.fill_sockets,
        lambda out: [_MANY_FILES - 32],
        limits=replace(LIMITS, max_open_files=_MANY_FILES),
    ),
    Attempt("processes", attempts.fork, lambda out: [LIMITS.max_processes]),
    Attempt("file size", attempts.write_a_large_file, lambda out: [LIMITS.max_file_bytes]),
    Attempt("disk", attempts.fill_disk, lambda out: [LIMITS.tmp_bytes]),
    Attempt("deleted files", attempts.fill_deleted_files, lambda out: [LIMITS.tmp_bytes, LIMITS.max_file_bytes]),
    Attempt("attributes of files", attempts.set_attributes),
    Attempt("keyrings", attempts.use_keyrings, lambda out: [_calls()["add_key"]]),
    Attempt("system calls", attempts.call_kernel, lambda out: [_calls()]),
    Attempt("foreign system calls", attempts.call_kernel_as_another_machine),
    Attempt("leftover processes", attempts.outlive, lambda out: [out.marker], _or_seen(Canaries.was_outlived)),
)


def probe(sandbox: Sandbox) -> dict[str, str]:
    """Try to escape from a sandbox.

    Returns:
        Protection -> how it failed, "" if it holds.

    Raises:
        OSError: the sandbox does not start, or runs no code.
    """
    with set_out(has_image=sandbox.backend.name == "container") as outside:
        first = _run(sandbox, _CONTROL, outside)
        if _answer(first) != attempts.run():
            errors = [str(record["error"]) for record in first.records if "error" in record]
            lines = first.errors.splitlines() or errors or ["it runs no code"]
            raise OSError(lines[-1] if lines[0].startswith("Traceback") else lines[0])
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda attempt: _run(sandbox, attempt, outside), ATTEMPTS))
        return {
            attempt.protection: attempt.success(_answer(result), outside) if result.started else "it did not start"
            for attempt, result in zip(ATTEMPTS, results, strict=True)
        }


def _run(sandbox: Sandbox, attempt: Attempt, outside: Canaries) -> JobResult:
    case = {"function": attempt.code.__name__, "arguments": attempt.arguments(outside)}
    parts = {"before": "", "code": inspect.getsource(attempts), "after": ""}
    request = {"kind": "functions", "token": "", "parts": parts, "cases": [case]}
    return sandbox.run(Job(request=request, limits=attempt.limits))


def _answer(result: JobResult) -> str:
    """Return what the code answered: nothing if it was killed or raised."""
    return str(next((record["value"] for record in result.records if "value" in record), ""))
