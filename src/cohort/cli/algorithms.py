"""`cohort algorithms`."""

import json
from typing import Annotated, Any

import typer

from cohort.cli.command import Debug
from cohort.config import ALGORITHMS, COMPONENTS
from cohort.config.algorithm import AlgorithmConfig, unknown_name
from cohort.config.catalogue import Parameter
from cohort.errors import UserError

KINDS = ("advantage", "policy_loss", "loss_weight")


def algorithms(
    name: Annotated[str | None, typer.Argument(help="Show only this algorithm or component.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """List the algorithms with their components, sources, defaults and when to use them."""
    kinds = {component: kind for kind, known in COMPONENTS.items() for component in known}
    if name is None:
        found: Any = [describe_algorithm(each) for each in ALGORITHMS]
        text = "\n".join(_short(each, width=max(map(len, ALGORITHMS))) for each in found) + (
            "\n\nShow one algorithm or component with `cohort algorithms NAME`, use one with algorithm: {name: NAME}.\n"
            "All combine with KL, entropy, masks and your own functions: docs/algorithm-terms.md"
        )
    elif name in ALGORITHMS:
        found = describe_algorithm(name)
        text = _long(found)
    elif name in kinds:
        found = {"kind": kinds[name], **describe_component(kinds[name], name)}
        text = "\n".join([*_part(kinds[name], found), "", f"algorithm: {{{kinds[name]}: {name}}}"])
    else:
        raise UserError(f"algorithm {name!r}: {unknown_name(name, [*ALGORITHMS, *kinds])}")
    typer.echo(json.dumps(found, indent=2) if json_ else text)


def _short(algorithm: dict[str, Any], *, width: int) -> str:
    lines = [f"{algorithm['name']:{width}}  {algorithm['when']}  ({algorithm['source']})"]
    for part in (algorithm[kind] for kind in KINDS):
        numbers = ", ".join(f"{key}: {json.dumps(value)}" for key, value in part["defaults"].items())
        lines.append(f"{'':{width}}  {part['name']}: {part['formula']}" + (f"  [{numbers}]" if numbers else ""))
    return "\n".join(lines)


def _long(algorithm: dict[str, Any]) -> str:
    lines = [f"{algorithm['title']} ({algorithm['source']}): {algorithm['when']}", ""]
    for kind in KINDS:
        lines += _part(kind, algorithm[kind])
    return "\n".join([*lines, "", f"algorithm: {{name: {algorithm['name']}}}"])


def _part(kind: str, part: dict[str, Any]) -> list[str]:
    numbers = [
        f"    {key}: {json.dumps(value)}\n        {part['meanings'][key]}" for key, value in part["defaults"].items()
    ]
    return [f"{kind}: {part['name']}  ({part['source']})", f"    {part['formula']}", *numbers]


def describe_algorithm(name: str) -> dict[str, Any]:
    """Describe a named algorithm: its components, their formulas and their parameter values."""
    algorithm, config = ALGORITHMS[name], AlgorithmConfig(name=name)
    parts: dict[str, Any] = {}
    for kind in COMPONENTS:
        part = describe_component(kind, getattr(algorithm, kind))
        parts[kind] = {**part, "defaults": {key: getattr(config, key) for key in part["defaults"]}}
    texts = {"name": name, "title": algorithm.title, "source": algorithm.source, "when": algorithm.when}
    return {**texts, **parts, "min_generations": config.min_generations}


def describe_component(kind: str, name: str) -> dict[str, Any]:
    """Describe a component: its formula and its parameters with defaults and meanings."""
    component = COMPONENTS[kind][name]
    return {
        "name": name,
        "formula": component.formula,
        "source": component.source,
        "defaults": component.defaults,
        "meanings": {key: _meaning(parameter) for key, parameter in component.parameters.items()},
    }


def _meaning(parameter: Parameter) -> str:
    words = {"at least": parameter.ge, "above": parameter.gt, "at most": parameter.le, "below": parameter.lt}
    bounds = ", ".join(f"{word} {bound:g}" for word, bound in words.items() if bound is not None)
    return parameter.description + (f" ({bounds})" if bounds else "")
