"""TRL's `GRPOTrainer` in front of `cohort.Trainer`."""

import math
import shutil
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import torch
from huggingface_hub import HfApi, ModelCardData
from transformers import AutoConfig, PreTrainedModel, TrainerCallback
from transformers.trainer_callback import (
    CallbackHandler,
    DefaultFlowCallback,
    ExportableState,
    TrainerControl,
    TrainerState,
)
from transformers.trainer_pt_utils import log_metrics, metrics_format, save_metrics
from transformers.trainer_utils import TrainOutput

from cohort.display import Display
from cohort.errors import UserError
from cohort.launch.python_trainer import Trainer
from cohort.ranks.join import rank_of_launcher, started_by_torchrun
from cohort.ranks.stopping import RunStopped
from cohort.run.files import checkpoints, has_progress
from cohort.run.log import StepReport
from cohort.trl.checkpoints import EARLIER, OutputFolder
from cohort.trl.config import GRPOConfig
from cohort.trl.rewards import RewardModel, RewardTable, names_of
from cohort.trl.sections import adapter_section, as_dict, sections

# By run folder, which only one trainer can have open
_open: WeakValueDictionary[str, Trainer] = WeakValueDictionary()
_NOT_AVERAGED: tuple[str, ...] = ("learning_rate", "num_tokens")  # in logs: their last value
_DISTRIBUTION = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_FIRST = ("loss", "grad_norm", "learning_rate")  # what `log` is called with; it adds the others
_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
_LOSS = "algorithm={'policy_loss': function} of cohort.Trainer"
_ROLLOUT = "environment_factory, or agent= of cohort.Trainer"
_ROWS = "rows in the order that they should have, with shuffle_dataset=False"
_OPTIMIZER = "args.optim and args.lr_scheduler_type, or the sections optim and train of cohort.Trainer"
_HOOKS = {
    **dict.fromkeys(("_generate_and_score_completions", "_generate", "_generate_single_turn"), _ROLLOUT),
    **dict.fromkeys(("_compute_loss", "compute_loss", "training_step", "_get_per_token_logps_and_entropies"), _LOSS),
    **dict.fromkeys(("get_train_dataloader", "get_eval_dataloader", "_get_train_sampler", "_prepare_inputs"), _ROWS),
    **dict.fromkeys(("create_optimizer", "create_scheduler", "create_optimizer_and_scheduler"), _OPTIMIZER),
    "prediction_step": "evaluate, which is called for each evaluation",
}


class _Flow(DefaultFlowCallback):
    """Logs, evaluates and saves at the intervals of optimizer steps, several of which may end at once."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        for before in reversed(range(args.num_iterations)):
            super().on_step_end(args, replace(state, global_step=state.global_step - before), control, **kwargs)
        return control


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
            reward_funcs: functions, or sequence classifiers or their ids; one or a list.
            args: of the run.
            train_dataset: rows with a column `prompt`; None: the environment brings them.
            eval_dataset: held-out rows, or several sets by name.
            processing_class: tokenizer. Default: the model's.
            reward_processing_classes: tokenizers of the reward models. Default: their own.
            callbacks: of transformers, classes or instances.
            optimizers: must be left out.
            peft_config: a `peft.LoraConfig`.
            quantization_config: a `transformers.BitsAndBytesConfig`.
            tools: functions that the model may call.
            environment_factory: environment class, or several by name.
            rollout_func: must be left out.

        Raises:
            UserError: something is not supported; the message says what to use.
        """
        self._refuse(rollout_func=rollout_func, optimizers=optimizers)
        self.args = args or GRPOConfig(output_dir=f"{_short_name(model)}-GRPO")
        if not isinstance(self.args, GRPOConfig):
            raise UserError(f"args: {type(self.args).__module__}.{type(self.args).__name__}; use cohort.trl.GRPOConfig")
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.reward_funcs = self._reward_functions(_as_list(reward_funcs), reward_processing_classes)
        self.reward_func_names = names_of(self.reward_funcs)
        self.reward_processing_classes = _as_list(reward_processing_classes)
        self._rewards = RewardTable(self.reward_funcs, self._calculate_rewards)
        self.tools = list(tools or ())
        self._given = {
            "model": self._model_section(model, peft_config, quantization_config),
            "rewards": self._reward_section(),
            "tokenizer": processing_class,
            "tools": self.tools,
            "environment": environment_factory,
            "display": Display() if self.args.disable_tqdm else None,
        }
        self.accelerator = self._accelerator()
        self._output = OutputFolder(Path(str(self.args.output_dir)))
        self._rows = train_dataset
        self._beta = self.args.beta
        self._trainer: Trainer | None = None
        self._is_trained = False
        self.control = TrainerControl()
        self.callback_handler = CallbackHandler([_Flow, *(callbacks or ())], None, None, None, None)
        self.state = TrainerState()
        self.state.is_world_process_zero = self.is_world_process_zero()
        self.state.is_local_process_zero = self.args.local_process_index == 0
        self._mode = "train"  # or "eval", whose metrics `log` adds
        self._metrics: dict[str, dict[str, list[float]]] = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._build(self._output.new_run())  # says now what is wrong
        self.control = self.callback_handler.on_init_end(self.args, self.state, self.control)

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> TrainOutput:
        """Train. Raises as `cohort.Trainer.train` does. Every rank calls this.

        Args:
            resume_from_checkpoint: True, or the path of a `checkpoint-N`: go on from the last one, or from that one.
            trial: no effect.
            ignore_keys_for_eval: no effect.
        """
        if resume_from_checkpoint:
            self._resume(resume_from_checkpoint)
        elif self._is_trained:
            raise UserError("this trainer has finished; create a new one, or pass resume_from_checkpoint=True")
        elif not self.state.global_step:
            self._set_aside(())
        trainer, start, begin = self._built(), time.perf_counter(), self.state.global_step
        num_logs = len(self.state.log_history)
        try:
            with trainer._stoppable():  # a signal during a callback waits for the next step, which saves
                self._run(trainer)
        except (KeyboardInterrupt, RunStopped):
            self._keep_interrupted(trainer)
            raise
        seconds, steps = time.perf_counter() - start, self.state.global_step - begin
        logged = (entry.get("loss") for entry in self.state.log_history[num_logs:])
        losses = [loss for loss in logged if loss is not None]
        completions = steps / self.args.num_iterations * trainer.progress()[0].completions_per_step
        metrics = {
            "train_runtime": round(seconds, 4),
            "train_samples_per_second": round(completions / seconds, 3),
            "train_steps_per_second": round(steps / seconds, 3),
            "train_loss": sum(losses) / max(1, len(losses)),
        }
        self.log(dict(metrics))
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        return TrainOutput(self.state.global_step, metrics["train_loss"], metrics)

    def _run(self, trainer: Trainer) -> None:
        """Run the steps, on every rank, and do what callbacks ask for on any of them."""
        args, handler, (schedule, steps_done) = self.args, self.callback_handler, trainer.progress()
        handler.model, handler.processing_class = trainer.model, trainer.tokenizer
        self.state.max_steps = schedule.num_steps * args.num_iterations
        self.state.num_train_epochs = math.ceil(schedule.num_steps / schedule.steps_per_epoch)
        self.state.compute_steps(args, self.state.max_steps)
        self.control = handler.on_train_begin(args, self.state, self.control)
        if args.eval_on_start and not steps_done:
            self.evaluate()
        steps, is_new_epoch = iter(trainer), True
        while steps_done < schedule.num_steps and not self._asks("should_training_stop"):
            if is_new_epoch:
                self.control = handler.on_epoch_begin(args, self.state, self.control)
            self.control = handler.on_step_begin(args, self.state, self.control)
            report = next(steps)
            steps_done = report.steps_done
            is_new_epoch = steps_done % schedule.steps_per_epoch < 1
            self.state.epoch = steps_done / schedule.steps_per_epoch
            self._finish_step(report)
            if is_new_epoch or steps_done == schedule.num_steps or self.control.should_training_stop:
                self.control = handler.on_epoch_end(args, self.state, self.control)
                self._obey()
        if steps_done == schedule.num_steps:
            trainer.train()  # saves the final model
            self._is_trained = True
        else:
            trainer.save_checkpoint()
        if args.load_best_model_at_end and self.state.best_model_checkpoint:
            trainer.load(self.state.best_model_checkpoint)

    def _finish_step(self, report: StepReport) -> None:
        """Notify callbacks, and log, evaluate and save if they say so."""
        self.state.global_step = report.steps_done * self.args.num_iterations
        for name, value in report.metrics.items():
            self._metrics["train"][name].append(value)
        self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
        self._obey()

    def _asks(self, flag: str) -> bool:
        """Whether a callback asks for something on any rank."""
        (asked,) = self._built().on_any_rank([getattr(self.control, flag)])
        setattr(self.control, flag, asked)
        return asked

    def _obey(self) -> None:
        asked = self._built().on_any_rank([getattr(self.control, flag) for flag in _FLAGS])
        vars(self.control).update(zip(_FLAGS, asked, strict=True))
        if self.control.should_log and self._metrics["train"]:
            self.control.should_log = False
            self.log(self._take_means("train", only=_FIRST))
        if self.control.should_evaluate:
            self.control.should_evaluate = False
            self._note_best(self.evaluate())
        if self._asks("should_save"):
            self.control.should_save = False
            self._save_checkpoint()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add metrics since the last call to `logs`, and these to `state.log_history`; tell callbacks."""
        if self._mode == "eval":
            logs.update({f"eval_{name}": value for name, value in self._take_means("eval").items()})
        else:
            logs.update(self._take_means("train"))
        entry = {**logs, **({} if self.state.epoch is None else {"epoch": self.state.epoch})}
        self.state.log_history.append({**entry, "step": self.state.global_step})
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, entry)

    def _take_means(self, mode: str, *, only: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the means of metrics since they were last taken; None where all values are NaN."""
        metrics, means = self._metrics[mode], {}
        for name in [name for name in metrics if only is None or name in only]:
            values = metrics.pop(name)
            known = [value for value in values if not math.isnan(value)]
            mean = sum(known) / len(known) if known else None
            means[name] = values[-1] if name in _NOT_AVERAGED else mean
        return means

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        """Evaluate the current model. Every rank calls this.

        Args:
            eval_dataset: rows, several sets by name, or the name of a set of the trainer. Default: the trainer's.
            ignore_keys: no effect.
            metric_key_prefix: begins the names of the metrics; that of several sets is `eval_NAME`.

        Returns:
            Metrics by name, such as `eval_reward`.
        """
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, str):
            metric_key_prefix, data = f"{metric_key_prefix}_{data}", self.eval_dataset[data]
        if isinstance(data, Mapping):
            every = [self.evaluate(rows, ignore_keys, f"{metric_key_prefix}_{name}") for name, rows in data.items()]
            return {name: value for metrics in every for name, value in metrics.items()}
        start = time.perf_counter()
        section = {**self._sampling(), "path": data} if data is not None else None
        found = self._built().evaluate(None if data is self._own_evaluation() else section).metrics
        metrics = {f"{metric_key_prefix}_{name.removeprefix('eval/')}": value for name, value in found.items()}
        metrics[f"{metric_key_prefix}_runtime"] = round(time.perf_counter() - start, 4)
        self._mode = "eval"
        try:
            self.log(metrics)
        finally:
            self._mode = "train"
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> torch.Tensor:
        """Return the rewards of all completions of a step, [N, rewards]. Called if a subclass overrides it."""
        return self._rewards.calculate(inputs, prompts, completions, completion_ids_list)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the current model (or adapter) and its tokenizer; with `args.push_to_hub`, upload it too."""
        self._built().save(Path(output_dir or str(self.args.output_dir)))
        if self.args.push_to_hub and not _internal_call and output_dir in (None, self.args.output_dir):
            self._upload("Model save")

    def save_state(self) -> None:
        """Write `trainer_state.json` into `args.output_dir`."""
        if self.is_world_process_zero():
            self._output.path.mkdir(parents=True, exist_ok=True)
            self._note_callbacks()
            self.state.save_to_json(str(self._output.path / "trainer_state.json"))

    log_metrics, save_metrics, metrics_format = log_metrics, save_metrics, staticmethod(metrics_format)

    def push_to_hub(self, commit_message: str = "End of training", blocking: bool = True, **kwargs: Any) -> Any:
        """Save the current model with a card, and upload it. `kwargs` are those of `create_model_card`."""
        card = {name: value for name, value in kwargs.items() if name in ("model_name", "dataset_name", "tags")}
        self._built().save(self._output.path)
        self.create_model_card(**card)
        return self._upload(commit_message, token=kwargs.get("token"), revision=kwargs.get("revision"))

    def _upload(self, commit_message: str, **options: Any) -> Any:
        """Upload the output folder without checkpoints and runs, on rank 0."""
        if not self.is_world_process_zero():
            return None
        api, name = HfApi(token=options.pop("token", None) or self.args.hub_token), self.args.hub_model_id
        repo = api.create_repo(name or self._output.path.name, private=self.args.hub_private_repo, exist_ok=True)
        return api.upload_folder(
            repo_id=repo.repo_id,
            folder_path=self._output.path,
            ignore_patterns=["cohort*/*", "checkpoint-*/*", f"{EARLIER}*/*"],
            commit_message=commit_message,
            **options,
        )

    def create_model_card(
        self, model_name: str | None = None, dataset_name: Any = None, tags: str | list[str] | None = None
    ) -> None:
        """Write `README.md` into `args.output_dir`."""
        if not self.is_world_process_zero():
            return
        base, name = self._given["model"]["path"], model_name or self._output.path.name
        data = ModelCardData(
            base_model=base if isinstance(base, str) and not Path(base).exists() else None,
            datasets=dataset_name,
            library_name="transformers",
            model_name=name,
            tags=sorted({*([tags] if isinstance(tags, str) else tags or ()), "cohort", "grpo"}),
        )
        text = f"---\n{data.to_yaml()}\n---\n\n# {name}\n\nTrained with GRPO (arXiv:2402.03300) by Cohort.\n"
        self._output.path.mkdir(parents=True, exist_ok=True)
        (self._output.path / "README.md").write_text(text, encoding="utf-8")

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
        """The reference model; None with `beta=0`, or with an adapter."""
        return self._built().reference_model if self.args.beta else None

    @property
    def beta(self) -> float:
        """Coefficient of the KL term. A new value counts from the next step on.

        Raises:
            UserError: on setting it, if it is 0 at the start.
        """
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._built().set_beta(value)
        self._beta = value

    def _refuse(self, *, rollout_func: Any, optimizers: Sequence[Any]) -> None:
        """Refuse arguments, and methods of subclasses, that have no equivalent.

        Raises:
            UserError: names what to use instead.
        """
        if rollout_func is not None:
            raise UserError(f"rollout_func is not supported; use {_ROLLOUT}")
        if any(each is not None for each in optimizers):
            raise UserError(f"optimizers is not supported; use {_OPTIMIZER}")
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
                raise UserError("quantization_config is not supported; use load_in_4bit=True or load_in_8bit=True")
            section["quantization"] = "nf4" if quantization_config.load_in_4bit else "int8"
        return section

    def _reward_functions(self, functions: Sequence[Any], tokenizers: Any) -> list[Any]:
        """Return the rewards, with models as functions."""
        tokenizers = _as_list(tokenizers) or [None] * len(functions)
        if len(tokenizers) != len(functions):
            raise UserError(f"reward_processing_classes: {len(tokenizers)} for {len(functions)} reward_funcs")
        options = as_dict(self.args.model_init_kwargs, "model_init_kwargs")
        options.setdefault("trust_remote_code", self.args.trust_remote_code)
        template = as_dict(self.args.chat_template_kwargs, "chat_template_kwargs")
        return [
            RewardModel(func, tokenizer, device=self.args.device, options=options, template=template)
            if isinstance(func, str | torch.nn.Module)
            else func
            for func, tokenizer in zip(functions, tokenizers, strict=True)
        ]

    def _reward_section(self) -> list[dict[str, Any]]:
        functions, weights = self.reward_funcs, self.args.reward_weights or [1.0] * len(self.reward_funcs)
        if len(weights) != len(functions):
            raise UserError(f"reward_weights: {len(weights)} for {len(functions)} reward_funcs; give one each")
        if type(self)._calculate_rewards is not GRPOTrainer._calculate_rewards:
            functions = self._rewards.columns()
        return [
            {"use": function, "name": name, "weight": weight}
            for function, name, weight in zip(functions, self.reward_func_names, weights, strict=True)
        ]

    def _build(self, run_dir: Path) -> None:
        if self._trainer is not None:
            self._trainer.close()
        if (earlier := _open.pop(str(run_dir), None)) is not None:
            earlier._forget()  # of the same process, such as of another cell
        args, given = self.args, dict(self._given)
        found = sections(args, world_size=args.world_size)
        if args.max_tool_calling_iterations is not None:
            found["rollout"]["max_turns"] = args.max_tool_calling_iterations + 1
        found["run"]["dir"] = str(run_dir)
        evaluation = self._own_evaluation()
        model, rewards = {**given.pop("model"), **found.pop("model")}, given.pop("rewards")
        rest: dict[str, Any] = {name: section for name, section in found.items() if section}
        self._trainer = Trainer(
            model,
            self._data_section(rest.pop("data", {}), rest["train"]),
            rewards,
            eval_data=None if evaluation is None else {**self._sampling(), "path": evaluation},
            **given,
            **rest,
        )
        self._trainer.on_any_rank([False])  # before rank 0 writes: the others have looked for a free folder too
        _open[str(run_dir)] = self._trainer

    def _data_section(self, section: Mapping[str, Any], train: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the `data` section. Only as many rows of a stream are read as the steps need."""
        if self.train_dataset is None:
            return None
        if hasattr(self.train_dataset, "__len__"):
            return {"path": self.train_dataset, **section}
        if "steps" not in train:
            raise UserError("max_steps: missing; a stream has no length")
        if self._rows is self.train_dataset:
            self._rows = list(islice(self.train_dataset, train["steps"] * train["prompts_per_step"]))
        return {"path": self._rows, **section, "shuffle": False}

    def _own_evaluation(self) -> Any:
        """Return the held-out rows if they are one set; several are evaluated one by one."""
        return None if isinstance(self.eval_dataset, Mapping) else self.eval_dataset

    def _sampling(self) -> dict[str, Any]:
        """Return the settings of evaluations."""
        args = self.args
        return {
            "every": 0,
            "before_training": False,
            "num_samples": args.num_generations_eval or args.num_generations,
            **{name: value for name in _DISTRIBUTION if (value := getattr(args, name)) is not None},
        }

    def _built(self) -> Trainer:
        assert self._trainer is not None, "built by the constructor"
        return self._trainer

    def _resume(self, wanted: str | bool) -> None:
        """Open the run of a checkpoint, or a copy that ends there, and restore `state`.

        Raises:
            UserError: there is no such checkpoint.
        """
        found = self._output.find(wanted)
        self._drop_unused_run()
        state, run_dir, ancestors = found.state(), found.run_dir(self._output), self._output.ancestors(found)
        self._built().on_any_rank([False])  # before rank 0 writes
        self._set_aside(ancestors)
        if self.is_world_process_zero():
            found.prepare(run_dir, self._built().config)
        self._build(run_dir)
        state.best_model_checkpoint = self._output.best_model(found, state)
        state.is_world_process_zero, state.is_local_process_zero = (
            self.state.is_world_process_zero,
            self.state.is_local_process_zero,
        )
        self.state, self._is_trained = state, False
        if self.args.beta:
            self._beta = self._built().beta()
        if self.args.restore_callback_states_from_checkpoint:
            self._restore_callbacks()

    def _note_callbacks(self) -> None:
        """Put the states of callbacks into `state`."""
        callbacks = [c for c in (*self.callback_handler.callbacks, self.control) if isinstance(c, ExportableState)]
        self.state.stateful_callbacks = TrainerState(stateful_callbacks=callbacks).stateful_callbacks

    def _restore_callbacks(self) -> None:
        """Replace callbacks by new ones with the states of the checkpoint, as transformers does."""
        callbacks = self.callback_handler.callbacks
        saved = {
            name: iter(states if isinstance(states, list) else [states])
            for name, states in dict(self.state.stateful_callbacks or {}).items()
        }
        for place, callback in enumerate(callbacks):
            if isinstance(callback, ExportableState) and (
                found := next(saved.get(type(callback).__name__, iter(())), None)
            ):
                callbacks[place] = type(callback).from_state({"args": {}, "attributes": {}, **found})

    def _drop_unused_run(self) -> None:
        """Delete the folder of the run that was opened before it was known that another one is resumed."""
        trainer = self._built()
        folder, was_opened = Path(trainer.config.run.dir), trainer._run is not None
        trainer.close()
        if was_opened and not has_progress(folder):
            shutil.rmtree(folder)
        trainer.on_any_rank([False])  # before the others look for a free folder

    def _set_aside(self, but: Sequence[Path]) -> None:
        """Move the checkpoints of other runs out of the way, on rank 0."""
        if self.is_world_process_zero():
            moved = self._output.set_aside(self._given["model"]["path"], but=but)
            if moved:
                print(f"{', '.join(p.name for p in moved)} of an earlier run: now in {moved[0].parent}")

    def _save_checkpoint(self) -> None:
        step = self._built().save_checkpoint()
        self._note_callbacks()
        if self.state.best_metric is not None and self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(self._output.path / f"checkpoint-{self.state.global_step}")
        if self.is_world_process_zero():
            self._output.write(step, self.state, with_state=not self.args.save_only_model)
            if self.args.save_total_limit:
                self._output.keep_last(self.args.save_total_limit, and_also=[str(self.state.best_model_checkpoint)])
        self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def _keep_interrupted(self, trainer: Trainer) -> None:
        """Write `checkpoint-N` for what the interrupted run has saved."""
        if self.is_world_process_zero():
            if not started_by_torchrun():
                trainer.close()
            for step in checkpoints(Path(trainer.config.run.dir) / "checkpoints")[-1:]:
                steps = int(step.name.rpartition("-")[2]) * self.args.num_iterations
                if not (self._output.path / f"checkpoint-{steps}").exists():
                    self.state.global_step = steps
                    self._note_callbacks()
                    self._output.write(step, self.state)

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
            wait_for_everyone=lambda: self._built().on_any_rank([False]),
            print=print if args.process_index == 0 else _silent,
        )


def _silent(*_: object) -> None:
    """Print nothing."""


def _short_name(model: Any) -> str:
    name = model if isinstance(model, str) else getattr(getattr(model, "config", None), "_name_or_path", "") or "model"
    return str(name).rstrip("/").rpartition("/")[2]


def _try_config(path: str) -> Any:
    """Return the configuration of a model, None where it cannot be read: an error for later."""
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError):
        return None


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
