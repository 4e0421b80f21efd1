"""Choose the sandbox's backend (the first that is installed and holds everything), and share it within a run."""

import atexit
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from cohort.config.hardware import DEFAULT_SANDBOX, SandboxConfig
from cohort.errors import UserError
from cohort.sandbox.backends import Backend, Bubblewrap, Container, SandboxFusion, Sandlock, Unconfined
from cohort.sandbox.interpreter import Interpreter, find_interpreter, new_folder
from cohort.sandbox.pool import Job, Sandbox, default_concurrency
from cohort.sandbox.probe import probe
from cohort.sandbox.process import Limits

_BACKENDS: Mapping[str, Callable[[Interpreter, SandboxConfig], Backend]] = {
    "bubblewrap": lambda interpreter, config: Bubblewrap(interpreter),
    "sandlock": lambda interpreter, config: Sandlock(interpreter),
    "container": lambda interpreter, config: Container(interpreter, config),
}


def open_sandbox(config: SandboxConfig) -> Sandbox:
    """Return a sandbox with the first backend whose escape checks pass, or what else `confinement` accepts.

    Raises:
        UserError: there is none; the message says why for each, and what to install.
    """
    if config.backend == "sandbox_fusion":
        assert config.url is not None  # checked by the schema
        return replace(_with_backend(SandboxFusion(config.url), config), protections=("whatever the server holds",))
    if sys.platform != "linux":
        raise UserError(
            f"sandbox.backend: {config.backend!r} runs code on Linux only, whatever confinement is; use a server "
            f"with sandbox.backend: sandbox_fusion, or run Cohort in a Linux container or virtual machine"
        )
    folder = new_folder()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    interpreter = find_interpreter(config.packages, folder)
    names = list(_BACKENDS) if config.backend == "auto" else [config.backend]
    reasons, partial = [], []
    for name in names:
        try:
            sandbox = _with_backend(_BACKENDS[name](interpreter, config), config, interpreter)
            failed = _check(sandbox, interpreter)
        except OSError as error:
            reasons.append(f"{name}: {error}")
            continue
        broken = {protection: how for protection, how in failed.items() if how}
        held = tuple(protection for protection in failed if protection not in broken)
        sandbox = replace(sandbox, protections=held, lacks=tuple(broken))
        if not broken:
            return sandbox
        partial.append(sandbox)
        reasons.append(f"{name}: does not hold {', '.join(f'{p} ({how[:60]})' for p, how in broken.items())}")
    if partial and config.confinement != "full":
        return min(partial, key=lambda sandbox: len(sandbox.lacks))
    if config.confinement == "none":
        return _with_backend(Unconfined(interpreter), config, interpreter)
    less = "sandbox.confinement: none, with your rights"
    if partial:
        less = f"sandbox.confinement: partial, without the protections named above, or {less}"
    raise UserError(
        f"sandbox: no backend works here ({'; '.join(reasons)}). Install bubblewrap (`apt install bubblewrap`) or "
        "sandlock (`pip install sandlock`), use a server with sandbox.backend: sandbox_fusion, or accept that "
        f"completions' code runs with less: {less}"
    )


def _check(sandbox: Sandbox, interpreter: Interpreter) -> dict[str, str]:
    """Return each protection with how it failed, "" if it holds.

    Raises:
        OSError: the backend cannot be used.
    """
    if (missing := sandbox.backend.missing()) is not None:
        raise OSError(missing)
    if sandbox.packages is None and interpreter.packages is not None:
        raise OSError("sandbox.packages has no effect; use an image with them and backend: container")
    try:
        failed = probe(sandbox)
    except OSError as error:
        raise OSError(f"does not start ({error})") from error
    if problem := _import_problem(sandbox, interpreter.modules):
        raise OSError(problem)
    return failed


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


def _with_backend(backend: Backend, config: SandboxConfig, interpreter: Interpreter | None = None) -> Sandbox:
    return Sandbox(
        backend=backend,
        limits=Limits.of(config),
        max_concurrent=default_concurrency() if config.max_concurrent == "auto" else config.max_concurrent,
        packages=interpreter.packages if interpreter is not None and backend.name != "container" else None,
    )


class SharedSandbox:
    """Opens a sandbox at most once."""

    def __init__(self, config: SandboxConfig = DEFAULT_SANDBOX) -> None:
        self._config = config
        self._opened: Sandbox | None = None

    def open(self) -> Sandbox:
        """Return the sandbox.

        Raises:
            UserError: no backend works here.
        """
        if self._opened is None:
            self._opened = open_sandbox(self._config)
        return self._opened

    @property
    def notes(self) -> list[str]:
        """Messages for the start of the run; none if nothing uses the sandbox."""
        if self._opened is None:
            return []
        held = ", ".join(self._opened.protections) or "nothing"
        lacks = f"; does not hold {', '.join(self._opened.lacks)}" if self._opened.lacks else ""
        return [f"sandbox: {self._opened.backend.name}, holds {held}{lacks}", *self.warnings]

    @property
    def warnings(self) -> list[str]:
        """Warnings for the run's summary."""
        if self._opened is None or (self._opened.protections and not self._opened.lacks):
            return []
        if not self._opened.protections:
            return ["warning: sandbox.confinement: none: code of the model runs with this user's rights and network"]
        level = self._config.confinement
        return [f"warning: sandbox.confinement: {level}: the sandbox does not hold {', '.join(self._opened.lacks)}"]
