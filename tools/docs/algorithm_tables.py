"""Write the tables of algorithms and of tested versions in pages such as `README.md`.

`python tools/docs/algorithm_tables.py docs/algorithms.md README.md`
"""

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from cohort.cli.algorithms import describe_algorithm
from cohort.config.catalogue import ALGORITHMS, COMPONENTS
from cohort.run.provenance import TESTED

_MARKED = re.compile(r"(<!-- table of (\w+), made by `make docs` -->\n).*?(<!-- end of table -->)", re.DOTALL)


def with_tables(page: str) -> str:
    """Return the page with the tables between its markers regenerated."""
    return _MARKED.sub(lambda found: found[1] + "\n".join(_TABLES[found[2]]()) + "\n" + found[3], page)


def tested_table() -> list[str]:
    """Return the lines of a Markdown table of the tested versions."""
    shown = {"python": "Python", "torch": "PyTorch", "vllm": "vLLM"}
    rows = [f"| {shown.get(name, name)} | {oldest} | {newest} |" for name, (oldest, newest) in TESTED.items()]
    return ["| | oldest tested | newest tested |", "| --- | --- | --- |", *rows]


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
