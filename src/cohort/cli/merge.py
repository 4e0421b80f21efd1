"""`cohort merge`: an adapter and its base become a model folder of their own."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress, TaskID

from cohort.cli.options import Debug
from cohort.errors import UserError
from cohort.startup import loading


def merge(
    adapter: Annotated[Path, typer.Argument(help="Folder of an adapter, or of a run that has trained one.")],
    out: Annotated[Path, typer.Argument(help="Folder that the merged model goes to.")],
    debug: Debug = False,
) -> None:
    """Add an adapter to the weights of its base, in float32, and write the model, one tensor after another."""
    loading()
    from cohort import policy
    from cohort.checkpoint import write_folder_atomically

    source = _find_adapter(adapter)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"OUT: {str(out)!r} is there already and is not empty; give a new folder")
    with Progress(transient=True) as bar:
        task = bar.add_task("tensors", total=None)
        told = partial(_tell, bar, task)
        write_folder_atomically(out, lambda folder: policy.merge(source, folder, on_progress=told))
    typer.echo(f"merged: {source}\nmodel:  {out}")
    quantized = policy.saved_quantization(source)
    if quantized is not None:
        typer.echo(
            f"note:   the adapter was trained on its base in {quantized} and is merged into the base's own weights, so "
            f"that logprobs differ from those in training by what {quantized} rounds"
        )


def _tell(bar: Progress, task: TaskID, done: int, total: int) -> None:
    bar.update(task, completed=done, total=total)


def _find_adapter(folder: Path) -> Path:
    """The adapter in a folder: its own, the run's final one, or that of the run's last checkpoint.

    Raises:
        UserError: there is none.
    """
    from cohort.checkpoint import checkpoints
    from cohort.policy.adapter_folder import CONFIG_FILE

    candidates = (folder, folder / "final", *reversed(checkpoints(folder / "checkpoints")))
    found = next((path for path in candidates if (path / CONFIG_FILE).is_file()), None)
    if found is None:
        inside = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) if folder.is_dir() else ""
        why = f"holds no adapter, but {inside or 'nothing'}" if folder.is_dir() else "is no folder"
        raise UserError(
            f"ADAPTER: {str(folder)!r} {why}; give a folder with {CONFIG_FILE}, or a run with model.adapter"
        )
    return found
