"""Describe failed processes from what they left behind."""

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from cohort.stopping import STOP_EXIT_CODES

_TAIL_LINES = 8
_EXITED_EARLY = "exited with code 0 before the run had ended, as by os._exit in a reward or tool"
_NOTICED_LINES = 200  # a rank terminated later appends the stacks of all threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A rank that caused the failure."""

    rank: int
    what: str  # "failed with exit code 1", "was killed by SIGKILL", "did not answer"
    stderr_file: Path
    stderr_tail: str

    def describe(self) -> str:
        """Describe the failure, with the end of the rank's stderr."""
        tail = f"; the last lines of its stderr:\n{self.stderr_tail}" if self.stderr_tail else "; its stderr is empty"
        return f"rank {self.rank} {self.what}{tail}\n({self.stderr_file})"


def read_failures(error: ChildFailedError, logs: Path) -> tuple[Failure, ...]:
    """Return the root causes among the failed ranks.

    Ranks that only noticed a missing peer, or were then terminated, are not causes. If no other rank failed, the cause
    is one that noticed nothing until it was terminated: it hung.
    """
    exit_codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
    files = {int(file.parent.name): file for file in logs.rglob("stderr.log")}
    noticed = {rank for rank, file in files.items() if "PeerError" in _tail(file, _NOTICED_LINES)}
    failed = {rank: code for rank, code in exit_codes.items() if rank not in noticed}
    terminated = {-signal.SIGTERM, -signal.SIGKILL, *STOP_EXIT_CODES}
    by_itself = {rank: code for rank, code in failed.items() if code not in terminated}
    killed = {rank: code for rank, code in failed.items() if code == -signal.SIGKILL}
    if by_itself:
        causes = {rank: _ending(code) for rank, code in by_itself.items()}
    elif noticed and (silent := _called_silent(files, noticed)):
        causes = dict.fromkeys(silent, f"did not answer its peers within hardware.timeout_s, or {_EXITED_EARLY}")
    else:
        causes = {rank: _ending(code) for rank, code in (killed or failed or exit_codes).items()}
    return tuple(
        Failure(rank=r, what=what, stderr_file=files.get(r, logs), stderr_tail=_tail(files.get(r), _TAIL_LINES))
        for r, what in sorted(causes.items())
    )


def early_exit(logs: Path) -> Failure:
    """Return the failure of a rank 0 that exited with code 0, like all others, without an exit status."""
    file = next(logs.rglob("0/stderr.log"), None)
    tail = _tail(file, _TAIL_LINES)
    return Failure(rank=0, what=_EXITED_EARLY, stderr_file=file or logs, stderr_tail=tail)


def _called_silent(files: Mapping[int, Path], noticed: set[int]) -> set[int]:
    """Return the ranks that every rank in `noticed` reports as silent; without reports, all other ranks."""
    silent = files.keys() - noticed
    for rank in noticed:
        for found in re.findall(r"ranks \[([\d, ]+)\] did not answer", _tail(files[rank], _NOTICED_LINES)):
            silent = silent & {int(number) for number in found.split(",")} or silent
    return silent


def _ending(exit_code: int) -> str:
    if exit_code < 0:
        by_the_system = "; usually out of memory" if exit_code == -signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-exit_code).name} (exit code {exit_code}{by_the_system})"
    return f"failed with exit code {exit_code}"


def _tail(file: Path | None, num_lines: int) -> str:
    if file is None or not file.is_file():
        return ""
    lines = file.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
    return "\n".join(f"  {line}" for line in lines[-num_lines:])
