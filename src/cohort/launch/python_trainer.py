"""`cohort.Trainer`: a run from Python objects, one step at a time."""

import atexit
import signal
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from cohort.config import Config, config_from_dict, to_yaml
from cohort.config.objects import unnamed_objects
from cohort.config.section import Section
from cohort.config.user_code import end_import
from cohort.display import Display, default_display
from cohort.doctor import failed_checks_text
from cohort.errors import TrainingError, UserError
from cohort.launch.given_model import GivenModel, is_model
from cohort.launch.given_optimizer import optim_section
from cohort.launch.local import environment_variables
from cohort.launch.rank import script_rank
from cohort.plan.schedule import RunSchedule
from cohort.ranks.collectives import Ranks
from cohort.ranks.join import rank_of_launcher, started_by_torchrun
from cohort.ranks.stopping import RunStopped, StopSignals
from cohort.records import RolloutGroup
from cohort.rollout import SamplingParams, StepKey
from cohort.rollout.engines.auto import choose_engine
from cohort.rollout.engines.object.setup import check_engine
from cohort.rollout.engines.servers.placement import num_gpus, place, split_machine
from cohort.run.files import resume_hint
from cohort.run.history import History
from cohort.run.log import StepReport
from cohort.run.result import RunResult
from cohort.trainer.evaluation import EvalResult, evaluate
from cohort.trainer.inputs import build_evaluation, render_prompts
from cohort.trainer.loop import TrainingLoop
from cohort.trainer.open_run import OpenRun, open_run
from cohort.trainer.parts import Parts
from cohort.trainer.run import open_training, reporting_stop
from cohort.trainer.worker import Worker

Settings = Mapping[str, Any] | Section
Callback = Callable[[StepReport], object]
T = TypeVar("T")
P = ParamSpec("P")


def _on_every_rank(
    method: Callable[Concatenate["Trainer", P], T],
) -> Callable[Concatenate["Trainer", P], T]:
    """Let rank 0 do a method that every rank calls, with the help of the others. They get its result without groups."""

    @wraps(method)
    def call(self: "Trainer", *args: P.args, **kwargs: P.kwargs) -> T:
        if not started_by_torchrun():
            return method(self, *args, **kwargs)
        act = partial(method, self, *args, **kwargs)
        return script_rank(self.config).call(method.__name__, act, self.config, _without_groups)

    return call


def _without_groups(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_without_groups, value))
    return replace(value, groups=()) if isinstance(value, StepReport | EvalResult) else value


class Trainer:
    """A run whose parts are Python objects.

    It runs in this process, on one GPU, and samples there or on vLLM servers. Nothing is loaded before the first step,
    or the first use of `model` or `generate`. A run that was interrupted goes on from its last checkpoint.

    Under torchrun every rank runs the script and calls the same; rewards and callbacks are called on rank 0.

    Example::

        trainer = cohort.Trainer("Qwen/Qwen3-0.6B", rows, [digits], run={"dir": "runs/digits"})
        for step in trainer:
            print(step.steps_done, step.metrics["reward"])
    """

    def __init__(
        self,
        model: Any,
        data: Any = None,
        rewards: Sequence[Any] = (),
        *,
        tokenizer: Any = None,
        eval_data: Any = None,
        tools: Sequence[Any] = (),
        environment: Any = None,
        agent: Any = None,
        engine: Any = None,
        optimizer: Any = None,
        callbacks: Sequence[Callback] = (),
        display: Display | None = None,
        **sections: Settings | str | None,
    ):
        """Check the settings. Arguments mean the same as the keys of a configuration file (docs/config.md).

        Args:
            model: folder or id of a model, a model of transformers or peft, or the section `model`, whose `path` may be
                a model.
            data: training rows (a list of dicts, a `datasets.Dataset` or an iterator), a path, or the section `data`.
                None: the environment brings them.
            rewards: functions, names of built-in rewards, or entries of the section `rewards`.
            tokenizer: used instead of the model's.
            eval_data: held-out rows, their path, or the section `eval`.
            tools: functions that the model may call.
            environment: an environment class or function, or several by name.
            agent: function that plays a row through an OpenAI-compatible endpoint.
            engine: object that samples, with a method `async def generate(self, token_ids, sampling, key)` that returns
                a `cohort.ModelCall` (docs/python-own.md).
            optimizer: a `torch.optim.Optimizer` of the parameters of `model`, which is then an object, or a pair of one
                and its scheduler; or a class or function that makes one (or a pair) of the list of trained parameters.
                Without a scheduler, the schedule of `train` scales its learning rates.
            callbacks: called with the report of each step.
            display: shows progress. Default: the notebook's cell, or the console.
            **sections: the other sections of the configuration, such as `rollout`, `train` and `run`; `algorithm` may
                be a name.

        Raises:
            UserError: a setting is invalid.
        """
        end_import()
        rollout = _mapping(sections.pop("rollout", None) or {})
        given = {"tools": tools, "environment": environment, "agent": agent}
        if engine is not None:
            check_engine(engine)
            if "engine" in rollout:
                raise UserError("set either engine= or rollout.engine, not both")
            given["engine"] = "object"
        model = _section(model, key="path")
        if optimizer is not None:
            if "optim" in sections:
                raise UserError("set either optimizer= or optim=, not both")
            sections["optim"] = optim_section(optimizer, model["path"])
        given_model = GivenModel(model["path"], tokenizer) if is_model(model["path"]) else None
        raw = {
            "model": model if given_model is None else {**model, "path": "given"},
            "data": _section(data, key="path"),
            "rewards": [{"use": reward} if isinstance(reward, str) else reward for reward in rewards],
            "eval": None if eval_data is None else _section(eval_data, key="path"),
            "rollout": rollout | {key: value for key, value in given.items() if value},
            **{name: _section(section, key="name") for name, section in sections.items()},
        }
        config = _in_one_process(config_from_dict({key: value for key, value in raw.items() if value is not None}))
        self.config = config if given_model is None else given_model.with_paths(config)
        self._given_model = given_model
        self.callbacks = list(callbacks)
        self.result: RunResult | None = None  # of the finished run
        self._tokenizer = tokenizer
        self._engine = engine
        self._display = display
        self._stop = StopSignals("guest")
        self._opened = ExitStack()
        weakref.finalize(self, self._opened.close)  # before the threads of the interpreter end
        self._run: OpenRun | None = None
        self._loop: TrainingLoop | None = None
        self._steps: Iterator[StepReport] = iter(())

    def __iter__(self) -> Iterator[StepReport]:
        """Run the remaining steps, one at a time. A loop that is left is continued by the next one.

        Raises:
            UserError: the configuration, the data or a reward is invalid.
            TrainingError: the run failed.
            KeyboardInterrupt: the run was interrupted; it is saved, and the next loop goes on.
        """
        while (report := self._next()) is not None:
            for callback in self.callbacks if rank_of_launcher() == 0 else ():
                callback(report)
            yield report

    def train(self) -> RunResult:
        """Run the remaining steps and save the trained model. Raises as a loop over the trainer does."""
        with self._stoppable():  # between steps, too
            for _ in self:
                pass
        if self.result is None:
            raise TrainingError("Trainer: the run was closed before its last step")
        return self.result

    @_on_every_rank
    def generate(
        self,
        prompts: Sequence[Any],
        *,
        num_generations: int = 1,
        temperature: float | None = None,
        max_completion_tokens: int | None = None,
    ) -> list[RolloutGroup]:
        """Sample from the current policy, with the run's tools or environment.

        Args:
            prompts: texts or lists of chat messages.
            num_generations: completions per prompt.
            temperature: 0 is greedy. Default: that of training.
            max_completion_tokens: maximum tokens of a completion. Default: that of training.

        Returns:
            One group per prompt; `group.trajectories[0].text` is the first completion.

        Raises:
            UserError: a prompt is invalid.
        """
        run, loop = self._open()
        column = self.config.data.prompt
        rows = [{column: prompt} for prompt in prompts]
        rendered = render_prompts(self.config, run.parts, rows, column=column, field="generate.prompts").prompts
        usual = SamplingParams.for_training(self.config.rollout)
        sampling = replace(
            usual,
            num_generations=num_generations,
            temperature=usual.temperature if temperature is None else temperature,
            max_completion_tokens=max_completion_tokens or usual.max_completion_tokens,
        )
        key = StepKey(purpose="eval", seed=self.config.train.seed, step=loop.steps_done)
        with self._stoppable():
            groups = loop.components.collector.collect(rendered, sampling, key)
        loop.components.collector.release(groups)
        return groups

    @_on_every_rank
    def evaluate(self, eval_data: Any = None) -> EvalResult:
        """Evaluate the current policy. The result is returned, and not recorded in the run folder.

        Args:
            eval_data: rows, their path, or the section `eval`. Default: those of the trainer.

        Raises:
            UserError: there is no `eval_data`, or rows are invalid.
        """
        own = self.config.eval
        if own is None and eval_data is None:
            raise UserError("eval_data: missing; evaluate() needs held-out rows, given to Trainer(...)")
        run, loop = self._open()
        evaluation, rewards, last = run.inputs.evaluation, run.inputs.rewards, loop.last_evaluation
        if eval_data is not None:
            raw = {**({} if own is None else _mapping(own)), "rows": None, **_section(eval_data, key="path")}
            config = config_from_dict({**_mapping(self.config), "eval": raw})
            assert config.eval is not None, "it is given"
            parts = Parts(config, tokenizer=run.inputs.tokenizer)
            evaluation = build_evaluation(config, config.eval, parts, rewards)
        elif last is not None and last[0] == loop.steps_done:
            return last[1]
        assert evaluation is not None, "the configuration has the section"
        with self._stoppable(), loop.checkpointer.saving_when_stopped():
            result = evaluate(evaluation, loop.components.collector, rewards)
            self._stop.check()
            return result

    @_on_every_rank
    def skip_epoch(self) -> None:
        """Go on with the next epoch of the data."""
        loop = self._open()[1]
        loop.components.data.skip_epoch()
        loop.checkpointer.amend(data=loop.components.data.state())

    @_on_every_rank
    def epochs(self) -> float:
        """Return how many epochs of the data are done or skipped."""
        return self._open()[1].components.data.epochs()

    @_on_every_rank
    def load(self, path: str | Path) -> None:
        """Go on with the weights of a model (or adapter) that this run has saved."""
        loop = self._open()[1]
        loop.workers.call(Worker.load_model, Path(path))
        loop.components.collector.update_weights(policy_version=loop.workers.local.engine.updates_done + 1)
        loop.last_evaluation = None

    @_on_every_rank
    def beta(self) -> float:
        """Return the coefficient of the KL term, which a checkpoint keeps."""
        return self._open()[1].updater.coefficient_state.kl

    @_on_every_rank
    def set_beta(self, beta: float) -> None:
        """Change the coefficient of the KL term from the next step on.

        Raises:
            UserError: the run has no KL term.
        """
        if not self.config.algorithm.beta:
            raise UserError(
                "beta: is 0 at the start, so there is no reference model; start with a small one, such as 1e-6"
            )
        loop = self._open()[1]
        updater = loop.updater
        updater.coefficient_state = replace(updater.coefficient_state, kl=beta)
        loop.checkpointer.amend(control=asdict(updater.coefficient_state))

    @_on_every_rank
    def save(self, path: str | Path) -> None:
        """Save the current model (or adapter) and its tokenizer in Hugging Face format."""
        self._open()[1].workers.call(Worker.save_model, Path(path))

    @_on_every_rank
    def save_checkpoint(self) -> Path:
        """Write a checkpoint of the last finished step, unless there is one. Return its folder."""
        checkpointer = self._open()[1].checkpointer
        checkpointer.save_if_due()
        return checkpointer.last_path

    def save_config(self, path: str | Path) -> None:
        """Write the configuration as YAML, which `cohort train` runs.

        Raises:
            UserError: a part cannot be said in YAML.
        """
        unnamed = [f"{field} ({name})" for field, name in unnamed_objects(self.config)]
        if self._given_model is not None:
            self._given_model.save(self.config)
        elif self._tokenizer is not None:
            unnamed.append("tokenizer")
        if self._engine is not None:
            unnamed.append(f"engine ({type(self._engine).__name__})")
        if unnamed:
            what = ", ".join(unnamed)
            raise UserError(
                f"save_config: {what}: exists in this process only; give a path, or define functions at the top level "
                f"of a file"
            )
        Path(path).write_text(to_yaml(self.config), encoding="utf-8")

    @property
    def model(self) -> Any:
        """The model that is trained: a `transformers.PreTrainedModel`, or peft's with an adapter."""
        return self._worker().policy.model

    @property
    def reference_model(self) -> Any:
        """The reference model; None without a KL term, or with an adapter, whose base it is."""
        reference = self._worker().engine.reference
        return None if reference is None or self.config.model.adapter is not None else reference.model

    @property
    def tokenizer(self) -> Any:
        """The tokenizer."""
        self.progress()  # which saves that of a given model
        return (
            Parts(self.config, tokenizer=self._tokenizer).tokenizer if self._run is None else self._run.parts.tokenizer
        )

    @_on_every_rank
    def progress(self) -> tuple[RunSchedule, int]:
        """Load what is needed for the next step. Return the schedule and the number of steps done."""
        loop = self._open()[1]
        return loop.schedule, loop.steps_done

    @property
    def history(self) -> History:
        """Metrics of the steps so far."""
        return History(Path(self.config.run.dir))

    @_on_every_rank
    def close(self) -> None:
        """Save the last finished step, and close what is open. Using the trainer again opens it again."""
        if self._loop is not None:
            self._loop.checkpointer.save_if_due()
        self._forget()

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next(self) -> StepReport | None:
        """Run a step; None after the last one, when the trained model is saved."""
        if self.result is None:
            report, self.result = self._step()
            return report
        return None

    @_on_every_rank
    def _step(self) -> tuple[StepReport | None, RunResult | None]:
        """Run a step, or save the trained model after the last one."""
        self._ensure_started()
        if self._loop is None:  # it was finished before
            return None, self.result
        with self._stoppable(), self._forgetting_on_errors():
            report = next(self._steps, None)
            if report is None:
                return None, self._loop.finish()
            if self._stop.number is not None:  # since the step's last check: saves and stops
                next(self._steps, None)
            return report, None

    def _worker(self) -> Worker:
        """Return this rank's worker."""
        self.progress()
        return script_rank(self.config).worker if self._loop is None else self._loop.workers.local

    def on_any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """Return which of some flags are set on any rank. Every rank calls this."""
        if not started_by_torchrun():
            return list(flags)
        return script_rank(self.config).on_any_rank(flags, self.config)

    def _open(self) -> tuple[OpenRun, TrainingLoop]:
        """Load the run's parts and weights, once.

        Raises:
            UserError: something is invalid, or the run is finished.
        """
        self._ensure_started()
        if self._loop is None or self._run is None:
            assert self.result is not None, "otherwise there is a loop"
            raise UserError(f"Trainer: the run is finished; load its model from {self.result.final_dir}")
        return self._run, self._loop

    def _ensure_started(self) -> None:
        if self._loop is not None or self.result is not None:
            return
        with self._stoppable(), self._forgetting_on_errors():
            try:
                self._start()
            except (UserError, TrainingError) as error:
                with suppress(Exception):
                    if (text := failed_checks_text(error, self.config)) is not None:
                        print(text, file=sys.stderr)
                raise
            self._stop.check()

    def _start(self) -> None:
        display = self._display or default_display(self.config)
        if self._given_model is not None:
            self._given_model.save(self.config)
        config = choose_engine(self.config, display.notify)
        self._opened.enter_context(closing(display))
        if not started_by_torchrun():
            self._place(config, display)
        elif self._engine is not None:
            raise UserError("engine: an object samples for one process only; use rollout.engine under torchrun")
        parts = Parts(config, tokenizer=self._tokenizer, engine=self._engine)
        opening = open_run(config, parts, notify=display.notify, on_data_progress=display.data_progress)
        self._run = self._opened.enter_context(opening)
        if started_by_torchrun():
            rank = script_rank(config)
            atexit.register(_forget_at_exit, weakref.ref(self))  # before the ranks part
            rank.open(config)
            opened = open_training(self._run, display=display, ranks=rank.ranks, others=rank.others)
        else:
            opened = open_training(self._run, display=display, ranks=Ranks(stop=self._stop))
        if isinstance(opened, RunResult):
            self.result = opened
        else:
            self._loop, self._steps = opened, opened.steps()

    def _place(self, config: Config, display: Display) -> None:
        """Give this process and the servers their GPUs."""
        if (found := num_gpus(config)) > 1 and not config.rollout.uses_servers:
            display.notify(f"training on 1 of {found} GPUs; start the script with `cohort launch local`")
        if (split := split_machine(config)) is not None:
            self._opened.enter_context(environment_variables(place(config, split, [0]).environment()))

    @contextmanager
    def _stoppable(self) -> Iterator[None]:
        """Let signals stop the run within the context.

        Raises:
            KeyboardInterrupt: for SIGINT, as Python does.
        """
        if started_by_torchrun():
            self._stop = script_rank(self.config).stop
        try:
            with self._stop, reporting_stop(self.config, self._display or Display(), self._stop):
                yield
        except RunStopped as stopped:
            if stopped.code == 128 + signal.SIGINT and not started_by_torchrun():
                raise KeyboardInterrupt(f"stopped; {resume_hint(Path(self.config.run.dir))}") from None
            raise

    @contextmanager
    def _forgetting_on_errors(self) -> Iterator[None]:
        """After an error within, the next call goes on from the last checkpoint."""
        try:
            yield
        except BaseException:
            self._forget()
            raise

    def _forget(self) -> None:
        self._run = self._loop = None
        self._steps = iter(())
        self._opened.close()
        self._stop.can_save = False


def _forget_at_exit(trainer: "weakref.ref[Trainer]") -> None:
    if (still_there := trainer()) is not None:
        still_there._forget()


def _mapping(section: Any) -> dict[str, Any]:
    return dict(section)  # of a mapping, or of the fields of a section's class


def _section(value: Any, *, key: str) -> Any:
    """Return a section from its class, its mapping, or the value of its main key."""
    if value is None or isinstance(value, Mapping | Section):
        return None if value is None else _mapping(value)
    return {key: value}


def _in_one_process(config: Config) -> Config:
    """Return the configuration of a run in this process.

    Raises:
        UserError: it wants several processes.
    """
    if started_by_torchrun():
        return config
    hardware = config.hardware
    if hardware.processes not in ("auto", 1) or hardware.max_restarts:
        raise UserError(
            f"hardware.processes: {hardware.processes}: Trainer runs in this process; start the script with `cohort "
            f"launch local --processes {hardware.processes} SCRIPT`, and leave out processes and max_restarts"
        )
    return config.model_copy(update={"hardware": hardware.model_copy(update={"processes": 1})})
