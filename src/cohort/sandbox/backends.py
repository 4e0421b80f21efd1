"""Backends: how a process is confined. Which protections a backend really gives here is for `probe` to find out."""

import importlib.util
import itertools
import os
import shlex
import shutil
import tempfile
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import httpx2

from cohort.config.hardware import SandboxConfig
from cohort.sandbox.fork_server import ForkServer
from cohort.sandbox.interpreter import GUEST_SOURCE, Interpreter, system_libraries
from cohort.sandbox.process import Conversation, Limits, PopenChild, ProcessResult, run_process
from cohort.sandbox.system_calls import filter_program

GUEST_ENV = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}
_FOLDER = "/tmp/code"  # to work in: folders of the interpreter may be beside it
_KEYS = ("/proc/keys", "/proc/key-users")  # names the keys of the run
_MADE_UP = ("/etc/hosts", "/etc/hostname", "/proc/mounts", "/proc/self/mounts")  # files that sandlock invents
_MOUNT_POINTS_BYTES = "65536"  # room for the names of packages
# unprivileged, and nobody else's: root is not subject to RLIMIT_NPROC, nor to file permissions
_OWN_UID, _NUM_UIDS = 165_534, 50_000


class Backend(ABC):
    """A way to confine one process."""

    name: str
    holds_sessions = True  # whether a process can be talked to while it runs
    counts_processes = False  # whether RLIMIT_NPROC counts the processes of one sandbox alone
    guest_filter = b""  # of system calls, that the guest program loads; empty if the backend does or there is none

    def missing(self) -> str | None:
        """Return what has to be installed, or None."""
        return None

    @abstractmethod
    def run(self, settings: str, request: bytes | Conversation, limits: Limits, *, toolchain: bool) -> ProcessResult:
        """Run the guest program on a request.

        Args:
            settings: the guest's command line argument.
            request: the job, its standard input; or a conversation, if the backend `holds_sessions`.
            limits: limits that hold for all of it.
            toolchain: whether compilers and other programs of the system may be used.

        Raises:
            OSError: the process cannot be started.
        """


class Bubblewrap(Backend):
    """Namespaces of bubblewrap: own users, processes, network, mounts; as root with an own uid by setpriv."""

    name = "bubblewrap"
    counts_processes = True

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter
        self._filter = filter_program(refuse_attributes=False)

    def missing(self) -> str | None:
        """See `Backend`."""
        if shutil.which("bwrap") is None:
            return "bubblewrap is not installed (`apt install bubblewrap`)"
        if os.geteuid() == 0 and shutil.which("setpriv") is None:
            return "as root it needs setpriv (util-linux)"
        return None

    def run(self, settings: str, request: bytes | Conversation, limits: Limits, *, toolchain: bool) -> ProcessResult:
        """See `Backend`."""
        program = os.memfd_create("system calls")
        try:
            os.write(program, self._filter)
            os.lseek(program, 0, os.SEEK_SET)
            options = self._options(limits, toolchain=toolchain)
            command = [*options, "--seccomp", str(program), "--", *self._interpreter.command(settings)]
            child = PopenChild(command, env={}, pass_fds=[program])
        finally:
            os.close(program)
        return run_process(child, request, limits)

    def _options(self, limits: Limits, *, toolchain: bool) -> list[str]:
        own_uid = ("--reuid", str(_OWN_UID), "--regid", str(_OWN_UID), "--clear-groups")
        command = [str(shutil.which("setpriv")), *own_uid] if os.geteuid() == 0 else []
        command += [str(shutil.which("bwrap")), "--unshare-all", "--unshare-user", "--disable-userns"]
        command += ["--die-with-parent", "--new-session", "--cap-drop", "ALL", "--hostname", "sandbox"]
        for path in system_libraries(toolchain=toolchain):
            if path.is_symlink():
                command += ["--symlink", os.readlink(path), str(path)]
            else:
                command += ["--ro-bind", str(path), str(path)]
        if toolchain:
            command += ["--symlink", "usr/bin", "/bin"]
        command += ["--size", str(limits.tmp_bytes), "--tmpfs", "/tmp"]
        hidden = self._interpreter.hidden
        for name in self._interpreter.readable:
            if not _is_below(name, hidden):
                command += ["--ro-bind", name, name]
        for name in hidden:
            command += ["--size", _MOUNT_POINTS_BYTES, "--tmpfs", name]
        for name in self._interpreter.readable:
            if _is_below(name, hidden):
                command += ["--ro-bind", name, name]
        for name in hidden:
            command += ["--remount-ro", name]
        command += ["--proc", "/proc"]
        for name in _KEYS:
            command += ["--ro-bind", "/dev/null", name]
        command += ["--dev", "/dev", "--remount-ro", "/dev", "--remount-ro", "/"]
        for key, value in (GUEST_ENV | self._interpreter.env).items():
            command += ["--setenv", key, value]
        return [*command, "--dir", _FOLDER, "--chdir", _FOLDER]


class Sandlock(Backend):
    """Landlock and seccomp by sandlock, without namespaces; its supervisor runs in a process of its own."""

    name = "sandlock"
    counts_processes = False  # sandlock counts them itself

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter
        self._launcher = ForkServer()
        # of verdicts at the same time: where Landlock does not keep signals away, user ids do
        self._uids = itertools.cycle(range(_OWN_UID, _OWN_UID + _NUM_UIDS))
        self._denied = [path for folder in interpreter.hidden for path in _denied_in(folder, interpreter.readable)]
        # not loaded before sandlock starts, whose supervisor needs some of what judged code does not
        self.guest_filter = filter_program(refuse_attributes=True, refuse_owners=os.geteuid() != 0)

    def missing(self) -> str | None:
        """See `Backend`."""
        if importlib.util.find_spec("sandlock") is None:
            return "sandlock is not installed (`pip install sandlock`)"
        return None

    def run(self, settings: str, request: bytes | Conversation, limits: Limits, *, toolchain: bool) -> ProcessResult:
        """See `Backend`."""
        uid = next(self._uids) if os.geteuid() == 0 else None
        with tempfile.TemporaryDirectory(prefix="cohort-box-") as parent:
            os.chmod(parent, 0o755)
            folder, changes = f"{parent}/tmp", f"{parent}/changes"
            for path in (folder, changes):
                os.mkdir(path, 0o700)
                if uid is not None:
                    os.chown(path, uid, uid)
            libraries = [str(p) for p in system_libraries(toolchain=toolchain)]
            box = {
                "fs_readable": [*libraries, *self._interpreter.readable, "/dev/null", "/dev/zero", "/dev/urandom"],
                "fs_denied": [*self._denied, *_MADE_UP],
                "fs_writable": [folder, "/dev/null"],
                "fs_storage": changes,
                "workdir": folder,
                "cwd": folder,
                "env": GUEST_ENV | self._interpreter.env | {"HOME": folder, "TMPDIR": folder},
                "max_memory": limits.memory_bytes,
                "max_processes": limits.max_processes,
                "max_open_files": limits.max_open_files,
                "max_disk": limits.tmp_bytes,
            }
            order = {"command": self._interpreter.command(settings), "uid": uid, "box": box}
            return run_process(self._launcher.start(order), request, limits)


class Container(Backend):
    """A container per run, such as `docker run`. Slow to start, but it needs nothing of this machine's kernel."""

    name = "container"
    counts_processes = False  # `--pids-limit` does

    def __init__(self, interpreter: Interpreter, config: SandboxConfig) -> None:
        self._guest = str(GUEST_SOURCE)  # not the compiled one: the image has its own interpreter
        self._start, self._image = shlex.split(config.container), config.image
        self.guest_filter = filter_program(refuse_attributes=False)

    def missing(self) -> str | None:
        """See `Backend`."""
        return None if shutil.which(self._start[0]) else f"{self._start[0]} is not installed"

    def run(self, settings: str, request: bytes | Conversation, limits: Limits, *, toolchain: bool) -> ProcessResult:
        """See `Backend`."""
        name = f"cohort-{uuid.uuid4().hex}"
        result = run_process(PopenChild([*self._command(name, limits), settings], env=os.environ), request, limits)
        if result.ending != "exited" or not isinstance(request, bytes):  # the client was killed, not the container
            remove = [self._start[0], "rm", "--force", name]
            run_process(PopenChild(remove, env=os.environ), b"", limits)
        return result

    def _command(self, name: str, limits: Limits) -> list[str]:
        options = ["--rm", "--interactive", "--name", name, "--network", "none", "--read-only", "--cap-drop", "ALL"]
        options += ["--security-opt", "no-new-privileges", "--user", "65534:65534", "--workdir", "/tmp"]
        options += ["--log-driver", "none", "--tmpfs", f"/tmp:rw,exec,size={limits.tmp_bytes}"]
        options += ["--pids-limit", str(limits.max_processes + 1), "--memory", str(limits.memory_bytes)]
        options += ["--memory-swap", str(limits.memory_bytes), "--init"]
        options += ["--volume", f"{self._guest}:/guest.py:ro", "--ipc", "none"]
        for key, value in GUEST_ENV.items():
            options += [] if key == "PATH" else ["--env", f"{key}={value}"]
        return [*self._start, *options, self._image, "python3", "-s", "-P", "-B", "/guest.py"]  # with its packages


class Unconfined(Backend):
    """No confinement: only resource limits, and the end of what was started."""

    name = "none"

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter

    def run(self, settings: str, request: bytes | Conversation, limits: Limits, *, toolchain: bool) -> ProcessResult:
        """See `Backend`."""
        with tempfile.TemporaryDirectory() as folder:
            env = GUEST_ENV | {"HOME": folder, "TMPDIR": folder}
            return run_process(PopenChild(self._interpreter.command(settings), env=env, cwd=folder), request, limits)


def _is_below(path: str, folders: Iterable[str]) -> bool:
    return any(path.startswith(f"{folder}/") for folder in folders)


def _denied_in(folder: str, readable: Sequence[str]) -> list[str]:
    """Return what to deny of a folder, which has no exceptions: the folder, or what is beside the packages in it."""
    if not any(_is_below(path, [folder]) for path in readable):
        return [folder]
    entries = [f"{folder}/{name}" for name in sorted(os.listdir(folder))]
    return [entry for entry in entries if not any(f"{path}/".startswith(f"{entry}/") for path in readable)]


_PROGRAM = """import sys
sys.argv = ["guest", {settings!r}]
exec(compile({source!r}, "guest.py", "exec"), {{"__name__": "__main__"}})
"""
_ANSWER_S = 30.0  # for the server's queue and the transfer, besides the run


class SandboxFusion(Backend):
    """A remote sandbox (`POST /run_code`). What it holds is the server's business; the guest limits itself too."""

    name = "sandbox_fusion"
    holds_sessions = False

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._client = httpx2.Client()

    def run(self, settings: str, request: bytes | Conversation, limits: Limits, *, toolchain: bool) -> ProcessResult:
        """See `Backend`.

        Raises:
            OSError: no answer, or the server says that its sandbox failed.
        """
        assert isinstance(request, bytes), "it holds no sessions"
        body = {
            "language": "python",
            "code": _PROGRAM.format(settings=settings, source=GUEST_SOURCE.read_text()),
            "stdin": request.decode(),
            "run_timeout": limits.wall_s,
        }
        try:
            response = self._client.post(f"{self._url}/run_code", json=body, timeout=limits.wall_s + _ANSWER_S)
            response.raise_for_status()
            answer = response.json()
        except (httpx2.HTTPError, ValueError) as error:
            raise OSError(f"{self._url}/run_code: {error}") from error
        ran = answer.get("run_result") or {}
        if answer.get("status") == "SandboxError" or not isinstance(ran.get("stdout"), str):
            raise OSError(f"{self._url}/run_code: {answer.get('message') or answer.get('status')}")
        timed_out = ran.get("status") == "TimeLimitExceeded"
        return ProcessResult(
            output=ran["stdout"].encode()[: limits.channel_bytes],
            errors=str(ran.get("stderr") or "").encode()[:4096],
            ending="wall time" if timed_out else "exited",
            exit_code=None if timed_out else ran.get("return_code"),
            wall_s=float(ran.get("execution_time") or 0.0),
        )
