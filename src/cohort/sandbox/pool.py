"""Run jobs in the sandbox, each in a fresh process, several at a time."""

import json
import marshal
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

from cohort.processes.this_process import usable_cores
from cohort.sandbox.backends import Backend
from cohort.sandbox.process import Conversation, Ending, Limits, ProcessResult

FORMAT = 2  # of marshal, which every Python 3 reads; only the guest reads it, and it trusts the parent

_MORE_RECORDS = 10_000  # of a job, besides one for each case; tests of pytest are no cases
_GRACE = 0.1  # share of a budget that is waited for what is being ended


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """What came back from one job. Nothing in `records` is to be trusted: judged code may have written it."""

    started: bool  # whether the sandbox worked; if not, nothing was judged
    was_cut: bool = False  # whether it had less than its wall time, and used that up: nothing was judged
    ending: Ending = "exited"
    exit_code: int | None = None
    records: tuple[Mapping[str, Any], ...] = ()
    errors: str = ""  # of the sandbox itself, if it did not start
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job of the guest program (`guest.py`) with the limits that hold for it."""

    request: Mapping[str, Any]
    toolchain: bool = False  # whether compilers and other programs of the system may be used
    limits: Limits | None = None  # default: the sandbox's


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """A backend with limits."""

    backend: Backend
    limits: Limits
    max_concurrent: int
    packages: str | None = None  # folder to import packages from
    protections: tuple[str, ...] = field(default=())  # that the probe found to hold; none without a sandbox
    lacks: tuple[str, ...] = field(default=())  # protections that it found not to hold

    def run(self, job: Job, *, end: float = math.inf) -> JobResult:
        """Run one job. A sandbox that does not start is tried twice.

        Args:
            job: the job.
            end: time by `time.monotonic` at which it must have ended.
        """
        outcome = self._run_once(job, end)
        return outcome if outcome.started or time.monotonic() >= end else self._run_once(job, end)

    def run_all(
        self,
        jobs: Sequence[Job],
        *,
        budget_s: float,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[JobResult | None]:
        """Run jobs concurrently and return their outcomes, None for those without, as time is up.

        Args:
            jobs: jobs.
            budget_s: seconds after which no further job starts, and those that run are ended.
            on_progress: called with the number of finished jobs and of all jobs, one call at a time.
        """
        end = time.monotonic() + budget_s
        lock, done = threading.Lock(), 0

        def run(job: Job) -> JobResult | None:
            nonlocal done
            outcome = self.run(job, end=end) if time.monotonic() < end else None
            with lock:
                done += 1
                on_progress(done, len(jobs))
            return None if outcome is None or outcome.was_cut else outcome

        pool = ThreadPoolExecutor(self.max_concurrent, thread_name_prefix="sandbox")
        try:
            futures = [pool.submit(run, job) for job in jobs]
            wait(futures, timeout=(1 + _GRACE) * budget_s)  # a backend, such as a server, may not answer
        finally:  # the run may be asked to stop
            pool.shutdown(wait=False, cancel_futures=True)
        return [future.result() if future.done() and not future.cancelled() else None for future in futures]

    def start(self, conversation: Conversation) -> ProcessResult:
        """Start a process for a conversation, return when it is over.

        Raises:
            OSError: it does not start.
        """
        return self._start(conversation, self.limits, toolchain=False)

    def _start(self, request: bytes | Conversation, limits: Limits, *, toolchain: bool) -> ProcessResult:
        rlimits = limits.rlimits(counts_processes=self.backend.counts_processes, limits_addresses=not toolchain)
        path = [self.packages] if self.packages else []
        settings = {"limits": rlimits, "path": path, "filter": self.backend.guest_filter}
        return self.backend.run(marshal.dumps(settings, FORMAT).hex(), request, limits, toolchain=toolchain)

    def _run_once(self, job: Job, end: float) -> JobResult:
        limits = job.limits or self.limits
        left_s = end - time.monotonic()
        is_short = left_s < limits.wall_s
        if is_short:
            limits = replace(limits, wall_s=max(0.0, left_s))
        request = marshal.dumps(dict(job.request), FORMAT).hex().encode()  # text, for servers
        try:
            result = self._start(request, limits, toolchain=job.toolchain)
        except OSError as error:
            return JobResult(started=False, errors=str(error))
        max_records = _MORE_RECORDS + len(job.request.get("cases", ()))
        records = tuple(_records(result.output, max_records))
        started = bool(records) and records[0] == {"ready": True}
        return JobResult(
            started=started,
            was_cut=is_short and result.ending == "wall time",
            ending=result.ending,
            exit_code=result.exit_code,
            records=records[1:],
            errors="" if started else result.errors.decode(errors="replace").strip(),
            wall_s=result.wall_s,
        )


def default_concurrency() -> int:
    """Return two for each CPU that this process may use: part of a verdict's time is spent waiting."""
    return 2 * usable_cores()


def _records(output: bytes, max_records: int) -> Iterator[Mapping[str, Any]]:
    """Parse JSON lines, up to the first that is none: then the code wrote into the channel, or was cut off."""
    for line in output.split(b"\n", max_records)[:max_records]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(record, dict):
            return
        yield record
