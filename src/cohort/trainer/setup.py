"""Building a run from its configuration, cheapest first: text, data, tokenizer, and only then weights."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cohort.algorithms import Algorithm, build_algorithm
from cohort.checkpoint import TrainerState, load_engine_state, load_trainer_state
from cohort.config import Config, EvalConfig
from cohort.data import PromptRenderer, PromptSet, PromptStream, build_prompts, read_rows
from cohort.engine import TrainEngine, learning_rate_factor
from cohort.errors import UserError
from cohort.evaluation import Evaluation, pick_success_reward
from cohort.metrics import check_loggers
from cohort.plan import RunPlan, plan_run
from cohort.policy import (
    Policy,
    check_lengths,
    check_vocabulary,
    end_token_ids,
    load_policy,
    load_tokenizer,
    resolve_device,
)
from cohort.rewards import RewardRunner, build_rewards, check_columns
from cohort.rollout import LocalEngine, RolloutEngine, SamplingParams

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What can be read and checked without loading any weights."""

    tokenizer: Any
    prompts: PromptSet
    rewards: RewardRunner
    evaluation: Evaluation | None
    plan: RunPlan
    device: torch.device

    def notes(self, max_prompt_tokens: int) -> list[str]:
        """What a person should know of the data before the run starts."""
        counts = [("training", self.prompts.num_dropped_overlong, len(self.prompts.prompts))]
        if self.evaluation is not None:
            counts.append(("held-out", self.evaluation.num_dropped_overlong, len(self.evaluation.prompts)))
        return [
            f"{dropped} {kind} prompts over rollout.max_prompt_tokens: {max_prompt_tokens} dropped, {left} left"
            for kind, dropped, left in counts
            if dropped
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything that the loop needs."""

    inputs: Inputs
    policy: Policy
    data: PromptStream
    rollout: RolloutEngine
    sampling: SamplingParams
    algorithm: Algorithm
    engine: TrainEngine
    state: TrainerState  # as the run starts or goes on


def read_inputs(config: Config) -> Inputs:
    """Read data, tokenizer and rewards, and check that they fit together.

    Raises:
        UserError: something is missing or does not fit; no weights have been loaded.
    """
    check_loggers(config.run.log)
    device = resolve_device(config.hardware.device)
    rows = read_rows(
        config.data.path, field="data.path", base_dir=Path.cwd(), split=config.data.split, name=config.data.name
    )
    columns = columns_besides(rows, config.data.prompt)
    rewards = RewardRunner(build_rewards(config.rewards, base_dir=Path.cwd(), columns=columns), columns=columns)
    eval_rows = read_eval_rows(config.eval) if config.eval else []
    if config.eval:
        _check_eval_columns(columns_besides(eval_rows, config.eval.prompt or config.data.prompt), rewards)
    tokenizer = load_tokenizer(config.model)
    prompts = build_prompts(
        rows,
        _renderer(config, tokenizer, config.data.prompt),
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        overlong=config.data.overlong_prompts,
        field="data.path",
    )
    evaluation = read_evaluation(config, config.eval, eval_rows, tokenizer, rewards) if config.eval else None
    check_lengths(config.model, prompts.prompts, max_completion_tokens=config.rollout.max_completion_tokens)
    if evaluation is not None:
        check_eval_lengths(config, evaluation)
    return Inputs(
        tokenizer=tokenizer,
        prompts=prompts,
        rewards=rewards,
        evaluation=evaluation,
        plan=plan_run(config, num_prompts=len(prompts.prompts)),
        device=device,
    )


def build_run(config: Config, inputs: Inputs, *, checkpoint: Path | None) -> Run:
    """Load the weights, from the model or from a checkpoint, and make everything that uses them."""
    rollout, train, plan = config.rollout, config.train, inputs.plan
    source = config.model if checkpoint is None else config.model.model_copy(update={"path": str(checkpoint)})
    policy = load_policy(source, device=inputs.device, tokenizer=inputs.tokenizer)
    check_vocabulary(policy, [*inputs.prompts.prompts, *(inputs.evaluation.prompts if inputs.evaluation else ())])
    algorithm = build_algorithm(config.algorithm, max_completion_tokens=rollout.max_completion_tokens)
    reference = None
    if algorithm.needs_reference:
        reference = load_policy(config.model, device=inputs.device, tokenizer=inputs.tokenizer, trainable=False)
    updates = train.updates_per_rollout
    factor = partial(
        learning_rate_factor,
        warmup=train.warmup_steps * updates,
        total=plan.num_steps * updates,
        schedule=train.lr_schedule,
    )
    engine = TrainEngine(
        policy,
        train,
        learning_rate=lambda updates_done: train.learning_rate * factor(updates_done),
        temperature=rollout.temperature,
        reference=reference,
    )
    data = PromptStream(inputs.prompts, seed=train.seed, shuffle=config.data.shuffle)
    state = TrainerState(steps_done=0, data=data.state(), num_tokens=0, seconds=0.0)
    if checkpoint is not None:
        state = load_trainer_state(checkpoint)
        data.restore(state.data)
        engine.load_state_dict(load_engine_state(checkpoint))
    sampler = make_rollout_engine(config, policy, inputs.tokenizer)
    sampler.load_weights(policy_version=engine.updates_done)
    return Run(
        inputs=inputs,
        policy=policy,
        data=data,
        rollout=sampler,
        sampling=SamplingParams(
            num_generations=rollout.num_generations,
            max_completion_tokens=rollout.max_completion_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
        ),
        algorithm=algorithm,
        engine=engine,
        state=state,
    )


def check_disk_space(config: Config, policy: Policy, folder: Path) -> None:
    """Refuse to start a run whose checkpoints and final model cannot fit on the disk.

    Raises:
        UserError: names what is needed and what is free.
    """
    weights = sum(p.numel() * p.element_size() for p in policy.model.parameters())
    # A checkpoint is the weights and AdamW's two moments; one more is being written while the kept ones are there.
    kept = 0 if config.run.checkpoint_every == 0 else config.run.keep_checkpoints + 1
    existing = sum(f.stat().st_size for f in (folder / "checkpoints").rglob("*") if f.is_file())
    needed = weights * (3 * kept + 1) - existing
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"run.dir: {str(folder)!r} has {free / 1e9:.1f} GB free, and the run needs {needed / 1e9:.1f} GB for "
            + (f"{kept} checkpoints and the final model" if kept else "the final model")
            + "; free some space, or give another folder"
            + (f", or lower run.keep_checkpoints (now {config.run.keep_checkpoints})" if kept else "")
        )


def _renderer(config: Config, tokenizer: Any, column: str) -> PromptRenderer:
    return PromptRenderer(
        tokenizer,
        prompt_column=column,
        system_prompt=config.data.system_prompt,
        apply_chat_template=config.data.apply_chat_template,
        chat_template_kwargs=config.data.chat_template_kwargs,
    )


def read_evaluation(
    config: Config, settings: EvalConfig, rows: Rows, tokenizer: Any, rewards: RewardRunner
) -> Evaluation:
    """The held-out prompts and how they are sampled and judged.

    Raises:
        UserError: a prompt or a setting does not work.
    """
    prompts = build_prompts(
        rows[: settings.max_prompts],
        _renderer(config, tokenizer, settings.prompt or config.data.prompt),
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        overlong=config.data.overlong_prompts,
        field="eval.path",
    )
    return Evaluation(
        prompts=prompts.prompts,
        num_dropped_overlong=prompts.num_dropped_overlong,
        sampling=SamplingParams(
            num_generations=settings.num_samples,
            max_completion_tokens=settings.max_completion_tokens or config.rollout.max_completion_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
        ),
        seed=config.train.seed,
        success_reward=pick_success_reward(settings.success_reward, [f.name for f in rewards.functions]),
        success_threshold=settings.success_threshold,
        prompts_at_a_time=max(1, config.rollout.max_num_seqs // settings.num_samples),
    )


def check_eval_lengths(config: Config, evaluation: Evaluation) -> None:
    """As `check_lengths`, for the held-out prompts.

    Raises:
        UserError: the model would have to extrapolate.
    """
    limit = evaluation.sampling.max_completion_tokens
    check_lengths(config.model, evaluation.prompts, max_completion_tokens=limit, field="eval.max_completion_tokens")


def read_eval_rows(settings: EvalConfig) -> Rows:
    """The rows of the held-out data."""
    return read_rows(settings.path, field="eval.path", base_dir=Path.cwd(), split=settings.split, name=settings.name)


def make_rollout_engine(config: Config, policy: Policy, tokenizer: Any) -> RolloutEngine:
    """The engine that `rollout.engine` names."""
    return LocalEngine(
        policy,
        tokenizer,
        end_token_ids=end_token_ids(policy, tokenizer),
        max_num_seqs=config.rollout.max_num_seqs,
    )


def columns_besides(rows: Rows, prompt_column: str) -> list[str]:
    """The names of the columns that reach the rewards."""
    return sorted({column for row in rows for column in row} - {prompt_column})


def _check_eval_columns(columns: Sequence[str], rewards: RewardRunner) -> None:
    for i, function in enumerate(rewards.functions):
        check_columns(
            function.function, name=function.name, args=function.args, columns=columns, field=f"eval.path, rewards[{i}]"
        )
