"""Evaluate a model (`cohort eval`) or sample a few trajectories (`cohort rollout`) without training."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cohort.config import Config
from cohort.data import PromptStream
from cohort.models import (
    LoadRequest,
    check_vocabulary,
    end_token_ids,
    load_policy,
    load_tokenizer,
    resolve_device,
    with_base,
)
from cohort.plan.rollout_engine import set_engine
from cohort.processes.this_process import resume_gc
from cohort.ranks.collectives import SINGLE_PROCESS
from cohort.ranks.worker_group import WorkerGroup
from cohort.records import ScoredGroup
from cohort.rollout import LocalEngine, RolloutCollector, RolloutEngine, Sampler, SamplingParams, StepKey
from cohort.sandbox import SharedSandbox
from cohort.trainer.build import WorkerSpec, build_worker
from cohort.trainer.evaluation import EvalResult, evaluate
from cohort.trainer.run_inputs import (
    Inputs,
    column_names,
    read_environments,
    read_eval_rows,
    read_evaluation,
    read_inputs,
    read_rewards,
    rollout_options,
)
from cohort.trainer.setup import open_engine, rank_device
from cohort.trainer.worker import TrainingWorkers


def evaluate_model(
    config: Config,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    notify: Callable[[str], None] = lambda text: None,
) -> EvalResult:
    """Evaluate `config.model`, which may be an adapter folder, on `config.eval`.

    Args:
        config: chat template, rewards and limits come from the other sections.
        on_progress: called with the number of prompts done and the total.
        notify: shows a message to the user, such as which sandbox is in use.

    Raises:
        UserError: the configuration, the data or a reward is invalid.
    """
    config = config.model_copy(update={"model": with_base(config.model)})
    resume_gc()
    assert config.eval is not None, "config.eval is required"
    device = resolve_device(config.hardware.device)
    tokenizer = load_tokenizer(config.model)
    sandbox = SharedSandbox(config.sandbox)
    environments = read_environments(config, tokenizer, sandbox)
    rows = read_eval_rows(config, config.eval, environments)
    # rewards get prompts under the name of the training column
    rewards = read_rewards(config, [*column_names(rows), config.data.prompt], environments, sandbox)
    for note in sandbox.notes:
        notify(note)
    evaluation = read_evaluation(config, config.eval, rows, tokenizer, rewards, environments)
    policy = load_policy(LoadRequest(config.model, device=device, tokenizer=tokenizer, trainable=False))
    check_vocabulary(policy, evaluation.prompts)
    ends = end_token_ids(policy, tokenizer)
    seqs = config.rollout.max_num_seqs
    sampler = Sampler(policy, end_token_ids=ends, max_num_seqs=seqs, tokenizer=tokenizer)
    options = rollout_options(config, environments)
    with closing(RolloutCollector(LocalEngine(sampler.sample), tokenizer, **options)) as collector:
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
    config: Config, *, rows: int, generations: int, notify: Callable[[str], None] = lambda text: None
) -> SampledRows:
    """Sample the first prompts of a training run with its initial weights, and score them. No file is written.

    With the local engine, the trajectories are the first ones of each group in the run's first step.

    Args:
        config: configuration of the run; `rollout.engine: auto` samples locally.
        rows: number of prompts.
        generations: trajectories per prompt.
        notify: shows a message to the user.

    Raises:
        UserError: the configuration, the data, a tool, an environment or a reward is invalid.
        TrainingError: the rollout engine failed.
    """
    config = set_engine(config, "local")
    resume_gc()
    inputs = read_inputs(config)
    for note in inputs.sandbox.notes:
        notify(note)
    sampling = replace(SamplingParams.for_training(config.rollout), num_generations=generations)
    prompts = PromptStream(inputs.prompts, seed=config.train.seed, shuffle=config.data.shuffle).take(rows)
    options = rollout_options(config, inputs.environments, notify=notify)
    with (
        _started_engine(config, inputs, notify) as engine,
        closing(RolloutCollector(engine, inputs.tokenizer, **options)) as collector,
    ):
        key = StepKey(purpose="train", seed=config.train.seed, step=0)
        groups = collector.collect(prompts, sampling, key)
        scored = inputs.rewards.score(groups, require_scores=False)
        collector.release(groups)
    return SampledRows(groups=scored, weights=inputs.rewards.weights, tokenizer=inputs.tokenizer)


@contextmanager
def _started_engine(config: Config, inputs: Inputs, notify: Callable[[str], None]) -> Iterator[RolloutEngine]:
    """Start the run's rollout engine, which the collector closes. Servers get the weights from a worker."""
    if not config.rollout.uses_servers:
        model, device = with_base(config.model), resolve_device(config.hardware.device)
        policy = load_policy(LoadRequest(model, device=device, tokenizer=inputs.tokenizer, trainable=False))
        check_vocabulary(policy, inputs.prompts.prompts)
        ends = end_token_ids(policy, inputs.tokenizer)
        seqs = config.rollout.max_num_seqs
        sampler = Sampler(policy, end_token_ids=ends, max_num_seqs=seqs, tokenizer=inputs.tokenizer)
        yield LocalEngine(sampler.sample)
        return
    setup = open_engine(config, inputs)
    with TemporaryDirectory(prefix="cohort-rollout-") as folder:
        spec = WorkerSpec(
            folder=Path(folder),
            num_steps=inputs.schedule.num_steps,
            checkpoint=None,
            micro_batch_tokens=inputs.longest_sequence_tokens,
            longest_sequence_tokens=inputs.longest_sequence_tokens,
        )
        device = rank_device(config, SINGLE_PROCESS)
        worker = build_worker(config, SINGLE_PROCESS, spec, device=device, tokenizer=inputs.tokenizer)
        workers = WorkerGroup(worker, SINGLE_PROCESS)
        yield setup.start(TrainingWorkers(workers), folder=spec.folder, notify=notify).engine
