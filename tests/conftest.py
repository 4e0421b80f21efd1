"""Before torch is imported: waiting threads must sleep and not spin, or a busy machine slows them several times."""

import os

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(autouse=True)
def no_calibration(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans know nothing of what `cohort plan --calibrate` has measured on this machine."""
    if request.module.__name__.startswith(("test_plan", "test_check")):
        monkeypatch.setenv("XDG_CACHE_HOME", str(request.getfixturevalue("tmp_path") / "cache"))
