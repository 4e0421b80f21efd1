"""The training loop: one line per stage. What a stage does is in the module of its name."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

from cohort import stopping
from cohort.algorithms import CoefficientState, assign_advantages, bare_sequences, value_metrics
from cohort.checkpoint import TrainerState, disk_errors
from cohort.config import Config
from cohort.display import Display, StepReport
from cohort.evaluation import evaluate
from cohort.metrics import MetricsWriter, PhaseClock
from cohort.records import TrainSequence
from cohort.run_folder import RunFolder
from cohort.run_result import RunResult
from cohort.trainer.checkpointer import Checkpointer
from cohort.trainer.collect_groups import Gathered
from cohort.trainer.publish import check_first_parity, publish_weights
from cohort.trainer.setup import Run
from cohort.trainer.step_metrics import StepCosts
from cohort.trainer.step_warnings import StepWarnings
from cohort.trainer.token_budget import find_auto_budget
from cohort.trainer.update import Updater
from cohort.trainer.worker_calls import compute_estimates


class Trainer:
    """A training run, on rank 0."""

    def __init__(self, config: Config, run: Run, folder: RunFolder, display: Display):
        worker, state = run.workers.local, run.state
        worker.save_options = replace(worker.save_options, on_progress=display.save_progress)
        self.config = config
        self.parts = run
        self.plan = run.inputs.plan
        self.folder = folder
        self.display = display
        self.clock = PhaseClock()
        self.started = time.perf_counter()
        self.seconds_before = state.seconds if state else 0.0  # until the run was last interrupted
        self.checkpointer = Checkpointer(config.run, run.workers, folder, state=state, note=display.note)
        self.first_step = self.checkpointer.first_step
        self.warnings = StepWarnings(rollout=config.rollout, worker=worker, note=display.note)
        self.updater = Updater(
            config=config,
            workers=run.workers,
            clock=self.clock,
            control=CoefficientState(**state.control) if state else worker.algorithm.initial_coefficients,
            begin=self.checkpointer.begin_update,
            out_of_memory=self.warnings.out_of_memory,
        )
        self.costs = StepCosts(run.workers, self.clock, num_tokens=state.num_tokens if state else 0)
        self.metrics = MetricsWriter(
            folder.path,
            log=config.run.log,
            config=config.model_dump(mode="json"),
            steps_done=self.first_step,
        )

    def run(self) -> RunResult:
        """Train, and save the final model and the summary."""
        try:
            self.train()
        finally:
            self.metrics.close()
        self.checkpointer.save_final_model()
        summary = self._summary()
        self.folder.write_summary(summary)
        return RunResult(run_dir=self.folder.path, final_dir=self.folder.final_path, summary=summary)

    def train(self) -> None:
        """Do all steps that are left."""
        self.display.started(self.plan, steps_done=self.first_step)
        find_auto_budget(self.config, self.parts.inputs, self.parts.workers, self.parts.state, self.display.note)
        check_first_parity(self.parts.parity, self.first_step, self.display.note)
        with self.checkpointer.saving_when_stopped():
            if self.first_step not in self.folder.metric_history("eval/accuracy"):
                self._evaluate_if_due(self.first_step)
            for step in range(self.first_step, self.plan.num_steps):
                stopping.check()
                self.step(step)

    def step(self, step: int) -> None:
        """Sample, score, assign advantages, pack, update, publish; then report, evaluate and save."""
        workers, phase = self.parts.workers, self.clock.phase
        algorithm = workers.local.algorithm
        gathered = self.parts.gatherer.gather(step, phase)
        with phase("estimate"):
            bare = bare_sequences(gathered.groups)
            estimates = compute_estimates(workers, bare, algorithm.estimates)
        with phase("pack"):
            weights, coefficients = self.parts.inputs.rewards.weights, algorithm.coefficients(self.updater.control)
            sequences = assign_advantages(gathered.groups, algorithm, estimates, weights, coefficients, bare=bare)
            batches = self.updater.pack(sequences)
        self.warnings.long_sequences(batches["policy"][0])
        updates = self.updater.update(
            batches, sequences, estimates, num_trajectories=gathered.num_trajectories, steps_done=step + 1
        )
        with phase("publish"):
            parity = publish_weights(self.parts, step + 1)
        self._write_completions(step + 1, gathered, sequences)
        values = value_metrics(sequences, estimates.values)
        costs = self.costs.take(batches["policy"][0], updates, sequences, gathered)
        metrics = {**gathered.metrics, **parity, **updates.metrics, **values, **costs}
        self._log(step + 1, metrics)
        self.warnings.different_logprobs(metrics)
        self.checkpointer.finish_step(self._state(step + 1))
        self.display.step(StepReport(steps_done=step + 1, metrics=metrics, groups=gathered.groups))
        self._evaluate_if_due(step + 1)
        if self.plan.saves_at(step + 1):
            self.checkpointer.save()

    def _write_completions(self, steps_done: int, gathered: Gathered, sequences: Sequence[TrainSequence]) -> None:
        if self.plan.writes_completions_at(steps_done):
            self.folder.write_completions("step", steps_done, gathered.groups, sequences)
            if gathered.replaced:
                self.folder.write_completions("replaced", steps_done, gathered.replaced)

    def _evaluate_if_due(self, steps_done: int) -> None:
        evaluation = self.parts.inputs.evaluation
        if evaluation is None or not self.plan.evaluates_at(steps_done):
            return
        start = time.perf_counter()
        result = evaluate(
            evaluation, self.parts.rollout, self.parts.inputs.rewards, on_progress=self.display.eval_progress
        )
        self._log(steps_done, {**result.metrics, "eval/time_s": time.perf_counter() - start}, kind="eval")
        self.folder.write_completions("eval", steps_done, result.groups)
        self.display.evaluated(steps_done, result.metrics, result.groups)

    def _log(self, steps_done: int, metrics: Mapping[str, float], *, kind: Literal["train", "eval"] = "train") -> None:
        self.folder.check_is_there()
        with disk_errors(self.folder.path / "metrics.jsonl"):
            self.metrics.write(steps_done, metrics, kind=kind)

    def _state(self, steps_done: int) -> TrainerState:
        return TrainerState(
            steps_done=steps_done,
            data=self.parts.data.state(),
            pending=self.parts.gatherer.prefetcher.state(),
            num_tokens=self.costs.num_tokens,
            seconds=self._seconds(),
            micro_batch_tokens=self.parts.workers.local.engine.budget.tokens,
            micro_batch_tokens_wanted=self.config.train.micro_batch_tokens,
            processes=self.parts.workers.ranks.world_size,
            control=asdict(self.updater.control),
        )

    def _seconds(self) -> float:
        """Wall time of the run so far, including what was done before it was last resumed."""
        return self.seconds_before + time.perf_counter() - self.started

    def _summary(self) -> dict[str, Any]:
        # a JSON object's keys are text; the summary is the same whether it was just made or read back
        accuracies = {str(step): a for step, a in self.folder.metric_history("eval/accuracy").items()}
        summary: dict[str, Any] = {
            "steps": self.plan.num_steps,
            "seed": self.config.train.seed,
            "seconds": round(self._seconds(), 2),
            "num_tokens": self.costs.num_tokens,
            "num_dropped_overlong_prompts": self.parts.inputs.prompts.num_dropped_overlong,
        }
        if accuracies:
            summary |= {
                "accuracy_before": accuracies.get("0"),
                "accuracy_after": accuracies.get(str(self.plan.num_steps)),
                "accuracy_by_step": accuracies,
            }
        return summary
