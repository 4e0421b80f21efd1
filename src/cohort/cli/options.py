"""Arguments and options common to several commands."""

from typing import Annotated

import typer

Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY.SUB=VALUE]...", help="Change keys of the file.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")]
