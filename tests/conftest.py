"""What every test finds: an environment for busy machines, Hypothesis profiles, and the command line as a function."""

import atexit
import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from selection import QUICK, THOROUGH

if TYPE_CHECKING:
    from commands import Ended

# Before torch is imported: waiting threads must sleep and not spin, or a busy machine slows them several times.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:  # as many workers as cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# What is written outlasts a killed process; only a machine that loses power needs more, and that takes disks' time.
os.fsync = lambda descriptor: None

for profile in (QUICK, THOROUGH):  # of `examples`; a busy machine is no reason to fail
    settings.register_profile(profile, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(QUICK)  # `--hypothesis-profile` comes after this

# markers, and how to run what is left out for them
LEFT_OUT = {"slow": "make test-all", "vllm": "make test-vllm", "extras": "make test-extras"}
left_out: Counter[str] = Counter()
QUICK_TIMEOUT_S = 600  # 20 processor seconds at most; pyproject.toml has the limit of tests that are left out


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every slow test says what `make test` has in its place; any other that hangs fails within minutes."""
    for item in items:
        assert all(mark.args for mark in item.iter_markers("slow")), f"{item.nodeid}: slow without a reason"
        if not any(item.get_closest_marker(name) for name in (*LEFT_OUT, "timeout")):
            item.add_marker(pytest.mark.timeout(QUICK_TIMEOUT_S))


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Count what the expression of `-m` leaves out, by the first of its markers."""
    left_out.update(next((name for name in LEFT_OUT if item.get_closest_marker(name)), "") for item in items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the counts from a worker of xdist to what started it."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the counts of a worker, which are those of all: each collects every test."""
    left_out.update(getattr(node, "workeroutput", {}).get("left_out", {}) if not left_out else {})


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say what was left out and how to run it."""
    for name, command in LEFT_OUT.items():
        if left_out[name]:
            terminalreporter.write_line(f"left out: {left_out[name]} tests marked {name}; run them by `{command}`")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Whatever collecting makes lives until the end: the collector need not look at it, then or later."""
    gc.disable()
    yield
    gc.enable()
    gc.freeze()
    atexit.register(gc.unfreeze)  # or libraries complain of leaks
    one_thread = "PYTEST_XDIST_WORKER" in os.environ and os.environ["OMP_NUM_THREADS"] == "1"  # else forks may hang
    if one_thread and sys.platform == "linux" and "forked" in sys.modules:
        sys.modules["forked"].become_server()


@pytest.fixture(autouse=True)
def same_state() -> Iterator[None]:
    """No test leaves gradients off, another dtype, autocast on, or signals with another handler."""
    before = _state()
    yield
    assert _state() == before


def _state() -> dict[str, object]:
    """State of the thread that torch computes with, and of the process's signals."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGVTALRM)
    handlers = {number.name: signal.getsignal(number) for number in signals}
    torch = sys.modules.get("torch")
    if torch is None:
        return {"gradients": True, "dtype": "torch.float32", "autocast": False, "inference": False} | handlers
    return {
        "gradients": torch.is_grad_enabled(),
        "dtype": str(torch.get_default_dtype()),
        "autocast": torch.is_autocast_enabled("cpu"),
        "inference": torch.is_inference_mode_enabled(),
    } | handlers


@pytest.fixture(autouse=True, scope="module")
def leave_the_group() -> Iterator[None]:
    """A model whose weights wait in host memory joins a group of one process; what comes after makes its own."""
    yield
    torch_distributed = sys.modules.get("torch.distributed")
    if torch_distributed is not None and torch_distributed.is_initialized():
        torch_distributed.destroy_process_group()


@pytest.fixture
def in_foreground() -> Iterator[None]:
    """Ctrl-C has Python's handler: the system ignores it in the background of a script."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def cohort(monkeypatch, capsys) -> "Callable[..., Ended]":
    """Runs the command line in this process."""
    from cohort.cli import main
    from commands import Ended

    def run(*arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["cohort", *map(str, arguments)])
        monkeypatch.setattr("cohort.cli.command._run", None)
        capsys.readouterr()
        code: Any = 0
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        captured = capsys.readouterr()
        return Ended(code=code, out=captured.out, err=captured.err)

    return run


@pytest.fixture
def no_weights(monkeypatch) -> None:
    """Makes it an error to get as far as loading weights."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("weights were about to be loaded")

    monkeypatch.setattr("cohort.trainer.run.build_run", refuse)
    monkeypatch.setattr("cohort.trainer.open_run.load_policy", refuse)
