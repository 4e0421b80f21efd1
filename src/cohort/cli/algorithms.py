"""`cohort algorithms`."""

import json
from typing import Annotated, Any

import typer

from cohort.cli.options import Debug
from cohort.errors import UserError


def algorithms(
    name: Annotated[str | None, typer.Argument(help="Show this one alone, with its formulas.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """List the algorithms: what they are made of, where they come from, their numbers, and when to use which."""
    from cohort.config import ALGORITHMS
    from cohort.config.algorithm_docs import described, not_one_of

    if name is not None and name not in ALGORITHMS:
        raise UserError(f"algorithm {name!r}: {not_one_of(name, ALGORITHMS)}")
    found = [described(each) for each in ([name] if name else ALGORITHMS)]
    if json_:
        typer.echo(json.dumps(found[0] if name else found, indent=2))
    elif name:
        typer.echo(_whole(found[0]))
    else:
        width = max(map(len, ALGORITHMS))
        for algorithm in found:
            parts = " + ".join(algorithm[kind]["name"] for kind in ("advantage", "policy_loss", "loss_weight"))
            typer.echo(
                f"{algorithm['name']:{width}}  {algorithm['when']}\n{'':{width}}  {parts}  ({algorithm['source']})"
            )
        typer.echo(
            "\ncohort algorithms NAME shows formulas and defaults; algorithm: {name: NAME} in a configuration uses one"
        )


def _whole(algorithm: dict[str, Any]) -> str:
    lines = [f"{algorithm['title']} ({algorithm['source']}): {algorithm['when']}", ""]
    for kind in ("advantage", "policy_loss", "loss_weight"):
        part = algorithm[kind]
        lines.append(f"{kind}: {part['name']}  ({part['source']})")
        lines.append(f"    {part['formula']}")
        lines += [f"    {key}: {json.dumps(value)}" for key, value in part["defaults"].items()]
    return "\n".join([*lines, "", f"algorithm: {{name: {algorithm['name']}}}"])
