"""Reports for people."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cohort.check.findings import RULES, Finding
from cohort.check.judge import FileReport
from cohort.check.launch import ANY_SETTING

_COLOURS = {"error": "red", "warning": "yellow"}


def print_reports(reports: Sequence[FileReport], console: Console) -> None:
    """Every file: what it is, what it computes, with which numbers of GPUs it starts, and the findings."""
    runs = [run for report in reports for run in (report, *report.others)]
    for run in runs:
        _print_report(run, console)
    errors = sum(finding.severity == "error" for run in runs for finding in run.findings)
    warnings = sum(finding.severity == "warning" for run in runs for finding in run.findings)
    files = "1 file" if len(reports) == 1 else f"{len(reports)} files"
    console.print(f"{files}: {_count(errors, 'error')}, {_count(warnings, 'warning')}", highlight=False)


def _print_report(report: FileReport, console: Console) -> None:
    console.print(f"[bold]{escape(report.file)}[/bold]", highlight=False, soft_wrap=True)
    launch, judged = report.launch, report.judged
    if launch is not None and judged is not None:
        lines = [f"{launch.framework} {judged.version} ({judged.version_reason}): {launch.reason}"]
        if not ANY_SETTING & {unread.key for unread in launch.unread}:
            lines.append(f"completions are sampled {judged.sampling}")
        if launch.processes is not None:
            lines.append(f"{launch.processes.value} training processes ({launch.processes.where})")
        for line in lines:
            console.print(f"  {escape(line)}", highlight=False, soft_wrap=True)
    if report.starts:
        console.print(_table(report))
    if report.memory is not None and not any(finding.code == "CHK019" for finding in report.findings):
        console.print(f"  memory {escape(report.memory)}", highlight=False, soft_wrap=True)
    for finding in report.findings:
        _print_finding(finding, console)
    console.print()


def _table(report: FileReport) -> Table:
    """A row for each number of GPUs that starts, one for all others. Batches count completions: of one optimizer step
    (global), sampled together (generation); prompts are those of a generation batch."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2), header_style="dim")
    for heading in ("GPUs", "starts", "global batch", "generation batch", "steps/generation", "prompts"):
        table.add_column(heading, justify="right")
    refused: list[str] = []
    for size, start in report.starts.items():
        if start.starts:
            numbers = (start.global_batch_size, start.generation_batch_size, start.steps_per_generation, start.prompts)
            table.add_row(str(size), "[green]yes[/green]", *(str(number) for number in numbers))
        else:
            refused.append(str(size))
    if refused:
        table.add_row(" ".join(refused), "[red]no[/red]", "", "", "", "")
    return table


def _print_finding(finding: Finding, console: Console) -> None:
    colour = _COLOURS[finding.severity]
    head = f"[{colour}]{finding.code} {finding.severity}[/{colour}] {escape(RULES[finding.code].title)}"
    console.print(f"  {head}: {escape(finding.message)}", highlight=False, soft_wrap=True)
    if finding.nearest:
        console.print(f"    nearest: {escape('; '.join(finding.nearest))}", highlight=False, soft_wrap=True)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
