"""TRL's `GRPOTrainer` in front of `cohort.Trainer`."""

import re
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, PreTrainedModel, TrainerCallback
from transformers.trainer_callback import (
    CallbackHandler,
    DefaultFlowCallback,
    ExportableState,
    TrainerControl,
    TrainerState,
)
from transformers.trainer_utils import TrainOutput

from cohort.display import Display
from cohort.errors import TrainingError, UserError
from cohort.launch.python_trainer import Trainer
from cohort.ranks.join import rank_of_launcher, started_by_torchrun
from cohort.run.folder import free_folder
from cohort.run.log import StepReport
from cohort.trl.config import GRPOConfig
from cohort.trl.sections import NEVER, adapter_section, sections

_RUN = "cohort"  # run folder in args.output_dir
_open: WeakValueDictionary[str, Trainer] = (
    WeakValueDictionary()
)  # by run folder, of which only one process has the lock
_NOT_AVERAGED: tuple[str, ...] = ("learning_rate", "num_tokens")  # in logs: their last value
_DISTRIBUTION = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_HOOKS = {
    "_generate_and_score_completions": "an environment or agent of cohort.Trainer",
    "_calculate_rewards": "a reward function, which gets all completions of a step",
    "_compute_loss": "algorithm={'policy_loss': function} of cohort.Trainer",
    "compute_loss": "algorithm={'policy_loss': function} of cohort.Trainer",
    "training_step": "algorithm={'policy_loss': function} of cohort.Trainer",
    "get_train_dataloader": "rows in the order that they should have, with shuffle_dataset=False",
    "create_optimizer": "args.optim, or the section optim of cohort.Trainer",
}


class GRPOTrainer:
    """Trains with GRPO from TRL's arguments; docs/from-trl.md says what is the same and what is not.

    The run folder of Cohort is `args.output_dir/cohort`, so `cohort view` shows it.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
        quantization_config: Any = None,
        tools: Sequence[Any] | None = None,
        environment_factory: Any = None,
        rollout_func: Any = None,
    ):
        """Check the arguments, which mean the same as TRL's. Nothing is loaded before training.

        Args:
            model: folder or id, or a model of transformers or peft.
            reward_funcs: functions, or ids of sequence classifiers; one or a list.
            args: of the run.
            train_dataset: rows with a column `prompt`; None: the environment brings them.
            eval_dataset: held-out rows.
            processing_class: tokenizer. Default: the model's.
            reward_processing_classes: no effect; reward models have their own tokenizers.
            callbacks: of transformers, classes or instances.
            optimizers: must be left out.
            peft_config: a `peft.LoraConfig`.
            quantization_config: a `transformers.BitsAndBytesConfig`.
            tools: functions that the model may call.
            environment_factory: environment class, or several by name.
            rollout_func: must be left out.

        Raises:
            UserError: something cannot be honored; the message says what to use.
        """
        self._refuse(rollout_func=rollout_func, optimizers=optimizers, eval_dataset=eval_dataset)
        self.args = args or GRPOConfig(output_dir=f"{_short_name(model)}-GRPO")
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        funcs = reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs] if reward_funcs else []
        self.reward_funcs = list(funcs)
        self.tools = list(tools or ())
        self._display = Display() if self.args.disable_tqdm else None
        self._given = {
            "model": self._model_section(model, peft_config, quantization_config),
            "data": train_dataset,
            "rewards": [self._reward(i, func) for i, func in enumerate(self.reward_funcs)],
            "tokenizer": processing_class,
            "tools": self.tools,
            "environment": environment_factory,
        }
        self.accelerator = self._accelerator()
        self._trainer: Trainer | None = None
        self.control = TrainerControl()
        self.callback_handler = CallbackHandler([DefaultFlowCallback, *(callbacks or ())], None, None, None, None)
        exportable = [c for c in self.callback_handler.callbacks if isinstance(c, ExportableState)]
        self.state = TrainerState(stateful_callbacks=[*exportable, self.control])
        self._metrics: dict[str, list[float]] = defaultdict(list)  # since the last log
        self._build(self._new_run_dir())  # says now what is wrong
        self.control = self.callback_handler.on_init_end(self.args, self.state, self.control)

    def train(self, resume_from_checkpoint: str | bool | None = None, **_: Any) -> TrainOutput:
        """Train. Raises as `cohort.Trainer.train` does.

        Args:
            resume_from_checkpoint: True, or the last `checkpoint-N` of `args.output_dir`: go on from there.
        """
        if resume_from_checkpoint:
            self._resume(resume_from_checkpoint)
        trainer = self._built()
        if started_by_torchrun():
            self.state.compute_steps(self.args, max(1, self.args.max_steps))
            self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
            trainer.callbacks.append(self._finish_step)
            trainer.train()
            self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        else:
            self._run(trainer)
        losses = [entry["loss"] for entry in self.state.log_history if "loss" in entry]
        loss = sum(losses) / max(1, len(losses))
        return TrainOutput(self.state.global_step, loss, {"train_loss": loss})

    def _run(self, trainer: Trainer) -> None:
        args, handler, loop = self.args, self.callback_handler, trainer._open()[1]
        handler.model, handler.processing_class = trainer.model, trainer.tokenizer
        schedule, updates = loop.schedule, args.num_iterations
        self.state.max_steps = schedule.num_steps * updates
        self.state.num_train_epochs = -(-schedule.num_steps // schedule.steps_per_epoch)
        self.state.is_world_process_zero = self.state.is_local_process_zero = True
        self.state.compute_steps(args, self.state.max_steps)
        self.control = handler.on_train_begin(args, self.state, self.control)
        if args.eval_on_start and not loop.steps_done:
            self.evaluate()
        steps = iter(trainer)
        while loop.steps_done < schedule.num_steps and not self.control.should_training_stop:
            if loop.steps_done % schedule.steps_per_epoch < 1:
                self.control = handler.on_epoch_begin(args, self.state, self.control)
            self.control = handler.on_step_begin(args, self.state, self.control)
            report = next(steps)
            self.state.epoch = report.steps_done / schedule.steps_per_epoch
            self._finish_step(report)
            if report.steps_done % schedule.steps_per_epoch < 1:
                self.control = handler.on_epoch_end(args, self.state, self.control)
                self._obey()
        if loop.steps_done == schedule.num_steps:
            trainer.train()  # saves the final model
        if args.load_best_model_at_end and self.state.best_model_checkpoint:
            self._load(Path(self.state.best_model_checkpoint))
        self.control = handler.on_train_end(args, self.state, self.control)

    def _finish_step(self, report: StepReport) -> None:
        """Tell callbacks of a step, and log, evaluate and save if they say so."""
        self.state.global_step = report.steps_done * self.args.num_iterations
        for name, value in report.metrics.items():
            self._metrics[name].append(value)
        self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
        self._obey()

    def _obey(self) -> None:
        if self.control.should_log and self._metrics:
            means = {name: sum(values) / len(values) for name, values in self._metrics.items()}
            last = {name: self._metrics[name][-1] for name in _NOT_AVERAGED if name in means}
            self._metrics.clear()
            self.control.should_log = False
            self.log({**means, **last})
        if started_by_torchrun():
            return  # Cohort evaluates and saves
        if self.control.should_evaluate:
            self.control.should_evaluate = False
            self._note_best(self.evaluate())
        if self.control.should_save:
            self.control.should_save = False
            self._save_checkpoint()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add metrics to `state.log_history` and tell callbacks."""
        entry = {**logs, **({} if self.state.epoch is None else {"epoch": self.state.epoch})}
        self.state.log_history.append({**entry, "step": self.state.global_step})
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, entry)

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        """Evaluate the current model on the held-out rows of the trainer.

        Returns:
            Metrics by name, such as `eval_reward`.
        """
        if eval_dataset is not None and eval_dataset is not self.eval_dataset:
            raise UserError("evaluate: another dataset cannot be honored; give it to GRPOTrainer(eval_dataset=...)")
        found = self._built().evaluate().metrics
        metrics = {f"{metric_key_prefix}_{name.removeprefix('eval/')}": value for name, value in found.items()}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the current model (or adapter) and its tokenizer."""
        folder = Path(output_dir or str(self.args.output_dir))
        trainer = self._built()
        if not started_by_torchrun():
            trainer.save(folder)
        elif rank_of_launcher() == 0:
            shutil.copytree(Path(trainer.config.run.dir) / "final", folder, dirs_exist_ok=True)

    def save_state(self) -> None:
        """Write `trainer_state.json` into `args.output_dir`."""
        Path(str(self.args.output_dir)).mkdir(parents=True, exist_ok=True)
        self.state.save_to_json(str(Path(str(self.args.output_dir)) / "trainer_state.json"))

    def push_to_hub(self, commit_message: str = "End of training", **kwargs: Any) -> Any:
        """Upload the current model and its tokenizer."""
        args = self.args
        name = args.hub_model_id or Path(str(args.output_dir)).name
        options = {
            "private": args.hub_private_repo,
            "token": args.hub_token,
            "commit_message": commit_message,
            **kwargs,
        }
        self.processing_class.push_to_hub(name, **options)
        return self.model.push_to_hub(name, **options)

    def add_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        """Add a callback, given as a class or an instance."""
        self.callback_handler.add_callback(callback)

    def remove_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        """Remove a callback."""
        self.callback_handler.remove_callback(callback)

    def pop_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> Any:
        """Remove a callback and return it."""
        return self.callback_handler.pop_callback(callback)

    def is_world_process_zero(self) -> bool:
        """Whether this process is rank 0."""
        return rank_of_launcher() == 0

    @property
    def model(self) -> Any:
        """The model that is trained."""
        return self._built().model

    @property
    def processing_class(self) -> Any:
        """The tokenizer."""
        return self._built().tokenizer

    @property
    def ref_model(self) -> Any:
        """The reference model; None, as Cohort keeps it to itself."""
        return None

    @property
    def beta(self) -> float:
        """Coefficient of the KL term."""
        return self.args.beta

    @property
    def reward_func_names(self) -> list[str]:
        """Names of the rewards, as in metrics."""
        return [
            _short_name(f) if isinstance(f, str) else str(getattr(f, "__name__", type(f).__name__))
            for f in self.reward_funcs
        ]

    def _refuse(self, *, rollout_func: Any, optimizers: Sequence[Any], eval_dataset: Any) -> None:
        """Refuse arguments, and methods of subclasses, that have no equivalent.

        Raises:
            UserError: names what to use instead.
        """
        if rollout_func is not None:
            raise UserError("rollout_func: cannot be honored; use environment_factory, or agent= of cohort.Trainer")
        if any(each is not None for each in optimizers):
            raise UserError("optimizers: cannot be honored; use args.optim, or the section optim of cohort.Trainer")
        if isinstance(eval_dataset, Mapping):
            raise UserError("eval_dataset: several sets cannot be honored; give one, with a column that says which")
        for name, instead in _HOOKS.items():
            if hasattr(type(self), name):
                raise UserError(f"{type(self).__name__}.{name}: is not called by Cohort; use {instead}")

    def _model_section(self, model: Any, peft_config: Any, quantization_config: Any) -> dict[str, Any]:
        section: dict[str, Any] = {"path": model}
        if peft_config is not None:
            config = model.config if isinstance(model, PreTrainedModel) else _try_config(str(model))
            section["adapter"] = adapter_section(peft_config, getattr(config, "model_type", None))
        if quantization_config is not None:
            if not (quantization_config.load_in_4bit or quantization_config.load_in_8bit):
                raise UserError("quantization_config: cannot be honored; use load_in_4bit=True or load_in_8bit=True")
            section["quantization"] = "nf4" if quantization_config.load_in_4bit else "int8"
        return section

    def _reward(self, number: int, func: Any) -> dict[str, Any]:
        weights = self.args.reward_weights
        if weights is not None and len(weights) != len(self.reward_funcs):
            raise UserError(f"reward_weights: {len(weights)} for {len(self.reward_funcs)} reward_funcs; give one each")
        if isinstance(func, PreTrainedModel):
            raise UserError(f"reward_funcs: a model object cannot be honored; give its path, {func.name_or_path!r}")
        if isinstance(func, str):
            entry: dict[str, Any] = {"use": "model", "name": _short_name(func), "args": {"path": func}}
        else:
            entry = {"use": func}
        return {**entry, "weight": 1.0 if weights is None else weights[number]}

    def _build(self, run_dir: Path) -> Trainer:
        if self._trainer is not None:
            self._trainer.close()
        if (earlier := _open.pop(str(run_dir), None)) is not None:
            earlier._forget()  # of the same process, such as of another cell
        given, args = self._given, self.args
        found = sections(args, world_size=args.world_size)
        if args.max_tool_calling_iterations is not None:
            found["rollout"]["max_turns"] = args.max_tool_calling_iterations + 1
        model = {**given["model"], **found.pop("model")}
        found["run"]["dir"] = str(run_dir)
        if started_by_torchrun():
            saves = args.save_strategy == "steps"
            found["run"]["checkpoint_every"] = max(1, int(args.save_steps) // args.num_iterations) if saves else NEVER
        rest: dict[str, Any] = {name: section for name, section in found.items() if section}
        evaluation = None if self.eval_dataset is None else self._evaluation(rest)
        rewards, environment = given["rewards"], given["environment"]
        self._trainer = Trainer(
            model,
            _with_prompt_column(given["data"], rest.pop("data", {})),
            rewards,
            tokenizer=given["tokenizer"],
            eval_data=evaluation,
            tools=given["tools"],
            environment=environment,
            display=self._display,
            **rest,
        )
        _open[str(run_dir)] = self._trainer
        return self._trainer

    def _evaluation(self, rest: Mapping[str, Any]) -> dict[str, Any]:
        args, sampling = self.args, rest["rollout"]
        every = 0
        if started_by_torchrun() and args.eval_strategy == "steps":
            every = max(1, int(args.eval_steps or 1) // args.num_iterations)
        return {
            "path": self.eval_dataset,
            "every": every,
            "before_training": False,
            "num_samples": args.num_generations_eval or args.num_generations,
            **{name: sampling[name] for name in _DISTRIBUTION if name in sampling},
        }

    def _built(self) -> Trainer:
        assert self._trainer is not None, "built by the constructor"
        return self._trainer

    def _new_run_dir(self) -> Path:
        folder = Path(str(self.args.output_dir)) / _RUN
        return folder if started_by_torchrun() else free_folder(folder)

    def _resume(self, checkpoint: str | bool) -> None:
        """Open the last run of the output folder, and restore `state`.

        Raises:
            UserError: there is none, or a checkpoint is given that is not its last one.
        """
        output = Path(str(self.args.output_dir))
        found = sorted(output.glob("checkpoint-*"), key=lambda folder: int(folder.name.rpartition("-")[2]))
        runs = sorted((run for run in output.glob(f"{_RUN}*") if run.is_dir()), key=_number)
        if not found or not runs:
            raise UserError(f"resume_from_checkpoint: {str(output)!r} has no checkpoint-N of a run; leave it out")
        if not isinstance(checkpoint, bool) and Path(checkpoint).name != found[-1].name:
            raise UserError(
                f"resume_from_checkpoint: {checkpoint!r}: only the last one, {str(found[-1])!r}, can be resumed"
            )
        self._build(runs[-1])
        self.state = TrainerState.load_from_json(str(found[-1] / "trainer_state.json"))

    def _save_checkpoint(self) -> None:
        folder = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
        trainer = self._built()
        trainer._open()[1].checkpointer.save_if_due()
        trainer.save(folder)
        if self.state.best_metric is not None and self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(folder)
        self.state.save_to_json(str(folder / "trainer_state.json"))
        self._rotate()
        self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def _rotate(self) -> None:
        if not self.args.save_total_limit:
            return
        found = sorted(Path(str(self.args.output_dir)).glob("checkpoint-*"), key=_number)
        for folder in found[: -self.args.save_total_limit]:
            if str(folder) != self.state.best_model_checkpoint:
                shutil.rmtree(folder)

    def _note_best(self, metrics: Mapping[str, float]) -> None:
        if (name := self.args.metric_for_best_model) is None:
            return
        name = name if name.startswith("eval_") else f"eval_{name}"
        if name not in metrics:
            raise UserError(f"metric_for_best_model: {name!r} is not among {', '.join(metrics)}")
        best, value = self.state.best_metric, metrics[name]
        if best is None or (value > best if self.args.greater_is_better else value < best):
            self.state.best_metric, self.state.best_global_step = value, self.state.global_step
            self.control.should_save |= self.args.save_strategy == "best"

    def _load(self, folder: Path) -> None:
        """Load the weights of a checkpoint into the model.

        Raises:
            TrainingError: they are of another model.
        """
        weights = {name: w for file in sorted(folder.glob("*.safetensors")) for name, w in load_file(file).items()}
        with torch.no_grad():
            unexpected = self.model.load_state_dict(weights, strict=False).unexpected_keys
        if unexpected:
            raise TrainingError(f"load_best_model_at_end: {folder}: no such weights in the model: {unexpected[:3]}")

    def _accelerator(self) -> Any:
        """Return what scripts read of `accelerator`."""
        args = self.args
        return SimpleNamespace(
            is_main_process=args.process_index == 0,
            is_local_main_process=args.local_process_index == 0,
            process_index=args.process_index,
            num_processes=args.world_size,
            device=args.device,
            unwrap_model=lambda model: model,
            wait_for_everyone=lambda: None,
            print=print if args.process_index == 0 else _silent,
        )


def _silent(*_: object) -> None:
    """Print nothing."""


def _short_name(model: Any) -> str:
    name = model if isinstance(model, str) else getattr(getattr(model, "config", None), "_name_or_path", "") or "model"
    return str(name).rstrip("/").rpartition("/")[2]


def _number(folder: Path) -> int:
    return int(found[0]) if (found := re.findall(r"(\d+)$", folder.name)) else 1


def _try_config(path: str) -> Any:
    """Return the configuration of a model, None where it cannot be read: an error for later."""
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError):
        return None


def _with_prompt_column(rows: Any, section: Mapping[str, Any]) -> Any:
    return None if rows is None else {"path": rows, **section}
