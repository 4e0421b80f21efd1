"""Write the tables of algorithms and of tested versions in pages such as `README.md`.

`python -m cohort.config.algorithm_docs docs/algorithms.md docs/gpu.md README.md`
"""

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from cohort.config.algorithm import AlgorithmConfig
from cohort.config.catalogue import ALGORITHMS, COMPONENTS, Parameter
from cohort.versions import tested_table

_MARKED = re.compile(r"(<!-- table of (\w+), made by `make docs` -->\n).*?(<!-- end of table -->)", re.DOTALL)


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


def with_tables(page: str) -> str:
    """Return the page with the tables between its markers regenerated."""
    return _MARKED.sub(lambda found: found[1] + "\n".join(_TABLES[found[2]]()) + "\n" + found[3], page)


def _summary() -> list[str]:
    rows = ["| `name` | algorithm | when |", "| --- | --- | --- |"]
    return rows + [f"| `{name}` | {a.title} ({_link(a.source)}) | {a.when} |" for name, a in ALGORITHMS.items()]


def _components(kind: str) -> list[str]:
    rows = ["| name | formula | keys and defaults | source |", "| --- | --- | --- | --- |"]
    for name, component in COMPONENTS[kind].items():
        formula = component.formula.replace("|", "\\|")
        rows.append(f"| `{name}` | `{formula}` | {_keys(component.defaults)} | {_link(component.source)} |")
    return rows


def _algorithms() -> list[str]:
    rows = ["| name | algorithm | advantage | policy loss | loss weight | defaults | when |"]
    rows.append("| --- | --- | --- | --- | --- | --- | --- |")
    for name in ALGORITHMS:
        it = describe_algorithm(name)
        kinds = [it[kind] for kind in COMPONENTS]
        defaults = _keys({key: value for part in kinds for key, value in part["defaults"].items()})
        parts = " | ".join(f"`{part['name']}`" for part in kinds)
        rows.append(f"| `{name}` | {it['title']} ({_link(it['source'])}) | {parts} | {defaults} | {it['when']} |")
    return rows


def _meaning(parameter: Parameter) -> str:
    words = {"at least": parameter.ge, "above": parameter.gt, "at most": parameter.le, "below": parameter.lt}
    bounds = ", ".join(f"{word} {bound:g}" for word, bound in words.items() if bound is not None)
    return parameter.description + (f" ({bounds})" if bounds else "")


def _keys(keys: Any) -> str:
    return ", ".join(f"`{key}: {'null' if value is None else value}`" for key, value in keys.items())


def _link(sources: str) -> str:
    """Format sources as Markdown links to papers."""
    sources = re.sub(r"arXiv:([\d.]+)", r"[arXiv:\1](https://arxiv.org/abs/\1)", sources)
    return re.sub(r"doi:(\S+)", r"[doi:\1](https://doi.org/\1)", sources)


_TABLES: dict[str, Callable[[], list[str]]] = {"names": _summary, "algorithms": _algorithms, "versions": tested_table}
_TABLES |= {kind: partial(_components, kind) for kind in COMPONENTS}

if __name__ == "__main__":
    for page in map(Path, sys.argv[1:]):
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
