"""Print reports: the verdict first, then each finding with its place, the framework's words and the fix."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from cohort_check.check_file import FileReport, batches, listed
from cohort_check.findings import RULES, Finding
from cohort_check.rules.common import counted

_COLORS = {"error": "red", "warning": "yellow"}
_FINDINGS = 6  # of one report, so that it fits on a screen
_TABLE_ROWS = 6
_FIXES = 3  # of one finding; --json lists all


def print_reports(reports: Sequence[FileReport], console: Console) -> None:
    """Print every run of every file, each on one screen at most, and a count of the findings."""
    runs = [run for report in reports for run in (report, *report.others)]
    for run in runs:
        _print_report(run, console)
    errors = sum(finding.severity == "error" for run in runs for finding in run.findings)
    warnings = sum(finding.severity == "warning" for run in runs for finding in run.findings)
    files, found = counted(len(reports), "file"), f"{counted(errors, 'error')}, {counted(warnings, 'warning')}"
    console.print(f"{files}: {found}", highlight=False)


def _print_report(report: FileReport, console: Console) -> None:
    lines = [f"[bold]{escape(report.file)}[/bold]: {escape(report.verdict)}"]
    lines += [line for finding in report.findings[:_FINDINGS] for line in _finding(finding)]
    if (rest := len(report.findings) - _FINDINGS) > 0:
        lines.append(f"  and {counted(rest, 'more finding')}; --json lists all")
    lines += [f"  {escape(line)}" for line in _details(report)]
    for line in lines:
        console.print(Text.from_markup(line), highlight=False, soft_wrap=True)
    console.print()


def _finding(finding: Finding) -> Iterator[str]:
    """Its lines, in rich markup."""
    color, where = _COLORS[finding.severity], f"{finding.where}: " if finding.where else ""
    head = f"{escape(where)}[{color}]{finding.severity}[/{color}] {finding.code}"
    yield f"  {head} {escape(RULES[finding.code].title)}: {escape(finding.message)}"
    if finding.says:
        yield f"    it says: {escape(finding.says)}"
    if finding.nearest:
        more = len(finding.nearest) - _FIXES
        fixes = "; ".join(finding.nearest[:_FIXES]) + (f"; and {more} more" if more > 0 else "")
        yield f"    fix: {escape(fixes)}"


def _details(report: FileReport) -> Iterator[str]:
    """What was read, and the batches by number of GPUs."""
    launch, rules = report.launch, report.rules
    if launch is None or rules is None:
        return
    yield f"read as {launch.framework} {rules.version} ({rules.version_reason}): {launch.reason}"
    if report.starts:
        yield f"completions are sampled {rules.sampling}"
    if launch.processes is None:
        yield from _batches(report)


def _batches(report: FileReport) -> Iterator[str]:
    """One line for all numbers of GPUs with the same batches, in completions."""
    rows: dict[str, list[int]] = {}
    for size, start in report.starts.items():
        if start.starts and start.global_batch_size:
            rows.setdefault(batches(start), []).append(size)
    for batch, sizes in list(rows.items())[:_TABLE_ROWS]:
        yield f"{listed(sizes)} GPU{'' if sizes == [1] else 's'}: {batch}"
    if len(rows) > _TABLE_ROWS:
        yield f"and {counted(len(rows) - _TABLE_ROWS, 'other batch size')}; --json has all"
