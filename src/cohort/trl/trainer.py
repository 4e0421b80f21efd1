"""TRL's `GRPOTrainer` in front of `cohort.Trainer`."""

import math
import shutil
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, TrainerControl, TrainerState
from transformers.trainer_pt_utils import log_metrics, metrics_format, save_metrics
from transformers.trainer_utils import TrainOutput

from cohort.display import Display
from cohort.errors import UserError
from cohort.launch.python_trainer import Trainer
from cohort.learner.train_engine import UpdateEvent
from cohort.ranks.join import started_by_torchrun
from cohort.ranks.stopping import RunStopped
from cohort.run.files import checkpoints, has_progress
from cohort.run.log import StepReport
from cohort.trl.attributes import TrainerAttributes, accelerator, as_peft
from cohort.trl.callbacks import note_states, restore_states
from cohort.trl.checkpoints import OutputFolder
from cohort.trl.config import GRPOConfig
from cohort.trl.hub import upload, write_card
from cohort.trl.optimizers import given_optimizer, scheduler_of, without_optimizer
from cohort.trl.rewards import RewardTable, names_of, reward_functions
from cohort.trl.sections import check_form, is_text, model_id, model_section, sections, short_name
from cohort.trl.unsupported import check_overrides, check_rollout_func

# By run folder, which only one trainer can have open
_open: WeakValueDictionary[str, Trainer] = WeakValueDictionary()
_NOT_AVERAGED: tuple[str, ...] = ("learning_rate", "num_tokens")  # in logs: their last value
_DISTRIBUTION = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_FIRST = ("loss", "grad_norm", "learning_rate")  # what `log` is called with; it adds the others
_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class GRPOTrainer(TrainerAttributes):
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
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Sequence[Any] | None = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
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
            optimizers: optimizer of the parameters of `model`, which is then an object, and its scheduler. Without an
                optimizer, that of the scheduler; without a scheduler, that of `args`.
            quantization_config: a `transformers.BitsAndBytesConfig`.
            peft_config: a `peft.LoraConfig`.
            tools: functions that the model may call.
            rollout_func: must be left out.
            environment_factory: environment class, or several by name.

        Raises:
            UserError: something is not supported; the message says what to use.
        """
        check_rollout_func(rollout_func)
        check_overrides(type(self))
        self.args = args or GRPOConfig(output_dir=f"{short_name(model)}-GRPO")
        if not isinstance(self.args, GRPOConfig):
            raise UserError(f"args: {type(self.args).__module__}.{type(self.args).__name__}; use cohort.trl.GRPOConfig")
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.reward_funcs = reward_functions(_as_list(reward_funcs), _as_list(reward_processing_classes), self.args)
        self.reward_func_names = names_of(self.reward_funcs)
        self.reward_processing_classes = _as_list(reward_processing_classes)
        self._rewards = RewardTable(self.reward_funcs, self._calculate_rewards)
        self.tools = list(tools or ())
        self._base_model = model_id(model)
        self._optimizer = given_optimizer(optimizers, model)
        self._given = {
            "model": model_section(model, peft_config, quantization_config),
            "optimizer": self._optimizer,
            "rewards": self._reward_section(),
            "tokenizer": processing_class,
            "tools": self.tools,
            "environment": environment_factory,
            "display": Display() if self.args.disable_tqdm else None,
        }
        self.accelerator = accelerator(self.args, lambda: self._built().on_any_rank([False]))
        self._output = OutputFolder(Path(str(self.args.output_dir)))
        self._stream: tuple[Any, list[Any]] = (None, [])  # and the rows that were read from it
        self._is_text: bool | None = None  # what the training prompts are, if that matters
        self._beta = self.args.beta
        self._trainer: Trainer | None = None
        self._has_trained = False
        self.control = TrainerControl()
        self.callback_handler = CallbackHandler([DefaultFlowCallback, *(callbacks or ())], None, None, None, None)
        self.state = self._of_this_rank(TrainerState())
        self._mode = "train"  # or "eval", whose metrics `log` adds
        self._metrics: dict[str, dict[str, list[float]]] = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._build(self._output.new_run())  # says now what is wrong
        self.control = self.callback_handler.on_init_end(self.args, self.state, self.control)

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> TrainOutput:
        """Train; the second time, from the current weights. Raises as `cohort.Trainer.train` does.

        Every rank calls this. After an error or an interrupt, the run goes on from its last checkpoint.

        Args:
            resume_from_checkpoint: True, or the path of a `checkpoint-N`: go on from the last one, or from that one.
            trial: no effect.
            ignore_keys_for_eval: no effect.
        """
        if resume_from_checkpoint:
            self._resume(resume_from_checkpoint)
        else:
            self._begin()
        trainer, start, begin = self._built(), time.perf_counter(), self.state.global_step
        num_logs = len(self.state.log_history)
        try:
            with trainer._stoppable():  # a signal during a callback waits for the next step, which saves
                self._run(trainer)
        except (KeyboardInterrupt, RunStopped):
            self._keep_interrupted(trainer)
            raise
        finally:
            self.callback_handler.optimizer = self.callback_handler.lr_scheduler = None  # they hold its memory
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
        self._forget_steps_after(steps_done, epochs=trainer.epochs())
        self.state.max_steps = schedule.num_steps * args.num_iterations
        self.state.num_train_epochs = math.ceil(schedule.num_steps / schedule.steps_per_epoch)
        self.state.compute_steps(args, self.state.max_steps)
        self._log_if_asked()  # of a step after which a callback failed
        engine = trainer._worker().engine
        engine.on_event = self._on_event
        handler.optimizer = engine.optimizer.first
        handler.lr_scheduler = scheduler_of(engine.optimizer)
        self.control = handler.on_train_begin(args, self.state, self.control)
        if args.eval_on_start and not steps_done:
            self.evaluate()
        steps, is_new_epoch, epochs_done = iter(trainer), True, self._epochs_done()
        # callbacks may have ended epochs early
        skipped = (self.state.epoch or 0.0) - steps_done / schedule.steps_per_epoch
        while (
            steps_done < schedule.num_steps
            and epochs_done < self.state.num_train_epochs
            and not self._asks("should_training_stop")
        ):
            if is_new_epoch:
                self.control = handler.on_epoch_begin(args, self.state, self.control)
            self.control = handler.on_step_begin(args, self.state, self.control)
            report = next(steps)
            steps_done = report.steps_done
            self._finish_step(report, steps_per_epoch=schedule.steps_per_epoch, skipped_epochs=skipped)
            is_new_epoch, epochs_done = self._epochs_done() > epochs_done, self._epochs_done()
            self._obey(can_skip=not is_new_epoch)
            ends_early = not is_new_epoch and self._asks("should_epoch_stop")
            if is_new_epoch or ends_early or steps_done == schedule.num_steps or self.control.should_training_stop:
                self.control = handler.on_epoch_end(args, self.state, self.control)
                self._obey(can_skip=not is_new_epoch)
            if ends_early:
                is_new_epoch, epochs_done = True, epochs_done + 1
                skipped += epochs_done - (self.state.epoch or 0.0)
        engine.on_event = None  # else trainer and engine keep each other in memory
        if steps_done == schedule.num_steps:
            trainer.train()  # saves the final model
        else:
            trainer.save_checkpoint()
        if args.load_best_model_at_end and self.state.best_model_checkpoint:
            trainer.load(self.state.best_model_checkpoint)
        self._has_trained = True

    def _epochs_done(self) -> int:
        return int((self.state.epoch or 0.0) + 1e-9)

    def _on_event(self, event: UpdateEvent) -> None:
        """Tell callbacks what happens within a step."""
        self.control = getattr(self.callback_handler, f"on_{event}")(self.args, self.state, self.control)
        self.state.global_step += event == "optimizer_step"

    def _finish_step(self, report: StepReport, *, steps_per_epoch: float, skipped_epochs: float) -> None:
        """Notify callbacks of the step's updates, and log if they say so."""
        handler, num_updates = self.callback_handler, self.args.num_iterations
        should_evaluate = should_save = False
        for number, update in enumerate(report.updates, start=1):
            if number > 1:
                self.control = handler.on_step_begin(self.args, self.state, self.control)
            for name, value in ({**report.metrics, **update} if number == 1 else update).items():
                self._metrics["train"][name].append(value)
            self.state.global_step = (report.steps_done - 1) * num_updates + number
            self.state.epoch = self.state.global_step / num_updates / steps_per_epoch + skipped_epochs
            self.control = handler.on_step_end(self.args, self.state, self.control)
            self._combine_flags()
            self._log_if_asked()
            should_evaluate |= self.control.should_evaluate
            should_save |= self.control.should_save
        self.control.should_evaluate, self.control.should_save = should_evaluate, should_save

    def _asks(self, flag: str) -> bool:
        """Whether a callback asks for something on any rank."""
        (asked,) = self._built().on_any_rank([getattr(self.control, flag)])
        setattr(self.control, flag, asked)
        return asked

    def _combine_flags(self) -> None:
        asked = self._built().on_any_rank([getattr(self.control, flag) for flag in _FLAGS])
        vars(self.control).update(zip(_FLAGS, asked, strict=True))

    def _log_if_asked(self) -> None:
        if self.control.should_log and self._metrics["train"]:
            self.control.should_log = False
            self.log(self._take_means("train", only=_FIRST))

    def _obey(self, *, can_skip: bool) -> None:
        """Log, evaluate, skip the rest of the epoch if that `can_skip`, and save, as callbacks say."""
        self._combine_flags()
        self._log_if_asked()
        if self.control.should_evaluate:
            self.control.should_evaluate = False
            self._note_best(self.evaluate())
        if can_skip and self._asks("should_epoch_stop"):
            self._built().skip_epoch()  # before the checkpoint, from which a run goes on with the next epoch
        if self._asks("should_save"):
            self.control.should_save = False
            self._write_checkpoint()

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
        check_form(data, trained=self._is_text)
        start = time.perf_counter()
        section = {**self._sampling(), "path": data} if data is not None else None
        is_own = data is self._own_evaluation() and self._sampling() == self._built_sampling
        found = self._built().evaluate(None if is_own else section).metrics
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
        wanted = self.args.push_to_hub and not _internal_call and output_dir in (None, self.args.output_dir)
        if wanted and self.is_world_process_zero():
            upload(self._output.path, self.args, "Model save")

    def save_state(self) -> None:
        """Write `trainer_state.json` into `args.output_dir`."""
        if self.is_world_process_zero():
            self._output.path.mkdir(parents=True, exist_ok=True)
            note_states(self.state, self.callback_handler, self.control)
            self.state.save_to_json(str(self._output.path / "trainer_state.json"))

    log_metrics, save_metrics, metrics_format = log_metrics, save_metrics, staticmethod(metrics_format)

    def push_to_hub(self, commit_message: str = "End of training", blocking: bool = True, **kwargs: Any) -> Any:
        """Save the current model with a card, and upload it. `kwargs` are those of `create_model_card`."""
        card = {name: value for name, value in kwargs.items() if name in ("model_name", "dataset_name", "tags")}
        self._built().save(self._output.path)
        self.create_model_card(**card)
        if not self.is_world_process_zero():
            return None
        options = {name: kwargs.get(name) for name in ("token", "revision")}
        return upload(self._output.path, self.args, commit_message, **options)

    def create_model_card(
        self, model_name: str | None = None, dataset_name: Any = None, tags: str | list[str] | None = None
    ) -> None:
        """Write `README.md` into `args.output_dir`."""
        if not self.is_world_process_zero():
            return
        write_card(
            self._output.path,
            name=model_name or self._output.path.name,
            base=self._base_model,
            datasets=dataset_name,
            tags=tags,
        )

    @property
    def model(self) -> Any:
        """The model that is trained. With an adapter it saves and merges like a `peft.PeftModel`."""
        trainer = self._built()
        return trainer.model if trainer.config.model.adapter is None else as_peft(trainer)

    @property
    def processing_class(self) -> Any:
        """The tokenizer."""
        return self._built().tokenizer

    tokenizer = processing_class  # its name in earlier versions

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
        found, self._built_from = sections(args, world_size=args.world_size), self._arguments()
        if args.max_tool_calling_iterations is not None:
            found["rollout"]["max_turns"] = args.max_tool_calling_iterations + 1
        found["run"]["dir"] = str(run_dir)
        evaluation, self._built_sampling = self._own_evaluation(), self._sampling()
        model, rewards = {**given.pop("model"), **found.pop("model")}, given.pop("rewards")
        if self._optimizer is not None:
            without_optimizer(found, self._optimizer)
        rest: dict[str, Any] = {name: section for name, section in found.items() if section}
        self._trainer = Trainer(
            model,
            self._data_section(rest.pop("data", {}), rest["train"]),
            rewards,
            eval_data=None if evaluation is None else {**self._sampling(), "path": evaluation},
            **given,
            **rest,
        )
        check_form(self.eval_dataset, trained=self._is_text)
        self._trainer.on_any_rank([False])  # before rank 0 writes: the others have looked for a free folder too
        _open[str(run_dir)] = self._trainer

    def _data_section(self, section: Mapping[str, Any], train: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the `data` section. Only as many rows of a stream are read as the steps need."""
        if self.train_dataset is None:
            return None
        if hasattr(self.train_dataset, "__len__"):
            return {"path": self.train_dataset, **section, **self._template_of(self.train_dataset)}
        if "steps" not in train:
            raise UserError("max_steps: missing; a stream has no length")
        count = train["steps"] * train["prompts_per_step"]
        if self._stream[0] is not self.train_dataset or len(self._stream[1]) < count:
            self._stream = self.train_dataset, list(islice(self.train_dataset, count))
        return {"path": self._stream[1], **section, "shuffle": False, **self._template_of(self._stream[1])}

    def _template_of(self, rows: Any) -> dict[str, bool]:
        """Return whether prompts get the chat template: those that are text do not, as in TRL."""
        chats = self.tools or self._given["environment"]
        self._is_text = None if chats else is_text(rows)
        return {"apply_chat_template": False} if self._is_text else {}

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

    def _arguments(self) -> tuple[Any, ...]:
        """Return the arguments that scripts may change before training."""
        return sections(self.args, world_size=self.args.world_size), id(self.train_dataset), id(self.eval_dataset)

    def _begin(self) -> None:
        """Open another run from the current weights if one has ended, or with arguments that were changed since."""
        if self._has_trained:
            self._given["model"] = self._current_model()
            self.state, self._beta, self._has_trained = self._of_this_rank(TrainerState()), self.args.beta, False
            self._metrics["train"].clear()
            self._build(self._output.new_run())
        elif not self.state.global_step and self._arguments() != self._built_from:
            is_new_beta = self.args.beta != self._built().config.algorithm.beta
            self._drop_unused_run()
            self._build(self._output.new_run())
            if is_new_beta:
                self._beta = self.args.beta
            elif self._beta != self.args.beta:  # it was set on the trainer
                self._built().set_beta(self._beta)
        if not self.state.global_step:
            self._set_aside(())

    def _current_model(self) -> dict[str, Any]:
        """Save the current weights, and return the section of a run that starts from them."""
        trainer = self._built()
        folder = Path(trainer.config.run.dir) / "last"
        trainer.save(folder)
        section = trainer.config.model
        if section.adapter is None:
            return {**self._given["model"], "path": str(folder)}
        adapter = {**section.adapter.model_dump(exclude_unset=True), "path": str(folder)}
        return {**self._given["model"], "path": section.path, "adapter": adapter}

    def _of_this_rank(self, state: TrainerState) -> TrainerState:
        state.is_world_process_zero = self.is_world_process_zero()
        state.is_local_process_zero = self.is_local_process_zero()
        return state

    def _forget_steps_after(self, steps_done: int, *, epochs: float) -> None:
        """Set `state` to where the run goes on: a failed one, from its last checkpoint."""
        self.state.epoch = epochs
        if self.state.global_step > (step := steps_done * self.args.num_iterations):
            self.state.global_step = step
            self.state.log_history = [entry for entry in self.state.log_history if entry["step"] <= step]

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
        self.state, self._has_trained = self._of_this_rank(state), False
        self._beta = self._built().beta() if self.args.beta else 0.0
        if self.args.restore_callback_states_from_checkpoint:
            restore_states(self.state, self.callback_handler)

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

    def _write_checkpoint(self) -> None:
        step = self._built().save_checkpoint()
        note_states(self.state, self.callback_handler, self.control)
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
                    note_states(self.state, self.callback_handler, self.control)
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


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
