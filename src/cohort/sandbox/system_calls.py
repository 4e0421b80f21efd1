"""The filter of system calls for judged code: one table for all backends, on x86-64 and aarch64.

Whole families are refused, also where a backend or a missing privilege would refuse them as well: judged code needs
none of them, and each is an interface to the kernel that other confinements overlook.
"""

import os
import struct
from collections.abc import Iterator
from errno import ENOSYS, EPERM

_MACHINES = ("x86_64", "aarch64")
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_HIGHEST = 462  # mseal; later ones do not exist for judged code, nor do those of x32, which start at 1 << 30
_CLONE3 = 435  # its flags are out of a filter's sight; the C library uses clone where it does not exist

# name -> number on x86-64 and aarch64, None where it does not exist
_Numbers = dict[str, tuple[int | None, int | None]]
# No address is ever checked, since there is no socket but the two ends of a `socketpair`. Passing descriptors
# (`sendmsg`) would hide files and memory from the watcher; a larger buffer would hold more than it counts.
_SOCKETS: _Numbers = {
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "setsockopt": (54, 208),
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
}
_KEYRINGS: _Numbers = {"add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219)}
_KERNEL: _Numbers = {
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_setup": (206, 0),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "acct": (163, 89),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "settimeofday": (164, 170),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "syslog": (103, 116),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "lookup_dcookie": (212, 18),
    "iopl": (172, None),
    "ioperm": (173, None),
}
_PROCESSES: _Numbers = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
}
_WATCHES: _Numbers = {
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
}
# Shared with other processes, or in no process's resident memory
_HIDDEN_MEMORY: _Numbers = {
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "memfd_secret": (447, 447),
    "landlock_create_ruleset": (444, 444),  # its rules hold deleted files
    "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
    "vmsplice": (278, 75),
}
_NAMESPACES: _Numbers = {
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "statmount": (457, 457),
    "listmount": (458, 458),
    "setns": (308, 268),
    "unshare": (272, 97),
}
# Landlock has no right for these: whoever may write to a file, or owns it, may change them anywhere
_ATTRIBUTES: _Numbers = {
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
}
_OWNERS: _Numbers = {
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
}
_REFUSED = _SOCKETS | _KEYRINGS | _KERNEL | _PROCESSES | _WATCHES | _HIDDEN_MEMORY | _NAMESPACES
# Their first argument is a process; 0 is the caller
_OF_ONESELF: _Numbers = {
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
}
_SOCKETPAIR, _CLONE, _FCNTL, _IOCTL, _MMAP, _CLOSE_RANGE = (
    (53, 199),
    (56, 220),
    (72, 25),
    (16, 29),
    (9, 222),
    (436, 436),
)
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
    machine = _machine()
    steps = [_step(_LOAD, _ARCH), _step(_EQUAL, _AUDIT_ARCH[os.uname().machine], 1, 0), _step(_RETURN, _NONE_SUCH)]
    steps += [_step(_LOAD, _NUMBER), _step(_GREATER, _HIGHEST, 0, 1), _step(_RETURN, _NONE_SUCH)]
    steps += _rule(_CLONE3, [_step(_RETURN, _NONE_SUCH)])
    for number in refused(attributes=refuse_attributes, owners=refuse_owners).values():
        steps += _rule(number, [_step(_RETURN, _REFUSE)])
    for number, body in _rules_of_arguments(machine):
        steps += _rule(number, body)
    return b"".join([*steps, _step(_RETURN, _ALLOW)])


def refused(*, attributes: bool = False, owners: bool = False) -> dict[str, int]:
    """Return the system calls that are refused whatever their arguments, with their numbers here."""
    machine = _machine()
    table = _REFUSED | (_ATTRIBUTES if attributes else {}) | (_OWNERS if owners else {})
    return {name: number for name, numbers in table.items() if (number := numbers[machine]) is not None}


def _machine() -> int:
    if os.uname().machine not in _MACHINES:
        raise OSError(ENOSYS, f"no filter of system calls for {os.uname().machine}")
    return _MACHINES.index(os.uname().machine)


def _rules_of_arguments(machine: int) -> Iterator[tuple[int, list[bytes]]]:
    """Yield the number of each system call whose arguments decide, and what it jumps to, which returns."""
    allow, refuse = _step(_RETURN, _ALLOW), _step(_RETURN, _REFUSE)
    for numbers in _OF_ONESELF.values():
        number = numbers[machine]
        assert number is not None
        yield number, [_step(_LOAD, _FIRST), _step(_EQUAL, 0, 0, 1), allow, refuse]
    pair = [_step(_LOAD, _FIRST), _step(_EQUAL, _AF_UNIX, 0, 4), _step(_LOAD, _SECOND), _step(_AND, 0xF)]
    pair += [_step(_EQUAL, _SOCK_STREAM, 2, 0), _step(_EQUAL, _SOCK_SEQPACKET, 1, 0), refuse, allow]
    yield _SOCKETPAIR[machine], pair
    clone = [_step(_LOAD, _FIRST), _step(_ANY_BIT, _NEW_NAMESPACES, 3, 0), _step(_AND, _THREAD_AND_FILES)]
    yield _CLONE[machine], [*clone, _step(_EQUAL, _THREAD, 1, 0), allow, refuse]
    for numbers, commands in ((_FCNTL, _FCNTL_REFUSED), (_IOCTL, _IOCTL_REFUSED)):
        checks = [step for command in commands for step in (_step(_EQUAL, command, 0, 1), refuse)]
        yield numbers[machine], [_step(_LOAD, _SECOND), *checks, allow]
    is_shared = [_step(_LOAD, _FOURTH), _step(_ANY_BIT, _MAP_SHARED, 0, 4), _step(_LOAD, _SECOND + _HIGH_WORD)]
    is_large = [_step(_EQUAL, 0, 0, 3), _step(_LOAD, _SECOND), _step(_GREATER, MAX_SHARED_BYTES, 1, 0)]
    yield _MMAP[machine], [*is_shared, *is_large, allow, refuse]
    unshares = [_step(_LOAD, _THIRD), _step(_ANY_BIT, _CLOSE_RANGE_UNSHARE, 0, 1)]
    yield _CLOSE_RANGE[machine], [*unshares, refuse, allow]


def _rule(number: int, body: list[bytes]) -> list[bytes]:
    """Return the steps that run `body`, which must return, for one system call."""
    return [_step(_EQUAL, number, 0, len(body)), *body]


def _step(operation: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return one instruction. Jumps count the instructions to skip."""
    return struct.pack("=HBBI", operation, if_true, if_false, operand)
