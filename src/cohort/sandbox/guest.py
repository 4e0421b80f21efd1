"""The program inside the sandbox. It needs only the standard library and imports nothing of Cohort.

It limits itself, reports that it is ready, and only then reads the job from standard input: whatever goes wrong before
that line is the sandbox's fault, whatever goes wrong after it is the code's. It answers with JSON lines, one per test
case. Nobody trusts them: they hold values and output, and the parent, which alone knows what is expected, compares.
"""

from __future__ import annotations

# Starting the interpreter is most of a verdict's time, and `json` would double it.
import builtins
import marshal
import os
import resource
import sys

TYPE_CHECKING = False  # of `typing`, without its import
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

MAX_DEPTH = 60
MAX_ERROR_CHARS = 300
_ESCAPES = {code: f"\\u{code:04x}" for code in (*range(32), ord('"'), ord("\\"))}  # of JSON's strings
_ESCAPES |= {ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t"}


class Channel:
    """The pipe to the parent, out of the way of what the code prints."""

    def __init__(self) -> None:
        self._fd = os.dup(1)
        self._write, self._to_json = os.write, to_json  # the code may replace them
        nowhere = os.open(os.devnull, os.O_RDWR)
        for fd in (1, 2):
            os.dup2(nowhere, fd)
        os.close(nowhere)

    def send(self, record: dict[str, Any]) -> None:
        """Write one JSON line."""
        data = self._to_json(record).encode(errors="backslashreplace") + b"\n"
        while data:
            data = data[self._write(self._fd, data) :]

    def close(self) -> None:
        """Close it, in a process that runs a program of its own."""
        os.close(self._fd)


def limit_self(limits: dict[str, int]) -> None:
    """Set the resource limits of this process and of all that it starts."""
    for name, value in limits.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def refuse_system_calls(program: bytes) -> None:
    """Load a filter of system calls, an array of `struct sock_filter`, for this process and all that it starts."""
    import _ctypes  # `ctypes` would take a tenth of a verdict's time

    address = id(program) + bytes.__basicsize__ - 1  # of its content
    header = (len(program) // 8).to_bytes(8, sys.byteorder) + address.to_bytes(8, sys.byteorder)
    prctl = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")  # type: ignore[arg-type]
    no_new_privileges, set_filter, by_program = 38, 22, 2
    for arguments in ((no_new_privileges, 1, 0, 0, 0), (set_filter, by_program, header, 0, 0)):
        if _ctypes.call_function(prctl, arguments):
            raise OSError(_ctypes.get_errno(), "cannot refuse system calls")


def encode(value: Any, depth: int = 0) -> Any:
    """Return a plain value as JSON; other types become `{"x": name of the type}`, which equals nothing."""
    if depth > MAX_DEPTH:
        raise ValueError(f"a value nested more than {MAX_DEPTH} deep")
    if value is None or isinstance(value, bool):
        return value
    plain: tuple[Any, ...] = (int, float, str)
    for kind in plain:
        if isinstance(value, kind):
            return kind.__add__(value, kind())  # of the exact type
    collections: tuple[Any, ...] = ((list, None), (tuple, "t"), (set, "s"), (frozenset, "s"))
    for kind, tag in collections:
        if isinstance(value, kind):
            items = [encode(item, depth + 1) for item in kind.__iter__(value)]
            return items if tag is None else {tag: items}
    if isinstance(value, dict):
        return {"d": [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in dict.items(value)]}
    if isinstance(value, bytes):
        return {"b": bytes.hex(value)}
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
    if type(value).__module__ == "numpy":
        return encode(value.tolist(), depth + 1)
    return {"x": type(value).__name__}


def to_json(value: Any) -> str:
    """Return JSON of None, bool, int, float, str, and lists and dicts of them."""
    if value is None or value is True or value is False:
        return {None: "null", True: "true", False: "false"}[value]
    if type(value) is float:
        return {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}.get(repr(value), repr(value))
    if type(value) is int:
        return repr(value)
    if type(value) is str:
        return f'"{value.translate(_ESCAPES)}"'
    if type(value) is list:
        return "[" + ",".join(map(to_json, value)) + "]"
    return "{" + ",".join([f"{to_json(key)}:{to_json(item)}" for key, item in value.items()]) + "}"


def describe(error: BaseException) -> str:
    """Return an exception in one short line."""
    try:
        return f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
    except BaseException:
        return type(error).__name__


def run_functions(job: dict[str, Any], channel: Channel) -> None:
    """Run the code once, then evaluate each case in its namespace."""
    module = type(sys)("solution")
    sys.modules["solution"] = module
    namespace = module.__dict__
    token, cases, parts = job["token"], job["cases"], job["parts"]
    job.clear()
    for part in ("before", "code", "after"):
        try:
            exec(compile(parts[part], part, "exec", dont_inherit=True), namespace)
        except BaseException as error:
            channel.send({"token": token, "error": describe(error), "in": part})
            return
        if part == "before":
            channel.send({"begun": True})  # from here on, records may be the code's
    for i, case in enumerate(cases):
        record = {"token": token, "case": i}
        try:
            if "setup" in case:
                exec(compile(case["setup"], "test", "exec", dont_inherit=True), namespace)
            if "statement" in case:
                exec(compile(case["statement"], "test", "exec", dont_inherit=True), namespace)
                record["passed"] = True
            elif "expression" in case:
                expression = compile(case["expression"], "case", "eval", dont_inherit=True)
                record["value"] = encode(eval(expression, namespace))
            else:
                record["value"] = encode(_function(namespace, case["function"])(*case["arguments"]))
            channel.send(record)
        except BaseException as error:  # also of an int with too many digits to write
            channel.send({"token": token, "case": i, "error": describe(error)})


def _function(namespace: dict[str, Any], name: str) -> Any:
    if name not in namespace and "Solution" in namespace:
        return getattr(namespace["Solution"](), name)
    return namespace[name]


def run_pytest(job: dict[str, Any], channel: Channel) -> None:
    """Write the files, run pytest in this process and report every test."""
    token = job["token"]
    try:
        _try(job["before"])
        import pytest
    except BaseException as error:
        channel.send({"error": describe(error), "in": "before"})
        return
    channel.send({"begun": True})

    class Recorder:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or not report.passed:
                channel.send({"token": token, "test": report.nodeid, "passed": report.outcome == "passed"})

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed:
                error = str(report.longrepr)[-MAX_ERROR_CHARS:]
                channel.send({"token": token, "test": report.nodeid, "passed": False, "error": error})

    for name, text in job["files"].items():
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        with open(name, "w") as file:
            file.write(text)
    sys.path.insert(0, os.getcwd())
    tests = job["tests"]
    job.clear()
    # sandlock cannot fstat the deleted files that pytest's default capturing uses
    options = ["-q", "-p", "no:cacheprovider", "--rootdir=.", "--capture=sys"]
    code = pytest.main([*options, *tests], plugins=[Recorder()])
    channel.send({"token": token, "exit": int(code)})


def run_program(job: dict[str, Any], channel: Channel) -> None:
    """Run the program once per case, each in a fresh process, and report what it prints."""
    try:
        _try(job["before"])
        _find_programs(filter(None, (job["compile"], job["run"])))
    except BaseException as error:
        channel.send({"error": describe(error), "in": "before"})
        return
    channel.send({"begun": True})
    start, problem = _build(job)
    if start is None:
        channel.send({"error": problem, "in": "compile"})
        return
    room = job["max_output"]
    for i, case in enumerate(job["cases"]):
        output, errors, ended = _run_case(start, case["input"], job["case_s"], room, channel)
        record = {"case": i, "output": output.decode(errors="replace"), "exit": ended}
        if ended != 0:
            record["error"] = errors[-MAX_ERROR_CHARS:].decode(errors="replace")
        elif job.get("keep_errors"):
            record["errors"] = errors.decode(errors="replace")
        channel.send(record)
        room -= len(output)
        if job["stop_early"] and ended != 0:
            return


def _try(setup: str) -> None:
    """Run setup that is repeated with the code, to find out whether it fails without it."""
    exec(compile(setup, "setup", "exec", dont_inherit=True), {"__name__": "setup"})


def _find_programs(commands: Iterable[str]) -> None:
    """Raise `FileNotFoundError` for programs that are not installed. Relative paths are left out: they may be built."""
    import shlex
    import shutil

    for command in commands:
        program = shlex.split(command)[0]
        if shutil.which(program) is None and ("/" not in program or program.startswith("/")):
            raise FileNotFoundError(f"{program} is not installed")


def _build(job: dict[str, Any]) -> tuple[Callable[[], None] | None, str | None]:
    """Return a function that becomes the program in a forked process, and an error."""
    import shlex
    import subprocess

    if job["run"] is None:
        try:
            code = compile(job["code"], "solution.py", "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return None, describe(error)
        return (lambda: _run_main(code)), None
    with open(job["file"], "w") as file:
        file.write(job["code"])
    if job["compile"] is not None:
        made = subprocess.run(shlex.split(job["compile"]), stdin=subprocess.DEVNULL, capture_output=True)
        if made.returncode:
            return None, made.stderr[-MAX_ERROR_CHARS:].decode(errors="replace")
        _make_executable()
    command = shlex.split(job["run"])
    return (lambda: os.execvp(command[0], command)), None


def _make_executable() -> None:
    """Write binaries of this folder anew as executable ones: under sandlock, a linker may not change a file's mode."""
    for name in os.listdir("."):
        if os.path.isfile(name) and not os.stat(name).st_mode & 0o100:
            with open(name, "rb") as file:
                data = file.read()
            if data[:4] == b"\x7fELF" and data[16] in (2, 3):  # ET_EXEC, ET_DYN
                os.remove(name)
                with open(os.open(name, os.O_WRONLY | os.O_CREAT, 0o700), "wb") as file:
                    file.write(data)


def _run_main(code: Any) -> None:
    import atexit
    import io
    import traceback

    module = type(sys)("__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    sys.argv = ["solution.py"]
    sys.stdin = io.TextIOWrapper(open(0, "rb"), encoding="utf-8", errors="replace")  # noqa: SIM115
    sys.stdout = io.TextIOWrapper(open(1, "wb"), encoding="utf-8", errors="replace")  # noqa: SIM115
    sys.__stdin__, sys.__stdout__ = sys.stdin, sys.stdout  # type: ignore[misc]  # programs restore them from here
    status, output = 0, sys.stdout
    try:
        exec(code, module.__dict__)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        os.write(2, traceback.format_exc(limit=-3).encode(errors="replace"))
        status = 1
    # as the interpreter does before it ends
    end_threads = getattr(sys.modules.get("threading"), "_shutdown", lambda: None)
    for end in (end_threads, atexit._run_exitfuncs, lambda: sys.stdout.flush(), output.flush):
        try:
            end()
        except BaseException:
            status = status or 1
    os._exit(status & 0xFF)


def _run_case(
    start: Callable[[], None], text: str, limit_s: float, room: int, channel: Channel
) -> tuple[bytes, bytes, int | str]:
    """Return standard output, standard error, and the exit status, `-signal` or a reason."""
    import contextlib
    import signal
    import time

    data = os.memfd_create("stdin")
    with open(os.dup(data), "wb") as file:
        file.write(text.encode(errors="replace"))
    os.lseek(data, 0, os.SEEK_SET)
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setpgid(0, 0)
            for fd, target in ((data, 0), (out_write, 1), (err_write, 2)):
                os.dup2(fd, target)
            channel.close()
            os.closerange(3, 256)
            start()
        finally:
            os._exit(127)
    for fd in (data, out_write, err_write):
        os.close(fd)
    output, reason = _read({out_read: room, err_read: 4096}, time.monotonic() + limit_s, child)
    for fd in (out_read, err_read):
        os.close(fd)
    for kill in (os.kill, os.killpg):  # it may have left its group
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return bytes(output[out_read]), bytes(output[err_read]), reason or status


def _read(rooms: dict[int, int], deadline: float, child: int) -> tuple[dict[int, bytearray], str | None]:
    """Read pipes until the child ends. Returns what they held and why it must be killed, or None."""
    import selectors
    import time

    chunks = {fd: bytearray() for fd in rooms}
    first = next(iter(rooms))
    ended = os.pidfd_open(child)
    with selectors.DefaultSelector() as selector:
        for fd in (*rooms, ended):
            os.set_blocking(fd, False)
            selector.register(fd, selectors.EVENT_READ)
        try:
            while True:
                events = selector.select(max(0.0, deadline - time.monotonic()))
                if not events or time.monotonic() >= deadline:
                    return chunks, "timeout"
                ready = {key.fd for key, _ in events}
                for fd in ready & rooms.keys():
                    data = os.read(fd, 65536)
                    if not data:
                        selector.unregister(fd)
                    chunks[fd] += data[: rooms[fd] - len(chunks[fd])]
                    if fd == first and data and len(chunks[fd]) >= rooms[fd]:
                        return chunks, "output"
                if ready == {ended}:
                    return chunks, None
        finally:
            os.close(ended)


def run_python(job: dict[str, Any], channel: Channel) -> None:
    """Run code as a REPL does, then each further line of standard input, in the same namespace."""
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    requests = open(os.dup(0), "rb")  # noqa: SIM115
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    room, code = job["max_output"], job["code"]
    call = 0
    while True:
        output = os.memfd_create("output")
        for fd in (1, 2):
            os.dup2(output, fd)
        sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False, buffering=1)  # noqa: SIM115
        _run_cell(code, module.__dict__)
        size = os.lseek(output, 0, os.SEEK_END)
        text = os.pread(output, room, 0).decode(errors="replace")
        os.close(output)
        channel.send({"call": call, "output": text, "missing": max(0, size - room)})
        call += 1
        line = requests.readline()
        if not line:
            return
        code = bytes.fromhex(line.decode()).decode()


def _run_cell(code: str, namespace: dict[str, Any]) -> None:
    """Run code and print the value of a last expression, or the traceback."""
    import ast
    import contextlib
    import traceback

    try:
        tree = ast.parse(code, "<python>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<python>", "exec", dont_inherit=True), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<python>", "eval", dont_inherit=True), namespace)
            if value is not None:
                print(repr(value))
        sys.stdout.flush()
    except BaseException as error:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        trace = error.__traceback__
        frames = trace.tb_next if trace is not None else None  # without this function
        if isinstance(error, SyntaxError):
            frames = None
        os.write(2, "".join(traceback.format_exception(type(error), error, frames)).encode(errors="replace"))


def main() -> None:
    """Run one job."""
    settings = marshal.loads(bytes.fromhex(sys.argv[1]))
    channel = Channel()
    limit_self(settings["limits"])
    sys.path[:0] = settings["path"]
    os.environ.pop("PYTHONHOME", None)  # of this interpreter, not of others that the code may start
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # of `site`, which is not imported
    if settings["filter"]:
        refuse_system_calls(settings["filter"])
    channel.send({"ready": True})
    job = marshal.loads(bytes.fromhex(sys.stdin.readline()))
    kinds = {"functions": run_functions, "pytest": run_pytest, "program": run_program, "python": run_python}
    kinds[job["kind"]](job, channel)
    os._exit(0)  # no handlers of the code


if __name__ == "__main__":
    main()
