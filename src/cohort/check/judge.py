"""One file from its text to its report."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cohort.check.findings import Finding
from cohort.check.launch import ANY_SETTING, Launch, Unread
from cohort.check.nearest import GPUS, Proposal, nearest_starts
from cohort.check.readers import read_launch
from cohort.check.rules import MemoryVerdict, judge, judge_memory
from cohort.check.rules.cohort import missing_file_findings
from cohort.check.rules.gpus import counted, node_gpu_findings
from cohort.check.rules.start import EVALUATION, Judged, Knobs, Start, refused
from cohort.errors import UserError

WORLD_SIZES = (*range(1, 17), 24, 32, 64)
_USUAL_NODE = 8  # GPUs, for proposals where the file does not say how many there are


@dataclass(frozen=True, slots=True, kw_only=True)
class FileReport:
    """What is to say about one file."""

    file: str
    launch: Launch | None  # None: it could not be read
    judged: Judged | None
    starts: dict[int, Start]  # by number of training processes; empty where the numbers could not be read
    findings: tuple[Finding, ...]
    memory: str | None = None  # whether it suffices, in words; None: not asked
    others: "tuple[FileReport, ...]" = ()  # of further runs of the file

    @property
    def failed(self) -> bool:
        """Whether any finding is an error, of any of its runs."""
        return any(finding.severity == "error" for finding in self.findings) or any(o.failed for o in self.others)

    def as_json(self) -> dict[str, Any]:
        """The report as `--json` prints it. `other_runs` is there where the file starts several."""
        others = [other.as_json() for other in self.others]
        return {
            "file": self.file,
            "framework": self.launch.framework if self.launch else None,
            "version": self.judged.version if self.judged else None,
            "starts": {str(size): start.as_json() for size, start in self.starts.items()},
            "findings": [finding.as_json() for finding in self.findings],
            **({"other_runs": others} if others else {}),
        }


def check_file(
    path: Path,
    *,
    world_sizes: Sequence[int] = WORLD_SIZES,
    trl_version: str | None = None,
    launched_with: str | None = None,
    gpu: str | None = None,
    gpu_memory: str | None = None,
) -> FileReport:
    """Reads and judges one file. What is wrong with the file itself is a finding too.

    Args:
        path: the file.
        world_sizes: numbers of training processes to judge.
        trl_version: whose rules hold, for TRL and Open-R1.
        launched_with: the command that starts it, where the file does not hold it.
        gpu: that it runs on, by the name that `cohort plan` has for it; memory is judged then.
        gpu_memory: of each GPU, such as 80GB.

    Raises:
        UserError: `launched_with` cannot be read, or there is no such GPU or size.
    """
    try:
        launch = read_launch(path)
    except UserError as error:
        message = str(error).removeprefix(f"{path}: ")
        finding = Finding("CHK001", None, message)
        return FileReport(file=str(path), launch=None, judged=None, starts={}, findings=(finding,))
    if launched_with:
        launch = read_launch(path, launched_with=launched_with)
    about: dict[str, Any] = {"trl_version": trl_version, "gpu": gpu, "gpu_memory": gpu_memory}
    first, *others = (_report(path, run, world_sizes=world_sizes, **about) for run in (launch, *launch.others))
    return replace(first, others=tuple(others))


def _report(
    path: Path,
    launch: Launch,
    *,
    world_sizes: Sequence[int],
    trl_version: str | None,
    gpu: str | None,
    gpu_memory: str | None,
) -> FileReport:
    """Judges one run of a file."""
    judged = judge(launch, trl_version=trl_version)
    findings = [*(_unread(unread, judged.decides) for unread in launch.unread), *launch.findings, *judged.findings]
    if launch.framework == "cohort" and judged.blocked is None:
        findings += missing_file_findings(launch, path.parent)
    findings += node_gpu_findings(launch, server_elsewhere="server" in judged.sampling)
    unknown = {u.key for u in launch.unread} - EVALUATION | {str(f.field) for f in findings if f.code == "CHK010"}
    lacking = unknown & (judged.decides | ANY_SETTING)
    starts: dict[int, Start] = {}
    memory = None
    if lacking:  # the findings above say why
        asked = gpu or gpu_memory or launch.gpu
        memory = MemoryVerdict(f"not judged: {', '.join(sorted(lacking))} could not be read") if asked else None
    else:
        starts = {size: judged.start(size, judged.knobs) for size in world_sizes}
        findings += _start_findings(launch, judged, starts)
        if judged.blocked is not None:
            stopped = refused(judged.blocked)
            starts = {size: stopped if start.starts else start for size, start in starts.items()}
        processes = world_sizes[0] if len(world_sizes) == 1 else None
        memory = judge_memory(launch, judged, gpu=gpu, gpu_memory=gpu_memory, processes=processes)
        findings += memory.findings if memory else ()
    findings = [_removable(finding) for finding in findings]
    order = {"error": 0, "warning": 1}
    findings.sort(key=lambda finding: (order[finding.severity], finding.code))
    return FileReport(
        file=str(path),
        launch=launch,
        judged=judged,
        starts=starts,
        findings=tuple(dict.fromkeys(findings)),
        memory=memory.told if memory else None,
    )


def _removable(finding: Finding) -> Finding:
    """What does nothing or is refused can go, where nothing better is known."""
    if finding.nearest or finding.field is None or finding.code not in ("CHK005", "CHK006"):
        return finding
    return replace(finding, nearest=(f"without {finding.field}",))


def _unread(unread: Unread, decides: frozenset[str]) -> Finding:
    message = f"{unread.key.strip('()')} ({unread.where}) could not be read: {unread.reason}"
    if unread.key in decides & EVALUATION:
        message += "; so evaluation is not judged"
    elif unread.key in decides | ANY_SETTING:
        message += "; so whether it starts is not judged"
    return Finding("CHK004", None if unread.key.startswith("(") else unread.key, message)


def _start_findings(launch: Launch, judged: Judged, starts: dict[int, Start]) -> list[Finding]:
    """Whether the run starts with the processes that its file names, or with any at all."""
    if launch.processes is not None:
        size = int(launch.processes.value)
        if size < 1:
            return []  # the launcher's own finding says so
        start = judged.start(size, judged.knobs)
        if start.starts or start.message == judged.blocked:
            return []
        text = f"with {counted(size)} ({launch.processes.where}): {start.message}"
        return [_refusal("CHK002", text, judged, size)]
    failing = [size for size, start in starts.items() if not start.starts]
    if not failing or starts[failing[0]].message == judged.blocked:
        return []
    size = _USUAL_NODE if _USUAL_NODE in failing else failing[-1]
    working = [size for size, start in starts.items() if start.starts]
    if not working:
        text = f"with none of {_gpus(failing)}; with {size}: {starts[size].message}"
        return [_refusal("CHK002", text, judged, size)]
    text = (
        f"the file does not say how many processes train; it starts with {_gpus(working)} and not with "
        f"{_gpus(failing)}; with {size}: {starts[size].message}"
    )
    return [_refusal("CHK003", text, judged, size)]


def _refusal(code: str, text: str, judged: Judged, size: int) -> Finding:
    """With what nobody has set, or the nearest numbers, or both at once."""
    missing = judged.missing(size, judged.knobs)
    if missing:
        return Finding(code, missing[0].partition("=")[0], text, missing)
    nearest = tuple(map(str, nearest_starts(judged.start, size, judged.knobs)))
    return Finding(
        code, judged.start(size, judged.knobs).field or judged.usual_field, text, nearest or _both(judged, size)
    )


def _both(judged: Judged, size: int) -> tuple[str, ...]:
    """The nearest numbers with which it starts once what nobody has set is there."""

    def start(world_size: int, knobs: Knobs) -> Start:
        result = judged.start(world_size, knobs)
        return replace(result, starts=True) if judged.missing(world_size, knobs) else result

    def told(proposal: Proposal) -> str:
        changes = dict(proposal.changes)
        missing = judged.missing(changes.pop(GPUS, size), {**judged.knobs, **changes})
        return " and ".join((str(proposal), *missing))

    return tuple(map(told, nearest_starts(start, size, judged.knobs)))


def _gpus(sizes: Sequence[int]) -> str:
    return f"{listed(sizes)} GPU" + ("" if list(sizes) == [1] else "s")


def listed(sizes: Sequence[int]) -> str:
    """`1 to 6, 8`: runs of numbers that follow each other as ranges."""
    runs: list[list[int]] = []
    for size in sizes:
        if runs and size == runs[-1][-1] + 1:
            runs[-1].append(size)
        else:
            runs.append([size])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
