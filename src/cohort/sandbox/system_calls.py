"""The filter of system calls for judged code: one table for all backends, on x86-64 and aarch64.

Whole families are refused, also where a backend or a missing privilege would refuse them as well: judged code needs
none of them, and each is an interface to the kernel that other confinements overlook.
"""

import os
import struct
import tomllib
from collections.abc import Iterator
from errno import ENOSYS, EPERM
from pathlib import Path

_MACHINES = ("x86_64", "aarch64")
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_HIGHEST = 462  # mseal; later ones do not exist for judged code, nor do those of x32, which start at 1 << 30
_CLONE3 = 435  # its flags are out of a filter's sight; the C library uses clone where it does not exist

# family -> name -> number on each machine, negative where there is none
_TABLE: dict[str, dict[str, list[int]]] = tomllib.loads(
    Path(__file__).with_name("system_calls.toml").read_text(encoding="utf-8")
)
_REFUSED = ("sockets", "keyrings", "kernel", "processes", "watches", "hidden_memory", "namespaces")
_AF_UNIX, _SOCK_STREAM, _SOCK_SEQPACKET = 1, 1, 5  # datagrams could be sent to the addresses of others
_NEW_NAMESPACES = 0x7E020000
_THREAD, _THREAD_AND_FILES = 0x10000, 0x10400  # a thread with descriptors of its own would hide them from the watcher
_FCNTL_REFUSED = (1024, 1026)  # F_SETLEASE, F_NOTIFY
_IOCTL_REFUSED = (0x5412, 0x541C, 0x40086602, 0x401C5820)  # TIOCSTI, TIOCLINUX, FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR

MAX_SHARED_BYTES = 1 << 24  # of a mapping; what is unmapped of one stays in memory, where no process shows it
_MAP_SHARED, _CLOSE_RANGE_UNSHARE = 1, 2

_LOAD, _EQUAL, _GREATER, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x54, 0x06  # of BPF
_NUMBER, _ARCH, _FIRST, _SECOND, _THIRD, _FOURTH = 0, 4, 16, 24, 32, 40  # in struct seccomp_data; low words
_HIGH_WORD = 4
_ALLOW, _REFUSE, _NONE_SUCH = 0x7FFF0000, 0x50000 | EPERM, 0x50000 | ENOSYS


def filter_program(*, refuse_attributes: bool, refuse_owners: bool = False) -> bytes:
    """Return the filter as an array of `struct sock_filter`.

    Args:
        refuse_attributes: refuse times and extended attributes of files, where files outside are in reach.
        refuse_owners: refuse modes and owners of files too, where the code has the user id of the run.

    Raises:
        OSError: there is no table for this machine.
    """
    arch = _AUDIT_ARCH[_MACHINES[_machine()]]
    steps = [_step(_LOAD, _ARCH), _step(_EQUAL, arch, 1, 0), _step(_RETURN, _NONE_SUCH)]
    steps += [_step(_LOAD, _NUMBER), _step(_GREATER, _HIGHEST, 0, 1), _step(_RETURN, _NONE_SUCH)]
    steps += _rule(_CLONE3, [_step(_RETURN, _NONE_SUCH)])
    for number in refused(attributes=refuse_attributes, owners=refuse_owners).values():
        steps += _rule(number, [_step(_RETURN, _REFUSE)])
    for number, body in _rules_of_arguments():
        steps += _rule(number, body)
    return b"".join([*steps, _step(_RETURN, _ALLOW)])


def refused(*, attributes: bool = False, owners: bool = False) -> dict[str, int]:
    """Return the system calls that are refused whatever their arguments, with their numbers here."""
    families = [*_REFUSED, *["attributes"] * attributes, *["owners"] * owners]
    return {name: number for family in families for name, number in _numbers(family).items()}


def _numbers(family: str) -> dict[str, int]:
    """Return the system calls of a family that exist here."""
    machine = _machine()
    return {name: numbers[machine] for name, numbers in _TABLE[family].items() if numbers[machine] >= 0}


def _machine() -> int:
    if os.uname().machine not in _MACHINES:
        raise OSError(ENOSYS, f"no filter of system calls for {os.uname().machine}")
    return _MACHINES.index(os.uname().machine)


def _rules_of_arguments() -> Iterator[tuple[int, list[bytes]]]:
    """Yield the number of each system call whose arguments decide, and what it jumps to, which returns."""
    allow, refuse = _step(_RETURN, _ALLOW), _step(_RETURN, _REFUSE)
    number = _numbers("some_arguments")
    for of_oneself in _numbers("of_oneself").values():
        yield of_oneself, [_step(_LOAD, _FIRST), _step(_EQUAL, 0, 0, 1), allow, refuse]
    pair = [_step(_LOAD, _FIRST), _step(_EQUAL, _AF_UNIX, 0, 4), _step(_LOAD, _SECOND), _step(_AND, 0xF)]
    pair += [_step(_EQUAL, _SOCK_STREAM, 2, 0), _step(_EQUAL, _SOCK_SEQPACKET, 1, 0), refuse, allow]
    yield number["socketpair"], pair
    clone = [_step(_LOAD, _FIRST), _step(_ANY_BIT, _NEW_NAMESPACES, 3, 0), _step(_AND, _THREAD_AND_FILES)]
    yield number["clone"], [*clone, _step(_EQUAL, _THREAD, 1, 0), allow, refuse]
    for name, commands in (("fcntl", _FCNTL_REFUSED), ("ioctl", _IOCTL_REFUSED)):
        checks = [step for command in commands for step in (_step(_EQUAL, command, 0, 1), refuse)]
        yield number[name], [_step(_LOAD, _SECOND), *checks, allow]
    is_shared = [_step(_LOAD, _FOURTH), _step(_ANY_BIT, _MAP_SHARED, 0, 4), _step(_LOAD, _SECOND + _HIGH_WORD)]
    is_large = [_step(_EQUAL, 0, 0, 3), _step(_LOAD, _SECOND), _step(_GREATER, MAX_SHARED_BYTES, 1, 0)]
    yield number["mmap"], [*is_shared, *is_large, allow, refuse]
    unshares = [_step(_LOAD, _THIRD), _step(_ANY_BIT, _CLOSE_RANGE_UNSHARE, 0, 1)]
    yield number["close_range"], [*unshares, refuse, allow]


def _rule(number: int, body: list[bytes]) -> list[bytes]:
    """Return the steps that run `body`, which must return, for one system call."""
    return [_step(_EQUAL, number, 0, len(body)), *body]


def _step(operation: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return one instruction. Jumps count the instructions to skip."""
    return struct.pack("=HBBI", operation, if_true, if_false, operand)
