"""`cohort view`: the page of one or several runs."""

import os
from pathlib import Path
from typing import Annotated

import typer

from cohort.cli.command import Debug
from cohort.errors import UserError


def view(
    run_folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN_FOLDER]...", help="Run folders. Default: all runs below the current folder."),
    ] = None,
    list_: Annotated[
        Path | None, typer.Option("--list", metavar="ROOT", help="Show all runs below this folder, also new ones.")
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(help="Write the page of one run to this HTML file (under 5 MB) instead of serving it."),
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port on 127.0.0.1. Default: the first free one from 7600.")
    ] = None,
    open_: Annotated[
        bool | None,
        typer.Option("--open/--no-open", help="Open a browser. Default: if this terminal is on your own machine."),
    ] = None,
    beside: Annotated[int | None, typer.Option(hidden=True, help="Process id of the run that started this.")] = None,
    debug: Debug = False,
) -> None:
    """Show a run in the browser, while it trains or afterwards: how it learns, or why not."""
    if beside is not None and run_folders:
        from cohort_view.server.process import serve_beside

        serve_beside(run_folders[0], beside)
        return
    folders, root = _what_to_show(run_folders or [], list_)
    if export is not None:
        _export(folders, export)
        return
    from cohort_view.server.process import describe_address, open_browser, opens_by_default
    from cohort_view.server.serve import ViewServer, lower_priority

    lower_priority()
    server = ViewServer(folders, root=root, port=port)
    server.stop_on_signals()
    opened = None
    try:
        if root is not None:
            found = len(server.runs.all())
            print(f"{found} run{'' if found == 1 else 's'} below {root}")
        print(f"{describe_address(server.address, os.environ)}\nCtrl-C stops the page; runs go on.", flush=True)
        if opens_by_default() if open_ is None else open_:
            opened = open_browser(server.address)
        server.serve_until_stopped()
    finally:
        if opened is not None:
            opened.unlink(missing_ok=True)


def _what_to_show(folders: list[Path], root: Path | None) -> tuple[list[Path], Path | None]:
    """Return the run folders and the folder of runs to show.

    Raises:
        UserError: there is nothing to show.
    """
    from cohort_view.server.runs import check_is_run, find_run_folders

    for folder in folders:
        check_is_run(folder)
    if root is None and not folders:
        root = Path()
        if not find_run_folders(root):
            raise UserError("there is no run below the current folder; give a run folder, as in: cohort view runs/demo")
    if root is not None and not root.is_dir():
        raise UserError(f"--list: {str(root)!r} is not a folder")
    return folders, root


def _export(folders: list[Path], file: Path) -> None:
    if len(folders) != 1:
        raise UserError(f"--export: needs one run folder, but {len(folders) or 'none'} were given")
    from cohort.display import ProgressBar
    from cohort_view.export import export_run

    with ProgressBar("exporting") as progress:
        report = export_run(folders[0], file, on_progress=progress.update)
    print(f"{file}: {report.num_bytes / 1e6:.1f} MB. {report.note}")
