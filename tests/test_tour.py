"""Code that the pages for newcomers point to: every linked file, and every name in it, exists."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
TOUR = "docs/tour.md"
PAGES = (TOUR, "docs/design.md", "CONTRIBUTING.md")
LINK = re.compile(r"\[`([^`\]]+)`\]\(([^)#\s]+)\)")  # [`name`](file)
QUOTED = re.compile(r"`([^`\n]+)`")


class Reference(NamedTuple):
    """A name that a page links to the file that should define it."""

    page: str
    path: str  # relative to the root of the repository
    name: str  # may be dotted, as in `Class.method`


def references(page: str, text: str) -> list[Reference]:
    """The links of a page to names in Python files; a link to a file by its own name is none."""
    found = []
    for name, target in LINK.findall(text):
        path = (ROOT / page).parent.joinpath(target).resolve()
        assert path.is_relative_to(ROOT) and path.exists(), f"{page} links `{name}` to {target}, which does not exist"
        if path.suffix == ".py" and name != path.name:
            found.append(Reference(page, path.relative_to(ROOT).as_posix(), name))
    return found


def defined(nodes: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Functions, classes, methods, fields and constants: `name`, or `Class.name`."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from defined(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))


@cache
def names_in(path: str) -> set[str]:
    return set(defined(ast.parse((ROOT / path).read_text(encoding="utf-8")).body))


def missing(found: list[Reference]) -> list[str]:
    """What does not exist, as messages."""
    names = {path: names_in(path) for path in {reference.path for reference in found}}
    return [f"{page}: {path} defines no `{name}`" for page, path, name in found if name not in names[path]]


def is_path(quoted: str) -> bool:
    return re.fullmatch(r"(\w+/)+|[\w/.-]+\.(py|md)", quoted) is not None


def exists(path: str) -> bool:
    """Relative to the repository, `docs` or `src`, or to any folder of the package or of the tests."""
    fixed = any((folder / path).exists() for folder in (ROOT, ROOT / "docs", ROOT / "src"))
    return fixed or any(any((ROOT / folder).rglob(path)) for folder in ("src/cohort", "tests"))


@pytest.mark.parametrize("page", PAGES)
def test_linked_names_are_defined_in_their_files(page: str):
    found = references(page, (ROOT / page).read_text(encoding="utf-8"))
    assert found or page != TOUR
    assert not missing(found), "\n" + "\n".join(missing(found))


@pytest.mark.parametrize("page", PAGES)
def test_quoted_paths_exist(page: str):
    quoted = QUOTED.findall((ROOT / page).read_text(encoding="utf-8"))
    paths = {text for text in quoted if is_path(text)}
    assert paths
    absent = sorted(path for path in paths if not exists(path))
    assert not absent, "\n" + "\n".join(f"{page}: no file or folder `{path}`" for path in absent)


def test_every_other_name_of_the_tour_is_known():
    """Names without a link, and those of the diagram, are in a linked file or are configuration keys."""
    text = (ROOT / TOUR).read_text(encoding="utf-8")
    found = references(TOUR, text)
    parts = {name for path in {reference.path for reference in found} for name in names_in(path)}
    parts |= {name.rpartition(".")[2] for name in parts}
    diagram = text.split("```")[1]
    names = {name for name in QUOTED.findall(text.replace(diagram, "")) if re.fullmatch(r"[A-Za-z_][\w.]*", name)}
    names |= set(re.findall(r"\b[A-Z][a-z]+[A-Z]\w+", diagram))
    unknown = sorted(name for name in names - parts if not is_path(name) and not is_key(name))
    assert not unknown, "\n" + "\n".join(f"{TOUR}: no linked file defines `{name}`" for name in unknown)
    absent = [path for path in re.findall(r"[a-z_]+/(?:\w+\.py)?", diagram) if not exists(path)]
    assert not absent, f"{TOUR}: the diagram names what does not exist: {', '.join(absent)}"


def is_key(name: str) -> bool:
    """Whether some section of the configuration has this key, such as `rollout.engine`."""
    section, _, key = name.partition(".")
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "src/cohort/config").glob("*.py")]
    fields = {name for path in files for name in names_in(path)}
    return f"Config.{section}" in fields and any(field.endswith(f"Config.{key}") for field in fields)


def test_a_wrong_name_and_a_wrong_file_fail():
    page = "[`Trainer.step`](../src/cohort/trainer/loop.py) [`Trainer.leap`](../src/cohort/trainer/loop.py)"
    assert missing(references(TOUR, page)) == [f"{TOUR}: src/cohort/trainer/loop.py defines no `Trainer.leap`"]
    with pytest.raises(AssertionError, match=r"docs/tour\.md links `x` to \.\./src/x\.py, which does not exist"):
        references(TOUR, "[`x`](../src/x.py)")
    assert not exists("trainer/leap.py") and not is_key("rollout.leap")
