"""The process that starts others under sandlock. Run by `fork_server`; it imports nothing of Cohort.

Each order arrives with five descriptors: standard input, output and error, one to write the exit code to, and one whose
end means that the run no longer wants the result. A forked process serves it.
"""

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import sandlock

_SET_DUMPABLE, _SET_CHILD_SUBREAPER = 4, 36  # of prctl(2)
_MAX_ORDER_BYTES = 1 << 17
_ORPHANS_S, _END_S = 0.5, 3.0
# Landlock has these from Linux 6.10 and 6.12 on. Without them, no device is granted, the guest's filter refuses all
# sockets, and another user id keeps signals away; `probe` refuses the backend where there is none.
_MAY_BE_MISSING = [
    sandlock.Protection.FS_IOCTL_DEV,
    sandlock.Protection.SIGNAL_SCOPE,
    sandlock.Protection.ABSTRACT_UNIX_SOCKET_SCOPE,
]
_libc = ctypes.CDLL(None, use_errno=True)


def serve(channel: socket.socket) -> None:
    """Fork a process for every order, until the run closes its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    gc.freeze()  # forked processes share what is never collected
    gc.disable()
    supervisors: set[int] = set()
    while True:
        end_orphans(supervisors)
        if not select.select([channel], [], [], _ORPHANS_S)[0]:
            continue
        order, fds, *_ = socket.recv_fds(channel, _MAX_ORDER_BYTES, 5)
        if not order:
            break
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                channel.close()
                code = run(json.loads(order), fds)
            except BaseException as error:
                os.write(2, f"sandlock: {type(error).__name__}: {error}".encode())
            finally:
                os._exit(code)
        supervisors.add(pid)
        channel.send(str(pid).encode())
        for fd in fds:
            os.close(fd)
    deadline = time.monotonic() + _END_S
    while children():
        end_orphans(supervisors if time.monotonic() < deadline else set())
        time.sleep(0.05)


def end_orphans(supervisors: set[int]) -> None:
    """Kill what supervisors that died have left behind, and forget those supervisors."""
    pids = set(children())
    supervisors &= pids
    for pid in pids - supervisors:
        kill(pid)


def run(order: dict, fds: list[int]) -> int:
    """Run one process under sandlock, end what it left behind, and write its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    stdin, stdout, stderr, status, life = fds
    for fd, target in ((stdin, 0), (stdout, 1), (stderr, 2)):
        os.dup2(fd, target)
        os.close(fd)
    uid = order["uid"]
    if uid is not None:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        _libc.prctl(_SET_DUMPABLE, 1, 0, 0, 0)  # else its own /proc/self belongs to root, and sandlock needs it
    _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.chdir(order["box"]["cwd"])
    for fd in (status, life):
        os.set_inheritable(fd, False)
    box = sandlock.Sandbox(
        **order["box"], on_exit=sandlock.BranchAction.ABORT, clean_env=True, allow_degraded=_MAY_BE_MISSING
    )
    process = box.popen(order["command"])

    def watch() -> None:
        os.read(life, 1)
        process.kill()

    threading.Thread(target=watch, daemon=True).start()
    result = process.wait()
    end_children()
    code = result.exit_code if result.exit_code is not None and result.signal < 0 else -abs(result.signal)
    os.write(status, str(code).encode())
    return 0


def end_children() -> None:
    """Kill what the process left behind: orphans become children of this process."""
    while True:
        for pid in children():
            kill(pid)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def children() -> list[int]:
    """Return the children of this process."""
    return [int(p) for task in Path("/proc/self/task").iterdir() for p in (task / "children").read_text().split()]


def kill(pid: int) -> None:
    """Kill a process, which may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
