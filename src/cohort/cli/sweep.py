"""`cohort plan --sweep`: plans of several values of a key, as a table and a picture."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cohort.errors import UserError
from cohort.plan.advice import NODE_GPUS, parse_sweep
from cohort.plan.predict import Plan
from cohort.plan.timing import digits

_MAX_BAR, _MIN_BAR = 40, 8  # characters
_GAP = 2  # characters between columns
_PICTURES = (".png", ".svg", ".pdf")
_COLUMNS = {"step_s": "s per\nstep", "gpu_s": "GPU s\nper step", "cost_per_step": "cost\nper step"}


def run_sweep(
    text: str,
    plan_with: Callable[..., tuple[Plan, list[str]]],
    *,
    price: float | None,
    as_json: bool,
    picture: Path | None,
) -> None:
    """Plan several values of `gpus` or a key, and show time and cost per step of each.

    Args:
        text: what to sweep, as `parse_sweep` takes it.
        plan_with: plans with more overrides, or with other `gpus` and `nodes`.
        price: price of a GPU hour; None: no costs.
        as_json: print JSON instead of a table.
        picture: file for a picture, besides.

    Raises:
        UserError: no value can be planned, or the picture cannot be drawn.
    """
    if picture is not None:
        _check_picture(picture)
    key, values = parse_sweep(text)
    rows: list[dict[str, Any]] = []
    errors: list[UserError] = []
    for value in values:
        row: dict[str, Any] = {"value": value, "fits": False, "layout": "", "step_s": None, "problem": None}
        try:
            row |= _row(_plan_value(key, value, plan_with), price)
        except UserError as error:
            errors.append(error)
            row["problem"] = str(error)
        rows.append(row)
    if len(errors) == len(rows):
        raise errors[0]
    if as_json:
        typer.echo(json.dumps({"sweep": rows, "key": key}, indent=2))
    else:
        _print_table(key, rows, Console())
    if picture is not None:
        _draw(key, rows, picture)


def _plan_value(key: str, value: str, plan_with: Callable[..., tuple[Plan, list[str]]]) -> Plan:
    if key != "gpus":
        return plan_with([f"{key}={value}"])[0]
    nodes = max(1, -(-int(value) // NODE_GPUS))
    return plan_with([], gpus=int(value) // nodes, nodes=nodes)[0]


def _row(plan: Plan, price: float | None) -> dict[str, Any]:
    row: dict[str, Any] = {"fits": plan.fits, "layout": plan.layout.in_words, "problem": plan.layout.problem}
    if plan.timing:
        step_s = plan.timing["step_s"].value
        row |= {"step_s": step_s, "gpu_s": step_s * plan.layout.num_used}
        row |= {} if price is None else {"cost_per_step": price * row["gpu_s"] / 3600}
    return row


def _number(name: str, value: float | None) -> str:
    return "" if not value else f"{value:.3f}" if name == "cost_per_step" else digits(value, 3)


def _print_table(key: str, rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Print a line per value; bars of the time per step take the width that the numbers leave."""
    shown = {name: title for name, title in _COLUMNS.items() if any(name in row for row in rows)}
    titles = [key.replace(".", ".\n"), "fits", "GPUs", *shown.values()]
    cells = [
        [
            row["value"],
            "yes" if row["fits"] else "no",
            row["layout"],
            *(_number(name, row.get(name)) for name in shown),
        ]
        for row in rows
    ]
    widths = [max(map(len, [*title.split("\n"), *column])) for title, *column in zip(titles, *cells, strict=True)]
    room = console.width - sum(widths) - _GAP * len(widths)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    for number, title in enumerate(titles):
        # a long value is folded, numbers are never
        table.add_column(title, justify="right", vertical="bottom", no_wrap=number > 0, overflow="fold")
    table.add_column("")
    longest = max((row["step_s"] or 0.0 for row in rows if row["fits"]), default=0.0)
    for row, line in zip(rows, cells, strict=True):
        length = min(_MAX_BAR, max(_MIN_BAR, room)) * (row["step_s"] or 0.0) / longest if longest else 0.0
        table.add_row(*map(escape, line), "█" * round(length) if row["fits"] else "")
    console.print(table)
    for row in rows:
        if row["problem"]:
            problem = row["problem"].partition(";")[0]
            console.print(escape(f"{row['value']}: {problem}"), highlight=False, soft_wrap=True)


def _check_picture(file: Path) -> None:
    """Refuse a picture that cannot be drawn, before anything is planned.

    Raises:
        UserError: an unknown format, a missing folder or a missing package.
    """
    from cohort.rewards.function import require_package

    if file.suffix.lower() not in _PICTURES:
        raise UserError(f"--plot: {str(file)!r} has no known format; use a name that ends with {', '.join(_PICTURES)}")
    if not file.absolute().parent.is_dir():
        raise UserError(f"--plot: {str(file)!r}: the folder does not exist")
    try:
        require_package("matplotlib", extra="plot")
    except ValueError as error:
        raise UserError(f"--plot: {error}") from None


def _draw(key: str, rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Draw time per step by value, and what the step costs; values that do not fit are pale."""
    from matplotlib.figure import Figure

    cost = "cost_per_step" if any("cost_per_step" in row for row in rows) else "gpu_s"
    figure = Figure(figsize=(10, 4), layout="constrained")
    pale = "" if all(row["fits"] for row in rows) else " (pale: does not fit)"
    for axes, name in zip(figure.subplots(1, 2), ("step_s", cost), strict=True):
        heights = [row.get(name) or 0.0 for row in rows]
        bars = axes.bar(range(len(rows)), heights, color=["#3b82f6" if row["fits"] else "#cbd5e1" for row in rows])
        axes.bar_label(bars, [_number(name, height) for height in heights])
        axes.set_xticks(range(len(rows)), [row["value"] for row in rows])
        axes.set_xlabel(f"{key}{pale}")
        axes.set_title(_COLUMNS[name].replace("\n", " "))
    try:
        figure.savefig(file)
    except OSError as error:
        raise UserError(f"--plot: {str(file)!r} cannot be written: {error.strerror}") from error
