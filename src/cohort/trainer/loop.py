"""The training loop. Each line of it names a stage; what a stage does is in the module of its name."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cohort.algorithms import assign_advantages, with_gradient
from cohort.batch import TrainBatch
from cohort.checkpoint import TrainerState, disk_errors, save_checkpoint, save_model, write_folder_atomically
from cohort.config import Config, config_from_dict, load_config
from cohort.display import ConsoleDisplay, Display, StepReport
from cohort.engine import ForwardBackwardResult
from cohort.errors import UserError
from cohort.evaluation import evaluate
from cohort.metrics import MetricsWriter, PhaseClock, peak_memory_bytes, rollout_metrics
from cohort.packing import pack
from cohort.records import TrainSequence
from cohort.rollout import StreamKey
from cohort.run_folder import RunFolder
from cohort.trainer.setup import Run, build_run, check_disk_space, read_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """A finished run."""

    run_dir: Path
    final_dir: Path  # the trained model, in Hugging Face format
    summary: Mapping[str, Any]  # as in summary.json


def train(
    config: Config | Mapping[str, Any] | str | Path, *, resume: bool = False, display: Display | None = None
) -> RunResult:
    """Train as `config` says; goes on from the last checkpoint where its run folder holds the same run.

    Args:
        config: a `Config`, the same as a nested mapping, or the path of a YAML file.
        resume: insist that there is a run to go on with.
        display: what a person sees; by default lines and a bar on the console.

    Raises:
        UserError: something in the configuration, the data or a reward does not work.
        TrainingError: the run cannot go on.
    """
    if isinstance(config, str | Path):
        config = load_config(config)
    elif not isinstance(config, Config):
        config = config_from_dict(config)
    display = display or ConsoleDisplay(show_completions_every=config.run.show_completions_every)
    inputs = read_inputs(config)
    folder = RunFolder(config, resume=resume)
    try:
        finished = folder.finished_steps()
        if finished is not None and finished >= inputs.plan.num_steps:
            display.note(f"this run is finished ({finished} steps): {folder.final_path}")
            return RunResult(run_dir=folder.path, final_dir=folder.final_path, summary=folder.summary())
        for note in inputs.notes(config.rollout.max_prompt_tokens):
            display.note(note)
        run = build_run(config, inputs, checkpoint=folder.last_checkpoint())
        if run.state.steps_done > inputs.plan.num_steps:
            raise UserError(
                f"train.steps: the run in {str(folder.path)!r} has {run.state.steps_done} steps behind it already, "
                f"more than {inputs.plan.num_steps}; use at least {run.state.steps_done}, or another run.dir"
            )
        check_disk_space(config, run.policy, folder.path)
        folder.rewind(run.state.steps_done)
        return _Training(config, run, folder, display).run()
    finally:
        display.close()
        folder.close()


class _Training:
    """One run under way."""

    def __init__(self, config: Config, run: Run, folder: RunFolder, display: Display):
        self.config = config
        self.parts = run
        self.folder = folder
        self.display = display
        self.plan = run.inputs.plan
        self.clock = PhaseClock()
        self.num_tokens = run.state.num_tokens
        self.started = time.perf_counter()
        self.warned_of_long_sequences = False
        self.warned_of_different_logprobs = False
        self.metrics = MetricsWriter(
            folder.path,
            log=config.run.log,
            config=config.model_dump(mode="json"),
            steps_done=run.state.steps_done,
        )

    def run(self) -> RunResult:
        """The loop, and the end of the run."""
        try:
            self._loop()
        finally:
            self.metrics.close()
        write_folder_atomically(
            self.folder.final_path, lambda to: save_model(self.parts.policy, self.parts.inputs.tokenizer, to)
        )
        summary = self._summary()
        self.folder.write_summary(summary)
        return RunResult(run_dir=self.folder.path, final_dir=self.folder.final_path, summary=summary)

    def _loop(self) -> None:
        first_step = self.parts.state.steps_done
        self.display.started(self.plan, steps_done=first_step)
        if first_step == 0:
            self._evaluate_where_due(0)
        for step in range(first_step, self.plan.num_steps):
            self._step(step)

    def _step(self, step: int) -> None:
        config, parts, phase = self.config, self.parts, self.clock.phase
        key = StreamKey(purpose="train", seed=config.train.seed, step=step)
        torch.manual_seed(_step_seed(key))  # dropout, where a model has it, depends on the step alone
        prompts = parts.data.take(self.plan.prompts_per_step)
        with phase("rollout"):
            groups = parts.rollout.generate(prompts, parts.sampling, key)
        with phase("reward"):
            scored = parts.inputs.rewards.score(groups)
        with phase("pack"):
            sequences = assign_advantages(scored, parts.algorithm)
            (batch,) = pack(
                with_gradient(sequences, parts.algorithm),
                micro_batch_tokens=config.train.micro_batch_tokens,
                share_prompts=parts.policy.shares_prompts,
                padded=parts.policy.layout == "padded",
            )
        self._warn_of_long_sequences(batch)
        old_logprobs = None
        updates = []
        for _ in range(self.plan.updates_per_rollout):
            with phase("train"):
                losses = parts.engine.forward_backward(batch, parts.algorithm.policy_loss, old_logprobs=old_logprobs)
                # the first pass runs on the policy that sampled: its logprobs are the old ones of the later passes
                old_logprobs = losses.logprobs if old_logprobs is None else old_logprobs
            with phase("optim"):
                optim = parts.engine.optim_step()
            updates.append({**losses.metrics, "grad_norm": optim.grad_norm, "learning_rate": optim.learning_rate})
        with phase("publish"):
            parts.rollout.load_weights(policy_version=parts.engine.updates_done)
        if self.plan.writes_completions_at(step + 1):
            self.folder.write_completions("step", step + 1, scored, sequences)
        report = StepReport(
            steps_done=step + 1,
            metrics={
                **rollout_metrics(scored),
                **self._reward_counts(),
                **_means(updates),
                **self._costs(batch, sequences, losses),
            },
            groups=scored,
        )
        self._log(step + 1, report.metrics)
        self._warn_of_different_logprobs(report.metrics)
        self.display.step(report)
        self._evaluate_where_due(step + 1)
        if self.plan.saves_at(step + 1):
            self._save(step + 1)

    def _reward_counts(self) -> dict[str, float]:
        """What the rewards counted in this step, such as answers that took too long to judge."""
        return {f"rewards/{name}": float(count) for name, count in self.parts.inputs.rewards.counts().items()}

    def _warn_of_long_sequences(self, batch: TrainBatch) -> None:
        if batch.num_over_budget and not self.warned_of_long_sequences:
            self.warned_of_long_sequences = True
            self.display.note(
                f"{batch.num_over_budget} sequences are longer than train.micro_batch_tokens: "
                f"{self.config.train.micro_batch_tokens}; each has a micro-batch to itself, over that cap"
            )

    def _warn_of_different_logprobs(self, metrics: Mapping[str, float]) -> None:
        """Law 5: the sampler and the trainer compute the same distribution."""
        sampling = self.parts.sampling
        if self.warned_of_different_logprobs or sampling.top_p < 1 or sampling.top_k > 0:
            return  # with top-p or top-k the sampler's distribution is another one, and the difference says nothing
        largest = metrics.get("sampling/sampling_logp_difference/max", 0.0)
        if largest > self.parts.policy.logprob_tolerance:
            self.warned_of_different_logprobs = True
            self.display.note(
                f"warning: the sampler's logprobs differ from the trainer's by up to {largest:.2g} (expected: at most "
                f"{self.parts.policy.logprob_tolerance:g}); this model may not be computed the same way in both"
            )

    def _costs(
        self, batch: TrainBatch, sequences: Sequence[TrainSequence], losses: ForwardBackwardResult
    ) -> dict[str, float]:
        """What the step took: tokens, time, memory."""
        times = self.clock.take()
        sampled = sum(s.num_completion_tokens for s in sequences)
        self.num_tokens += sum(len(s.token_ids) for s in sequences)
        return times | {
            "num_tokens": self.num_tokens,
            "tokens_per_second": sampled / times["step_time"],
            "rollout/tokens_per_second": sampled / times["time/rollout_s"],
            "completions/trained_ratio": batch.num_sequences / len(sequences),
            "padding_fraction": 1.0 - losses.num_inputs / losses.num_positions if losses.num_positions else 0.0,
            "micro_batches": len(batch.micro_batches),
            "sequences_over_budget": batch.num_over_budget,
            "memory/peak_bytes": peak_memory_bytes(self.parts.policy.device),
        }

    def _evaluate_where_due(self, steps_done: int) -> None:
        evaluation = self.parts.inputs.evaluation
        if evaluation is None or not self.plan.evaluates_at(steps_done):
            return
        start = time.perf_counter()
        result = evaluate(
            evaluation, self.parts.rollout, self.parts.inputs.rewards, on_progress=self.display.eval_progress
        )
        self._log(steps_done, {**result.metrics, "eval/time_s": time.perf_counter() - start})
        self.folder.write_completions("eval", steps_done, result.groups)
        self.display.evaluated(steps_done, result.metrics, result.groups)

    def _log(self, steps_done: int, metrics: Mapping[str, float]) -> None:
        with disk_errors(self.folder.path / "metrics.jsonl"):
            self.metrics.write(steps_done, metrics)

    def _save(self, steps_done: int) -> None:
        save_checkpoint(
            self.folder.checkpoints_path,
            policy=self.parts.policy,
            tokenizer=self.parts.inputs.tokenizer,
            engine_state=self.parts.engine.state_dict(),
            state=TrainerState(
                steps_done=steps_done,
                data=self.parts.data.state(),
                num_tokens=self.num_tokens,
                seconds=self._seconds(),
            ),
            keep=self.config.run.keep_checkpoints,
        )

    def _seconds(self) -> float:
        """Wall time of the run so far, including what was done before it was last resumed."""
        return self.parts.state.seconds + time.perf_counter() - self.started

    def _summary(self) -> dict[str, Any]:
        # a JSON object's keys are text; the summary is the same whether it was just made or read back
        accuracies = {str(step): a for step, a in self.folder.metric_history("eval/accuracy").items()}
        summary: dict[str, Any] = {
            "steps": self.plan.num_steps,
            "seed": self.config.train.seed,
            "seconds": round(self._seconds(), 2),
            "num_tokens": self.num_tokens,
            "num_dropped_overlong_prompts": self.parts.inputs.prompts.num_dropped_overlong,
        }
        if accuracies:
            summary |= {
                "accuracy_before": accuracies.get("0"),
                "accuracy_after": accuracies.get(str(self.plan.num_steps)),
                "accuracy_by_step": accuracies,
            }
        return summary


def _means(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each metric's mean over the updates of a step."""
    return {name: sum(update[name] for update in updates) / len(updates) for name in updates[0]}


def _step_seed(key: StreamKey) -> int:
    """A seed for the process-wide generator that only (seed, step) decide."""
    return int(np.random.SeedSequence((key.seed, key.step)).generate_state(1, np.uint64)[0] >> np.uint64(1))
