"""Options common to all commands."""

from typing import Annotated

import typer

Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")]
