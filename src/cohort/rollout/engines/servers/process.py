"""Run a server program as a child process, of whatever engine, and leave nothing of it behind."""

import os
import signal
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from cohort.processes.child import end_group, start_in_group
from cohort.rollout.engines.servers.secret import SECRET_VARIABLE, Secret

SERVER_SIDE = Path(__file__).parent / "server_side"  # modules for servers, which lack Cohort
GRACE_S = 5.0  # between SIGTERM and SIGKILL
_MAX_LOG_BYTES = 4 << 20
# Variables of torchrun, of Cohort's own Python environment, and of its CUDA allocator: sleep mode does not support
# expandable segments.
_NOT_INHERITED = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
    *("ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"),
    *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "TORCH_NCCL_BLOCKING_WAIT"),
}
_PREFIX_NOT_INHERITED = "TORCHELASTIC_"


def start_guarded(
    command: Sequence[str], added: Mapping[str, str], *, secret: Secret, log: IO[bytes] | None
) -> "subprocess.Popen[bytes]":
    """Start a server that stops when this process dies.

    Args:
        command: the server's command line.
        added: additional environment variables.
        secret: what the server demands of every request. It is passed through a pipe, which is empty once it is read.
        log: file for the server's output; None for this process's standard error.

    Returns:
        its process, to be stopped with `end_group`.
    """
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in _NOT_INHERITED and not key.startswith(_PREFIX_NOT_INHERITED)
    }
    source, sink = os.pipe()
    try:
        with open(sink, "w", encoding="ascii") as pipe:
            pipe.write(f"{secret.text}\n")
        return start_in_group(
            command,
            output=2 if log is None else log,
            env=environment | dict(added) | {SECRET_VARIABLE: f"/dev/fd/{source}"},
            pass_fds=(source,),
            grace_s=GRACE_S,
        )
    finally:
        os.close(source)


class GuardedServer(ABC):
    """A server whose processes never outlive this one. Not thread-safe."""

    def __init__(self, *, secret: Secret, log_file: Path):
        """Create a server without starting it.

        Args:
            secret: what it demands of every request.
            log_file: receives the server's output, appended.
        """
        self.secret = secret
        self.log_file = log_file
        self.url = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @abstractmethod
    def command(self, port: int) -> tuple[list[str], dict[str, str]]:
        """Return the command line of a server on this port, and additional environment variables."""

    def start(self) -> None:
        """Start or restart on a free port without waiting. Check `/health` and `poll` for the result."""
        self.stop()
        port = _free_port()
        command, added = self.command(port)
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("ab") as log:
            self._log_start = log.tell()
            self._process = start_guarded(command, added, secret=self.secret, log=log)
        self.url = f"http://127.0.0.1:{port}"

    def poll(self) -> str | None:
        """Return None while the server runs, else how it ended. Exit code 0 is a failure too."""
        if self._process is None:
            return "not started"
        code = self._process.poll()
        if code is None:
            return None
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def log(self) -> str:
        """Return the log since the last start, at most its last 4 MiB."""
        try:
            with self.log_file.open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, end - _MAX_LOG_BYTES))
                return log.read().decode(errors="replace")
        except OSError:
            return ""

    def stop(self) -> None:
        """Stop the server and all of its processes within seconds. It can be restarted."""
        if self._process is not None:
            end_group(self._process, grace_s=GRACE_S)
        self._process = None


def _free_port() -> int:
    """Return a free port. If another process takes it before the server does, the start fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
