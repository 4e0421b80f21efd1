"""The training loop: one line per stage."""

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

from cohort.algorithms import CoefficientState, assign_advantages, build_sequences, value_metrics
from cohort.config import Config
from cohort.display import Display, StepReport
from cohort.metrics.resources import PhaseClock
from cohort.plan.predict import Plan
from cohort.records import ForwardOnlyOutputs, TrainSequence
from cohort.rewards import TrainerProgress
from cohort.run.atomic import disk_errors
from cohort.run.folder import LOGS, RunFolder
from cohort.run.log import MetricsWriter
from cohort.run.result import RunResult
from cohort.trainer.checkpoint import TrainerState
from cohort.trainer.checkpointer import Checkpointer
from cohort.trainer.collect_groups import StepGroups
from cohort.trainer.evaluation import EvalResult, evaluate
from cohort.trainer.preflight import compare_memory
from cohort.trainer.publish import check_first_parity, publish_weights
from cohort.trainer.setup import RunComponents, find_auto_budget
from cohort.trainer.step_metrics import PerformanceMetrics, StepWarnings, health_monitor
from cohort.trainer.update import Updater
from cohort.trainer.worker import run_forward_only, with_first_pass

_HISTORY_LENGTH = 100  # steps and evaluations whose metrics reward functions see; isolated ones get a copy at each call


class TrainingLoop:
    """The loop on rank 0, which directs the workers."""

    def __init__(
        self,
        config: Config,
        components: RunComponents,
        folder: RunFolder,
        display: Display,
        *,
        memory_plan: Plan | None = None,
    ):
        worker, state = components.workers.local, components.state
        worker.save_options = replace(worker.save_options, on_progress=display.save_progress)
        self.config = config
        self.components = components
        self.inputs = components.inputs
        self.workers = components.workers
        self.schedule = components.inputs.schedule
        self.folder = folder
        self.display = display
        self._memory_plan = memory_plan
        self.clock = PhaseClock(display.phase)
        self.started = time.perf_counter()
        self.seconds_before = state.seconds if state else 0.0  # before the run was last interrupted
        self.checkpointer = Checkpointer(config.run, components.workers, folder, state=state, display=display)
        self.first_step = self.steps_done = self.checkpointer.first_step
        self.last_evaluation: tuple[int, EvalResult] | None = None  # with the steps done before it
        rewards = components.inputs.rewards
        rewards.notify = display.notify
        rewards.on_progress = display.reward_progress
        rewards.trainer_progress = self._progress
        rewards.log_folder = folder.path / LOGS
        self.log_history = deque(folder.last_metrics(_HISTORY_LENGTH), maxlen=_HISTORY_LENGTH)
        self.warnings = StepWarnings(worker=worker, notify=display.notify)
        self.updater = Updater(
            config=config,
            workers=components.workers,
            clock=self.clock,
            coefficient_state=CoefficientState(**state.control) if state else worker.algorithm.initial_coefficients,
            before_update=self.checkpointer.begin_update,
            on_out_of_memory=self.warnings.out_of_memory,
        )
        self.performance = PerformanceMetrics(
            components.workers, self.clock, num_tokens=state.num_tokens if state else 0
        )
        self.metrics = MetricsWriter(
            folder.path,
            log=config.run.log,
            config=config.model_dump(mode="json"),
            steps_done=self.first_step,
        )
        self.health = health_monitor(
            config,
            rewards,
            folder=folder,
            num_steps=self.schedule.num_steps,
            steps_done=self.first_step,
            logprob_tolerance=worker.policy.logprob_tolerance,
            notify=display.notify,
            on_change=display.health,
            alert=self.metrics.alert,
        )

    def run(self) -> RunResult:
        """Train, then save the final model and the summary."""
        for _ in self.steps():
            pass
        return self.finish()

    def steps(self) -> Iterator[StepReport]:
        """Run the remaining steps, one at a time."""
        self.display.started(self.schedule, steps_done=self.first_step)
        find_auto_budget(self.config, self.inputs, self.workers, self.components.state, self.display.notify)
        check_first_parity(self.components.parity, self.first_step, self.display.notify)
        self.health.report(self.first_step)
        with self.checkpointer.saving_when_stopped():
            if self.first_step not in self.folder.metric_history("eval/accuracy"):
                self._evaluate_if_due(self.first_step)
            for step in range(self.first_step, self.schedule.num_steps):
                self.workers.ranks.stop.check()
                yield self.step(step)

    def finish(self) -> RunResult:
        """Save the final model and the summary."""
        self.close()
        self.folder.wait_for_files()
        self.checkpointer.save_final_model()
        summary = self._summary()
        self.folder.write_summary(summary)
        if self._memory_plan is not None:
            peaks, reserved = map(self.folder.metric_history, ("memory/peak_bytes", "memory/reserved_peak_bytes"))
            if comparison := compare_memory(self._memory_plan, peaks, reserved):
                self.display.notify(comparison)
        return RunResult(run_dir=self.folder.path, final_dir=self.folder.final_path, summary=summary)

    def close(self) -> None:
        """Close the metrics file and the trackers."""
        self.metrics.close()

    def step(self, step: int) -> StepReport:
        """Sample, score, assign advantages, pack, update and publish; then log, evaluate and save."""
        workers, phase, algorithm = self.workers, self.clock.phase, self.workers.local.algorithm
        collected = self.components.group_collector.collect(step, phase)
        with phase("forward_only"):
            sequences = build_sequences(collected.groups)
            outputs = run_forward_only(workers, sequences, algorithm.forward_only_outputs)
        with phase("pack"):
            weights, coefficients = self.inputs.rewards.weights, self.updater.coefficients
            sequences = assign_advantages(
                collected.groups, algorithm, sequences, outputs, reward_weights=weights, coefficients=coefficients
            )
            batches = self.updater.pack(sequences)
        self.warnings.long_sequences(batches["policy"][0])
        updates = self.updater.update(
            batches, outputs, num_trajectories=collected.num_trajectories, steps_done=step + 1
        )
        with phase("publish"):
            parity = publish_weights(self.components, step + 1)
        self._write_completions(step + 1, collected, sequences, outputs)
        values = value_metrics(sequences, outputs.values)
        speed = self.performance.metrics(batches["policy"][0], updates, sequences, collected)
        own = {**collected.metrics, **parity, **updates.metrics, **values, **speed}
        self._log(step + 1, metrics := self.inputs.rewards.take_logged(own))
        self.checkpointer.finish_step(self._state(step + 1))
        self.steps_done = step + 1
        report = StepReport(steps_done=step + 1, metrics=metrics, groups=collected.groups, updates=updates.each)
        self.display.step(report)
        self.health.add(step + 1, metrics)
        self._evaluate_if_due(step + 1)
        if self.schedule.saves_at(step + 1):
            self.checkpointer.save()
        return report

    def _write_completions(
        self, steps_done: int, collected: StepGroups, sequences: Sequence[TrainSequence], outputs: ForwardOnlyOutputs
    ) -> None:
        if self.schedule.writes_completions_at(steps_done):
            self.folder.write_completions("step", steps_done, collected.groups, sequences)
            if self.config.run.record_tokens:
                recorded = self.folder.recorded(sequences)
                known = with_first_pass(self.workers, recorded, outputs)
                self.folder.write_tokens(steps_done, collected.groups, recorded, known)
            for kind, groups in (("replaced", collected.replaced), ("dropped", collected.dropped)):
                if groups:
                    self.folder.write_completions(kind, steps_done, groups)

    def _evaluate_if_due(self, steps_done: int) -> None:
        evaluation = self.inputs.evaluation
        if evaluation is None or not self.schedule.evaluates_at(steps_done):
            return
        self.display.phase("evaluation")
        start = time.perf_counter()
        result = evaluate(
            evaluation, self.components.collector, self.inputs.rewards, on_progress=self.display.eval_progress
        )
        self.last_evaluation = steps_done, result
        self._log(steps_done, {**result.metrics, "eval/time_s": time.perf_counter() - start}, kind="eval")
        self.folder.write_completions("eval", steps_done, result.groups)
        self.display.evaluated(steps_done, result.metrics, result.groups)
        self.health.add(steps_done, result.metrics, kind="eval")

    def _log(self, steps_done: int, metrics: Mapping[str, float], *, kind: Literal["train", "eval"] = "train") -> None:
        self.folder.check_is_there()
        with disk_errors(self.folder.path / "metrics.jsonl"):
            self.metrics.write(steps_done, metrics, kind=kind)
        self.log_history.append({"step": steps_done, **metrics})

    def _progress(self) -> TrainerProgress:
        """Return how far the run is, for reward functions."""
        schedule, steps_done = self.schedule, self.steps_done
        return TrainerProgress(
            global_step=steps_done * schedule.updates_per_rollout,
            max_steps=schedule.num_steps * schedule.updates_per_rollout,
            epoch=steps_done / schedule.steps_per_epoch,
            num_train_epochs=math.ceil(schedule.num_steps / schedule.steps_per_epoch),
            log_history=tuple(self.log_history),
        )

    def _state(self, steps_done: int) -> TrainerState:
        return TrainerState(
            steps_done=steps_done,
            data=self.components.data.state(),
            pending=self.components.group_collector.prefetcher.state(),
            num_tokens=self.performance.num_tokens,
            seconds=self._seconds(),
            micro_batch_tokens=self.workers.local.engine.budget.tokens,
            micro_batch_tokens_wanted=self.config.train.micro_batch_tokens,
            processes=self.workers.ranks.world_size,
            control=asdict(self.updater.coefficient_state),
        )

    def _seconds(self) -> float:
        """Wall time of the run in seconds, including the time before it was resumed."""
        return self.seconds_before + time.perf_counter() - self.started

    def _summary(self) -> dict[str, Any]:
        # JSON keys are strings; use them here too, so that a summary equals the one read back from its file
        accuracies = {str(step): a for step, a in self.folder.metric_history("eval/accuracy").items()}
        summary: dict[str, Any] = {
            "steps": self.schedule.num_steps,
            "seed": self.config.train.seed,
            "seconds": round(self._seconds(), 2),
            "num_tokens": self.performance.num_tokens,
            "num_dropped_overlong_prompts": self.inputs.prompts.num_dropped_overlong,
        }
        if accuracies:
            summary |= {
                "accuracy_before": accuracies.get("0"),
                "accuracy_after": accuracies.get(str(self.schedule.num_steps)),
                "accuracy_by_step": accuracies,
            }
        if warnings := [*self.inputs.sandbox.warnings, *self.inputs.rewards.warnings()]:
            summary["warnings"] = warnings
        return summary
