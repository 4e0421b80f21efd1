"""The training loop. Each line of it names a stage; what a stage does is in the module of its name."""

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from cohort import stopping
from cohort.algorithms import (
    Control,
    assign_advantages,
    bare_sequences,
    mean_reference_kl,
    value_metrics,
    with_gradient,
    with_returns,
)
from cohort.batch import TrainBatch
from cohort.checkpoint import TrainerState, disk_errors, write_folder_atomically
from cohort.config import Config
from cohort.display import Display, StepReport
from cohort.engine import TrainResult
from cohort.errors import OutOfStepError, StopRequested, TrainingError, UserError
from cohort.evaluation import evaluate
from cohort.metrics import MetricsWriter, PhaseClock, device_peak_flops, flops_of, speed_metrics
from cohort.outcome import RunResult
from cohort.records import TrainSequence
from cohort.run_files import goes_on_from
from cohort.run_folder import RunFolder
from cohort.trainer.gather import Gathered
from cohort.trainer.setup import (
    Run,
    knows_budget,
)

# Between the end of a server or a worker and the news of the signal that has ended it and asked the run to end.
_SAME_SIGNAL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Update:
    """What one optimizer step gave."""

    of_policy: TrainResult
    of_critic: TrainResult
    metrics: Mapping[str, float]


class Training:
    """One run under way."""

    def __init__(self, config: Config, run: Run, folder: RunFolder, display: Display):
        self.config = config
        self.parts = run
        self.folder = folder
        self.display = display
        self.plan = run.inputs.plan
        self.clock = PhaseClock()
        self.first_step = run.state.steps_done if run.state else 0
        self.num_tokens = run.state.num_tokens if run.state else 0
        self.seconds_before = run.state.seconds if run.state else 0.0  # until it was last interrupted
        first_control = run.crew.algorithm.first_control
        self.control = Control(**run.state.control) if run.state else first_control  # of the loss's coefficients
        self.started = time.perf_counter()
        self.state = run.state  # of the end of the last step; None before the first one
        self.saved = self.first_step  # steps done at the last checkpoint
        self.learning = False  # weights may have moved since
        self.warned_of_long_sequences = False
        self.warned_of_different_logprobs = False
        run.crew.saving = replace(run.crew.saving, on_progress=display.save_progress)
        policy = run.crew.policy
        self.flops = flops_of(policy.model)
        critic = run.crew.critic
        self.critic_flops = None if critic is None else flops_of(critic.policy.model)
        self.device_peak = device_peak_flops(policy.device, policy.compute_dtype or policy.dtype)
        self.metrics = MetricsWriter(
            folder.path,
            log=config.run.log,
            config=config.model_dump(mode="json"),
            steps_done=self.first_step,
        )

    def run(self) -> RunResult:
        """The loop, and the end of the run."""
        try:
            self._loop()
        finally:
            self.metrics.close()
        write_folder_atomically(self.folder.final_path, self.parts.crew.save_model)
        summary = self._summary()
        self.folder.write_summary(summary)
        return RunResult(run_dir=self.folder.path, final_dir=self.folder.final_path, summary=summary)

    def _loop(self) -> None:
        self.display.started(self.plan, steps_done=self.first_step)
        self._find_budget()
        self._check_parity(self.first_step, first=True)
        try:
            if self.first_step not in self.folder.metric_history("eval/accuracy"):
                self._evaluate_where_due(self.first_step)
            for step in range(self.first_step, self.plan.num_steps):
                stopping.check()
                self._step(step)
        except OutOfStepError:
            raise  # the others are elsewhere: nothing can be saved with them
        except (UserError, TrainingError) as error:
            # what has ended with this process may be noticed before the signal is
            asked = stopping.requested(within_s=_SAME_SIGNAL_S)
            if asked is None or (self.learning and not isinstance(error, StopRequested)):
                raise
            self._save_and_stop(asked)

    def _save_and_stop(self, number: signal.Signals) -> None:
        """The end that a signal asks for: the state is that of the end of the last step, and this one is dropped."""
        if self.state is None or self.state.steps_done == self.first_step:
            raise StopRequested("nothing to save")
        steps_done, kept = self.state.steps_done, "the same command continues"
        if self.config.run.checkpoint_every == 0:
            kept = f"run.checkpoint_every: 0, so nothing is saved; {goes_on_from(self.folder.path)}"
        elif self.saved < steps_done:
            self._save(self.state)
            kept = f"saved; {kept}"
        else:
            kept = f"saved before; {kept}"
        self.display.note(f"stopped by {number.name} after step {steps_done}: {kept}")
        raise stopping.RunStopped(number)

    def _step(self, step: int) -> None:
        parts, crew, phase = self.parts, self.parts.crew, self.clock.phase
        gathered = parts.gatherer.gather(step, phase)
        with phase("estimate"):
            estimates = crew.estimate(bare_sequences(gathered.groups), crew.algorithm.estimates)
        with phase("pack"):
            sequences = assign_advantages(
                gathered.groups,
                crew.algorithm,
                estimates,
                parts.inputs.rewards.weights,
                crew.algorithm.coefficients(self.control),
            )
            batches = crew.pack(with_gradient(sequences, crew.algorithm))
            for_critic = crew.pack_for_critic(with_returns(sequences))
        self._warn_of_long_sequences(batches[0])
        updates = [
            self._update(None if n else batches, None if n else for_critic, num_completions=len(sequences))
            for n in range(self.plan.updates_per_rollout)
        ]
        kl_of_rewards = mean_reference_kl(crew.algorithm, estimates)
        self.control = crew.algorithm.updated(self.control, kl_of_rewards, len(sequences))
        with phase("optim"):
            self._refresh_reference_where_due(step + 1)
        with phase("publish"):
            parity = self._publish(step + 1)
        if self.plan.writes_completions_at(step + 1):
            self.folder.write_completions("step", step + 1, gathered.groups, sequences)
            if gathered.replaced:
                self.folder.write_completions("replaced", step + 1, gathered.replaced)
        report = StepReport(
            steps_done=step + 1,
            metrics={
                **gathered.metrics,
                **parity,
                **_means([update.metrics for update in updates]),
                **kl_of_rewards,
                **value_metrics(sequences, estimates.values),
                **self._costs(batches[0], updates, sequences, gathered),
            },
            groups=gathered.groups,
        )
        self._log(step + 1, report.metrics)
        self._warn_of_different_logprobs(report.metrics)
        self.state, self.learning = self._state(step + 1), False
        stopping.can_save()
        self.display.step(report)
        self._evaluate_where_due(step + 1)
        if self.plan.saves_at(step + 1):
            self._save(self.state)

    def _update(
        self, batches: Sequence[TrainBatch] | None, for_critic: Sequence[TrainBatch] | None, *, num_completions: int
    ) -> _Update:
        """One optimizer step, of the critic too where there is one; with None another one on the same completions."""
        crew, phase = self.parts.crew, self.clock.phase
        coefficients = crew.algorithm.coefficients(self.control)
        with phase("train"):
            if crew.critic is not None:
                self._begin_to_learn()
            of_critic = crew.train_critic(for_critic)
            of_policy = crew.forward_backward(batches, coefficients)
        self._begin_to_learn()
        with phase("optim"):
            optim = crew.optim_step()
        self.control = crew.algorithm.updated(self.control, of_policy.metrics, num_completions)
        self._tell_of_memory(of_policy.num_out_of_memory + of_critic.num_out_of_memory)
        return _Update(
            of_policy=of_policy,
            of_critic=of_critic,
            metrics={
                **of_policy.metrics,
                **of_critic.metrics,
                **asdict(optim),
                **crew.algorithm.as_metrics(coefficients),
            },
        )

    def _begin_to_learn(self) -> None:
        """From here on the step is finished before the run ends, also the first one."""
        self.learning = True
        stopping.can_save()

    def _publish(self, steps_done: int) -> dict[str, float]:
        """The weights to whoever samples; nothing where the run is to end, as servers may be ending too."""
        try:
            stopping.check()
            self.parts.rollout.load_weights(policy_version=self.parts.crew.engine.updates_done)
            return self._check_parity(steps_done)
        except OutOfStepError:
            raise
        except TrainingError:
            if stopping.requested(within_s=_SAME_SIGNAL_S) is None:
                raise
            return {}

    def _refresh_reference_where_due(self, steps_done: int) -> None:
        reference = self.config.reference
        if reference is not None and reference.mix is not None and steps_done % reference.refresh_every == 0:
            self.parts.crew.refresh_reference(reference.mix)

    def _find_budget(self) -> None:
        """Where the configuration leaves the budget to us, and no earlier part of the run has found it."""
        state, wanted = self.parts.state, self.config.train.micro_batch_tokens
        if wanted != "auto" or (state and knows_budget(state, wanted, self.parts.crew.ranks.world_size)):
            return
        most = self.parts.crew.engine.micro_batch_tokens
        share = self.parts.inputs.largest_share(self.parts.crew.ranks.world_size)
        found = self.parts.crew.find_budget(share, most)
        why = "a whole step's share of one process" if found == most else "the most that fits"
        self.display.note(f"train.micro_batch_tokens: auto: {found} tokens, {why}")

    def _check_parity(self, steps_done: int, *, first: bool = False) -> dict[str, float]:
        """Law 5, where it is due: the servers' logprobs are the trainer's; the metrics."""
        gate = self.parts.parity
        if gate is None or not gate.due(steps_done, first=first):
            return {}
        metrics = gate.check(steps_done)
        if first:
            self.display.note(
                f"parity: the servers' logprobs are the trainer's, to {metrics['sampling/parity/mean']:.1e} nats in "
                f"the mean and {metrics['sampling/parity/max']:.1e} at most"
            )
        return metrics

    def _tell_of_memory(self, num_out_of_memory: int) -> None:
        if num_out_of_memory:
            budget = self.parts.crew.engine.micro_batch_tokens
            self.display.note(
                f"out of memory in {num_out_of_memory} micro-batches: that pass was computed again with smaller ones; "
                f"the gradient is the same, and the budget is {budget} tokens from here on"
            )

    def _warn_of_long_sequences(self, batch: TrainBatch) -> None:
        if batch.num_over_budget and not self.warned_of_long_sequences:
            self.warned_of_long_sequences = True
            budget = self.parts.crew.engine.micro_batch_tokens
            self.display.note(
                f"warning: {batch.num_over_budget} sequences are longer than train.micro_batch_tokens: {budget}; each "
                f"has a micro-batch to itself, over that cap"
            )

    def _warn_of_different_logprobs(self, metrics: Mapping[str, float]) -> None:
        """Law 5: the sampler and the trainer compute the same distribution."""
        rollout = self.config.rollout
        if self.warned_of_different_logprobs or rollout.top_p < 1 or rollout.top_k > 0:
            return  # with top-p or top-k the sampler's distribution is another one, and the difference says nothing
        if metrics["rollout/staleness_max"] > 0:
            return  # older weights have another distribution
        largest = metrics.get("sampling/sampling_logp_difference/max", 0.0)
        if largest > self.parts.crew.policy.logprob_tolerance:
            self.warned_of_different_logprobs = True
            self.display.note(
                f"warning: the sampler's logprobs differ from the trainer's by up to {largest:.2g} (expected: at most "
                f"{self.parts.crew.policy.logprob_tolerance:g}); this model may not be computed the same way in both"
            )

    def _costs(
        self,
        batch: TrainBatch,
        updates: Sequence[_Update],
        sequences: Sequence[TrainSequence],
        gathered: Gathered,
    ) -> dict[str, float]:
        """What the step took: tokens, time, memory. Tokens are the policy's; a critic computes the same."""
        crew, times = self.parts.crew, self.clock.take()
        losses, of_critic = [update.of_policy for update in updates], [update.of_critic for update in updates]
        sampled = gathered.num_completion_tokens
        self.num_tokens += sum(len(s.token_ids) for s in sequences)
        num_positions = sum(p.num_positions for p in losses)
        return times | {
            "num_tokens": self.num_tokens,
            "tokens_per_second": sampled / times["step_time"],
            "rollout/tokens_per_second": sampled / times["time/rollout_s"],
            "completions/trained_ratio": batch.num_sequences / len(sequences),
            "padding_fraction": 1 - sum(p.num_inputs for p in losses) / num_positions if num_positions else 0.0,
            "micro_batches": losses[-1].num_micro_batches,
            "micro_batch_tokens": crew.engine.micro_batch_tokens,
            "out_of_memory": sum(p.num_out_of_memory for p in (*losses, *of_critic)),
            "sequences_over_budget": batch.num_over_budget,
            "processes": crew.ranks.world_size,
            "time/move_s": crew.seconds_moving(),
            **crew.peak_memory(),
            **speed_metrics(
                self._train_flops(batch, losses) + self._critic_flops(of_critic),
                seconds=times["time/train_s"],
                num_processes=crew.ranks.world_size,
                peak=self.device_peak,
            ),
            **_saving(losses),
        }

    def _train_flops(self, batch: TrainBatch, losses: Sequence[TrainResult]) -> float:
        """Operations of the step's passes: the policy's there and back, the reference's there."""
        total = 0.0
        for update, done in enumerate(losses):
            sizes = {
                "tokens": done.num_inputs,
                "scored": batch.num_scored_tokens,
                "pairs": done.attention_pairs,
            }
            total += self.flops.forward_backward(**sizes)
            if self.parts.crew.engine.reference_in_loss and update == 0:
                total += self.flops.forward(**sizes)
        return total

    def _critic_flops(self, done: Sequence[TrainResult]) -> float:
        """Operations of the critic's passes, there and back; its head's are none to speak of."""
        if self.critic_flops is None:
            return 0.0
        return sum(
            self.critic_flops.forward_backward(tokens=d.num_inputs, scored=0, pairs=d.attention_pairs) for d in done
        )

    def _evaluate_where_due(self, steps_done: int) -> None:
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
            num_tokens=self.num_tokens,
            seconds=self._seconds(),
            micro_batch_tokens=self.parts.crew.engine.micro_batch_tokens,
            micro_batch_tokens_wanted=self.config.train.micro_batch_tokens,
            processes=self.parts.crew.ranks.world_size,
            control=asdict(self.control),
        )

    def _save(self, state: TrainerState) -> None:
        self.folder.check_is_there()
        self.parts.crew.save(self.folder.checkpoints_path, state, keep=self.config.run.keep_checkpoints)
        self.saved = state.steps_done

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


def _saving(losses: Sequence[TrainResult]) -> dict[str, float]:
    """The share of the prompt tokens of the sequences computed that sharing prompts spared."""
    spared = sum(done.num_unshared_inputs - done.num_inputs for done in losses)
    whole = spared + sum(done.num_prompt_inputs for done in losses)
    return {"prompt_tokens_saved": spared / whole if whole else 0.0}
