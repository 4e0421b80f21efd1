"""The result of a run, and the exit status that rank 0 leaves for the launcher."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from cohort.errors import TrainingError, UserError

EXIT_STATUS_FILE = "COHORT_EXIT_STATUS_FILE"  # environment variable with the path to write to


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Result of a finished run."""

    run_dir: Path
    final_dir: Path  # the trained model, in Hugging Face format
    summary: Mapping[str, Any]  # as in summary.json


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitStatus:
    """Exit status of a run that did not crash."""

    kind: Literal["finished", "stopped", "user error", "training error"]
    message: str = ""
    code: int = 0  # exit code, if a signal stopped the run

    def raise_error(self) -> None:
        """Raise the error that ended the run in this process.

        Raises:
            UserError: raised on rank 0.
            TrainingError: raised on rank 0.
            SystemExit: a signal stopped the run, which rank 0 has reported.
        """
        if self.kind == "stopped":
            raise SystemExit(self.code)
        if self.kind == "user error":
            raise UserError(self.message)
        if self.kind == "training error":
            raise TrainingError(self.message)

    def write(self, file: Path) -> None:
        """Write the status to `file` atomically."""
        partial = file.with_name(f".{file.name}.partial")  # the process may be killed at any time
        partial.write_text(json.dumps(asdict(self)), encoding="utf-8")
        partial.replace(file)

    @classmethod
    def read(cls, file: Path) -> "ExitStatus | None":
        """Read the status from `file`; None if rank 0 did not write one."""
        try:
            return cls(**json.loads(file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
