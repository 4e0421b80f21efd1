"""Python files with `GRPOConfig(...)`, read as a syntax tree and never run."""

import ast
import operator
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cohort.check.launch import Launch, Said, Unread
from cohort.check.lora import PEFT_PREFIX
from cohort.check.readers.launcher import read_launcher, sharding_of
from cohort.check.readers.options import find_command
from cohort.check.readers.shell import parse_shell
from cohort.check.readers.trl_yaml import pinned_version

_UNREADABLE = (ValueError, TypeError, ZeroDivisionError, OverflowError, RecursionError)
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


def read(path: Path, text: str) -> Launch | None:
    """Every `GRPOConfig(...)` of a file, or None where there is none.

    Raises:
        ValueError: not valid Python.
    """
    if "GRPOConfig" not in text:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # the file's affair
            tree = ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"line {error.lineno}: not valid Python: {error.msg}") from error
    except (RecursionError, MemoryError, ValueError) as error:
        raise ValueError(f"not readable as Python: {error}") from error
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    constants = _constants(tree)
    kinds = _config_classes(tree, constants)
    configs = [call for call in calls if _name(call.func) in kinds]
    if not configs:
        if any("Parser" in _name(call.func) for call in calls):
            raise ValueError(
                "takes GRPOConfig from its command line; check the recipe or the shell script that it is started with"
            )
        return None
    launches = [_launch_of(config, kinds[_name(config.func)], calls, constants, tree, path, text) for config in configs]
    return replace(launches[0], others=tuple(launches[1:]))


def _config_classes(tree: ast.Module, constants: Mapping[str, Any]) -> dict[str, dict[str, Said]]:
    """GRPOConfig, other names of it, and classes made from it, with the defaults that these set."""
    found: dict[str, dict[str, Said]] = {"GRPOConfig": {}}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname: {} for alias in node.names if alias.name == "GRPOConfig" and alias.asname}
    for node in ast.walk(tree):
        base = (
            next((_name(base) for base in node.bases if _name(base) in found), None)
            if isinstance(node, ast.ClassDef)
            else None
        )
        if isinstance(node, ast.ClassDef) and base is not None:
            fields = [entry for entry in node.body if isinstance(entry, ast.AnnAssign) and entry.value is not None]
            own = {entry.target.id: entry for entry in fields if isinstance(entry.target, ast.Name)}
            found[node.name] = found[base] | {
                name: Said(_value(entry.value, constants), f"line {entry.lineno}", added=True)
                for name, entry in own.items()
                if isinstance(entry.value, ast.Constant | ast.Name | ast.BinOp) and _is_readable(entry.value, constants)
            }
    return found


def _is_readable(node: ast.expr, constants: Mapping[str, Any]) -> bool:
    try:
        _value(node, constants)
    except _UNREADABLE:
        return False
    return True


def _launch_of(
    config: ast.Call,
    defaults: Mapping[str, Said],
    calls: list[ast.Call],
    constants: Mapping[str, Any],
    tree: ast.Module,
    path: Path,
    text: str,
) -> Launch:
    settings, unread = _arguments(config, constants)
    settings |= {key: replace(said, added=True) for key, said in settings.items() if key in defaults}
    settings = {**defaults, **settings}
    trainers = [call for call in calls if _name(call.func) == "GRPOTrainer"]
    if trainers:
        settings |= _trainer(trainers[0], constants) | _model(trainers[0], config, constants, tree)
        adapter, not_read = _adapter(trainers[0], constants, tree)
        settings |= adapter
        unread += not_read
    settings |= _dataset(calls, constants)
    launcher = _launch_command(ast.get_docstring(tree) or "", path)
    return Launch(
        framework="trl",
        form="python",
        reason=f"Python with GRPOConfig(...) on line {config.lineno}",
        settings=settings,
        unread=tuple(unread),
        version=pinned_version(text),
        processes=launcher,
        sharding=sharding_of(settings, path.parent),
    )


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _arguments(call: ast.Call, constants: Mapping[str, Any]) -> tuple[dict[str, Said], list[Unread]]:
    settings: dict[str, Said] = {}
    unread: list[Unread] = []
    named = [(keyword.arg, keyword.value) for keyword in call.keywords]
    named += [("output_dir", value) for value in call.args[:1]]  # the only one that is given by position
    for key, node in named:
        where = f"line {node.lineno}"
        try:
            value = _value(node, constants)
        except _UNREADABLE:
            unread.append(Unread(key or "(**arguments)", where, f"computed: {ast.unparse(node):.60}"))
            continue
        if key is None:
            settings |= (
                {str(name): Said(entry, where) for name, entry in value.items()} if isinstance(value, dict) else {}
            )
        else:
            settings[key] = Said(value, where)
    return settings, unread


def _value(node: ast.expr, constants: Mapping[str, Any]) -> Any:
    """A literal, a constant of the module, or arithmetic of them.

    Raises:
        ValueError: anything else.
    """
    if isinstance(node, ast.Name) and node.id in constants:
        return constants[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left, constants), _value(node.right, constants)
        if not all(isinstance(part, int | float) and abs(part) < 1e12 for part in (left, right)):
            raise ValueError("not plain arithmetic")
        return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.Call) and _name(node.func) == "dict" and not node.args:
        return {keyword.arg: _value(keyword.value, constants) for keyword in node.keywords if keyword.arg}
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        pairs = zip(node.keys, node.values, strict=True)
        return {key.value: _value(value, constants) for key, value in pairs if isinstance(key, ast.Constant)}
    return ast.literal_eval(node)


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Names that are assigned once in the whole file, in a straight line of the module or of a function."""
    assigned = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    assigned += [node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)]  # parameters are set by callers
    constants: dict[str, Any] = {}
    for node in _straight_lines(tree):
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        target = node.target if isinstance(node, ast.AnnAssign) else target
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(target, ast.Name) and value is not None and assigned.count(target.id) == 1:
            try:
                constants[target.id] = _value(value, constants)
            except _UNREADABLE:
                continue
    return constants


def _straight_lines(tree: ast.Module) -> list[ast.stmt]:
    """Statements outside of branches and loops, but for `if __name__ == "__main__":`."""
    lines: list[ast.stmt] = []
    for node in tree.body:
        is_main = isinstance(node, ast.If) and "__name__" in ast.dump(node.test)
        lines += node.body if isinstance(node, ast.If) and is_main else [node]
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return lines + [line for function in functions for line in function.body]


def _trainer(call: ast.Call, constants: Mapping[str, Any]) -> dict[str, Said]:
    """The rewards of `GRPOTrainer(...)`, for conversion."""
    found: dict[str, Said] = {}
    for keyword in call.keywords:
        where = f"line {keyword.value.lineno}"
        if keyword.arg == "reward_funcs":
            nodes = keyword.value.elts if isinstance(keyword.value, ast.List | ast.Tuple) else [keyword.value]
            found["trainer.reward_funcs"] = Said([_name(node) for node in nodes if _name(node)], where)
    return found


def _model(trainer: ast.Call, config: ast.Call, constants: Mapping[str, Any], tree: ast.Module) -> dict[str, Said]:
    """What `X.from_pretrained("id", dtype=...)` says where that is the trainer's model, and BitsAndBytesConfig."""
    found: dict[str, Said] = {}
    given = _keyword(trainer, "model") or (trainer.args[0] if trainer.args else None)
    if given is not None and _is_readable(given, constants):
        found["trainer.model"] = Said(_value(given, constants), f"line {given.lineno}")
    loaded = _resolved(given, tree)
    quantized = [_keyword(trainer, "quantization_config")]
    extra = _resolved(_keyword(config, "model_init_kwargs"), tree)
    if isinstance(extra, ast.Dict):
        pairs = zip(extra.keys, extra.values, strict=True)
        quantized += [v for k, v in pairs if isinstance(k, ast.Constant) and k.value == "quantization_config"]
    quantized += [_keyword(extra, "quantization_config")] if isinstance(extra, ast.Call) else []
    if isinstance(loaded, ast.Call) and _name(loaded.func) == "from_pretrained":
        where = f"line {loaded.lineno}"
        if loaded.args and _is_readable(loaded.args[0], constants):
            found["trainer.model"] = Said(_value(loaded.args[0], constants), where)
        dtype = _keyword(loaded, "dtype") or _keyword(loaded, "torch_dtype")
        if dtype is not None:
            found["trainer.dtype"] = Said(ast.unparse(dtype).strip("'\"").removeprefix("torch."), where)
        quantized += [loaded, _keyword(loaded, "quantization_config")]
    for node in (_resolved(node, tree) for node in quantized):
        for bits in (4, 8) if isinstance(node, ast.Call) else ():
            given = _keyword(node, f"load_in_{bits}bit") if isinstance(node, ast.Call) else None
            if isinstance(given, ast.Constant) and given.value is True:
                found[f"trainer.load_in_{bits}bit"] = Said(True, f"line {given.lineno}")
    return found


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def _resolved(node: ast.expr | None, tree: ast.Module) -> ast.expr | None:
    """What is assigned to a name, where that is done once; any other expression itself."""
    if not isinstance(node, ast.Name):
        return node
    assigned = [
        assign.value
        for assign in ast.walk(tree)
        if isinstance(assign, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == node.id for target in assign.targets)
    ]
    return assigned[0] if len(assigned) == 1 else node


def _adapter(trainer: ast.Call, constants: Mapping[str, Any], tree: ast.Module) -> tuple[dict[str, Said], list[Unread]]:
    """`peft_config=LoraConfig(...)`, written there or assigned once to the name that stands there."""
    given = _keyword(trainer, "peft_config")
    if given is None or (isinstance(given, ast.Constant) and given.value is None):
        return {}, []
    where, node = f"line {given.lineno}", _resolved(given, tree) or given
    if not isinstance(node, ast.Call) or _name(node.func) != "LoraConfig":
        return {}, [Unread("peft_config", where, f"computed: {ast.unparse(node):.60}")]
    settings, unread = _arguments(ast.Call(node.func, [], node.keywords), constants)
    found = {f"{PEFT_PREFIX}{key}": said for key, said in settings.items()}
    not_read = [Unread(f"peft_config.{entry.key}", entry.where, entry.reason) for entry in unread]
    return {"trainer.peft_config": Said("LoraConfig", where), **found}, not_read


def _dataset(calls: list[ast.Call], constants: Mapping[str, Any]) -> dict[str, Said]:
    """The first argument of `load_dataset(...)`, for conversion."""
    for call in calls:
        if _name(call.func) == "load_dataset" and call.args:
            try:
                return {"trainer.dataset": Said(_value(call.args[0], constants), f"line {call.lineno}")}
            except (ValueError, TypeError):
                return {}
    return {}


def _launch_command(docstring: str, path: Path) -> Said | None:
    """The processes that the docstring's launch command starts, where it has exactly one."""
    lines = docstring.replace("\\\n", " ").splitlines()
    text = "\n".join(line.strip().strip("`$ ") for line in lines if "launch" in line or "torchrun" in line)
    commands = find_command(parse_shell(text), ("accelerate", "launch"), ("torchrun",))
    if len(commands) != 1:
        return None
    return read_launcher(commands[0], "the docstring's launch command", path.parent).processes
