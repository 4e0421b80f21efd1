"""Evaluate names, argparse options and dataclass fields in a Python syntax tree, without running anything."""

import ast
import contextlib
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cohort.check.launch import Setting, parse_number
from cohort.check.readers.arithmetic import UNREADABLE, compute

_LONGEST = 1_000  # characters of text that is put together
_MOST_CLASSES = 500
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {"int": int, "float": float, "str": str, "bool": bool, "len": len}
_COMPARISONS = {ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Is: operator.is_, ast.IsNot: operator.is_not}


def name_of(node: ast.AST | None) -> str:
    """`b` of `b` and of `a.b`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def keyword_of(call: ast.Call, name: str) -> ast.expr | None:
    """The argument with this name."""
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


class Script:
    """A script and the values of its command line."""

    def __init__(self, tree: ast.Module, path: Path, given: Mapping[str, Setting]) -> None:
        self.path = path
        self._given = given
        self.nodes = list(ast.walk(tree))
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        self.classes = [node for node in self.nodes if isinstance(node, ast.ClassDef)]
        self.functions = {n.name: n for n in self.nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
        self.defined = {node.name: self.where(node) for node in (*self.functions.values(), *self.classes)}
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom):
                self.defined |= {alias.asname or alias.name: str(node.module) for alias in node.names}
        lines = _straight_lines(tree, list(self.functions.values()))
        self.straight = {id(line) for line in lines}
        names = [node.id for node in self.nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
        self.stores = Counter([*names, *(node.arg for node in self.nodes if isinstance(node, ast.arg))])
        self.values: dict[str, list[ast.expr]] = defaultdict(list)
        self.parts: dict[str, list[tuple[str, ast.Assign]]] = defaultdict(list)  # of NAME.key = x and NAME["key"] = x
        for node in self.nodes:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._assign(target, node)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
                self.values[node.target.id].append(node.value)
        self.options: dict[str, Any] = {}  # of the script's own command line
        self.constants: dict[str, Any] = {}
        self._read_constants(lines)
        self._read_options()
        self._read_constants(lines)  # those that options decide

    def _assign(self, target: ast.expr, node: ast.Assign) -> None:
        if isinstance(target, ast.Tuple):
            for part in target.elts:
                self._assign(part, node)
        elif isinstance(target, ast.Name):
            self.values[target.id].append(node.value)
        elif isinstance(target, ast.Attribute):
            self.parts[name_of(target.value)].append((target.attr, node))
        elif isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
            self.parts[name_of(target.value)].append((str(target.slice.value), node))

    def where(self, node: ast.AST) -> str:
        """NAME:LINE of a node."""
        return f"{self.path.name}:{getattr(node, 'lineno', 1)}"

    def _read_constants(self, lines: list[ast.stmt]) -> None:
        """Evaluate names that are assigned once, outside of branches and loops."""
        for node in lines:
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            name = name_of(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            if self.stores[name] == 1 and len(self.values[name]) == 1 and name not in self.parts:
                with contextlib.suppress(*UNREADABLE):
                    self.constants[name] = self.value(node.value)

    def value(self, node: ast.expr) -> Any:
        """Evaluate a literal, a constant, an option of the script, or a simple expression of these.

        Raises:
            ValueError: anything else; further errors are in `UNREADABLE`.
        """
        if isinstance(node, ast.Name) and node.id in self.constants:
            return self.constants[node.id]
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in self.options:
            return self.options[node.attr]
        if isinstance(node, ast.BinOp):
            return compute(node, self.value)
        if isinstance(node, ast.IfExp):
            return self.value(node.body if self.value(node.test) else node.orelse)
        if isinstance(node, ast.BoolOp):
            values = [self.value(part) for part in node.values]
            ends = [value for value in values if bool(value) == isinstance(node.op, ast.Or)]
            return [*ends, values[-1]][0]
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
            return _COMPARISONS[type(node.ops[0])](self.value(node.left), self.value(node.comparators[0]))
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.FormattedValue) else part for part in node.values]
            return "".join(str(self.value(part)) for part in parts)[:_LONGEST]
        if isinstance(node, ast.Call):
            return self._called(node)
        if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
            pairs = zip(node.keys, node.values, strict=True)
            return {key.value: self._part(value) for key, value in pairs if isinstance(key, ast.Constant)}
        if isinstance(node, ast.List | ast.Tuple):
            return [self._part(part) for part in node.elts]
        return ast.literal_eval(node)

    def _called(self, node: ast.Call) -> Any:
        """`dict(...)`, `int(x)`, and the default of `os.environ.get("NAME", default)`."""
        name = name_of(node.func)
        if name == "dict" and not node.args:
            return {keyword.arg: self._part(keyword.value) for keyword in node.keywords if keyword.arg}
        if name in _FUNCTIONS and len(node.args) == 1:
            return _FUNCTIONS[name](self.value(node.args[0]))
        if len(node.args) == 2 and ast.unparse(node.func) in ("os.environ.get", "os.getenv"):
            return self.value(node.args[1])
        raise ValueError("a call")

    def _part(self, node: ast.expr) -> Any:
        """Evaluate an element. Names of lists are not resolved, since they could double without end."""
        value = self.value(node)
        if isinstance(value, dict | list) and not isinstance(node, ast.Dict | ast.List | ast.Tuple | ast.Call):
            raise ValueError("a list of lists by name")
        return value

    def resolved(self, node: ast.expr | None) -> ast.expr | None:
        """The expression assigned to a name, if there is exactly one; any other node unchanged."""
        found = self.values[node.id] if isinstance(node, ast.Name) and node.id in self.values else []
        return found[0] if len(found) == 1 else node

    def _read_options(self) -> None:
        """Read argparse options and dataclass fields: values of the command line, else defaults."""
        found: list[tuple[str, ast.expr | None]] = []
        for call in self.calls:
            flags = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            if name_of(call.func) != "add_argument" or not flags:
                continue
            dest = keyword_of(call, "dest")
            name = str(dest.value) if isinstance(dest, ast.Constant) else max(flags, key=len).lstrip("-")
            switch = "store_" in ast.unparse(keyword_of(call, "action") or ast.Constant(""))
            required = not flags[0].startswith("-") or keyword_of(call, "required") is not None
            default = keyword_of(call, "default") or (None if required else ast.Constant(False if switch else None))
            found.append((name.replace("-", "_"), default))
        for kind in self.classes:
            if kind.decorator_list and not any("Config" in name_of(base) for base in kind.bases):
                found += [(key, _field_default(value)) for key, value in _fields(kind)]
        several = {name for name, times in Counter(name for name, _ in found).items() if times > 1}
        for name, node in found:
            if name in self._given:
                self.options[name] = parse_number(self._given[name].value)
            elif node is not None and name not in several:
                with contextlib.suppress(*UNREADABLE):
                    self.options[name] = self.value(node)

    def classes_like(self, known: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Setting]]:
        """Known classes, their aliases and their subclasses, each with its defaults."""
        place = f"{self.path.name}:1"
        found = {kind: {key: Setting(value, place) for key, value in own.items()} for kind, own in known.items()}
        for node in self.nodes:
            for alias in node.names if isinstance(node, ast.ImportFrom) else ():
                if alias.name in known and alias.asname:
                    found[alias.asname] = found[alias.name]
        for node in self.classes[:_MOST_CLASSES]:
            base = next((name_of(base) for base in node.bases if name_of(base) in found), None)
            if base is not None:
                found[node.name] = dict(found[base])
                for key, value in _fields(node):
                    with contextlib.suppress(*UNREADABLE):
                        default = self.value(_field_default(value) or value)
                        found[node.name][key] = Setting(default, self.where(value), added=True)
        return found

    def named(self, key: str | None, node: ast.expr, depth: int = 0) -> Iterator[tuple[str | None, ast.expr, bool]]:
        """Yield (key, value, certain) of an argument. `**more` is expanded into its keys."""
        found = self.resolved(node)
        pairs: list[tuple[str | None, ast.expr]] = []
        if isinstance(found, ast.Dict):
            pairs = [(constant(key), value) for key, value in zip(found.keys, found.values, strict=True)]
        elif isinstance(found, ast.Call) and name_of(found.func) == "dict" and not found.args:
            pairs = [(keyword.arg, keyword.value) for keyword in found.keywords]
        if key is not None or depth > 3 or not pairs:
            yield key, node, key is not None
            return
        for name, value in pairs:
            yield from self.named(name, value, depth + 1)
        yield from self.changes(name_of(node))

    def changes(self, name: str) -> Iterator[tuple[str, ast.expr, bool]]:
        """Yield (key, value, certain) of `NAME.key = value` and `NAME["key"] = value`."""
        for key, line in self.parts.get(name, []):
            yield key, line.value, id(line) in self.straight


def constant(node: ast.AST | None) -> str | None:
    """The value of a string literal; None for any other node."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _fields(node: ast.ClassDef) -> list[tuple[str, ast.expr]]:
    """The fields of a class and their defaults."""
    lines = [line for line in node.body if isinstance(line, ast.AnnAssign)]
    return [(line.target.id, line.value) for line in lines if isinstance(line.target, ast.Name) and line.value]


def _field_default(node: ast.expr) -> ast.expr | None:
    """The default that `field(default=...)` has, or the value itself."""
    return keyword_of(node, "default") if isinstance(node, ast.Call) and name_of(node.func) == "field" else node


def _straight_lines(tree: ast.Module, functions: list[Any]) -> list[ast.stmt]:
    """Statements outside of branches and loops. `if __name__ == "__main__":` is not a branch."""
    lines: list[ast.stmt] = []
    for node in tree.body:
        is_main = isinstance(node, ast.If) and "__name__" in ast.dump(node.test)
        lines += node.body if isinstance(node, ast.If) and is_main else [node]
    return lines + [line for function in functions for line in function.body]
