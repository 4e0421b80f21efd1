"""TRL in Python: `GRPOConfig(...)` and its trainer, with the values of the launch command."""

import ast
import contextlib
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from cohort_check.findings import Finding, load_table
from cohort_check.launch import Launch, Setting, Unread
from cohort_check.readers import python_values
from cohort_check.readers.launcher import is_of_launcher, read_command, with_recipe
from cohort_check.readers.python_values import NAMES, TRAINERS, UNREADABLE, Script, constant, keyword_of, name_of
from cohort_check.readers.shell import Command

_CONFIGS = tuple(NAMES["configs"])

_IS_OTHER = re.compile(r"Tokenizer|Processor|Config|Peft")  # loads something else than the model
_SEES = re.compile(r"ImageText|Vision|VL|Multimodal|Llava|PaliGemma|Idefics|Pixtral")
_MODULES = re.compile(r"(trl|open_r1|swift|unsloth|cohort)\b")
_IMPORTS_TRL = r"^\s*(from|import) (trl|swift|cohort\.trl)\b"


def read(path: Path, text: str, command: Command | None) -> Iterator[Launch]:
    """Yield every GRPO run of a file that `command` launches.

    Raises:
        ValueError: not valid Python.
    """
    if not any(name in text for name in (*_CONFIGS, "GRPOTrainer")):
        return
    try:
        with warnings.catch_warnings(action="ignore"):  # the file's affair
            tree = ast.parse(text, path.name)
    except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
        raise ValueError(f"not valid Python: {error}") from error
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    if not re.search(_IMPORTS_TRL, text, re.MULTILINE) and {*_CONFIGS} & classes:
        return  # a class that only has the name of TRL's
    tree.body[:0] = python_values.imported_constants(tree, path.parent)
    launch = replace(read_command(command, "trl", path.parent) if command else python_values.UNSTARTED, form="python")
    script = Script(tree, path, launch)
    for run in _runs(script, launch, by_command=command is not None):
        own = {*load_table("keys/unsloth.yaml")["adds"]} & {*run.settings, *(entry.key for entry in run.unread)}
        yield _of_unsloth(run) if (script.unsloth or own) and run.framework == "trl" else run


def _of_unsloth(run: Launch) -> Launch:
    """Return the run with the values that Unsloth takes from the loaded model or overrides for its loss."""
    table, settings = load_table("keys/unsloth.yaml"), dict(run.settings)
    for key, loaded in table["loaded"].items():
        if (said := settings.pop(loaded, None)) and not (key in settings and settings[key].value):
            settings[key] = replace(said, added=True)
    if loss := settings.get("loss_type"):
        settings |= {key: Setting(v, loss.where) for key, v in table["sets"].get(str(loss.value).lower(), {}).items()}
    return replace(run, framework="unsloth", settings=settings)


def _runs(script: Script, launch: Launch, *, by_command: bool) -> Iterator[Launch]:
    """Yield the run of every `GRPOConfig(...)`, else of every parser that makes one, else of the trainer."""
    kinds = {id(call): script.originals.get(name_of(call), name_of(call)) for call in script.calls}
    made = [call for call in script.calls if name_of(call) in script.derived or kinds[id(call)].endswith(_CONFIGS)]
    made = [call for call in made if not ast.unparse(call).endswith("{model_name}-GRPO')")]  # of a trainer's module
    made = [call for call in made if id(call) not in script.fallbacks] or made
    classes = {id(call): _classes(script, call) for call in script.calls if name_of(call).endswith("Parser")}
    parsers = [call for call in script.calls if {*_CONFIGS} & classes.get(id(call), set())]
    if made:  # what the command line says are options of the script's own, whose values `script` knows
        unread = tuple(entry for entry in launch.unread if is_of_launcher(entry) or entry.key.startswith("("))
        launch = replace(launch, unread=unread)
    of_trl = [call for call in made if _MODULES.match(script.defined.get(name_of(call), "trl"))]
    for call in of_trl or made:
        kind = kinds[id(call)]
        run = _Run(script, call)
        run.arguments(call)
        if kind != "RLHFArguments":
            unknown = f"{kind}, whose defaults are not known here"
            other = _of_others(script, name_of(call)) if kind in _CONFIGS else unknown
            yield replace(run.launch(launch), not_checked=other)
        elif "rlhf_type" in run.settings and run.settings["rlhf_type"].value == "grpo":
            yield replace(run.launch(launch), framework="ms-swift")
    for call in [] if made else parsers:
        own = any(not script.defined.get(name, "trl").startswith("trl") for name in classes[id(call)])
        run = _Run(script, call, parsed=True)
        run.settings |= {key: replace(said, added=own) for key, said in launch.settings.items()}
        if not by_command:
            reason = f'its command line sets them; add it: --launch "accelerate launch {script.path.name} --beta 0.0"'
            run.unread.append(Unread("(recipe)", script.where(call), reason))
        others = filter(None, (_of_others(script, name) for name in _CONFIGS if name in classes[id(call)]))
        found = with_recipe(run.launch(launch), script.path.parent)
        yield replace(found, not_checked=next(others, found.not_checked))
    trainers = [call for call in script.calls if name_of(call).endswith("GRPOTrainer")]
    for call in [] if made or parsers else (trainers or script.calls)[:1]:
        run = _Run(script, call)
        run.unread.append(Unread("(recipe)", script.where(call), "the configuration is made elsewhere"))
        found = run.launch(launch)
        foreign = call in trainers and run.foreign(call)
        yield replace(found, settings={}, unread=(), not_checked=foreign) if foreign else found


def _of_others(script: Script, name: str) -> str | None:
    """Whose class of arguments it is, if it is neither TRL's nor the script's own."""
    module = script.defined.get(name, "trl")
    other = f"{script.originals.get(name, name)} of {module}, which is not TRL's"
    return None if ":" in module or _MODULES.match(module) else other


def _part(trainer: ast.Call, name: str) -> ast.expr | None:
    """The argument of a trainer, by name or by position."""
    return dict(zip(NAMES["positions"], trainer.args, strict=False)).get(name, keyword_of(trainer, name))


def _loaded(call: ast.Call) -> ast.expr | None:
    """The name of the model that `from_pretrained` loads."""
    names = (keyword_of(call, name) for name in ("pretrained_model_name_or_path", "model_name"))
    return next(filter(None, (*call.args[:1], *names)), None)


def _classes(script: Script, call: ast.Call) -> set[str]:
    """Names in the arguments of a call."""
    parts = [*call.args, *(keyword.value for keyword in call.keywords)]
    return {name_of(node) for part in parts for node in ast.walk(script.inlined(part) or part)}


class _Run:
    """Collects the settings of one configuration and its trainer. `parsed`: a parser makes the configuration."""

    def __init__(self, script: Script, config: ast.Call, *, parsed: bool = False) -> None:
        self.script, self.config, self.parsed = script, config, parsed
        self.settings: dict[str, Setting] = {}
        if "RLOOConfig" in (name_of(config), *_classes(script, config)):
            self.settings["num_generations"] = Setting(2, script.where(config))  # its default; GRPOConfig's is 8
        self.unread: list[Unread] = []
        self.todo: list[Setting] = []
        self.findings: list[Finding] = []

    def add(
        self, key: str | None, node: ast.expr, *, certain: bool = True, prefix: str = "", added: bool = False
    ) -> None:
        """Add the value of a key. It is unread if it cannot be evaluated or is not `certain` to be set."""
        where = self.script.where(node)
        try:
            if key is None or not certain:
                raise ValueError("it may be anything")
            self.settings[prefix + key] = Setting(self.script.value(node), where, added)
        except UNREADABLE:
            reason = f"{'set in a branch' if key and not certain else 'computed'}: {self.script.why(node):.80}"
            name = prefix.removeprefix("trainer.") + key if key else "(**arguments)"
            self.unread.append(Unread(name, where, reason, added))
            self.settings.pop(prefix + (key or ""), None)

    def arguments(self, call: ast.Call, prefix: str = "") -> None:
        """Add the arguments of a call. The only positional one is `output_dir`."""
        for value in call.args[:1] if not prefix else ():
            self.add(None if ast.unparse(value) == "..." else "output_dir", value)
        for keyword in call.keywords:
            # those that GRPOConfig has, of which the script chooses
            chosen = keyword.arg is None and isinstance(self.script.inlined(keyword.value), ast.DictComp)
            for key, node, certain in self.script.named(keyword.arg, keyword.value):
                self.add(key, node, certain=certain, prefix=prefix, added=chosen)
        for key in [key for key, count in Counter(k.arg for k in call.keywords if k.arg).items() if count > 1]:
            says, text = f"SyntaxError: keyword argument repeated: {key}", f"{key} is given twice"
            self.findings.append(Finding("CHK008", None, text, (), self.script.where(call), says))

    def launch(self, started: Launch) -> Launch:
        """Build the launch, including the trainer's arguments."""
        trainers = [call for call in self.script.calls if self._trains(call)]
        mine = [call for call in trainers if self.script.inlined(_part(call, "args")) is self.config] or trainers
        names = [name for name, values in self.script.values.items() if any(value is self.config for value in values)]
        names += [name_of(_part(trainer, "args")) for trainer in mine[:1]]
        for key, node, certain in (c for name in dict.fromkeys(names) for c in self.script.changes(ast.Name(name))):
            self.add(key, node, certain=certain, added=True)  # an attribute is never refused
        for trainer in mine[:1]:
            self._trainer(trainer, alone=len(trainers) == 1)
        for keyword in (k for call in self.script.calls if name_of(call) == "train" for k in call.keywords):
            if keyword.arg not in ("resume_from_checkpoint", "mode"):
                self._leave(f"train({ast.unparse(keyword)})", keyword.value)
        return replace(
            started,
            reason=f"Python with {name_of(self.config)}(...) at {self.script.where(self.config)}",
            settings=self.settings,
            unread=(*self.unread, *(entry for entry in started.unread if entry.key not in self.settings)),
            todo=tuple(dict.fromkeys(self.todo)),
            findings=tuple(self.findings),
            not_checked=next((self.foreign(trainer) for trainer in mine[:1] if self.parsed), None),
        )

    def _trainer(self, trainer: ast.Call, *, alone: bool) -> None:
        """Add what a trainer is given."""
        changed = [name for name in self.script.trainers.get(name_of(trainer), ()) if name not in NAMES["harmless"]]
        other = f"{name_of(trainer)} changes {', '.join(changed)}" if changed else self.foreign(trainer)
        if other:
            self._leave(f"trainer: {other}", trainer)
        self._model(trainer)
        self._rewards(trainer)
        for which in ("train_dataset", "eval_dataset"):
            self._dataset(trainer, which)
        of_trl = name_of(trainer) == "GRPOTrainer" and not (other or self.script.unsloth)
        if of_trl and alone and keyword_of(trainer, "tokenizer"):
            says = "GRPOTrainer.__init__() got an unexpected keyword argument 'tokenizer'"
            text, where = "tokenizer is called processing_class", self.script.where(trainer)
            self.findings.append(Finding("CHK006", None, text, ("processing_class=tokenizer",), where, says))
        for keyword in trainer.keywords:
            if keyword.arg in ("processing_class", "tokenizer") and self._is_loaded(keyword.value):
                self._set("trainer.processing_class", ast.unparse(keyword.value), keyword.value)
            elif keyword.arg not in NAMES["converted"]:
                self._leave(f"{keyword.arg}={ast.unparse(keyword.value)}", keyword.value)

    def _trains(self, call: ast.Call) -> bool:
        name = name_of(self.script.inlined(call.func))
        # a class with reward functions is a trainer of another module, or by another name
        own = name[:1].isupper() and keyword_of(call, "reward_funcs") is not None
        return name.endswith(TRAINERS) or name in self.script.trainers or own

    def foreign(self, trainer: ast.Call) -> str | None:
        """Whose trainer it is, if it is neither TRL's nor the script's own."""
        name, of = name_of(self.script.inlined(trainer.func)), getattr(trainer.func, "value", None)
        module = self.script.defined.get(name_of(of) or name, ast.unparse(of) if of else "trl")
        of_trl = _MODULES.match(module) and not (module.startswith("open_r1") and name != "GRPOTrainer")
        known = name in self.script.trainers or of_trl
        return None if known else f"{name} of {module}, which is not TRL's"

    def _set(self, key: str, value: Any, node: ast.AST) -> None:
        self.settings[key] = Setting(value, self.script.where(node))

    def _is_none(self, node: ast.expr) -> bool:
        with contextlib.suppress(*UNREADABLE):
            return self.script.value(node) is None
        return False

    def _leave(self, text: str, node: ast.AST) -> None:
        self.todo.append(Setting(f"{text:.80}", self.script.where(node)))

    def _is_loaded(self, tokenizer: ast.expr) -> bool:
        """Whether a tokenizer is one as it was loaded, with its own chat template."""
        changed = [key for key, *_ in self.script.parts.get(name_of(tokenizer), ())]
        made = [name_of(call) for call in self.script.reached(tokenizer)]
        return "from_pretrained" in made and "chat_template" not in changed

    def _rewards(self, trainer: ast.Call) -> None:
        """Add the names of the reward functions, and where they are defined."""
        said = _part(trainer, "reward_funcs")
        given = self.script.inlined(said)
        if given is None:
            return
        own = self.parsed and name_of(given) == "get_reward_funcs"  # of the names that the same parser reads
        nodes = [*map(self.script.resolved, given.elts if isinstance(given, ast.List | ast.Tuple) else [given])]
        names = [constant(node) or name_of(node) for node in nodes]
        variables = (self.script.parameters.keys() | self.script.values.keys()) - self.script.defined.keys()
        computed = not variables.isdisjoint(node.id for node in nodes if isinstance(node, ast.Name)) or not all(names)
        methods = [call.func for call in self.script.calls if isinstance(call.func, ast.Attribute)]
        grown = isinstance(said, ast.Name) and said.id in {name_of(method.value) for method in methods}
        reason = ""
        if any(isinstance(node, ast.Lambda) for node in nodes):
            reason = "a lambda; write it as `def reward(completions, **kwargs)` in rewards.py"
        elif computed or grown or (isinstance(given, ast.Call) and not own):
            reason = "a list that the script puts together"
        if reason:
            self.unread.append(Unread("reward_funcs", self.script.where(given), f"{reason}: {ast.unparse(given):.60}"))
            return
        self._set("trainer.reward_funcs", names, given)
        for name, node in zip(names, nodes, strict=True):
            if name in self.script.defined:
                self._set(f"trainer.reward_funcs.{name}", self.script.defined[name], given)
            if isinstance(node, ast.Call) and not own:
                self._leave(f"rewards: {ast.unparse(node)} returns one", node)

    def _dataset(self, trainer: ast.Call, which: str) -> None:
        """Add the arguments of the `load_dataset` that `which` comes from. Other code on the way becomes a to-do."""
        given = self.script.resolved(_part(trainer, which))
        if given is None or self._is_none(given):
            return
        calls = sorted(self.script.reached(given), key=lambda call: call.lineno)
        loads = [call for call in calls if name_of(call) == "load_dataset"]
        for load in loads[:1]:
            keywords = [(keyword.arg or "**", keyword.value) for keyword in load.keywords]
            for key, value in [*zip(("path", "name"), load.args, strict=False), *keywords]:
                try:
                    self._set(f"trainer.{which}.{key}", self.script.value(value), load)
                except UNREADABLE:
                    self._leave(f"{key}={ast.unparse(value)}", load)
        for load in loads[1:]:
            self._leave(f"{which}: or {ast.unparse(load)}", load)
        changes = [call for call in calls if name_of(call) in NAMES["dataset_code"]]
        for call in changes:
            self._leave(f"{which} goes through {name_of(call)}(...): write it as data.map, or save its rows", call)
        if isinstance(given, ast.Subscript) and (split := constant(given.slice)):
            self.settings.setdefault(f"trainer.{which}.split", Setting(split, self.script.where(given)))
        if not loads and not changes:
            self._leave(f"{which}={ast.unparse(given)}", given)

    def _model(self, trainer: ast.Call) -> None:
        """Add the trainer's model, its quantization and its adapter, whichever call of its making has them."""
        given = _part(trainer, "model")
        parts = (keyword_of(trainer, "quantization_config"), keyword_of(self.config, "model_init_kwargs"))
        calls = list(self.script.reached(given, *parts))
        loads = [
            call
            for call in calls
            if name_of(call) == "from_pretrained" and not _IS_OTHER.search(ast.unparse(call.func))
        ]
        models = {ast.unparse(_loaded(load) or load) for load in loads}
        given = _loaded(loads[0]) if loads else given
        if len(models) > 1:
            text = f"loaded in several places, as {' or '.join(sorted(models)):.80}"
            self.unread.append(Unread("model", self.script.where(loads[0]), text))
        elif given is not None:
            self.add("model", given, prefix="trainer.")
        for load in loads:
            if _SEES.search(ast.unparse(load.func)):
                self._leave(f"images: {ast.unparse(load.func)} loads a model that reads images", load)
            more = [each for keyword in load.keywords for each in self.script.named(keyword.arg, keyword.value)]
            for key, value, certain in more:
                if key in ("dtype", "torch_dtype"):
                    self.add("dtype", value, certain=certain, prefix="trainer.")
                elif len(models) == 1 and key not in NAMES["of_loads"]:
                    self.add(f"model.{key}" if key else "model", value, certain=certain, prefix="trainer.")
        for call, key in [(call, key) for call in calls for key in ("load_in_4bit", "load_in_8bit")]:
            if (flag := keyword_of(call, key)) is not None:
                self.add(key, flag, certain=self.script.runs(call) is True, prefix="trainer.")
        self._adapters(calls, keyword_of(trainer, "peft_config"))
        for place in self.script.frozen():
            self._leave("frozen: some parameters do not require gradients", place)

    def _adapters(self, calls: list[ast.Call], given: ast.expr | None) -> None:
        """Add the adapter of the trainer's `peft_config`, or of `get_peft_model(...)`: peft's or Unsloth's."""
        wraps = [call for call in calls if name_of(call) == "get_peft_model" or "PeftModel" in ast.unparse(call.func)]
        for call in wraps:
            config = self.script.resolved(keyword_of(call, "peft_config") or next(iter(call.args[1:]), None))
            config = config or (call if call.keywords else None)
            branched = not self.script.runs(call)
            if branched or len(wraps) > 1:
                self._unclear(f"adapter, {'in a branch' if branched else 'one of several'}: {ast.unparse(call)}", call)
            else:
                self._lora(config, call)
        parsed = self.parsed and name_of(self.script.resolved(given)) == "get_peft_config"  # of use_peft and lora_r
        if given is not None and not self._is_none(given) and not parsed:
            self._lora(self.script.resolved(given), given)

    def _lora(self, config: ast.expr | None, place: ast.AST) -> None:
        """Add the arguments of an adapter's configuration, or of Unsloth's call, which has them itself."""
        if isinstance(config, ast.Call) and name_of(config) in ("LoraConfig", "get_peft_model"):
            self._set("trainer.peft_config", "LoraConfig", place)
            self.arguments(config, "trainer.peft_config.")
        else:
            self._unclear(f"adapter: {ast.unparse(place)}", place)

    def _unclear(self, text: str, node: ast.AST) -> None:
        self.unread.append(Unread("peft_config", self.script.where(node), f"{text:.80}"))
