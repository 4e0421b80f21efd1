"""The process that starts others under sandlock. Run by `launcher`; it imports nothing of Cohort.

Each order arrives with five descriptors: standard input, output and error, one to write the exit code to, and one whose
end means that the run no longer wants the result. A forked process serves it.
"""

import contextlib
import ctypes
import errno
import gc
import json
import os
import signal
import socket
import struct
import sys
import threading
from pathlib import Path

import sandlock

_SET_DUMPABLE, _SET_CHILD_SUBREAPER = 4, 36  # of prctl(2)
_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2
_MAX_ORDER_BYTES = 1 << 17
# Landlock has these from Linux 6.10 and 6.12 on. Without them, no device is granted, `refuse_system_calls` is for
# abstract sockets, and another user id keeps signals away; `probe` refuses the backend where there is none.
_MAY_BE_MISSING = [
    sandlock.Protection.FS_IOCTL_DEV,
    sandlock.Protection.SIGNAL_SCOPE,
    sandlock.Protection.ABSTRACT_UNIX_SOCKET_SCOPE,
]
_SCOPES_ABI = 6  # of Landlock
# machine -> AUDIT_ARCH_* and numbers of system calls
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SOCKET = {"x86_64": 41, "aarch64": 198}
# chmod, chown and utime with their variants; setxattr, removexattr, file_setattr, setpriority, ioprio_set
_OF_OWNERS = {
    "x86_64": [
        *(90, 91, 92, 93, 94, 132, 235, 260, 261, 268, 280, 452),
        *(188, 189, 190, 197, 198, 199, 463, 466, 469, 141, 251),
    ],
    "aarch64": [52, 53, 54, 55, 88, 452, 5, 6, 7, 14, 15, 16, 463, 466, 469, 140, 30],
}
# prlimit64, sched_setaffinity, sched_setscheduler, sched_setparam, sched_setattr: their first argument is a process
_OF_PROCESSES = {"x86_64": (302, 203, 144, 142, 314), "aarch64": (261, 122, 119, 118, 274)}
_libc = ctypes.CDLL(None, use_errno=True)


def serve(channel: socket.socket) -> None:
    """Fork a process for every order, until the run closes its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    gc.freeze()  # forked processes share what is never collected
    gc.disable()
    while True:
        order, fds, *_ = socket.recv_fds(channel, _MAX_ORDER_BYTES, 5)
        if not order:
            return
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
        channel.send(str(pid).encode())
        for fd in fds:
            os.close(fd)


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
    lacks_scopes = sandlock.landlock_abi_version() < _SCOPES_ABI
    if lacks_scopes or uid is None:
        refuse_system_calls(of_owners=uid is None, unix_sockets=lacks_scopes)
    os.chdir(order["folder"])
    for fd in (status, life):
        os.set_inheritable(fd, False)
    box = sandlock.Sandbox(
        fs_readable=order["readable"],
        fs_denied=order["denied"],
        fs_writable=[order["folder"], "/dev/null"],
        workdir=order["folder"],
        cwd=order["folder"],
        fs_storage=order["changes"],
        max_disk=order["max_disk"],
        on_exit=sandlock.BranchAction.ABORT,
        clean_env=True,
        env=order["env"],
        max_memory=order["max_memory"],
        max_processes=order["max_processes"],
        max_open_files=order["max_open_files"],
        allow_degraded=_MAY_BE_MISSING,
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


def refuse_system_calls(*, of_owners: bool, unix_sockets: bool) -> None:
    """Refuse system calls, and those of other architectures, to this process and all that it starts.

    Args:
        of_owners: what Landlock allows to the owner of files and processes: to change modes and times of files
            anywhere, and limits and priorities of other processes.
        unix_sockets: `socket(AF_UNIX, ...)`.

    Raises:
        OSError: the kernel refuses the filter.
    """
    machine = os.uname().machine
    load, equal, mask, leave = 0x20, 0x15, 0x54, 0x06  # of BPF
    # operation, operand (offsets are of struct seccomp_data), and labels to jump to if equal, and if not
    steps: list[tuple] = [
        (load, 4),  # architecture
        (equal, _ARCHITECTURES[machine], None, "refuse"),
        (load, 0),  # number
        (mask, ~0x40000000 & 0xFFFFFFFF),  # without the flag of x32
    ]
    if of_owners:
        steps += [(equal, number, "refuse", None) for number in _OF_OWNERS[machine]]
        steps += [(equal, number, "process", None) for number in _OF_PROCESSES[machine]]
    if unix_sockets:
        steps.append((equal, _SOCKET[machine], "socket", None))
    blocks: dict[str, list[tuple]] = {
        "allow": [(leave, 0x7FFF0000)],
        "process": [(load, 16), (equal, 0, "allowed", "refuse")],  # first argument; 0 is the caller
        "socket": [(load, 16), (equal, socket.AF_UNIX, "refuse", "allowed")],
        "refuse": [(leave, 0x50000 | errno.EPERM)],
        "allowed": [(leave, 0x7FFF0000)],  # jumps only go forward
    }
    labels = {}
    for label, block in blocks.items():
        labels[label] = len(steps)
        steps += block
    program = b""
    for i, (operation, operand, *jumps) in enumerate(steps):
        skip = [labels[label] - i - 1 if label else 0 for label in jumps] or [0, 0]
        program += struct.pack("=HBBI", operation, *skip, operand)
    code = ctypes.create_string_buffer(program)
    header = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(code)))
    zero = ctypes.c_ulong(0)
    _libc.prctl(_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero)
    if _libc.prctl(_SET_SECCOMP, ctypes.c_ulong(_FILTER), header, zero, zero):
        raise OSError(ctypes.get_errno(), "cannot refuse system calls")


def end_children() -> None:
    """Kill what the process left behind: orphans become children of this process."""
    while True:
        pids = [int(p) for task in Path("/proc/self/task").iterdir() for p in (task / "children").read_text().split()]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
