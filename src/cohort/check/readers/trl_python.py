"""TRL in Python: `GRPOConfig(...)` and its trainer, with the values of the launch command."""

import ast
import contextlib
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from cohort.check.launch import Launch, Setting, Unread
from cohort.check.lora import PEFT_PREFIX
from cohort.check.readers.arithmetic import UNREADABLE
from cohort.check.readers.launcher import pinned_version, read_command, read_sharding, with_recipe
from cohort.check.readers.python_values import Script, constant, keyword_of, name_of
from cohort.check.readers.shell import Command, parse_shell

# classes of settings, with the defaults that differ from those of GRPOConfig
_KINDS: dict[str, dict[str, Any]] = {"GRPOConfig": {}, "RLOOConfig": {"num_generations": 2}, "RLHFArguments": {}}
_MOST_ARGUMENTS = 5_000
_DATASET_CODE = (  # what may be done to a dataset on its way to the trainer
    "map filter select shuffle train_test_split remove_columns rename_column rename_columns cast_column from_list "
    "from_dict from_generator from_pandas concatenate_datasets interleave_datasets take skip sort add_column"
)
_CONVERTED = ("model", "args", "reward_funcs", "train_dataset", "eval_dataset", "peft_config", "quantization_config")

_IMPORTS_UNSLOTH = r"^\s*(from|import) unsloth\b"
_UNSLOTH = "Unsloth, which replaces TRL's configuration and its batch rules, is not checked"


def read(path: Path, text: str, command: Command | None) -> Iterator[Launch]:
    """Yield every GRPO run of a file, launched by `command` or else by the commands in its docstring.

    Raises:
        ValueError: not valid Python.
    """
    if not any(name in text for name in (*_KINDS, "GRPOTrainer")):
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # the file's affair
            tree = ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"line {error.lineno}: not valid Python: {error.msg}") from error
    except (RecursionError, MemoryError, ValueError) as error:
        raise ValueError(f"not readable as Python: {error}") from error
    commands: list[Command] = [command] if command else _commands_in(ast.get_docstring(tree) or "", path)
    started = [read_command(found, "trl", path.parent) for found in commands[:100]]
    for launch in started or [Launch(framework="trl", form="python", reason="", settings={})]:
        script = Script(tree, path, launch.settings)
        launch = replace(launch, form="python", version=pinned_version(path, text))
        for run in _launches(script, launch, by_command=bool(started)):
            yield replace(run, not_checked=_UNSLOTH) if re.search(_IMPORTS_UNSLOTH, text, re.MULTILINE) else run


def _commands_in(docstring: str, path: Path) -> list[Command]:
    """Commands in a docstring that start this file."""
    lines = [line.strip(" `$") for line in docstring.replace("\\\n", " ").splitlines() if path.name in line]
    commands = [command for line in lines for command in parse_shell(line, path.name)]
    return [found for found in commands if any(word.name == path.name for word in found.words[1:])]


def _launches(script: Script, launch: Launch, *, by_command: bool) -> Iterator[Launch]:
    """Yield the run of every `GRPOConfig(...)`, or of the parser that makes one."""
    kinds = script.classes_like(_KINDS)
    made = [call for call in script.calls if name_of(call.func) in kinds]
    made = made or [call for call in script.calls if name_of(call.func).endswith("GRPOConfig")]
    parsers = [call for call in script.calls if not made and name_of(call.func).endswith("Parser")]
    for call in made:
        kind = name_of(call.func)
        run = _Run(script, call, dict(kinds.get(kind, {})))
        run.arguments(call)
        own = kinds.get(kind, {}).keys() & run.settings.keys()
        run.settings |= {key: replace(run.settings[key], added=True) for key in own}
        if kind == "RLHFArguments" and run.text("rlhf_type") == "grpo":
            yield replace(run.launch(launch), framework="ms-swift")
        elif kind != "RLHFArguments":  # another one is such as AsyncGRPOConfig
            yield replace(run.launch(launch), not_checked=None if kind in kinds else f"{kind} is not checked")
    for call in parsers:
        kind = next((name_of(node) for node in ast.walk(call) if name_of(node) in kinds), "")
        if not kind:
            continue
        settings = {**kinds[kind], **launch.settings}
        own = {*kinds[kind], *script.options}
        run = _Run(script, call, {key: replace(said, added=key in own) for key, said in settings.items()})
        if not by_command:
            reason = f'its command line sets them; add it: --launch "accelerate launch {script.path.name} --beta 0.0"'
            run.unread.append(Unread("(recipe)", script.where(call), reason))
        yield with_recipe(run.launch(launch, parsed=True), script.path.parent)
    trainers = [call for call in script.calls if name_of(call.func).endswith("GRPOTrainer")]
    for call in [] if made or parsers else trainers[:1]:
        run = _Run(script, call, {})
        run.unread.append(Unread("(recipe)", script.where(call), "the trainer's configuration is made elsewhere"))
        yield run.launch(launch)


class _Run:
    """Collects the settings of one configuration and its trainer."""

    def __init__(self, script: Script, config: ast.Call, settings: dict[str, Setting]) -> None:
        self.script, self.config, self.settings = script, config, settings
        self.unread: list[Unread] = []
        self.todo: list[Setting] = []

    def text(self, key: str) -> str:
        """A value as text; empty if there is none."""
        return str(self.settings[key].value) if key in self.settings else ""

    def add(self, key: str | None, node: ast.expr, *, certain: bool = True, prefix: str = "") -> None:
        """Add the value of a key. It is unread if it cannot be evaluated or is not `certain` to be set."""
        where = self.script.where(node)
        try:
            if key is None or not certain:
                raise ValueError("it may be anything")
            self.settings[prefix + key] = Setting(self.script.value(node), where)
        except UNREADABLE:
            reason = f"{'set in a branch' if key and not certain else 'computed'}: {ast.unparse(node):.60}"
            self.unread.append(Unread(prefix.removeprefix("trainer.") + key if key else "(**arguments)", where, reason))
            self.settings.pop(prefix + (key or ""), None)

    def arguments(self, call: ast.Call, prefix: str = "") -> None:
        """Add the arguments of a call. The only positional one is `output_dir`."""
        for value in call.args[:1] if not prefix else ():
            if isinstance(value, ast.Constant) and value.value is ...:
                self.unread.append(Unread("(**arguments)", self.script.where(value), "... stands for what is left out"))
            else:
                self.add("output_dir", value)
        entries = (entry for keyword in call.keywords for entry in self.script.named(keyword.arg, keyword.value))
        for place, (key, node, certain) in enumerate(entries):
            if place == _MOST_ARGUMENTS:
                raise ValueError(f"{self.script.where(call)}: more than {_MOST_ARGUMENTS:,} arguments")
            self.add(key, node, certain=certain, prefix=prefix)

    def launch(self, started: Launch, *, parsed: bool = False) -> Launch:
        """Build the launch, including the trainer's arguments. `parsed`: a parser makes the configuration."""
        trainers = [c for c in self.script.calls if name_of(c.func).endswith(("GRPOTrainer", "RLOOTrainer"))]
        mine = [call for call in trainers if self.script.resolved(keyword_of(call, "args")) is self.config]
        for trainer in (mine or trainers)[:1]:
            changes = self.script.changes(name_of(keyword_of(trainer, "args")))
            for key, node, certain in islice(changes, _MOST_ARGUMENTS):
                self.add(key, node, certain=certain)
                if key in self.settings:  # an attribute is never refused
                    self.settings[key] = replace(self.settings[key], added=True)
            self._model(trainer)
            self._adapter(trainer, parsed=parsed)
            self._rewards(trainer)
            for which in ("train_dataset", "eval_dataset"):
                self._dataset(trainer, which)
            for keyword in trainer.keywords:
                if keyword.arg not in _CONVERTED:
                    self._leave(f"{keyword.arg}={ast.unparse(keyword.value)}", keyword.value)
        return replace(
            started,
            reason=f"Python with {name_of(self.config.func)}(...) at {self.script.where(self.config)}",
            settings=self.settings,
            unread=(*self.unread, *(entry for entry in started.unread if entry.key not in self.settings)),
            todo=tuple(dict.fromkeys(self.todo)),
            sharding=started.sharding or read_sharding(self.settings, self.script.path.parent),
        )

    def _leave(self, text: str, node: ast.AST) -> None:
        self.todo.append(Setting(f"{text:.80}", self.script.where(node)))

    def _rewards(self, trainer: ast.Call) -> None:
        """Add the names of the reward functions, and where they are defined."""
        given = self.script.resolved(keyword_of(trainer, "reward_funcs"))
        if given is None:
            return
        where = self.script.where(given)
        nodes = map(self.script.resolved, given.elts if isinstance(given, ast.List | ast.Tuple) else [given])
        names = [constant(node) or name_of(node.func if isinstance(node, ast.Call) else node) for node in nodes]
        self.settings["trainer.reward_funcs"] = Setting([name for name in names if name], where)
        for name in names:
            if name in self.script.defined:
                self.settings[f"trainer.reward_funcs.{name}"] = Setting(self.script.defined[name], where)

    def _dataset(self, trainer: ast.Call, which: str) -> None:
        """Add the arguments of the `load_dataset` that `which` comes from. Other code on the way becomes a to-do."""
        given = self.script.resolved(keyword_of(trainer, which))
        if given is None or (isinstance(given, ast.Constant) and given.value is None):
            return
        before, waiting, seen, loaded = len(self.todo), list[ast.AST]([given]), set[str](), False
        while waiting:
            for node in ast.walk(waiting.pop()):
                name = name_of(node.func if isinstance(node, ast.Call) else node)
                if isinstance(node, ast.Name) and name not in seen:
                    seen.add(name)
                    waiting += self.script.values.get(name, [])
                    waiting += self.script.functions[name].body if name in self.script.functions else []
                elif isinstance(node, ast.Call) and name == "load_dataset" and not loaded:
                    loaded = True
                    named = [*zip(("path", "name"), node.args, strict=False)]
                    for key, value in [*named, *((keyword.arg or "**", keyword.value) for keyword in node.keywords)]:
                        try:
                            self.settings[f"trainer.{which}.{key}"] = Setting(
                                self.script.value(value), self.script.where(node)
                            )
                        except UNREADABLE:
                            self._leave(f"{key}={ast.unparse(value)}", node)
                elif isinstance(node, ast.Call) and name in _DATASET_CODE.split():
                    self._leave(f"{ast.unparse(node.func):.60}(...)", node)
        if not loaded and len(self.todo) == before:
            self._leave(f"{which}={ast.unparse(given)}", given)

    def _model(self, trainer: ast.Call) -> None:
        """Add the trainer's model, from `X.from_pretrained("id", dtype=...)` or a name, and its quantization."""
        resolved = self.script.resolved
        given = keyword_of(trainer, "model") or (trainer.args[0] if trainer.args else None)
        loaded, extra = resolved(given), resolved(keyword_of(self.config, "model_init_kwargs"))
        quantized = [keyword_of(trainer, "quantization_config")]
        inside = self.script.named(None, extra) if extra else ()
        quantized += [node for key, node, _ in inside if key == "quantization_config"]
        if isinstance(loaded, ast.Call) and name_of(loaded.func) == "from_pretrained":
            given = loaded.args[0] if loaded.args else None
            quantized += [loaded, keyword_of(loaded, "quantization_config")]
            dtype = keyword_of(loaded, "dtype") or keyword_of(loaded, "torch_dtype")
            if dtype is not None:
                text = ast.unparse(dtype).strip("'\"").removeprefix("torch.")
                self.settings["trainer.dtype"] = Setting(text, self.script.where(loaded))
        if given is not None:
            with contextlib.suppress(*UNREADABLE):
                self.settings["trainer.model"] = Setting(self.script.value(given), self.script.where(given))
        for call in map(resolved, quantized):
            for key in ("load_in_4bit", "load_in_8bit") if isinstance(call, ast.Call) else ():
                switch = keyword_of(call, key) if isinstance(call, ast.Call) else None
                if isinstance(switch, ast.Constant) and switch.value is True:
                    self.settings[f"trainer.{key}"] = Setting(True, self.script.where(switch))

    def _adapter(self, trainer: ast.Call, *, parsed: bool) -> None:
        """Add the arguments of `peft_config=LoraConfig(...)`, inline or by name."""
        given = keyword_of(trainer, "peft_config")
        node = self.script.resolved(given)
        made_by = name_of(node.func) if isinstance(node, ast.Call) else ""
        if given is None or (isinstance(node, ast.Constant) and node.value is None):
            return
        if isinstance(node, ast.Call) and made_by == "LoraConfig":
            self.settings["trainer.peft_config"] = Setting("LoraConfig", self.script.where(given))
            self.arguments(node, PEFT_PREFIX)
        elif not (parsed and made_by == "get_peft_config"):  # of use_peft and lora_r, which the same parser reads
            self.unread.append(Unread("peft_config", self.script.where(given), f"computed: {ast.unparse(given):.60}"))
