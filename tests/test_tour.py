"""Code that the pages for newcomers point to: every linked file, and every name in it, exists."""

import ast
import builtins
import re
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
TOUR = "docs/tour.md"
RECIPES = "CONTRIBUTING.md"
PAGES = (TOUR, RECIPES, "docs/design.md")
LINK = re.compile(r"\[`([^`\]]+)`\]\(([^)#\s]+)\)")  # [`name`](file)
QUOTED = re.compile(r"`([^`\n]+)`")
DIAGRAM = re.compile(r"^```text\n.*?^```", re.MULTILINE | re.DOTALL)


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


def find(path: str) -> Path | None:
    """A file or folder of the repository, `docs` or `src`, or of any folder of the package or of the tests.

    Of a file that a reader is to write, with NAME in its name, the folder.
    """
    path = path if "NAME" not in path else f"{path.partition('NAME')[0].rpartition('/')[0]}/"
    if not is_path(path):
        return None
    fixed = [folder / path for folder in (ROOT, ROOT / "docs", ROOT / "src") if (folder / path).exists()]
    return next(chain(fixed, *((ROOT / folder).rglob(path) for folder in ("src/cohort", "tests"))), None)


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
    absent = sorted(path for path in paths if not find(path))
    assert not absent, "\n" + "\n".join(f"{page}: no file or folder `{path}`" for path in absent)


@pytest.mark.parametrize("page", [TOUR, RECIPES])
def test_names_without_a_link_are_known(page: str):
    """They are part of a file that the page names, or configuration keys."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = text if page == TOUR else text.partition("## Adding things")[2].partition("## Words")[0]
    linked = references(page, text)
    files = {reference.path for reference in linked}
    files |= {path.relative_to(ROOT).as_posix() for path in map(find, QUOTED.findall(text)) if path and path.is_file()}
    known = {name for path in files if path.endswith(".py") for name in names_in(path)} | set(dir(builtins))
    known |= {name.rpartition(".")[2] for name in known}
    diagram = DIAGRAM.findall(text)
    names = {name for name in QUOTED.findall(DIAGRAM.sub("", text)) if re.fullmatch(r"[A-Za-z_][\w.]*", name)}
    names |= set(re.findall(r"\b[A-Z][a-z]+[A-Z]\w+", "".join(diagram)))
    names -= {reference.name for reference in linked}
    unknown = sorted(name for name in names - known if not is_path(name) and not is_key(name))
    assert not unknown, "\n" + "\n".join(f"{page}: no file that it names defines `{name}`" for name in unknown)
    absent = [path for path in re.findall(r"[a-z_]+/(?:\w+\.py)?", "".join(diagram)) if not find(path)]
    assert not absent, f"{page}: the diagram names what does not exist: {', '.join(absent)}"


def is_key(name: str) -> bool:
    """Whether some section of the configuration has this key, such as `rollout.engine`."""
    section, _, key = name.partition(".")
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "src/cohort/config").glob("*.py")]
    fields = {name for path in files for name in names_in(path)}
    return f"Config.{section}" in fields and any(field.endswith(f"Config.{key}") for field in fields)


def test_a_wrong_name_and_a_wrong_file_fail():
    page = "[`TrainingLoop.step`](../src/cohort/trainer/loop.py) [`TrainingLoop.leap`](../src/cohort/trainer/loop.py)"
    assert missing(references(TOUR, page)) == [f"{TOUR}: src/cohort/trainer/loop.py defines no `TrainingLoop.leap`"]
    with pytest.raises(AssertionError, match=r"docs/tour\.md links `x` to \.\./src/x\.py, which does not exist"):
        references(TOUR, "[`x`](../src/x.py)")
    assert not find("trainer/leap.py") and not is_key("rollout.leap")
