"""Check one file: read it, apply its framework's rules, and report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from cohort.errors import UserError
from cohort_check.findings import Finding
from cohort_check.launch import ANY_SETTING, Launch, Setting, Unread
from cohort_check.readers import read_launch, read_variants
from cohort_check.readers.files import read_text
from cohort_check.readers.launcher import is_of_launcher
from cohort_check.readers.pins import pinned_version
from cohort_check.rules import common, run_rules
from cohort_check.rules.cohort import missing_file_findings
from cohort_check.rules.common import EVALUATION, RunRules, Start

WORLD_SIZES = (*range(1, 17), 24, 32, 64)
_USUAL_NODE = 8  # GPUs, for proposals if the file names no number of processes
_REFUSALS = frozenset(("CHK002", "CHK006", "CHK008", "CHK010"))
Outcome = Literal["starts", "refused", "depends", "not checked", "unreadable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileReport:
    """The result for one run of a file."""

    file: str
    outcome: Outcome
    verdict: str  # the outcome in words, without the file's name
    launch: Launch | None = None  # None: it could not be read
    rules: RunRules | None = None
    # by number of training processes; empty if a deciding value could not be read
    starts: dict[int, Start] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    others: "tuple[FileReport, ...]" = ()  # of further runs in the file

    @property
    def failed(self) -> bool:
        """Whether any finding of any run is an error."""
        return any(finding.severity == "error" for finding in self.findings) or any(o.failed for o in self.others)

    def as_json(self) -> dict[str, Any]:
        """The report as `--json` prints it. `other_runs` is there if the file starts several."""
        others = [other.as_json() for other in self.others]
        return {
            "file": self.file,
            "outcome": self.outcome,
            "verdict": self.verdict,
            "framework": self.launch.framework if self.launch else None,
            "version": self.rules.version if self.rules else None,
            "starts": {str(size): start.as_json() for size, start in self.starts.items()},
            "findings": [finding.as_json() for finding in self.findings],
            **({"other_runs": others} if others else {}),
        }


def check_file(
    path: Path,
    *,
    world_sizes: Sequence[int] = WORLD_SIZES,
    framework_version: str | None = None,
    launched_with: str | None = None,
    ran: Mapping[str, Any] | None = None,
) -> FileReport:
    """Read and check one file. An unreadable file is a finding too.

    Args:
        path: the file.
        world_sizes: numbers of training processes to check if the file names none.
        framework_version: version of the framework whose rules apply (for Open-R1: of TRL).
        launched_with: the launch command, if the file does not contain it.
        ran: what the script would train, by running it: `arguments`, parts of the `trainer` and `where` it is.

    Raises:
        UserError: `launched_with` cannot be read.
    """
    if ran is not None:
        settings = {key: Setting(value, ran["where"]) for key, value in {**ran["arguments"], **ran["trainer"]}.items()}
        reason = f"the GRPOTrainer at {ran['where']}, by running the script"
        pinned = pinned_version("trl", path, read_text(path))
        exact = Launch(framework="trl", form="python", reason=reason, settings=settings, version=pinned)
        if ran["processes"] > 1:
            exact = replace(exact, processes=Setting(ran["processes"], "--launch"), processes_per_node=ran["processes"])
        return _report(path, exact, world_sizes, framework_version)
    try:
        launch = read_launch(path)
    except UserError as error:
        message = str(error).removeprefix(f"{path}: ")
        finding = Finding("CHK001", None, message, where=str(path))
        return FileReport(file=str(path), outcome="unreadable", verdict="cannot be read", findings=(finding,))
    if launched_with:
        launch = read_launch(path, launched_with=launched_with)
    runs = (launch, *launch.others)
    reports = [_report(path, run, world_sizes, framework_version) for run in runs]
    if not launched_with:
        reports = [_with_branches(path, report, world_sizes, framework_version) for report in reports]
    return replace(reports[0], others=tuple(reports[1:]))


def _with_branches(path: Path, report: FileReport, sizes: Sequence[int], version: str | None) -> FileReport:
    """Judge a run with each of the values that branches of its script give to what decides, if they are known."""
    if report.outcome not in ("not checked", "depends") or report.launch is None or report.rules is None:
        return report
    runs = read_variants(path, report.launch, report.rules.decides | ANY_SETTING)
    tried = {said: _report(path, run, sizes, version) for said, run in runs}
    outcomes = dict.fromkeys(one.outcome for one in tried.values())
    if not outcomes or "not checked" in outcomes:
        return report
    if len(outcomes) == 1:
        said, first = next(iter(tried.items()))
        return replace(first, verdict=f"{first.verdict} with {said}; the script's other branches lead to the same")
    by_outcome = ((each, [said for said, one in tried.items() if one.outcome == each]) for each in outcomes)
    told = "; ".join(f"{outcome} with {' or '.join(said)}" for outcome, said in by_outcome)
    return replace(report, outcome="depends", verdict=f"depends: {told}")


def _report(path: Path, launch: Launch, sizes: Sequence[int], version: str | None) -> FileReport:
    """Check one run of a file."""
    rules = run_rules(launch, framework_version=version) if launch.not_checked is None else None
    if rules is None or rules.foreign:
        report = FileReport(file=str(path), outcome="not checked", verdict="", launch=launch, rules=rules)
        told = f"not checked: {rules.foreign if rules else launch.not_checked}"
        return replace(report, verdict=told, findings=launch.findings)
    found = [*(_unread(unread, rules.decides) for unread in launch.unread), *launch.findings, *rules.findings]
    if launch.framework == "cohort" and rules.blocked is None:
        found += missing_file_findings(launch, path.parent)
    unknown = {u.key for u in launch.unread} - EVALUATION | {str(f.field) for f in found if f.code == "CHK010"}
    lacking = sorted(unknown & (rules.decides | ANY_SETTING))
    name = f"{common.FRAMEWORK_NAMES.get(launch.framework, launch.framework)} {rules.version}"
    name += f" with {common.counted(int(launch.processes.value))}" if launch.processes else ""
    starts: dict[int, Start] = {}
    outcome: Outcome = "not checked"
    if lacking:  # the findings above say why
        keys = ", ".join(key.strip("()") for key in lacking)
        verdict = f", {keys} {'is' if len(lacking) == 1 else 'are'} only known at run time"
        verdict += "; --run finds out" if path.suffix == ".py" else ""
    else:
        starts = {size: rules.start(size, rules.sizes) for size in sizes}
        outcome, verdict, refusals = _outcome(launch, rules, starts)
        if refusals and "CHK020" in {finding.code for finding in found}:  # by the rules of another version
            outcome, verdict, refusals, starts = "not checked", ", whose rules are not known here", [], {}
        if rules.blocked is not None:
            stopped = common.refused(rules.blocked)
            starts = {size: stopped if start.starts else start for size, start in starts.items()}
        found += refusals
    found = [_complete(finding, launch) for finding in dict.fromkeys(found)]
    found.sort(key=lambda finding: (finding.severity, finding.code))  # errors, then warnings
    if any(finding.code in _REFUSALS for finding in found):
        outcome, verdict = "refused", ""
    elif outcome != "not checked" and any(finding.severity == "error" for finding in found):
        verdict += "; see the errors below"
    report = FileReport(file=str(path), outcome=outcome, verdict=f"{outcome}: {name}{verdict}")
    return replace(report, launch=launch, rules=rules, starts=starts, findings=tuple(found))


def _outcome(launch: Launch, rules: RunRules, starts: dict[int, Start]) -> tuple[Outcome, str, list[Finding]]:
    """Whether the run starts with the processes that its file names or with any at all, in words, and why not."""
    if launch.processes is not None:
        size = int(launch.processes.value)
        start = rules.start(max(size, 1), rules.sizes)
        if start.starts or size < 1:  # for fewer than 1 the launcher has a finding of its own
            return "starts", f", {batches(start)}", []
        text = f"does not start with {common.counted(size)} ({launch.processes.where})"
        return "refused", "", _refusal("CHK002", text, rules, size)
    working = [size for size, start in starts.items() if start.starts]
    failing = [size for size in starts if size not in working]
    if not failing:
        return "starts", f" with {_gpus(working)}", []
    if not working and any(map(is_of_launcher, launch.unread)):  # and the number of processes may be any
        working = [size for size in range(1, max(WORLD_SIZES)) if rules.start(size, rules.sizes).starts]
    size = _USUAL_NODE if _USUAL_NODE in failing else failing[-1]
    if not working:
        text = f"does not start with {_gpus(failing)}; with {size}"
        return "refused", "", _refusal("CHK002", text, rules, size)
    text = f"starts with {_gpus(working)}, not with {_gpus(failing)}; with {size}"
    verdict = f" starts with {_gpus(working)}, not with {listed(failing)}"
    return "depends", verdict, _refusal("CHK003", text, rules, size)


def batches(start: Start) -> str:
    """The batches of a run that starts, in completions."""
    text = f"{start.global_batch_size} completions per optimizer step"
    if start.generation_batch_size != start.global_batch_size:
        text += f", {start.generation_batch_size} sampled together"
    return f"{text}, {common.counted(start.prompts or 0, 'prompt')}"


def _complete(finding: Finding, launch: Launch) -> Finding:
    """Add the place of the field and, for a key without effect and no other fix, its removal."""
    if finding.where is None and finding.field and finding.field in launch.settings:
        finding = replace(finding, where=launch.settings[finding.field].where)
    if finding.nearest or finding.field is None or finding.code not in ("CHK005", "CHK006"):
        return finding
    return replace(finding, nearest=(f"without {finding.field}",))


def _unread(unread: Unread, decides: frozenset[str]) -> Finding:
    message = f"{unread.key.strip('()')}: {unread.reason}"
    if unread.key in decides & EVALUATION:
        message += "; evaluation is not checked"
    elif unread.key in decides | ANY_SETTING:
        message += "; whether the run starts is not checked"
    return Finding("CHK004", None if unread.key.startswith("(") else unread.key, message, where=unread.where)


def _refusal(code: str, text: str, rules: RunRules, size: int) -> list[Finding]:
    """Report a refusal with `size` processes, with the nearest numbers that start."""
    start = rules.start(size, rules.sizes)
    if start.message == rules.blocked:
        return []  # has its own finding
    proposals = common.nearest_starts(rules.start, size, rules.sizes)
    nearest = tuple(f"{name}={value}" for name, value in proposals)
    return [Finding(code, start.field or rules.usual_field, text, nearest, says=start.message)]


def _gpus(sizes: Sequence[int]) -> str:
    return f"{listed(sizes)} GPU" + ("" if list(sizes) == [1] else "s")


def listed(sizes: Sequence[int]) -> str:
    """Numbers with ranges: `1 to 6, 8`."""
    runs: list[list[int]] = []
    for size in sizes:
        if runs and size == runs[-1][-1] + 1:
            runs[-1].append(size)
        else:
            runs.append([size])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
