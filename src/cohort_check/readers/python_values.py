"""Evaluate names and argparse options in a Python syntax tree, without running anything."""

import ast
import contextlib
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cohort.errors import UserError
from cohort_check.launch import Launch, parse_number
from cohort_check.readers.files import find_text

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
UNREADABLE = (ValueError, LookupError, TypeError, ArithmeticError, RecursionError, SyntaxError, MemoryError)


def compute(node: ast.expr, value: Callable[[ast.expr], Any] = ast.literal_eval) -> Any:
    """The value of arithmetic on plain numbers. `value` evaluates its operands.

    Raises:
        ValueError: an unknown operation, or the numbers are too large. Further errors are in `UNREADABLE`.
    """
    if not isinstance(node, ast.BinOp):
        return value(node)
    if type(node.op) not in _OPERATORS:
        raise ValueError("not arithmetic")
    left, right = compute(node.left, value), compute(node.right, value)
    if not all(isinstance(part, int | float) and abs(part) < 1e12 for part in (left, right)):
        raise ValueError("not plain numbers")
    return _OPERATORS[type(node.op)](left, right)


UNSTARTED = Launch(framework="trl", form="python", reason="", settings={})  # a script without a command
TRAINERS = ("GRPOTrainer", "RLOOTrainer")  # ends of the names of trainers
_BRANCHES = (ast.If, ast.IfExp, ast.For, ast.While, ast.Try, ast.Match)
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {"int": int, "float": float, "str": str, "bool": bool, "len": len}
_COMPARISONS = {ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Is: operator.is_, ast.IsNot: operator.is_not}


def name_of(node: ast.AST | None) -> str:
    """`b` of `b` and of `a.b`, and of a call of these."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def keyword_of(call: ast.Call, name: str) -> ast.expr | None:
    """The argument with this name."""
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def imported_constants(tree: ast.Module, folder: Path) -> Iterator[ast.stmt]:
    """Yield an assignment of each constant that a script in this folder imports from a module beside it."""
    for line in [line for line in tree.body if isinstance(line, ast.ImportFrom) and line.module]:
        with contextlib.suppress(UserError, *UNREADABLE):
            place, text = find_text(f"{str(line.module).replace('.', '/')}.py", folder)
            module = Script(ast.parse(text), place)
            for alias in line.names:
                with contextlib.suppress(*UNREADABLE):
                    value = module.value(ast.Name(alias.name, lineno=len(text)))
                    made = ast.parse(f"{alias.asname or alias.name} = {value!r}").body
                    yield ast.increment_lineno(made[0], line.lineno - 1)


class Script:
    """A script and the values of the command line that starts it."""

    def __init__(self, tree: ast.Module, path: Path, started: Launch = UNSTARTED) -> None:
        self.path = path
        nodes = list(ast.walk(tree))
        self.calls = [node for node in nodes if isinstance(node, ast.Call)]
        functions = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        self.functions = {function.name: function for function in functions}
        self.parameters = {arg.arg: f.name for f in functions for arg in ast.walk(f.args) if isinstance(arg, ast.arg)}
        classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
        bases = {name: {name_of(base) for base in node.bases} for name, node in classes.items()}
        self.derived = {name for name, of in bases.items() if of & {"GRPOConfig", "RLOOConfig"}}
        trainers = {name: node for name, node in classes.items() if any(b.endswith(TRAINERS) for b in bases[name])}
        # by class derived from TRL's trainer: what it defines anew
        self.trainers = {name: [f.name for f in node.body if f in functions] for name, node in trainers.items()}
        self.defined = {name: self.where(node) for name, node in {**self.functions, **classes}.items()}
        self.values: dict[str, list[ast.expr]] = defaultdict(list)
        # by NAME, of `NAME.key = x` and `NAME["key"] = x`: key (None: any), value and the statement
        self.parts: dict[str, list[tuple[str | None, ast.expr, ast.AST]]] = defaultdict(list)
        self.fallbacks = {id(n) for node in nodes if isinstance(node, ast.ExceptHandler) for n in ast.walk(node)}
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self.defined |= {a.asname or a.name: str(getattr(node, "module", a.name)) for a in node.names}
            for target in _targets(node):
                self._assign(target, node)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                self._change(node.value, node)
        # by node in what may not run, or may run several times: tests and what they must be, or what has no value
        self.branched: dict[int, list[tuple[Any, bool]]] = defaultdict(list)
        named: list[Any] = [n for n in nodes if isinstance(n, _BRANCHES)]
        for branch in [n for n in named if "__name__" not in ast.dump(getattr(n, "test", n))]:
            is_if = isinstance(branch, ast.If)
            for block, holds in [(branch.body, True), (branch.orelse, False)] if is_if else [([branch], True)]:
                for inside in [node for line in block for node in ast.walk(line)]:
                    self.branched[id(inside)].append((branch.test if is_if else branch, holds))
        mains = [node for node in tree.body if isinstance(node, ast.If) and "__name__" in ast.dump(node.test)]
        # outside of branches and loops, but `if __name__ == "__main__":`
        lines: list[Any] = [*tree.body, *(line for block in (*mains, *functions) for line in block.body)]
        names = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
        self.stored = stores = Counter([*names, *(node.arg for node in nodes if isinstance(node, ast.arg))])
        assigned: dict[str, list[Any]] = defaultdict(list)
        for target, line in ((target, of) for of in lines for target in _targets(of)):
            assigned[target.id if isinstance(target, ast.Name) and target.id not in self.parts else ""].append(line)
        self._inside = {id(node) for function in functions for node in ast.walk(function)}
        # by name: the line that assigns it, or several outside of functions, if none is in a branch or a loop
        plain = {name: found for name, found in assigned.items() if len(found) == stores[name]}
        self._assigned = {n: of for n, of in plain.items() if len(of) == 1 or not {*map(id, of)} & self._inside}
        self._constants: dict[int, Any] = {}  # values of such lines
        self._options: dict[str, Any] = {}  # of the script's own command line
        self._read_options([node for node in classes.values() if node.decorator_list], started)

    def _assign(self, target: ast.expr, node: Any) -> None:
        if isinstance(target, ast.Tuple):
            for part in target.elts:
                self._assign(part, node)
        elif isinstance(target, ast.Name):
            self.values[target.id].append(node.value)
        elif isinstance(target, ast.Attribute):
            self.parts[name_of(target.value)].append((target.attr, node.value, node))
        elif isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
            self.parts[name_of(target.value)].append((str(target.slice.value), node.value, node))

    def _change(self, call: ast.Call, line: ast.AST) -> None:
        """Note `setattr(NAME, ...)` and `NAME.update(...)`, after which any key may have another value."""
        updated = call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr == "update" else None
        owner = call.args[0] if ast.unparse(call.func) == "setattr" and call.args else updated
        if isinstance(owner, ast.Name):
            self.parts[owner.id].append((None, call, line))

    def frozen(self) -> list[Any]:
        """Where parameters are set not to require gradients."""
        changes = [change for changed in self.parts.values() for change in changed]
        found = [line for key, value, line in changes if key == "requires_grad" and ast.unparse(value) == "False"]
        return found + [call for call in self.calls if ast.unparse(call).endswith(".requires_grad_(False)")]

    def where(self, node: ast.AST) -> str:
        """NAME:LINE of a node."""
        return f"{self.path.name}:{getattr(node, 'lineno', 1)}"

    def value(self, node: ast.expr) -> Any:
        """Evaluate a literal, a constant, an option of the script, or a simple expression of these.

        Raises:
            ValueError: anything else; further errors are in `UNREADABLE`.
        """
        if isinstance(node, ast.Name) and node.id in self._assigned:
            return self._last(node)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in self._options:
            if {node.attr, None} & {key for key, *_ in self.parts.get(node.value.id, ())}:
                raise ValueError("an option that is set anew")
            return self._options[node.attr]
        if isinstance(node, ast.BinOp):
            return compute(node, self.value)
        if isinstance(node, ast.Subscript) and name_of(node.value) in self._assigned:
            return self.value(dict(_pairs(self._assigned[name_of(node.value)][-1].value))[constant(node.slice)])
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return not self.value(node.operand)
        if isinstance(node, ast.IfExp):
            return self.value(node.body if self.value(node.test) else node.orelse)
        if isinstance(node, ast.BoolOp):
            values = [self.value(part) for part in node.values]
            ends = [value for value in values if bool(value) == isinstance(node.op, ast.Or)]
            return [*ends, values[-1]][0]
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
            return _COMPARISONS[type(node.ops[0])](self.value(node.left), self.value(node.comparators[0]))
        if isinstance(node, ast.Call):
            return self._called(node)
        if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
            pairs = zip(node.keys, node.values, strict=True)
            return {key.value: self._part(value) for key, value in pairs if isinstance(key, ast.Constant)}
        if isinstance(node, ast.List | ast.Tuple):
            return [self._part(part) for part in node.elts]
        return ast.literal_eval(node)

    def _last(self, node: ast.Name) -> Any:
        """The value that the only line that sets a name gives it or, outside of functions, the last one above."""
        found = self._assigned[node.id]
        if len(found) > 1:
            found = [line for line in found if line.lineno < node.lineno and id(node) not in self._inside]
        line = max(found, key=lambda line: line.lineno)  # ValueError: none
        if id(line) not in self._constants:
            self._constants[id(line)] = self.value(line.value)
        return self._constants[id(line)]

    def _called(self, node: ast.Call) -> Any:
        """`dict(...)` and `int(x)`."""
        name = name_of(node)
        if name == "dict" and not node.args:
            return {keyword.arg: self._part(keyword.value) for keyword in node.keywords if keyword.arg}
        if name in _FUNCTIONS and len(node.args) == 1:
            return _FUNCTIONS[name](self.value(node.args[0]))
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

    def reached(self, *expressions: ast.expr | None) -> Iterator[ast.Call]:
        """Yield all calls that expressions consist of, also in what is assigned to their names and in functions."""
        waiting, seen, told = list[ast.AST | None](expressions), set[str](), set[ast.Call]()
        while waiting:
            for node in ast.walk(waiting.pop() or ast.Constant(None)):
                name = name_of(node)
                if isinstance(node, ast.Call) and node not in told:
                    told.add(node)
                    yield node
                elif name not in seen and isinstance(node, ast.Name):
                    seen.add(name)
                    waiting += self.values.get(name, [])
                    waiting += [value for _, value, _ in self.parts.get(name, [])]
                    waiting += self.functions[name].body if name in self.functions else []

    def why(self, node: ast.expr) -> str:
        """Describe an expression whose value is not known."""
        name = node.id if isinstance(node, ast.Name) else ""
        found = self.values.get(name, [])
        if name in self.parameters:
            return f"{name}, a parameter of {self.parameters[name]}()"
        if len(found) == 1:
            return f"{name} = {ast.unparse(found[0])}"
        lines = ", ".join(str(each.lineno) for each in found)
        return f"{name}, which lines {lines} set" if found else ast.unparse(node)

    def _read_options(self, dataclasses: Sequence[ast.ClassDef], started: Launch) -> None:
        """Read argparse options and fields of dataclasses: values of the command line, else defaults.

        Fields that a call fills are not known, unless a parser's options do.
        """
        defaults: dict[str, list[ast.expr | None]] = defaultdict(list)
        defaults |= {entry.key: [None] for entry in started.unread}
        for of in dataclasses:
            lines: dict[str, Any] = {name_of(_targets(line)[0]): line for line in of.body if _targets(line)}
            for name, line in lines.items():
                is_field = isinstance(line.value, ast.Call) and name_of(line.value) == "field"
                defaults[name].append(keyword_of(line.value, "default") if is_field else line.value)
            inside = {id(call) for call in ast.walk(of) if name_of(call) == "cls"}
            made = [call for call in self.calls if name_of(call) == of.name or id(call) in inside]
            for keyword in [keyword for call in made for keyword in call.keywords]:
                if keyword.arg or "parse_" not in ast.unparse(keyword.value):
                    defaults |= {name: [None] for name in ([keyword.arg] if keyword.arg else lines)}
        for call in self.calls:
            flags = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            if name_of(call) == "add_argument" and flags:
                name = constant(keyword_of(call, "dest")) or max(flags, key=len).lstrip("-").replace("-", "_")
                switch = "store_" in ast.unparse(keyword_of(call, "action") or ast.Constant(""))
                required = not flags[0].startswith("-") or keyword_of(call, "required") is not None
                default = keyword_of(call, "default") or (None if required else ast.Constant(False if switch else None))
                defaults[name].append(default)
        for name, (node, *others) in defaults.items():
            if name in started.settings:
                self._options[name] = parse_number(started.settings[name].value)
            elif node is not None and not others:
                with contextlib.suppress(*UNREADABLE):
                    self._options[name] = self.value(node)

    def named(self, key: str | None, node: ast.expr) -> Iterator[tuple[str | None, ast.expr, bool]]:
        """Yield (key, value, certain) of an argument. `**more` is expanded into its keys."""
        pairs = _pairs(self.resolved(node)) if key is None else []
        yield from ((name, value, name is not None) for name, value in pairs or [(key, node)])
        yield from self.changes(name_of(node)) if pairs else ()

    def changes(self, name: str) -> Iterator[tuple[str | None, ast.expr, bool]]:
        """Yield (key, value, certain) of what is set on a name after it is made, but in branches that do not run."""
        for key, value, line in self.parts.get(name, []):
            try:
                if all(bool(self.value(test)) == holds for test, holds in self.branched.get(id(line), ())):
                    yield key, value, True
            except UNREADABLE:
                yield key, value, False


def _pairs(node: ast.expr | None) -> list[tuple[str | None, ast.expr]]:
    """Keys and values of `{...}` and `dict(...)`."""
    if isinstance(node, ast.Dict):
        return [(constant(key), value) for key, value in zip(node.keys, node.values, strict=True)]
    if isinstance(node, ast.Call) and name_of(node) == "dict" and not node.args:
        return [(keyword.arg, keyword.value) for keyword in node.keywords]
    return []


def constant(node: ast.AST | None) -> str | None:
    """The value of a string literal; None for any other node."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _targets(node: ast.AST) -> list[ast.expr]:
    """What an assignment assigns to; nothing for any other node."""
    if isinstance(node, ast.AnnAssign):
        return [node.target] if node.value else []
    return node.targets if isinstance(node, ast.Assign) else []
