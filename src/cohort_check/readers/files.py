"""Read untrusted text files, and YAML as dotted keys with line numbers."""

import ast
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cohort.config.load import compose
from cohort.errors import UserError
from cohort_check.findings import Finding
from cohort_check.launch import Framework, Launch, Setting

MAX_BYTES = 500_000
MAX_NOTEBOOK_BYTES = 20_000_000  # with the output of its cells; lock files list all packages
_MAGIC = re.compile(
    r"(?m)^([ \t]*)(?:[\w, ]+=[ \t]*)?(?:!|%%?\w)(?:.*\\[ \t]*\n)*.*$|^[ \t]*\?{0,2}[\w.]+\?{1,2}[ \t]*$"
)
_OTHER_LANGUAGE = re.compile(r"(?:\s*#.*\n)*\s*%%(?!capture|time|prun)")  # or text
_LEVELS_UP = 2  # from a script to where it is started


def read_text(path: Path) -> str:
    """Read the text of a file.

    Raises:
        UserError: it is missing, not a file, not text, or too large to be a configuration.
    """
    try:
        problem = _no_file(path)
        most = MAX_NOTEBOOK_BYTES if path.suffix in (".ipynb", ".lock") else MAX_BYTES
        if problem is None and path.stat().st_size > most:
            problem = f"larger than {most:,} bytes, which no configuration is"
        text = path.read_text(encoding="utf-8-sig") if problem is None else ""
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 text (byte {error.start})"
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        problem = f"cannot be read: {getattr(error, 'strerror', None) or error}"
    if problem is not None:
        raise UserError(f"{path}: {problem}")
    return text


def _no_file(path: Path) -> str | None:
    """Why a path is not a file; None if it is one."""
    if path.is_dir():
        return "is a folder; name the files in it"
    if path.is_file():
        return None
    return "is not a plain file" if path.exists() else "no such file"


def notebook_code(text: str) -> str:
    """Extract the Python code of a notebook. Line numbers count within it.

    Raises:
        ValueError: not a notebook.
    """
    book = json.loads(text)
    cells = book.get("cells", []) if isinstance(book, dict) else []
    found = [cell.get("source", "") for cell in cells if isinstance(cell, dict) and cell.get("cell_type") == "code"]
    return "\n".join(_as_python("".join(map(str, part))) for part in found)


def _as_python(cell: str) -> str:
    """A cell with `pass` in the place of magics and shell commands; nothing else if the rest is not Python."""
    code = _MAGIC.sub(lambda found: f"{found[1] or ''}pass" + "\n" * found[0].count("\n"), cell)
    try:
        with warnings.catch_warnings(action="ignore"):
            ast.parse(code)
    except (SyntaxError, ValueError):  # which IPython notes and goes on
        code = ""
    return code if code and not _OTHER_LANGUAGE.match(cell) else "pass\n" * (cell.count("\n") + 1)


def find_text(name: str, folder: Path) -> tuple[Path, str]:
    """Read a file that another one names: next to it, in the folders above it, or in the working directory.

    Raises:
        UserError: it cannot be read.
    """
    tries = [place / name for place in (folder, *folder.resolve().parents[:_LEVELS_UP], Path())]
    path = next((candidate for candidate in tries if _no_file(candidate) is None), tries[0])
    return path, read_text(path)


@dataclass(frozen=True, slots=True)
class YamlTree:
    """A YAML mapping."""

    values: dict[str, Setting] = field(default_factory=dict)  # dotted keys; lists and empty mappings are values
    top: dict[str, Setting] = field(default_factory=dict)  # top-level keys; a nested mapping is one value
    findings: list[Finding] = field(default_factory=list)  # keys that are there twice

    def launch(self, framework: Framework, reason: str, settings: Mapping[str, Setting], **more: Any) -> Launch:
        """The run that the mapping describes; `more` are further fields of a `Launch`."""
        findings = tuple(self.findings)
        return Launch(framework=framework, form="yaml", reason=reason, settings=settings, findings=findings, **more)


def read_yaml_tree(text: str, name: str) -> YamlTree | None:
    """Read the mapping of a YAML document; `name` is its file's. None if it holds something else.

    Raises:
        ValueError: as `compose`, or `<<` merges something other than a mapping.
    """
    node = compose(text)
    if not isinstance(node, yaml.MappingNode):
        return None
    tree, loader = YamlTree(), yaml.SafeLoader("")

    def value_of(node: yaml.Node) -> Any:
        try:
            return loader.construct_object(node, deep=True)
        except (yaml.YAMLError, LookupError, ValueError, AttributeError, TypeError, ArithmeticError):
            # a tag of its own, a date that does not exist, `!!bool maybe`
            return text[node.start_mark.index : node.end_mark.index]

    def read(node: yaml.MappingNode, prefix: str) -> None:
        keys: set[str] = set()
        for key_node, _ in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            own = node.start_mark.index <= key_node.start_mark.index < node.end_mark.index  # and not merged
            if own and key in keys:
                told = f"{prefix}{key} is there twice; the value on line {line} counts and the earlier one is dropped"
                tree.findings.append(Finding("CHK005", prefix + key, told))
            keys |= {key} if own else set()
        loader.flatten_mapping(node)  # `<<: *anchor`
        for key_node, value_node in node.value:
            key, where = f"{prefix}{key_node.value}", f"{name}:{key_node.start_mark.line + 1}"
            if not prefix:
                tree.top[key] = Setting(value_of(value_node), where)
            if isinstance(value_node, yaml.MappingNode) and value_node.value:
                read(value_node, f"{key}.")
            else:
                tree.values[key] = Setting(value_of(value_node), where)

    try:
        read(node, "")
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    return tree


def count_of(settings: Mapping[str, Setting], key: str) -> Setting | None:
    """A setting that is a whole number, such as that of the processes; None for any other."""
    said = settings.get(key)
    return said if said and isinstance(said.value, int) else None


def find_yaml(name: str, folder: Path) -> YamlTree:
    """Read a YAML or JSON file that another file names.

    Raises:
        ValueError: it cannot be found or read, or holds no mapping.
    """
    path, text = find_text(name, folder)
    tree = read_yaml_tree(text, path.name)
    if tree is None:
        raise ValueError(f"{path}: holds no mapping")
    return tree
