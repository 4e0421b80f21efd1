"""Evaluate a model (`cohort eval`) or sample a few trajectories (`cohort rollout`) without training."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cohort.config import Config
from cohort.data import OnProgress, no_progress
from cohort.models import with_base
from cohort.plan.rollout_engine import set_engine
from cohort.ranks.collectives import SINGLE_PROCESS
from cohort.ranks.worker_group import WorkerGroup
from cohort.records import ScoredGroup
from cohort.rollout import RolloutEngine, SamplingParams, StepKey
from cohort.trainer.build import WorkerSpec, build_worker
from cohort.trainer.evaluation import EvalResult, evaluate
from cohort.trainer.inputs import build_evaluation, build_reward_runner, column_names
from cohort.trainer.open_run import OpenRun, open_run
from cohort.trainer.setup import open_engine, rank_device
from cohort.trainer.worker import TrainingWorkers


def evaluate_model(
    config: Config,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_data_progress: OnProgress = no_progress,
    notify: Callable[[str], None] = lambda text: None,
) -> EvalResult:
    """Evaluate `config.model`, which may be an adapter folder, on `config.eval`.

    Args:
        config: chat template, rewards and limits come from the other sections.
        on_progress: called with the number of prompts done and the total.
        on_data_progress: called while data take long.
        notify: shows a message to the user, such as which sandbox is in use.

    Raises:
        UserError: the configuration, the data or a reward is invalid.
    """
    config = config.model_copy(update={"model": with_base(config.model)})
    assert config.eval is not None, "config.eval is required"
    with open_run(config, notify=notify, on_data_progress=on_data_progress) as run:
        # rewards get prompts under the name of the training column
        rewards = build_reward_runner(config, run.parts, [*column_names(run.parts.eval_rows), config.data.prompt])
        for note in run.parts.sandbox.notes:
            notify(note)
        evaluation = build_evaluation(config, config.eval, run.parts, rewards)
        collector = run.collector(run.untrained_engine(evaluation.prompts))
        return evaluate(evaluation, collector, rewards, on_progress=on_progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRows:
    """Scored trajectories, and what it takes to show them."""

    groups: list[ScoredGroup]
    weights: dict[str, float]  # of the rewards, by name
    tokenizer: Any

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of tokens, with special tokens."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=False))


def sample_rows(
    config: Config,
    *,
    rows: int,
    generations: int,
    notify: Callable[[str], None] = lambda text: None,
    on_data_progress: OnProgress = no_progress,
) -> SampledRows:
    """Sample the first prompts of a training run with its initial weights, and score them. No file is written.

    With the local engine, the trajectories are the first ones of each group in the run's first step.

    Args:
        config: configuration of the run; `rollout.engine: auto` samples locally.
        rows: number of prompts.
        generations: trajectories per prompt.
        notify: shows a message to the user.
        on_data_progress: called while data take long.

    Raises:
        UserError: the configuration, the data, a tool, an environment or a reward is invalid.
        TrainingError: the rollout engine failed.
    """
    config = set_engine(config, "local")
    with open_run(config, notify=notify, on_data_progress=on_data_progress) as run:
        inputs = run.inputs
        for note in inputs.sandbox.notes:
            notify(note)
        sampling = replace(SamplingParams.for_training(config.rollout), num_generations=generations)
        prompts = inputs.prompt_stream(config).take(rows)
        collector = run.collector(
            _server_engine(run) if config.rollout.uses_servers else run.untrained_engine(inputs.prompts.prompts)
        )
        groups = collector.collect(prompts, sampling, StepKey(purpose="train", seed=config.train.seed, step=0))
        scored = inputs.rewards.score(groups, require_scores=False)
        collector.release(groups)
        return SampledRows(groups=scored, weights=inputs.rewards.weights, tokenizer=inputs.tokenizer)


def _server_engine(run: OpenRun) -> RolloutEngine:
    """Start the run's servers, which get the weights from a worker."""
    config, inputs = run.config, run.inputs
    setup = open_engine(config, inputs)
    spec = WorkerSpec(
        folder=Path(run.enter(TemporaryDirectory(prefix="cohort-rollout-"))),
        num_steps=inputs.schedule.num_steps,
        checkpoint=None,
        micro_batch_tokens=inputs.longest_sequence_tokens,
        longest_sequence_tokens=inputs.longest_sequence_tokens,
    )
    device = rank_device(config, SINGLE_PROCESS)
    worker = build_worker(config, SINGLE_PROCESS, spec, device=device, tokenizer=inputs.tokenizer)
    workers = TrainingWorkers(WorkerGroup(worker, SINGLE_PROCESS))
    return setup.start(workers, folder=spec.folder, notify=run.notify).engine
