"""Take away what Linux has and macOS lacks, in every Python process with this folder on PYTHONPATH.

Only Python's own calls are taken away: what libraries do in compiled code, they do as on Linux.
"""

import builtins
import ctypes
import errno
import functools
import io
import os
import resource
import select
import signal
import socket
import sys
import sysconfig
import types
from collections.abc import Callable
from typing import Any

_MISSING: dict[Any, tuple[str, ...]] = {
    os: (
        *("sched_getaffinity", "sched_setaffinity", "pidfd_open", "memfd_create", "eventfd", "pipe2", "fdatasync"),
        *("getrandom", "copy_file_range", "splice", "posix_fallocate", "posix_fadvise", "setresuid", "O_TMPFILE"),
    ),
    select: ("epoll",),
    signal: ("pidfd_send_signal", "sigtimedwait", "sigwaitinfo", "SIGRTMIN", "SIGPWR"),
    socket: (
        *("SOCK_CLOEXEC", "SOCK_NONBLOCK", "AF_NETLINK", "AF_VSOCK", "AF_ALG", "SO_PEERCRED"),
        *("SO_BINDTODEVICE", "SO_DOMAIN", "SO_PROTOCOL", "TCP_KEEPIDLE", "TCP_USER_TIMEOUT", "MSG_CMSG_CLOEXEC"),
    ),
    resource: ("prlimit", "RUSAGE_THREAD"),
}
_FOLDERS = ("/proc", "/dev/shm")


def _without_folders(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapped(path: Any = ".", *arguments: Any, **options: Any) -> Any:
        if not isinstance(path, int) and os.fsdecode(path).startswith(_FOLDERS):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return call(path, *arguments, **options)

    return wrapped


def _refuse_address_space(call: Callable[..., Any]) -> Callable[..., Any]:
    def setrlimit(kind: int, limits: tuple[int, int]) -> None:
        if kind == resource.RLIMIT_AS:
            raise ValueError("current limit exceeds maximum limit")
        call(kind, limits)

    return setrlimit


def _in_bytes(call: Callable[..., Any]) -> Callable[..., Any]:
    def getrusage(who: int) -> Any:
        usage = list(call(who))
        usage[2] *= 1024  # ru_maxrss
        return resource.struct_rusage(usage)

    return getrusage


class _Library(ctypes.CDLL):
    def __getattr__(self, name: str) -> Any:
        if name == "prctl":
            raise AttributeError("dlsym(RTLD_DEFAULT, prctl): symbol not found")
        return super().__getattr__(name)


for module, names in _MISSING.items():
    for name in names:
        vars(module).pop(name, None)
import ctypes.util  # noqa: E402  (both choose the system's calls when they are imported)

import psutil  # noqa: E402

psutil.PROCFS_PATH = "/./proc"
for name in ("cpu_affinity", "cpu_num", "io_counters", "ionice", "memory_maps"):
    delattr(psutil.Process, name)
for name in ("listdir", "lstat", "open", "readlink", "scandir", "stat"):
    setattr(os, name, _without_folders(getattr(os, name)))
builtins.open = io.open = _without_folders(open)  # type: ignore[assignment]
resource.setrlimit = _refuse_address_space(resource.setrlimit)
resource.getrusage = _in_bytes(resource.getrusage)
ctypes.CDLL = _Library  # type: ignore[misc]
sysconfig.get_config_vars()  # from a file named after the system
sys.modules["_scproxy"] = types.ModuleType("_scproxy")  # macOS's own, for urllib.request
vars(sys.modules["_scproxy"]).update(_get_proxy_settings=dict, _get_proxies=dict)
sys.platform = "darwin"
