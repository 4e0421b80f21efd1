"""Run a script that uses TRL up to `.train()`, and return the configuration of the trainer that it built: both ends.

In the child, `GRPOConfig` and `GRPOTrainer` are those of `cohort.trl`, and stand-ins take the place of models, so that
no weights are loaded and no GPU is needed. Everything else of the script runs as it does for its user.
"""

import functools
import inspect
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import yaml

from cohort.config import config_from_dict
from cohort.errors import UserError
from cohort.processes.child import Child, ChildFailed, child_command, connect

TIMEOUT_S = 1800.0  # of a script, up to `.train()`: it may download and map its data
_UNNAMED = "object:"
_TAKES_WEIGHTS = ("parameters", "named_parameters", "requires_grad_", "named_modules", "modules", "state_dict")


def run_script(script: Path, arguments: Sequence[str] = (), *, processes: int = 1) -> dict[str, Any]:
    """Run a script in a child until its trainer trains.

    Args:
        script: the file.
        arguments: of its command line.
        processes: training processes, which the script is told by its batch only.

    Returns:
        `config`, the sections of a configuration; `decide_first`, `to_do` and `differences`, what they cannot say;
        `arguments`, the fields of `GRPOConfig` that are not its defaults, which are those of the version `trl`;
        `trainer`, the parts of the trainer by name; and `where` it is built.

    Raises:
        UserError: it fails, or trains nothing with GRPO.
    """
    environment = {"WANDB_MODE": "disabled", "TRACKIO_MODE": "disabled", **os.environ}
    child = Child(child_command(__name__), env=environment)
    try:
        answer: dict[str, Any] = child.call((str(script.resolve()), list(arguments), processes), TIMEOUT_S)
    except ChildFailed as error:
        raise UserError(f"{script}: --run: {error}") from error
    finally:
        child.kill()
    if "failed" in answer:
        raise UserError(f"{script}: --run: {answer['failed']}; without --run the file is read and not run")
    return {**answer, "processes": processes}


def as_yaml(script: Path, ran: Mapping[str, Any], *, pinned: str = "") -> str:
    """Return the configuration of a script that ran, as YAML with comments.

    Args:
        script: the file.
        ran: what `run_script` returned.
        pinned: the version of TRL that the script is for, with its place, if that is known.
    """
    version = f"those of TRL {ran['trl']}, which cohort.trl has" + (f"; the script is for {pinned}" if pinned else "")
    lines = [f"The configuration of the GRPOTrainer at {ran['where']}, by cohort convert --run."]
    for heading, entries in (("Defaults", [version]), ("To do", ran["to_do"]), ("Different here", ran["differences"])):
        lines += [f"{heading}:", *(f"- {entry}" for entry in entries)] if entries else []
    decide = list(ran["decide_first"])
    try:
        config_from_dict(ran["config"])
    except UserError as error:
        decide.insert(0, f"change this, which is not valid here: {error}")
    decisions = {"decide_first": decide} if decide else {}
    head = "".join("# " + " ".join(line.split()) + "\n" for line in lines)
    return head + yaml.safe_dump({**decisions, **ran["config"]}, sort_keys=False, allow_unicode=True, width=10_000)


# --- in the child


class LoadedModel:
    """A model that a script loads, without its weights."""

    def __init__(self, path: str, options: Mapping[str, Any], notes: list[str]) -> None:
        """`notes` is told what the script does with its weights."""
        vars(self).update(path=path, options=dict(options), notes=notes, adapter=None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _TAKES_WEIGHTS:
            self.notes.append(f"model: .{name} at {_place()}: whether it changes or freezes weights is not known")
        found = (lambda *args, **kwargs: self) if name in ("to", "cuda", "eval", "train", "half", "bfloat16") else None
        return found or MagicMock(name=name)

    def with_adapter(self, adapter: Any) -> "LoadedModel":
        """Return the model with an adapter."""
        wrapped = LoadedModel(self.path, self.options, self.notes)
        vars(wrapped)["adapter"] = adapter
        return wrapped


def _place() -> str:
    """FILE:LINE of the innermost call by the script."""
    script = str(Path(sys.argv[0]).resolve())
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename != script:
        frame = frame.f_back
    return f"{Path(script).name}:{frame.f_lineno if frame else 1}"


class SamplingParams(SimpleNamespace):
    """vLLM's, for scripts that hand it to Unsloth's GRPOConfig."""


def _stand_in_for_models(notes: list[str]) -> None:
    """Replace what loads models and wraps them, of transformers, peft, Unsloth and vLLM."""
    import peft
    import transformers
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    def load(cls: type, path: Any, *_: Any, **options: Any) -> LoadedModel:
        if "ImageText" in cls.__name__ or "Vision" in cls.__name__:
            notes.append(f"images: {cls.__name__} at {_place()} reads images; here only text is trained")
        return LoadedModel(str(path), options, notes)

    def load_adapter(cls: type, model: Any, path: Any, *_: Any, **options: Any) -> Any:
        return model.with_adapter(str(path))

    def unsloth_load(model_name: str = "", *_: Any, **options: Any) -> tuple[LoadedModel, Any]:
        return LoadedModel(model_name, options, notes), transformers.AutoTokenizer.from_pretrained(model_name)

    def unsloth_adapter(model: LoadedModel, **options: Any) -> LoadedModel:
        known = inspect.signature(peft.LoraConfig).parameters
        return model.with_adapter(peft.LoraConfig(**{"r": 16, **{k: v for k, v in options.items() if k in known}}))

    loaders = [kind for kind in _BaseAutoModelClass.__subclasses__() if "from_pretrained" in vars(kind)]
    for loader in (*loaders, _BaseAutoModelClass, transformers.PreTrainedModel):
        loader.from_pretrained = classmethod(load)
    peft.get_peft_model = lambda model, peft_config, *_, **__: model.with_adapter(peft_config)
    peft.prepare_model_for_kbit_training = lambda model, *_, **__: model
    peft.PeftModel.from_pretrained = classmethod(load_adapter)  # type: ignore[assignment, method-assign]
    unsloth = _Anything("unsloth")
    fast = MagicMock(from_pretrained=unsloth_load, get_peft_model=unsloth_adapter)
    vars(unsloth).update(FastLanguageModel=fast, FastModel=fast, FastVisionModel=fast, __path__=[])
    sys.modules |= {"unsloth": unsloth, "unsloth.chat_templates": _Anything("unsloth.chat_templates")}
    if find_spec("vllm") is None:
        sys.modules["vllm"] = vllm = _Anything("vllm")
        vars(vllm).update(SamplingParams=SamplingParams, __spec__=ModuleSpec("vllm", None), __path__=[])


class _Anything(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


def _as_unsloth(kind: Any, notes: list[str], differences: list[str]) -> None:
    """Let GRPOConfig take Unsloth's fields, and raise a batch that holds no whole groups, as Unsloth does."""
    build, imports = kind.__init__, re.search(r"(?m)^\s*(from|import) unsloth\b", Path(sys.argv[0]).read_text("utf-8"))

    @functools.wraps(build)
    def init(args: Any, *positional: Any, vllm_sampling_params: Any = None, **given: Any) -> None:
        if vllm_sampling_params is not None:
            notes.append(f"vllm_sampling_params: {vllm_sampling_params!r} at {_place()}; set what differs in rollout")
        given = {key: value for key, value in given.items() if not key.startswith("unsloth_")}  # of memory
        size, generations = given.get("per_device_train_batch_size", 8), given.get("num_generations", 8)
        if size * given.get("gradient_accumulation_steps", 1) % generations:
            given["per_device_train_batch_size"] = generations
            text = f"{size} as written, which Unsloth raises to num_generations {generations}"
            differences.append(f"per_device_train_batch_size: {text}")
        build(args, *positional, **given)

    if imports:
        kind.__init__ = init


def _front(answer: Callable[[dict[str, Any]], None], notes: list[str], processes: int) -> None:
    """Put the configuration and the trainer of `cohort.trl` in the place of TRL's."""
    from cohort.trl import GRPOConfig, GRPOTrainer

    differences: list[str] = []
    _as_unsloth(GRPOConfig, notes, differences)
    GRPOConfig.world_size = property(lambda args: processes)  # type: ignore[assignment, method-assign]

    names = list(inspect.signature(GRPOTrainer).parameters)

    class Trainer(GRPOTrainer):
        def __init__(
            self, model: Any = None, reward_funcs: Any = None, args: Any = None, *rest: Any, **parts: Any
        ) -> None:
            parts |= dict(zip(names[3:], rest, strict=False))
            self._where, self._parts, self._told = _place(), parts, list[str]()
            if isinstance(model, LoadedModel):
                model = self._unwrapped(model, sampled_by_vllm=bool(args and args.use_vllm))
            functions = reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]
            super().__init__(model, [self._function(each) for each in functions], args, **parts)

        def _unwrapped(self, model: LoadedModel, *, sampled_by_vllm: bool) -> str:
            if isinstance(model.adapter, str):
                self._told.append(f"adapter: {model.adapter} is trained on; set model.adapter.path and its rank")
            elif model.adapter is not None:
                self._parts["peft_config"] = model.adapter
            quantized = _quantization(model.options)
            if quantized is not None and sampled_by_vllm:
                self._told.append("model.quantization: no equivalent with vLLM; here the weights keep their dtype")
            else:
                self._parts.setdefault("quantization_config", quantized)
            dtype = model.options.get("dtype", model.options.get("torch_dtype"))
            self._dtype = str(dtype).removeprefix("torch.")
            return model.path

        def _function(self, reward: Any) -> Any:
            if callable(reward) and not isinstance(reward, LoadedModel):
                return reward
            path = reward.path if isinstance(reward, LoadedModel) else reward
            self._told.append(f"rewards: {path} is a reward model; see the reward `model` in docs/rewards.md")

            def model_reward(completions: Any, **_: Any) -> list[float]:
                raise NotImplementedError

            return model_reward

        def train(self, *_: Any, **__: Any) -> Any:
            told = _Teller(self, [*notes, *self._told])
            answer({**told.answer(), "differences": differences})
            os._exit(0)  # nothing after it runs

    classes = {"GRPOConfig": GRPOConfig, "GRPOTrainer": Trainer}
    for module in ("trl.trainer.grpo_trainer", "trl.trainer.grpo_config"):  # from which TRL itself takes them
        sys.modules[module] = ModuleType(module)
        vars(sys.modules[module]).update(classes)
    if find_spec("trl") is None:
        sys.modules["trl"] = ModuleType("trl")
        vars(sys.modules["trl"]).update(classes, __path__=[])
    vars(sys.modules["cohort.trl"]).update(GRPOTrainer=Trainer)


def _quantization(options: Mapping[str, Any]) -> Any:
    if "quantization_config" in options:
        return options["quantization_config"]
    given = {key: True for key in ("load_in_4bit", "load_in_8bit") if options.get(key)}
    if not given:
        return None
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(**given)


class _Teller:
    """Says what a trainer is, and what no file can say."""

    def __init__(self, trainer: Any, decide: list[str]) -> None:
        self.trainer, self.decide, self.todo = trainer, decide, list[str]()
        self.script = Path(sys.argv[0]).resolve()
        self.has_guard = "__name__" in self.script.read_text(encoding="utf-8")

    def answer(self) -> dict[str, Any]:
        """The answer to `run_script`."""
        from cohort.trl.config import TRL_VERSION, changed_fields

        trainer = self.trainer
        config = trainer._built().config.model_dump(mode="json", exclude_unset=True)
        self._sayable(config, trainer._built().config)
        self._intervals(config)
        for name in ("callbacks", "optimizers", "reward_processing_classes"):
            if trainer._parts.get(name):
                list_of = self.todo if name == "callbacks" else self.decide
                list_of.append(f"{name}: {trainer._parts[name]!r:.80}, at {trainer._where}")
        self._tokenizer(config)
        if getattr(trainer, "_dtype", "None") in ("float32", "bfloat16"):
            config["model"]["dtype"] = trainer._dtype
        usual = type(trainer.args)(output_dir="")  # some fields follow from others
        changed = [name for name in changed_fields(trainer.args) if getattr(trainer.args, name) != getattr(usual, name)]
        fields = {name: _plain(getattr(trainer.args, name)) for name in changed}
        parts = {"trainer.model": config["model"]["path"]}
        if trainer._parts.get("peft_config") is not None:
            parts["trainer.peft_config"] = "LoraConfig"
        if quantized := trainer._parts.get("quantization_config"):
            parts["trainer.load_in_4bit"] = bool(quantized.load_in_4bit)
        return {
            "config": {key: section for key, section in config.items() if section},
            "decide_first": list(dict.fromkeys(self.decide)),
            "to_do": self.todo,
            "trl": TRL_VERSION,
            "arguments": fields,
            "trainer": parts,
            "where": trainer._where,
        }

    def _sayable(self, config: dict[str, Any], built: Any) -> None:
        """Replace what only this process has by a place for it."""
        trainer = self.trainer
        for section, rows in (("data", trainer.train_dataset), ("eval", trainer.eval_dataset)):
            if str(config.get(section, {}).get("path", "")).startswith(_UNNAMED):
                columns = ", ".join(getattr(rows, "column_names", None) or ())
                file = "train.jsonl" if section == "data" else "eval.jsonl"
                config[section]["path"] = file
                name = "train_dataset" if section == "data" else "eval_dataset"
                size = f"{len(rows)} rows" if hasattr(rows, "__len__") else "a stream"
                self.decide.append(
                    f"{section}.path: {size} with the columns {columns}, made by the script; save them before "
                    f"{trainer._where}: {name}.to_json({file!r})"
                )
        for reward, function in zip(config.get("rewards", ()), trainer.reward_funcs, strict=True):
            reward["use"] = self._function(reward["use"], function)
            reward.pop("name", None)
        rollout = config.get("rollout", {})
        for tool in rollout.get("tools", ()):
            if isinstance(tool, dict) and str(tool.get("use", "")).startswith(_UNNAMED):
                self.decide.append(f"rollout.tools: {tool['use'].removeprefix(_UNNAMED)} exists in the script only")
        if str(rollout.get("environment", "")).startswith(_UNNAMED):
            self.decide.append("rollout.environment: exists in the script only; move it into a file of its own")

    def _function(self, use: str, function: Any) -> str:
        """The path of a reward: that of the script, if that can be imported without training."""
        code = getattr(function, "__code__", None)
        place = f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code else self.trainer._where
        name = use.rpartition(":")[2]
        if not name.isidentifier():  # of a lambda
            name = f"reward_{code.co_firstlineno}" if code else "reward"
        if use.startswith(_UNNAMED):
            closure = "a closure" if getattr(function, "__closure__", None) else "an object"
            self.decide.append(
                f"rewards: {name} ({place}) is {closure} of the script; write it as a function of a file"
            )
            return f"rewards.py:{name}"
        if use.startswith(f"{self.script}:") and not self.has_guard:
            self.todo.append(
                f"rewards.py: copy the function {name} ({place}); importing {self.script.name} would train"
            )
            return f"rewards.py:{name}"
        return f"{self.script.name}:{name}" if use.startswith(f"{self.script}:") else use

    def _intervals(self, config: dict[str, Any]) -> None:
        """Set when to save and to evaluate, which `GRPOTrainer` itself decides when it runs."""
        args, updates = self.trainer.args, self.trainer.args.num_iterations
        run = config["run"]
        run.update(dir=str(args.output_dir), checkpoint_every=0)
        run.pop("keep_checkpoints", None)
        steps = self.trainer._built().config.train.steps
        for strategy, every, section, key in (
            (args.save_strategy, args.save_steps, run, "checkpoint_every"),
            (args.eval_strategy, args.eval_steps, config.get("eval"), "every"),
        ):
            strategy = getattr(strategy, "value", strategy)
            if section is None or strategy == "no":
                continue
            if strategy != "steps" or (every < 1 and not steps):
                self.todo.append(f"{key}: the steps of {strategy} {every:g}")
            else:
                section[key] = max(1, -(-int(every * steps if every < 1 else every) // updates))
        if args.save_total_limit and run["checkpoint_every"]:
            run["keep_checkpoints"] = args.save_total_limit
        if args.world_size > 1:
            config["hardware"] = {**config.get("hardware", {}), "processes": args.world_size}

    def _tokenizer(self, config: dict[str, Any]) -> None:
        """Tell a tokenizer that is not the model's own."""
        tokenizer = self.trainer._given["tokenizer"]
        if tokenizer is None:
            return
        from transformers import AutoTokenizer

        name = str(getattr(tokenizer, "name_or_path", ""))
        is_own = name and Path(name).resolve() == Path(config["model"]["path"]).resolve()  # ids are relative paths here
        own = AutoTokenizer.from_pretrained(name) if is_own else None
        if own is None or own.chat_template != tokenizer.chat_template or len(own) != len(tokenizer):
            self.decide.append(f"tokenizer: {name or type(tokenizer).__name__}, which the script has changed or chosen")


def _plain(value: Any) -> Any:
    value = getattr(value, "value", value)
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return str(value)
    return value


def main() -> None:
    """Run the script of the one call."""
    connection = connect()
    ((script, arguments, processes),) = connection.recv()
    notes: list[str] = []

    def answer(found: dict[str, Any]) -> None:
        connection.send_bytes(json.dumps(found).encode())

    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    try:
        _stand_in_for_models(notes)
        _front(answer, notes, processes)
        module = ModuleType("__main__")
        module.__file__ = script
        sys.modules["__main__"] = module
        exec(compile(Path(script).read_text(encoding="utf-8"), script, "exec"), vars(module))
    except SystemExit as end:
        answer({"failed": f"ended with {end.code!r} before .train()"})
    except BaseException as error:  # the script may raise anything
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == script]
        where = f"{Path(script).name}:{lines[-1]}: " if lines else ""
        answer({"failed": f"{where}{type(error).__name__}: {error!s:.500}"})
    else:
        answer({"failed": "it ends without GRPOTrainer(...).train()"})
    os._exit(0)
