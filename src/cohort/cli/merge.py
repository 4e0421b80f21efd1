"""`cohort merge`: merge an adapter into its base model."""

from pathlib import Path
from typing import Annotated

import typer

from cohort.cli.command import Debug
from cohort.errors import UserError
from cohort.processes.this_process import print_loading_notice


def merge(
    adapter: Annotated[Path, typer.Argument(help="Adapter folder, or folder of a run that trained one.")],
    out: Annotated[Path, typer.Argument(help="Output folder for the merged model.")],
    debug: Debug = False,
) -> None:
    """Merge an adapter into its base model in float32, tensor by tensor."""
    print_loading_notice()
    from cohort import models
    from cohort.display import ProgressBar
    from cohort.run.atomic import write_folder_atomically

    source = _find_adapter(adapter)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"OUT: folder {str(out)!r} exists and is not empty; give a new folder")
    with ProgressBar("merging tensors") as bar:
        write_folder_atomically(out, lambda folder: models.merge(source, folder, on_progress=bar.update))
    typer.echo(f"merged: {source}\nmodel:  {out}")
    quantized = models.saved_quantization(source)
    if quantized is not None:
        typer.echo(
            f"note:   the adapter was trained on a base quantized to {quantized} but merged into the unquantized base, "
            f"so logprobs differ from training by the rounding of {quantized}"
        )


def _find_adapter(folder: Path) -> Path:
    """Find an adapter in a folder: the folder itself, a run's final model or its last checkpoint.

    Raises:
        UserError: there is none.
    """
    from cohort.models.adapters.adapter_folder import CONFIG_FILE
    from cohort.run.files import checkpoints

    candidates = (folder, folder / "final", *reversed(checkpoints(folder / "checkpoints")))
    found = next((path for path in candidates if (path / CONFIG_FILE).is_file()), None)
    if found is None:
        inside = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) if folder.is_dir() else ""
        why = f"contains no adapter (but {inside or 'nothing'})" if folder.is_dir() else "is not a folder"
        raise UserError(
            f"ADAPTER: {str(folder)!r} {why}; give a folder with {CONFIG_FILE}, or a run with model.adapter"
        )
    return found
