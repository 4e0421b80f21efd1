# ruff: noqa: E501  a table
"""Attempts to escape from a sandbox, as expressions: one that raises `OSError` has achieved nothing.

They see `call(name or number, *arguments)` for a system call, the processes `pid`, which is outside, and `parent` of the
guest, `folder` with a file `secret` outside, `port`, `path` and the abstract `name` of servers outside.
"""

PRELUDE = """
import array, ctypes, errno, fcntl, mmap, os, resource, signal, socket, stat, struct, sys, threading, time

library = ctypes.CDLL(None, use_errno=True)

def call(system_call, *arguments):
    number = numbers[system_call] if isinstance(system_call, str) else system_call
    given = [ctypes.c_long(x) if isinstance(x, int) else x for x in arguments]
    result = library.syscall(ctypes.c_long(number), *given, *[ctypes.c_long(0)] * (6 - len(given)))
    if result == -1:
        raise OSError(ctypes.get_errno(), str(system_call))
    return result

def by_interrupt(number, first=0, second=0, third=0):
    code = mmap.mmap(-1, 4096, prot=7)
    code.write(b"\x53")  # keep rbx
    for opcode, value in ((0xBB, first), (0xB9, second), (0xBA, third), (0xB8, number)):
        code.write(bytes([opcode]) + struct.pack("=I", value))
    code.write(bytes.fromhex("cd805bc3"))
    result = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
    if result < 0:
        raise OSError(-result, "by interrupt")
    return result

def opened(path, flags=os.O_RDONLY):
    return os.open(path, flags)

def pair(kind=socket.SOCK_STREAM):
    return socket.socketpair(socket.AF_UNIX, kind)

def one(expression, outside):
    try:
        return repr(eval(expression, globals(), outside))
    except OSError:
        return ""
    except BaseException as error:
        return f"does not run: {error!r}"

def f(known, outside, attempts):
    global numbers
    numbers = known
    outside["parent"] = os.getppid()
    achieved = {}
    for title, expression in attempts.items():
        ours, theirs = os.pipe()
        if os.fork() == 0:  # some of them are answered by a signal
            os.write(theirs, one(expression, outside).encode()[:1000])
            os._exit(0)
        os.close(theirs)
        result = os.read(ours, 1000).decode()
        os.close(ours)
        os.wait()
        if result:
            achieved[title] = result
    return achieved
"""

_FAMILIES = {
    "inet": 2, "inet6": 10, "unix": 1, "netlink": 16, "packet": 17, "rds": 21, "can": 29, "tipc": 30, "bluetooth": 31,
    "alg": 38, "vsock": 40, "kcm": 41, "qipcrtr": 42, "smc": 43, "xdp": 44,
}  # fmt: skip
_SOCKETS = {
    f"socket of {name}, type {kind}": f"call('socket', {number}, {kind}, 0)"
    for name, number in _FAMILIES.items()
    for kind in (1, 2, 3, 5)
} | {
    "socket of MPTCP": "call('socket', 2, 1, 262)",
    "socket of SCTP": "call('socket', 2, 1, 132)",
    "ping": "call('socket', 2, 2, 1)",
    "raw ICMP": "call('socket', 2, 3, 1)",
    "fast open": "call('sendto', call('socket', 2, 1, 0), b'x', 1, 0x20000000, struct.pack('=HHI8x', 2, 80, 127), 16)",
    "pair of datagrams": "pair(socket.SOCK_DGRAM)",
    "raw pair": "pair(socket.SOCK_RAW)",
    "pair of inet": "socket.socketpair(socket.AF_INET)",
    "an end sends to an abstract address": "pair(socket.SOCK_DGRAM)[0].sendto(b'x', chr(0) + name)",
    "an end binds an abstract name": "pair()[0].bind(chr(0) + 'cohort-' + str(os.getpid()))",
    "an end binds by itself": "call('bind', pair()[0].detach(), struct.pack('=H', 1), 2)",
    "an end listens": "pair()[0].listen()",
    "an end connects": "pair()[0].connect(path)",
    "an end of packets connects": "pair(socket.SOCK_SEQPACKET)[0].connect(chr(0) + name)",
    "an end accepts": "pair()[0].accept()",
    "larger buffers": "pair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)",
    "descriptors in flight": "socket.send_fds(pair()[0], [b'x'], [0])",
    "connection": "socket.create_connection(('127.0.0.1', port), 2)",
    "server": "socket.create_server(('127.0.0.1', 0))",
}
_KEYS = {f"key in keyring {ring}": f"call('add_key', b'user', b'cohort', b'x', 1, {ring})" for ring in range(-5, 0)} | {
    **{f"keyctl {n} of {ring}": f"call('keyctl', {n}, {ring}, 1)" for n in (0, 6, 11) for ring in (-3, -4, -5)},
    "new session keyring": "call('keyctl', 1, 0)",
    "search of a key": "call('keyctl', 10, -3, b'user', b'cohort', 0)",
    "persistent keyring": "call('keyctl', 22, -1, -3)",
    "keyring of the parent": "call('keyctl', 18)",
    "request of a key": "call('request_key', b'user', b'cohort', 0, -3)",
    "names of keys": "open('/proc/keys').read()[0]",
    "users of keys": "open('/proc/key-users').read()[0]",
}
_KERNEL = {
    **{f"bpf {n}": f"call('bpf', {n}, ctypes.create_string_buffer(128), 128)" for n in (0, 5, 18)},
    "performance events": "call('perf_event_open', ctypes.create_string_buffer(struct.pack('=IIQ', 1, 112, 0), 128), 0, -1, -1, 0)",
    "page faults": "call('userfaultfd', 1)",
    "a ring": "call('io_uring_setup', 4, ctypes.create_string_buffer(120))",
    "registration of a ring": "call('io_uring_register', -1, 16, ctypes.create_string_buffer(256), 0)",
    "asynchronous input": "call('io_setup', 4, ctypes.create_string_buffer(8))",
    "a handle of a file": "call('name_to_handle_at', -100, b'/', ctypes.create_string_buffer(struct.pack('=I', 128), 144), ctypes.create_string_buffer(8), 0)",
    "a file by its handle": "call('open_by_handle_at', -100, ctypes.create_string_buffer(144), 0)",
    "the kernel's log": "call('syslog', 3, ctypes.create_string_buffer(100), 100)",
    "a later system call": "call(467, -100, b'/', 0, 0, 0)",
    "a far later system call": "call(100_000)",
    "clone3": "call(435, ctypes.create_string_buffer(88), 88)",
    "typing into a terminal": "fcntl.ioctl(opened('/dev/ptmx', os.O_RDWR), 0x5412, b'x')",
    **{
        f"by interrupt: {name}": f"by_interrupt({arguments})"
        for name, arguments in {
            "getpid": "20", "socketcall": "102, 1, 0", "keyctl": "288, 0, 0xFFFFFFFD, 1", "bpf": "357", "add_key": "286",
            "mount": "21", "ptrace": "26", "io_uring": "425", "inotify": "291", "socket": "359, 2, 1, 0",
        }.items()
    },
    **{f"x32 {n}": f"call((1 << 30) + {n}, 2, 1, 0)" for n in (39, 41, 101, 250, 512)},
}  # fmt: skip
_PROCESSES = {
    "ptrace": "call('ptrace', 16, pid, 0, 0)",
    "ptrace by seizing": "call('ptrace', 0x4206, pid, 0, 0)",
    "ptrace of a parent": "call('ptrace', 16, parent, 0, 0)",
    "tracing oneself": "call('ptrace', 0, 0, 0, 0)",
    "memory of a process": "call('process_vm_readv', pid, ctypes.create_string_buffer(16), 1, ctypes.create_string_buffer(16), 1, 0)",
    "memory of a parent by its file": "open(f'/proc/{parent}/mem', 'rb').read(1)",
    "limits are read": "resource.prlimit(pid, resource.RLIMIT_NOFILE)",
    "limits are set": "resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))",
    "limits of a parent": "resource.prlimit(parent, resource.RLIMIT_NOFILE, (3, 3))",
    "affinity": "os.sched_setaffinity(pid, {0})",
    "affinity of a parent": "os.sched_setaffinity(parent, {0})",
    "scheduler": "os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))",
    "priority": "os.setpriority(os.PRIO_PROCESS, pid, 19)",
    "priority of a user": "os.setpriority(os.PRIO_USER, 0, 19)",
    "priority of input": "call('ioprio_set', 1, pid, 0)",
    "signal": "os.kill(pid, signal.SIGKILL)",
    "signal to a group": "os.killpg(pid, signal.SIGKILL)",
    "signal by descriptor": "signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGKILL)",
    "a descriptor of a process": "call('pidfd_getfd', os.pidfd_open(os.getpid()), 0, 0)",
    "comparison": "call('kcmp', os.getpid(), parent, 2, 0, 0)",
    "its folder": "os.listdir(f'/proc/{pid}/cwd')",
    "its root": "os.listdir(f'/proc/{pid}/root')",
    "its environment": "open(f'/proc/{pid}/environ').read()",
    "its descriptors": "os.listdir(f'/proc/{pid}/fd')",
    "its score for running out of memory": "open(f'/proc/{pid}/oom_score_adj', 'w').write('1000')",
    "pages": "call('move_pages', parent, 0, 0, 0, 0, 0)",
}
_FILES = {
    "times by descriptor": "os.utime(opened(os.__file__), (0, 0))",
    "times by path": "os.utime(os.__file__, (0, 0))",
    "times by path to now": "os.utime(folder + '/secret')",
    "times of the guest": "os.utime(opened(sys.argv[0]))",
    "attribute by descriptor": "os.setxattr(opened(os.__file__), 'user.x', b'')",
    "attribute by path": "os.setxattr(folder + '/secret', 'user.x', b'')",
    "removal of an attribute": "call('removexattr', os.__file__.encode(), b'user.x')",
    "mode by descriptor": "os.chmod(opened(os.__file__), 0o777)",
    "mode by path": "os.chmod(folder + '/secret', 0)",
    "mode of the guest": "os.chmod(sys.argv[0], 0o777)",
    "owner by descriptor": "os.chown(opened(os.__file__), os.getuid(), -1)",
    "flags of a file": "fcntl.ioctl(opened(os.__file__), 0x40086602, struct.pack('=l', 0x80))",
    "watch by inotify": "call('inotify_add_watch', call('inotify_init1', 0), os.path.dirname(os.__file__).encode(), 0xFFF)",
    "watch by fanotify": "call('fanotify_init', 0x200, 0)",
    "watch by signal": "fcntl.fcntl(opened(os.path.dirname(os.__file__)), fcntl.F_NOTIFY, 2)",
    "lease": "fcntl.fcntl(opened(os.__file__), fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    "reading": "open(folder + '/secret').read()",
    "reading by a descriptor of the root": "open(os.open(folder.lstrip('/') + '/secret', 0, dir_fd=os.open('/', os.O_PATH)))",
    "writing": "open(folder + '/secret', 'w')",
    "writing by a reopened descriptor": "open(f'/proc/self/fd/{opened(os.__file__)}', 'r+')",
    "truncation": "os.truncate(folder + '/secret', 0)",
    "renaming": "os.rename(folder + '/secret', 'taken')",
    "a hard link": "os.link(folder + '/secret', 'link')",
    "a hard link of the library": "os.link(os.__file__, 'link')",
    "a device": "os.mknod('disk', stat.S_IFBLK | 0o666, os.makedev(254, 0))",
    "the machine's users": "open('/etc/passwd').read()",
    "the machine's hosts": "open('/etc/hosts').read()",
    "the machine's name": "open('/etc/hostname').read()",
    "the kernel's messages": "open('/dev/kmsg').read(1)",
    "the kernel's memory": "open('/dev/mem', 'rb').read(1)",
    "a setting of the kernel": "open('/proc/sys/kernel/core_pattern', 'w').write('x')",
    "a trigger of the kernel": "open('/proc/sysrq-trigger', 'w').write('x')",
}  # fmt: skip
_NAMESPACES = {
    **{f"unshare {flag:#x}": f"call('unshare', {flag})"
       for flag in (0x200, 0x400, 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)},
    "clone into a namespace of users": "call(numbers['clone'], 0x10000011, 0, 0, 0, 0)",
    "namespace of a parent": "call('setns', opened(f'/proc/{parent}/ns/user'), 0)",
    "mount": "call('mount', b'none', b'/tmp', b'tmpfs', 0, 0)",
    "new mount": "call('fsopen', b'tmpfs', 0)",
    "tree of mounts": "call('open_tree', -100, b'/', 1)",
    "unmount": "call('umount2', b'/proc', 2)",
    "chroot": "os.chroot('/')",
    "pivot_root": "call('pivot_root', b'.', b'.')",
    "a name of the machine": "call('sethostname', b'x', 1)",
}  # fmt: skip
_HIDING = {
    "shared memory by a key": "call('shmget', 0, 1 << 20, 0o1600)",
    "semaphores": "call('semget', 0, 1, 0o1600)",
    "messages": "call('msgget', 0, 0o1600)",
    "a queue of messages": "call('mq_open', b'cohort', 0o102, 0o600, 0)",
    "secret memory": "call('memfd_secret', 0)",
    "pages in a pipe": "call('vmsplice', os.pipe()[1], ctypes.create_string_buffer(16), 1, 0)",
    "a large shared mapping": "mmap.mmap(-1, 1 << 25)",
    "descriptors of a thread alone": "call('unshare', 0x400)",
    "descriptors alone by closing": "call(436, 1000, 1001, 2)",
    "a thread without the others' descriptors": "call(numbers['clone'], 0x10900, 0, 0, 0, 0)",
    "rules that hold files": "call('landlock_create_ruleset', ctypes.create_string_buffer(struct.pack('=Q', 8)), 8, 0)",
}
ATTEMPTS = {
    "sockets": _SOCKETS,
    "keyrings": _KEYS,
    "kernel": _KERNEL,
    "processes": _PROCESSES,
    "files": _FILES,
    "namespaces": _NAMESPACES,
    "hiding": _HIDING,
}
