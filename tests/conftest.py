"""Before torch is imported: waiting threads must sleep and not spin, or a busy machine slows them several times."""

import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from commands import Ended

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:  # as many workers as cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def no_calibration(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans know nothing of what `cohort plan --calibrate` has measured on this machine."""
    if request.module.__name__.startswith(("test_plan", "test_check")):
        monkeypatch.setenv("XDG_CACHE_HOME", str(request.getfixturevalue("tmp_path") / "cache"))


@pytest.fixture(autouse=True, scope="module")
def leave_the_group() -> Iterator[None]:
    """A model whose weights wait in host memory joins a group of one process; what comes after makes its own."""
    yield
    torch_distributed = sys.modules.get("torch.distributed")
    if torch_distributed is not None and torch_distributed.is_initialized():
        torch_distributed.destroy_process_group()


@pytest.fixture
def cohort(monkeypatch, capsys) -> "Callable[..., Ended]":
    """Runs the command line in this process."""
    from cohort.cli import main
    from commands import Ended

    def run(*arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["cohort", *map(str, arguments)])
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
    monkeypatch.setattr("cohort.trainer.evaluate_model.load_policy", refuse)
