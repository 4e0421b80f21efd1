"""Evaluate names and argparse options in a Python syntax tree, without running anything."""

import ast
import contextlib
import operator
import posixpath
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cohort.errors import UserError
from cohort_check.findings import load_table
from cohort_check.launch import Launch, parse_number
from cohort_check.readers.files import find_text, find_yaml

NAMES: Mapping[str, Any] = load_table("readers/names.yaml")["python"]
_OPERATORS: dict[Any, Any] = {getattr(ast, name): getattr(operator, of) for name, of in NAMES["operators"].items()}
_OF_CODE = (SyntaxError, RecursionError, MemoryError)
UNREADABLE = (ValueError, LookupError, TypeError, ArithmeticError, AttributeError, *_OF_CODE)


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
    if isinstance(node.op, ast.Div) and isinstance(left, str) and isinstance(right, str):
        return f"{left}/{right}"  # paths
    if not all(isinstance(part, int | float) and abs(part) < 1e12 for part in (left, right)):
        raise ValueError("not plain numbers")
    return _OPERATORS[type(node.op)](left, right)


TRAINERS = tuple(NAMES["trainers"])
UNSTARTED = Launch(framework="trl", form="python", reason="", settings={})  # a script without a command
_REPEATED = (ast.For, ast.AsyncFor, ast.While, ast.Match, ast.ExceptHandler)  # statements whose body need not run once
_LONGEST = 50_000  # text of a value
_BUILT_IN: list[Any] = [int, float, str, bool, len, max, min]
_FUNCTIONS: dict[str, Callable[..., Any]] = {function.__name__: function for function in _BUILT_IN}
# a path is its text
_FUNCTIONS |= {f"os.path.{name}": str for name in ("abspath", "realpath")}
_FUNCTIONS |= {"os.path.join": posixpath.join, "os.path.dirname": posixpath.dirname, "Path": posixpath.join}
_OPERATORS |= {ast.In: lambda value, among: value in among, ast.NotIn: lambda value, among: value not in among}


def name_of(node: ast.AST | None) -> str:
    """Return the last part of a dotted name, or of the function in a call: `b` for `a.b` and `a.b()`."""
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
            for alias in map(ast.alias, module.values) if line.names[0].name == "*" else line.names:
                loads = module.functions.get(alias.name)
                if loads and "load(" in ast.unparse(loads):  # that may read the script's YAML file
                    yield loads
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
        self._parents = {id(child): node for node in nodes for child in ast.iter_child_nodes(node)}
        functions = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        times = Counter(function.name for function in functions)
        self.functions = {function.name: function for function in functions if times[function.name] == 1}
        self.parameters = {arg.arg: f.name for f in functions for arg in ast.walk(f.args) if isinstance(arg, ast.arg)}
        self._classes = classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
        bases = {name: {name_of(base) for base in node.bases} for name, node in classes.items()}
        self.derived = {name for name, of in bases.items() if of & {"GRPOConfig", "RLOOConfig"}}
        trainers = {name: node for name, node in classes.items() if any(b.endswith(TRAINERS) for b in bases[name])}
        # by class derived from TRL's trainer: what it defines anew
        self.trainers = {name: [f.name for f in node.body if f in functions] for name, node in trainers.items()}
        lines = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        imports = [(alias.asname or alias.name, alias.name, line) for line in lines for alias in line.names]
        self.originals = {name: original for name, original, _ in imports}
        modules = {name: str(getattr(line, "module", original)) for name, original, line in imports}
        self.unsloth = any(module.partition(".")[0] in ("unsloth", "unsloth_zoo") for module in modules.values())
        own = {**{function.name: function for function in functions}, **classes}
        self.defined = {name: self.where(node) for name, node in own.items()} | modules
        self.fallbacks = {id(n) for node in nodes if isinstance(node, ast.ExceptHandler) for n in ast.walk(node)}
        self.shared = {name for node in nodes if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
        # by name: the expressions that it may stand for, or be a part of
        self.values: dict[str, list[ast.expr]] = defaultdict(list)
        # by name and function: the lines that set it, and to what (None: a part of something, or of a loop)
        self._set_by: dict[tuple[str, int], list[tuple[Any, Any]]] = defaultdict(list)
        # by NAME, of `NAME.key = x` and `NAME["key"] = x`: key (None: any), value (None: removed) and the statement
        self.parts: dict[str, list[tuple[str | None, Any, Any]]] = defaultdict(list)
        self._uses: dict[str, list[ast.Name]] = defaultdict(list)
        whole = {id(target): value for node in nodes for target, value in _assigned(node)}
        for node in nodes:
            line, is_used = self._line(node), isinstance(getattr(node, "ctx", None), ast.Load)
            if isinstance(node, ast.Call):
                self._change(node)
            elif isinstance(node, ast.Name) and is_used:
                self._uses[node.id].append(node)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                value = whole.get(id(node))
                self.values[node.id] += filter(None, [value or getattr(line, "value", None)])
                if not isinstance(self._up(line), ast.ClassDef):
                    self._set_by[node.id, id(self._function(node))].append((line, value))
            elif isinstance(node, ast.Attribute | ast.Subscript) and not is_used:
                removed = isinstance(node.ctx, ast.Del)
                self._part_set(node, None if removed else whole.get(id(node), line), line)
        self._values: dict[int, Any] = {}  # of names
        self._steps = 50_000  # values that are computed at most: names may refer to each other twice, and so on
        self._options: dict[str, Any] = {}  # of the script's own command line
        self._read_options([node for node in classes.values() if node.decorator_list], started)

    def _part_set(self, target: ast.Attribute | ast.Subscript, value: Any, line: ast.AST) -> None:
        owner = inner = target.value
        while isinstance(inner, ast.Subscript | ast.Attribute):
            inner = inner.value
        at = target.attr if isinstance(target, ast.Attribute) else target.slice
        key = at if isinstance(at, str) else str(at.value) if isinstance(at, ast.Constant) else None
        self.parts[name_of(owner)].append((key, value, line))
        if inner is not owner and name_of(inner) != "self":  # a part of a part
            self.parts[name_of(inner)].append((None, line, line))

    def _change(self, call: ast.Call) -> None:
        """Note `setattr(NAME, ...)`, `NAME.pop(...)` and `NAME.update(...)`; any key may have another value then."""
        method, owner = name_of(call), getattr(call.func, "value", None)
        said: list[tuple[str | None, Any]] = []
        if method == "setattr" and call.args:
            owner = call.args[0]
        elif method == "update" and len(call.args) == 1:
            said = _pairs(call.args[0])
        elif method == "pop":
            said = [(key, None) for key in map(constant, call.args[:1]) if key]
        if isinstance(owner, ast.Name) and method in ("setattr", "update", "pop"):
            for key, value in said or [(None, call)]:
                self.parts[owner.id].append((None if key == "**" else key, value, call))

    def frozen(self) -> list[Any]:
        """Where parameters are set not to require gradients."""
        lines = [*self.calls, *(line for changed in self.parts.values() for _, _, line in changed)]
        return [line for line in lines if re.search(r"\.requires_grad( = |_\()False\)?$", ast.unparse(line))]

    def where(self, node: ast.AST) -> str:
        """NAME:LINE of a node."""
        return f"{self.path.name}:{getattr(node, 'lineno', 1)}"

    def _up(self, node: ast.AST) -> Any:
        return self._parents.get(id(node))

    def _line(self, node: Any) -> Any:
        """The statement that a node is in."""
        while node is not None and not isinstance(node, ast.stmt):
            node = self._up(node)
        return node

    def _function(self, node: ast.AST) -> Any:
        """The innermost function in whose body a node is; None: outside of functions."""
        while (above := self._up(node)) is not None:
            if isinstance(above, ast.FunctionDef | ast.AsyncFunctionDef) and node in above.body:
                return above
            node = above
        return None

    def runs(self, node: ast.AST) -> bool | None:
        """Whether a node is executed, given the conditions around it; None if unknown, or if it may run repeatedly."""
        certain: bool | None = True
        while (above := self._up(node)) is not None:
            in_body = isinstance(above, _REPEATED) and node not in above.__dict__.values()
            in_branch = isinstance(above, ast.If | ast.IfExp) and node is not above.test
            if in_body:
                certain = None
            elif in_branch and "__name__" not in ast.dump(above.test):
                try:
                    in_first = node is above.body or (isinstance(above, ast.If) and node in above.body)
                    if bool(self.value(above.test)) != in_first:
                        return False
                except UNREADABLE:
                    certain = None
            elif isinstance(above, ast.Try) and above.handlers and node not in above.finalbody:
                certain = None
            node = above
        return certain

    def value(self, node: ast.expr) -> Any:
        """Evaluate a literal, a name, an option of the script, or a simple expression of these.

        Raises:
            ValueError: anything else; further errors are in `UNREADABLE`.
        """
        self._steps -= 1
        if self._steps < 0:
            raise ValueError("too long")
        if isinstance(node, ast.Name):
            return self._name(node)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.BinOp):
            return compute(node, self.value)
        if isinstance(node, ast.Subscript):
            return self.value(node.value)[self.value(node.slice)]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return not self.value(node.operand)
        if isinstance(node, ast.IfExp):
            return self.value(node.body if self.value(node.test) else node.orelse)
        if isinstance(node, ast.BoolOp):
            for part in node.values:
                if bool(value := self.value(part)) == isinstance(node.op, ast.Or):
                    break
            return value
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OPERATORS:
            return _OPERATORS[type(node.ops[0])](self.value(node.left), self.value(node.comparators[0]))
        if isinstance(node, ast.Call):
            return self._called(node)
        if isinstance(node, ast.Dict):
            entries = zip(node.keys, node.values, strict=True)
            parts = [{self.value(k): self.value(v)} if k else self.value(v) for k, v in entries]
            return _bounded({key: value for each in parts for key, value in each.items()})
        if isinstance(node, ast.List | ast.Tuple):
            return _bounded([self.value(part) for part in node.elts])
        return ast.literal_eval(node)

    def _scope(self, name: str, node: ast.AST) -> Any:
        """The function whose variable a name is at a node; None: of the module."""
        scope = self._function(node)
        while scope and (name, id(scope)) not in self._set_by and name not in _parameters(scope):
            scope = self._function(scope)
        return scope

    def _binding(self, node: ast.Name) -> tuple[Any, Any]:
        """The line that gives a name its value, and the expression; a function's arguments and None for a parameter."""
        here, scope = self._function(node), self._scope(node.id, node)
        found = self._set_by.get((node.id, id(scope)), [])
        if any(value is None for _, value in found) or node.id in self.shared:
            raise ValueError("a loop or another statement sets it")
        before = [entry for entry in found if scope is not here or entry[0].lineno < node.lineno]
        ran = [(line, value, certain) for line, value in before if (certain := self.runs(line)) is not False]
        if scope is not here and len(ran) > 1:
            raise ValueError("several lines set it")
        if ran:
            line, value, certain = max(ran, key=lambda entry: entry[0].lineno)
            if not certain:
                raise ValueError("a branch decides")
            return line, value
        if scope is None or node.id not in _parameters(scope):
            raise ValueError("unknown")
        return scope, None

    def _name(self, node: ast.Name) -> Any:
        """The value of a name, unless it is a dictionary or list of which parts are changed afterwards."""
        if id(node) in self._values:
            return self._values[id(node)]
        if node.id == "__file__":
            return str(self.path)
        line, given = self._binding(node)
        value = self._argument(line, node.id) if given is None else self.value(given)
        if isinstance(value, dict | list) and any(True for _ in self.changes(node)):
            raise ValueError("any of its parts may be another")
        if id(node) in self._parents:
            self._values[id(node)] = value
        return value

    def _argument(self, function: Any, name: str) -> Any:
        """The argument that all calls of a function give it, or its default."""
        names, owner = _parameters(function), self._up(function)
        called = owner.name if function.name == "__init__" and isinstance(owner, ast.ClassDef) else function.name
        calls = [call for call in self.calls if name_of(call) == called and self._function(call) is not function]
        uses = [node for node in self._uses[called] if getattr(self._up(node), "func", None) is not node]
        if uses or function.decorator_list or (called not in self.functions and called not in self._classes):
            raise ValueError("others may call it")
        values = []
        for call in calls:
            if any(isinstance(arg, ast.Starred) for arg in call.args):
                raise ValueError("a list of arguments")
            given: dict[Any, Any]
            given = dict(zip([each for each in names if each not in ("self", "cls")], call.args, strict=False))
            said = [each for keyword in call.keywords for each in self.named(keyword.arg, keyword.value)]
            given |= {key: value if certain else None for key, value, certain in said}
            if function.args.kwarg and function.args.kwarg.arg == name:  # what has no parameter of its own
                values.append({key: self.value(value) for key, value in given.items() if key not in names})
            elif name not in given and None in given:
                raise ValueError("it may be anything")
            else:
                values.append(self.value(given.get(name, names[name])))
        if not values or any(value != values[0] for value in values):
            raise ValueError("a parameter with several values")
        return values[0]

    def _yaml(self, path: str) -> dict[str, Any]:
        """What a file says that is named by a plain path, or lies in the script's folder or the working directory."""
        folder, place = self.path.parent, Path(path)
        inside = any(place.resolve().is_relative_to(each.resolve()) for each in (folder, Path()))
        if not inside and (place.is_absolute() or ".." in place.parts):
            raise ValueError("a file elsewhere")
        return {key: said.value for key, said in find_yaml(path, folder).top.items()}

    def _attribute(self, node: ast.Attribute) -> Any:
        """An option of the script, a constant of a class, or an entry of a mapping."""
        owner = name_of(node.value) if isinstance(node.value, ast.Name) else ""
        if owner == "torch":  # a dtype
            return node.attr
        changes = self.parts.get(owner, ())
        set_on = any(key in (node.attr, None) and self.runs(at) is not False for key, _, at in changes)
        if owner and node.attr in self._options:
            if set_on:
                raise ValueError("an option that is set anew")
            return self._options[node.attr]
        if owner in self._classes and not set_on:
            lines = [line for line in self._classes[owner].body if node.attr in map(name_of, _targets(line))]
            return self.value(lines[-1].value)  # type: ignore[attr-defined]
        value = self.value(node.value)
        return posixpath.dirname(value) or "." if node.attr == "parent" and isinstance(value, str) else value[node.attr]

    def _called(self, node: ast.Call) -> Any:
        """`dict(...)`, `int(x)`, an entry of a mapping, the content of a YAML file, or a function of the script."""
        name = name_of(node)
        if name == "dict":
            keys: list[ast.expr | None] = [None for _ in node.args]  # as {**first, "key": value}
            keys += [ast.Constant(each.arg) if each.arg else None for each in node.keywords]
            return self.value(ast.Dict(keys, [*node.args, *(each.value for each in node.keywords)]))
        called = ast.unparse(node.func)
        if called in _FUNCTIONS and node.args and not node.keywords:
            return _FUNCTIONS[called](*map(self.value, node.args))
        of_user = called in ("os.environ.get", "os.getenv") and not re.search("RANK|WORLD|SLURM", ast.unparse(node))
        if of_user and len(node.args) == 2:  # as ${NAME:-default} in a shell
            return self.value(node.args[1])
        if name in NAMES["same_path"] and isinstance(node.func, ast.Attribute):
            return str(self.value(node.func.value))
        if name == "get" and isinstance(node.func, ast.Attribute) and not node.keywords:
            mapping, key = self.value(node.func.value), self.value(node.args[0])
            return mapping[key] if key in mapping else self.value([*node.args[1:], ast.Constant(None)][0])
        if called in NAMES["loads"] and node.args:
            return self._yaml(self._opened(node.args[0]))
        if not self._follows(node):
            raise ValueError("a call")
        for returned in self._returns(self.functions[name]):
            if (runs := self.runs(returned)) is None:
                raise ValueError("a branch decides")
            if runs:
                return self.value(returned.value or ast.Constant(None))
        raise ValueError("no value")

    def _follows(self, call: ast.Call) -> bool:
        """Whether it is a call of a function of the script, which no other statement defines."""
        function = self.functions.get(call.func.id) if isinstance(call.func, ast.Name) else None
        other = function is None or function.name in self.values or function.decorator_list
        return not other and not isinstance(self._up(function), ast.ClassDef)  # type: ignore[arg-type]

    def _returns(self, function: ast.AST) -> list[ast.Return]:
        return [n for n in ast.walk(function) if isinstance(n, ast.Return) and self._function(n) is function]

    def _opened(self, node: ast.expr | None) -> str:
        """The path of a file that an expression opens or reads."""
        node = self.resolved(node)
        if isinstance(node, ast.Call) and name_of(node) in NAMES["opens"]:
            return self._opened(node.func.value if isinstance(node.func, ast.Attribute) else node.args[0])
        return str(self.value(node)) if node else ""

    def resolved(self, node: ast.expr | None) -> ast.expr | None:
        """What a name is assigned, or a function of the script returns in one place; any other node unchanged."""
        with contextlib.suppress(*UNREADABLE):
            if isinstance(node, ast.Name):
                return self._binding(node)[1] or node
            if isinstance(node, ast.Call) and self._follows(node):
                (returned,) = self._returns(self.functions[name_of(node)])
                return returned.value
        return node

    def inlined(self, node: ast.expr | None) -> ast.expr | None:
        """What a name or a function of the script stands for in the end."""
        return self._way(node)[-1]

    def _way(self, node: Any) -> list[Any]:
        """Return a name or call, what it resolves to, and so on until an expression that is neither."""
        way = [node]
        while len(way) < 9 and (node := self.resolved(node)) is not way[-1]:
            way.append(node)
        return way

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
            elif node is not None and all(other and ast.dump(other) == ast.dump(node) for other in others):
                with contextlib.suppress(*UNREADABLE):
                    self._options[name] = self.value(node)

    def named(self, key: str | None, node: ast.expr) -> Iterator[tuple[str | None, ast.expr, bool]]:
        """Yield (key, value, certain) of an argument. `**more` is expanded into its keys."""
        if key is not None:
            yield key, node, True
            return
        *way, given = self._way(node)
        if isinstance(given, ast.DictComp):  # some of another
            source = given.generators[0].iter
            yield from self.named(None, getattr(getattr(source, "func", None), "value", source))
        elif pairs := _pairs(given):
            found: dict[str | None, tuple[ast.expr, bool]] = {}
            for name, value in pairs:
                parts = self.named(None, value) if name == "**" else [(name, value, name is not None)]
                found |= {key: (part, certain) for key, part, certain in parts}
            for name, value, certain in [change for each in reversed(way) for change in self.changes(each)]:
                found |= {name: (value or node, certain)}
                if value is None and certain:
                    del found[name]
            yield from ((key, part, certain) for key, (part, certain) in found.items())
        else:
            try:
                told = [(key, ast.copy_location(ast.Constant(said), node)) for key, said in self.value(node).items()]
                yield from ((str(key), said, True) for key, said in told)
            except UNREADABLE:
                yield None, node, False

    def changes(self, node: ast.expr) -> Iterator[tuple[str | None, Any, bool]]:
        """Yield (key, value, certain) for each item set on a name before a line, except in branches that do not run.

        A key of None stands for any, and a value of None for one that is removed.
        """
        name, placed = name_of(node), hasattr(node, "lineno")
        for key, value, line in self.parts.get(name, []):
            if self._before(name, line, node) and (runs := self.runs(line)) is not False:
                yield key, value, runs is True
        if placed and any(self._before(name, use, node) and not self._keeps(use) for use in self._uses[name]):
            yield None, node, False

    def _before(self, name: str, line: Any, node: Any) -> bool:
        """Whether a line may run before a node that refers to the same variable."""
        if not hasattr(node, "lineno"):
            return True
        here = self._function(node)
        same = self._scope(name, line) is self._scope(name, node)
        return same and (line.lineno < node.lineno or self._function(line) is not here)

    def _keeps(self, use: ast.AST) -> bool:
        """Whether a use of a dictionary certainly leaves it as it is."""
        above = self._up(use)
        if isinstance(above, ast.Attribute):
            return above.attr in NAMES["reads"] or getattr(self._up(above), "func", None) is not above
        if isinstance(above, ast.keyword) and above.arg:
            above = self._up(above)
        if isinstance(above, ast.Call):
            return name_of(above) in NAMES["readers"]
        return not isinstance(above, ast.Assign | ast.List | ast.Dict | ast.Tuple)


def _pairs(node: ast.expr | None) -> list[tuple[str | None, ast.expr]]:
    """Keys and values of `{...}` and `dict(...)`."""
    if isinstance(node, ast.Dict):
        return [("**" if k is None else constant(k), value) for k, value in zip(node.keys, node.values, strict=True)]
    if isinstance(node, ast.Call) and name_of(node) == "dict":
        return [*(("**", arg) for arg in node.args), *((each.arg or "**", each.value) for each in node.keywords)]
    return []


def _bounded(value: Any) -> Any:
    """A list or dictionary, unless its parts refer to others so often that it has no end."""
    if len(str(value)) > _LONGEST:
        raise ValueError("too long")
    return value


def _parameters(function: Any) -> dict[str, Any]:
    """The parameters of a function, with their defaults."""
    of = function.args
    plain = [*of.posonlyargs, *of.args]
    defaults = [*[None] * (len(plain) - len(of.defaults)), *of.defaults, *of.kw_defaults]
    names = {each.arg: default for each, default in zip([*plain, *of.kwonlyargs], defaults, strict=True)}
    return names | {each.arg: None for each in (of.vararg, of.kwarg) if each}


def constant(node: ast.AST | None) -> str | None:
    """The value of a string literal; None for any other node."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _assigned(node: ast.AST) -> list[tuple[Any, ast.expr]]:
    """What a statement sets to an expression, and the expression."""
    if isinstance(node, ast.With | ast.AsyncWith):
        return [(item.optional_vars, item.context_expr) for item in node.items]
    return [(target, node.value) for target in _targets(node)]  # type: ignore[attr-defined]


def _targets(node: ast.AST) -> list[ast.expr]:
    """What an assignment assigns to; nothing for any other node."""
    if isinstance(node, ast.AnnAssign):
        return [node.target] if node.value else []
    return node.targets if isinstance(node, ast.Assign) else []
