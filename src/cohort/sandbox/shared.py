"""The sandbox of a run: one for its rewards and tools, opened when the first of them needs it."""

from cohort.config.sandbox import DEFAULT_SANDBOX, SandboxConfig
from cohort.sandbox.choose import open_sandbox
from cohort.sandbox.pool import Sandbox


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
