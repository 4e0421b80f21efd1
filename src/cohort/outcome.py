"""How a run ended: for who asked for it, and for the process that started rank 0."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from cohort.errors import TrainingError, UserError

OUTCOME_FILE = "COHORT_OUTCOME_FILE"  # environment variable: where to write it


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """A finished run."""

    run_dir: Path
    final_dir: Path  # the trained model, in Hugging Face format
    summary: Mapping[str, Any]  # as in summary.json


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a run that was an orderly one."""

    kind: Literal["finished", "stopped", "user error", "training error"]
    message: str = ""
    code: int = 0  # exit code, where a signal stopped the run

    def raise_error(self) -> None:
        """Raise in this process what ended the run.

        Raises:
            UserError: as rank 0 did.
            TrainingError: as rank 0 did.
            SystemExit: a signal stopped the run, which rank 0 has told.
        """
        if self.kind == "stopped":
            raise SystemExit(self.code)
        if self.kind == "user error":
            raise UserError(self.message)
        if self.kind == "training error":
            raise TrainingError(self.message)

    def write(self, file: Path) -> None:
        """Leave it in `file`."""
        partial = file.with_name(f".{file.name}.partial")  # the process may be ended at any moment
        partial.write_text(json.dumps(asdict(self)), encoding="utf-8")
        partial.replace(file)

    @classmethod
    def read(cls, file: Path) -> "Outcome | None":
        """What was left in `file`; None if rank 0 did not get that far."""
        try:
            return cls(**json.loads(file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
