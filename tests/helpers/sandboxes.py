"""The sandboxes of this machine, opened once for all tests of a process."""

from functools import cache

import pytest

from builtin_rewards import Builtin
from cohort.config.hardware import SandboxConfig
from cohort.errors import UserError
from cohort.sandbox import Sandbox, open_sandbox

# `make test-extras` installs sandlock; the others are programs of the system
BACKENDS = [pytest.param(name, marks=pytest.mark.extras) for name in ("sandlock", "bubblewrap", "container")]
LIMITS = {
    "wall_s": 20.0,
    "cpu_s": 2,
    "memory": "300MB",
    "max_file_size": "4MB",
    "tmp_size": "8MB",
    "max_output": "100KB",
}


@cache
def opened(backend: str) -> Sandbox | str:
    """The sandbox, or why there is none."""
    try:
        packages = () if backend == "container" else ("pytest",)
        return open_sandbox(SandboxConfig(backend=backend, packages=packages, max_concurrent=2, **LIMITS))
    except UserError as error:
        return str(error)


def sandbox_or_skip(backend: str) -> Sandbox:
    """One that works here; else the test is skipped with the reason."""
    sandbox = opened(backend)
    if isinstance(sandbox, str):
        pytest.skip(sandbox.partition(". Install")[0])
    return sandbox


def graded(sandbox: Sandbox, code: str, tests, **settings) -> float | None:
    """The reward of one completion."""
    names = ("score", "language", "case_s")
    args = {k: v for k, v in settings.items() if k in names}
    columns = {k: [v] for k, v in settings.items() if k not in names}
    return Builtin("code", args, sandbox=sandbox)([code], tests=[tests], **columns)[0]
