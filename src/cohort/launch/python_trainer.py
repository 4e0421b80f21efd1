"""`cohort.Trainer`: a run from Python objects, one step at a time."""

import signal
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from cohort.config import Config, config_from_dict, to_yaml
from cohort.config.objects import unnamed_objects
from cohort.config.section import Section
from cohort.config.user_code import end_import
from cohort.display import Display, Displays, default_display
from cohort.errors import TrainingError, UserError
from cohort.launch.given_model import GivenModel, is_model
from cohort.launch.local import environment_variables
from cohort.launch.start import train
from cohort.ranks.collectives import Ranks
from cohort.ranks.join import started_by_torchrun
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
from cohort.trainer.inputs import render_prompts
from cohort.trainer.loop import TrainingLoop
from cohort.trainer.open_run import OpenRun, open_run
from cohort.trainer.parts import Parts
from cohort.trainer.run import open_training, reporting_stop

Settings = Mapping[str, Any] | Section
Callback = Callable[[StepReport], object]


class Trainer:
    """A run whose parts are Python objects.

    It runs in this process, on one GPU, and samples there or on vLLM servers. Nothing is loaded before the first step,
    or the first use of `model` or `generate`. A run that was interrupted goes on from its last checkpoint.

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
                a `cohort.ModelCall` (docs/python.md).
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
                raise UserError(f"engine: is given, and rollout.engine: {rollout['engine']} too; leave out one of them")
            given["engine"] = "object"
        model = _section(model, key="path")
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
            _CallbackDisplay(self.callbacks).step(report)
            yield report

    def train(self) -> RunResult:
        """Run the remaining steps and save the trained model. Raises as a loop over the trainer does.

        Under torchrun, every rank calls this; rewards and callbacks are called on rank 0.
        """
        if started_by_torchrun():
            if self._engine is not None:
                raise UserError("engine: an object samples for one process only; use rollout.engine under torchrun")
            if self._given_model is not None:
                self._given_model.save(self.config)
            elif self._tokenizer is not None:
                raise UserError("tokenizer: has no effect under torchrun; save it in the model's folder")
            display = self._display or default_display(self.config)
            return train(self.config, display=Displays(display, _CallbackDisplay(self.callbacks)))
        for _ in self:
            pass
        if self.result is None:
            raise TrainingError("Trainer: the run was closed before its last step")
        return self.result

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

    def evaluate(self) -> EvalResult:
        """Evaluate the current policy on `eval_data`. The result is returned, and not recorded in the run folder.

        Raises:
            UserError: the trainer has no `eval_data`.
        """
        if self.config.eval is None:
            raise UserError("eval_data: missing; evaluate() needs held-out rows, given to Trainer(...)")
        run, loop = self._open()
        assert run.inputs.evaluation is not None, "the configuration has the section"
        with self._stoppable():
            return evaluate(run.inputs.evaluation, loop.components.collector, run.inputs.rewards)

    def save(self, path: str | Path) -> None:
        """Save the current model (or adapter) and its tokenizer in Hugging Face format."""
        self._open()[1].workers.local.save_model(Path(path))

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
        return self._open()[1].workers.local.policy.model

    @property
    def tokenizer(self) -> Any:
        """The tokenizer."""
        return self._open()[0].parts.tokenizer

    @property
    def history(self) -> History:
        """Metrics of the steps so far."""
        return History(Path(self.config.run.dir))

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
        if self.result is not None:
            return None
        self._ensure_started()
        if self._loop is None:  # it was finished before
            return None
        try:
            with self._stoppable():
                report = next(self._steps, None)
                if report is None:
                    self.result = self._loop.finish()
                elif self._stop.number is not None:  # since the step's last check: saves and stops
                    next(self._steps, None)
                return report
        except BaseException:
            self._forget()  # the next call goes on from the last checkpoint
            raise

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
        if started_by_torchrun():
            raise UserError("Trainer: under torchrun only train() works, which every rank calls")
        if self._loop is not None or self.result is not None:
            return
        try:
            with self._stoppable():
                self._start()
        except BaseException:
            self._forget()
            raise

    def _start(self) -> None:
        display = self._display or default_display(self.config)
        if self._given_model is not None:
            self._given_model.save(self.config)
        config = choose_engine(self.config, display.notify)
        self._opened.enter_context(closing(display))
        if (found := num_gpus(config)) > 1 and not config.rollout.uses_servers:
            display.notify(f"training on 1 of {found} GPUs; start the script with `cohort launch local`")
        if (split := split_machine(config)) is not None:
            self._opened.enter_context(environment_variables(place(config, split, [0]).environment()))
        parts = Parts(config, tokenizer=self._tokenizer, engine=self._engine)
        self._run = self._opened.enter_context(open_run(config, parts, notify=display.notify))
        opened = open_training(self._run, display=display, ranks=Ranks(stop=self._stop))
        if isinstance(opened, RunResult):
            self.result = opened
        else:
            self._loop, self._steps = opened, opened.steps()

    @contextmanager
    def _stoppable(self) -> Iterator[None]:
        """Let signals stop the run within the context.

        Raises:
            KeyboardInterrupt: for SIGINT, as Python does.
        """
        try:
            with self._stop, reporting_stop(self.config, self._display or Display(), self._stop):
                yield
                self._stop.check()
        except RunStopped as stopped:
            if stopped.code == 128 + signal.SIGINT:
                raise KeyboardInterrupt(f"stopped; {resume_hint(Path(self.config.run.dir))}") from None
            raise

    def _forget(self) -> None:
        self._run = self._loop = None
        self._steps = iter(())
        self._opened.close()
        self._stop.can_save = False


class _CallbackDisplay(Display):
    """Calls functions after each step."""

    def __init__(self, callbacks: Sequence[Callback]):
        self._callbacks = callbacks

    def step(self, report: StepReport) -> None:
        """A step is done."""
        for callback in self._callbacks:
            callback(report)


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
