"""Reports for people."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cohort.check.findings import RULES, Finding
from cohort.check.judge import FileReport, listed
from cohort.check.launch import ANY_SETTING
from cohort.check.rules.gpus import counted

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
            lines.append(f"{counted(int(launch.processes.value), 'training process')} ({launch.processes.where})")
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
    """A row for all numbers of GPUs with the same batches. Batches count completions: of one optimizer step (global),
    sampled together (generation); prompts are those of a generation batch."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 1), header_style="dim")
    table.add_column("GPUs")
    for heading in ("starts", "global\nbatch", "generation\nbatch", "steps per\ngeneration", "prompts"):
        table.add_column(heading, justify="right", no_wrap=True)
    rows: dict[tuple[str, ...], list[int]] = {}
    for size, start in report.starts.items():
        numbers = (start.global_batch_size, start.generation_batch_size, start.steps_per_generation, start.prompts)
        cells = ("[green]yes[/green]", *map(str, numbers)) if start.starts else ("[red]no[/red]",)
        rows.setdefault(cells, []).append(size)
    for cells, sizes in sorted(rows.items(), key=lambda row: len(row[0]), reverse=True):  # what does not start is last
        table.add_row(listed(sizes), *cells)
    return table


def _print_finding(finding: Finding, console: Console) -> None:
    colour = _COLOURS[finding.severity]
    head = f"[{colour}]{finding.code} {finding.severity}[/{colour}] {escape(RULES[finding.code].title)}"
    console.print(f"  {head}: {escape(finding.message)}", highlight=False, soft_wrap=True)
    if finding.nearest:
        console.print(f"    nearest: {escape('; '.join(finding.nearest))}", highlight=False, soft_wrap=True)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
