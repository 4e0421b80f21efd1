"""Choose the sandbox's backend: the first that is installed and holds everything."""

import atexit
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence

from cohort.config.sandbox import SandboxConfig
from cohort.errors import UserError
from cohort.sandbox.backends import Backend, Bubblewrap, Container, Sandlock, Unconfined
from cohort.sandbox.fusion import SandboxFusion
from cohort.sandbox.interpreter import Interpreter, find_interpreter, new_folder
from cohort.sandbox.limits import Limits
from cohort.sandbox.pool import Job, Sandbox, default_concurrency
from cohort.sandbox.probe import probe

_BACKENDS: Mapping[str, Callable[[Interpreter, SandboxConfig], Backend]] = {
    "sandlock": lambda interpreter, config: Sandlock(interpreter),
    "bubblewrap": lambda interpreter, config: Bubblewrap(interpreter),
    "container": lambda interpreter, config: Container(interpreter, config),
}


def open_sandbox(config: SandboxConfig) -> Sandbox:
    """Return a sandbox with the first backend whose escape checks pass.

    Raises:
        UserError: none passes; the message says why for each, and what to install.
    """
    if config.backend == "sandbox_fusion":
        return _open_remote(config)
    if sys.platform != "linux":
        raise UserError(
            f"sandbox.backend: {config.backend!r} runs code on Linux only, also with unsafe_no_sandbox; use a server "
            f"with sandbox.backend: sandbox_fusion, or run Cohort in a Linux container or virtual machine"
        )
    folder = new_folder()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    interpreter = find_interpreter(config.packages, folder)
    names = list(_BACKENDS) if config.backend == "auto" else [config.backend]
    reasons = []
    for name in names:
        sandbox = _with_backend(_BACKENDS[name](interpreter, config), config, interpreter)
        reason, holds = _check(sandbox, interpreter)
        if reason is None:
            return _with_backend(sandbox.backend, config, interpreter, holds)
        reasons.append(f"{name}: {reason}")
    if config.unsafe_no_sandbox:
        return _with_backend(Unconfined(interpreter), config, interpreter)
    raise UserError(
        f"sandbox: no backend works here ({'; '.join(reasons)}). Install sandlock (`pip install sandlock`) or "
        "bubblewrap, use a server with sandbox.backend: sandbox_fusion, or accept that completions' code runs with "
        "your rights: sandbox.unsafe_no_sandbox: true (`cohort demo`: --unsafe-no-sandbox)"
    )


def _check(sandbox: Sandbox, interpreter: Interpreter) -> tuple[str | None, tuple[str, ...]]:
    """Return why a backend cannot be used, or None; and the protections that hold."""
    if (missing := sandbox.backend.missing()) is not None:
        return missing, ()
    if sandbox.packages is None and interpreter.packages is not None:
        return "sandbox.packages has no effect; use an image with them and backend: container", ()
    try:
        failed = probe(sandbox)
    except OSError as error:
        return f"does not start ({error})", ()
    broken = [f"{name} ({how[:60]})" for name, how in failed.items() if how]
    if broken:
        return f"does not hold {', '.join(broken)}", ()
    if problem := _import_problem(sandbox, interpreter.modules):
        return problem, ()
    return None, tuple(failed)


def _import_problem(sandbox: Sandbox, modules: Mapping[str, Sequence[str]]) -> str | None:
    """Return which of `sandbox.packages` has no module that can be imported in the sandbox, or None."""
    for package, names in modules.items():
        cases = [{"expression": f"__import__({name!r}) and None"} for name in names]
        parts = {"before": "", "code": "", "after": ""}
        outcome = sandbox.run(Job(request={"kind": "functions", "token": "", "parts": parts, "cases": cases}))
        results = [record for record in outcome.records if "case" in record]
        if names and all("error" in record for record in results):
            why = results[0]["error"] if results else outcome.errors or outcome.ending
            return f"cannot import {names[0]} of sandbox.packages: {package} ({why})"
    return None


def _open_remote(config: SandboxConfig) -> Sandbox:
    assert config.url is not None  # checked by the schema
    return Sandbox(
        backend=SandboxFusion(config.url),
        limits=Limits.of(config),
        max_concurrent=_concurrency(config),
        protections=("whatever the server holds",),
    )


def _with_backend(
    backend: Backend, config: SandboxConfig, interpreter: Interpreter, protections: tuple[str, ...] = ()
) -> Sandbox:
    return Sandbox(
        backend=backend,
        limits=Limits.of(config),
        max_concurrent=_concurrency(config),
        packages=None if backend.name == "container" else interpreter.packages,
        protections=protections,
    )


def _concurrency(config: SandboxConfig) -> int:
    return default_concurrency() if config.max_concurrent == "auto" else config.max_concurrent
