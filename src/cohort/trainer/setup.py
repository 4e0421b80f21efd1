"""Building a run from its configuration, cheapest first: text, data, tokenizer, and only then weights."""

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cohort.algorithms import build_algorithm
from cohort.checkpoint import TrainerState, load_engine_state
from cohort.config import Config, EvalConfig
from cohort.data import PromptRenderer, PromptSet, PromptStream, build_prompts, read_rows
from cohort.distributed import Ranks, Stopped
from cohort.engine import TrainEngine, learning_rate_factor
from cohort.errors import UserError
from cohort.evaluation import Evaluation, pick_success_reward
from cohort.metrics import PeakMemory, check_loggers
from cohort.plan import RunPlan, plan_run
from cohort.policy import (
    Collectives,
    Policy,
    check_lengths,
    check_offload,
    check_vocabulary,
    end_token_ids,
    load_policy,
    load_tokenizer,
    resolve_device,
)
from cohort.rewards import RewardRunner, build_rewards, check_columns
from cohort.rollout import LocalEngine, RolloutEngine, Sampler, SamplingParams
from cohort.trainer.crew import Crew

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What can be read and checked without loading any weights."""

    tokenizer: Any
    prompts: PromptSet
    rewards: RewardRunner
    evaluation: Evaluation | None
    plan: RunPlan

    @property
    def longest_sequence_tokens(self) -> int:
        """Input tokens of the longest training prompt with the longest completion."""
        return max(len(p.token_ids) for p in self.prompts.prompts) + self.plan.max_completion_tokens - 1

    @property
    def longest_path_tokens(self) -> int:
        """The same over training and evaluation: the most that the model ever sees at a time."""
        if self.evaluation is None:
            return self.longest_sequence_tokens
        longest = (
            max(len(p.token_ids) for p in self.evaluation.prompts) + self.evaluation.sampling.max_completion_tokens
        )
        return max(self.longest_sequence_tokens, longest - 1)

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
    """Everything that the loop needs. The loop is rank 0's."""

    inputs: Inputs
    crew: Crew
    data: PromptStream
    rollout: RolloutEngine
    sampling: SamplingParams
    state: TrainerState | None  # of the checkpoint that the run goes on from


def read_inputs(config: Config) -> Inputs:
    """Read data, tokenizer and rewards, and check that they fit together.

    Raises:
        UserError: something is missing or does not fit; no weights have been loaded.
    """
    check_loggers(config.run.log)
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
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOrder:
    """What rank 0 knows and the other ranks need to build their parts."""

    folder: Path  # of the run
    num_steps: int
    checkpoint: Path | None  # to go on from
    micro_batch_tokens: int  # the budget to begin with
    longest_sequence_tokens: int  # that there can be


def build_crew(config: Config, ranks: Ranks, order: BuildOrder, *, device: torch.device, tokenizer: Any) -> Crew:
    """Load the weights, from the model or from a checkpoint, and make everything that uses them. On every rank.

    Args:
        config: of the run, the same on every rank.
        ranks: this process among those of the run.
        order: from rank 0.
        device: of this rank.
        tokenizer: rank 0's; None elsewhere.

    Raises:
        UserError: on rank 0, where the model cannot be used, or a machine does not see the run folder.
        Stopped: on the other ranks then.
    """
    rollout, train = config.rollout, config.train
    _check_folder_is_shared(order.folder, ranks)
    path = config.model.path if order.checkpoint is None else str(order.checkpoint)
    load = partial(
        load_policy,
        device=device,
        tokenizer=tokenizer,
        ranks=ranks,
        collectives=Collectives(),
        longest_sequence_tokens=order.longest_sequence_tokens,
    )
    policy = load(config.model.model_copy(update={"path": path}))
    ranks.first(lambda: _check_head(config, policy))
    algorithm = build_algorithm(config.algorithm, max_completion_tokens=rollout.max_completion_tokens)
    reference = load(config.model, trainable=False) if algorithm.needs_reference else None
    factor = partial(
        learning_rate_factor,
        warmup=train.warmup_steps * train.updates_per_rollout,
        total=order.num_steps * train.updates_per_rollout,
        schedule=train.lr_schedule,
    )
    engine = TrainEngine(
        policy,
        train,
        micro_batch_tokens=order.micro_batch_tokens,
        learning_rate=lambda updates_done: train.learning_rate * factor(updates_done),
        temperature=rollout.temperature,
        reference=reference,
        ranks=ranks,
    )
    if order.checkpoint is not None:
        engine_state = engine.state_dict()
        load_engine_state(order.checkpoint, engine_state, ranks)
        engine.load_state_dict(engine_state)
    ends = ranks.first(lambda: end_token_ids(policy, tokenizer))
    return Crew(
        ranks=ranks,
        policy=policy,
        algorithm=algorithm,
        engine=engine,
        sampler=Sampler(policy, end_token_ids=ends, max_num_seqs=rollout.max_num_seqs),
        tokenizer=tokenizer,
        memory=PeakMemory(device),
    )


def _check_head(config: Config, policy: Policy) -> None:
    """Compare the `train` section with the model's head.

    Raises:
        UserError: a key has no effect on it.
    """
    if config.train.gradients_in_forward and not policy.has_plain_head:
        raise UserError(
            "train.gradients_in_forward: true has no effect on this model, whose head is not a linear layer that is "
            "known here, so that it computes its full logits; remove it"
        )


def _check_folder_is_shared(folder: Path, ranks: Ranks) -> None:
    """Every rank writes its part of a checkpoint into the run folder, so all of them have to see it.

    Raises:
        UserError: on rank 0, where one of them does not.
        Stopped: on the other ranks then.
    """
    if ranks.smallest(folder.is_dir()):
        return
    if not ranks.is_first:
        raise Stopped
    raise UserError(
        f"run.dir: {str(folder)!r} is not there on every machine of the run; give a folder on a file system that all "
        "of them share"
    )


def build_run(config: Config, inputs: Inputs, crew: Crew, state: TrainerState | None) -> Run:
    """What rank 0 alone has: the data's order, the rollout engine, and where the run stands.

    Raises:
        UserError: the data do not go with the model, or with the checkpoint.
    """
    rollout = config.rollout
    check_vocabulary(crew.policy, [*inputs.prompts.prompts, *(inputs.evaluation.prompts if inputs.evaluation else ())])
    data = PromptStream(inputs.prompts, seed=config.train.seed, shuffle=config.data.shuffle)
    if state is not None:
        data.restore(state.data)
    engine = LocalEngine(crew.sample, inputs.tokenizer)
    engine.load_weights(policy_version=crew.engine.updates_done)
    return Run(
        inputs=inputs,
        crew=crew,
        data=data,
        rollout=engine,
        sampling=SamplingParams(
            num_generations=rollout.num_generations,
            max_completion_tokens=rollout.max_completion_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
        ),
        state=state,
    )


def rank_device(config: Config, ranks: Ranks) -> torch.device:
    """The device of this rank.

    Raises:
        UserError: `hardware.device` does not exist on this machine, or makes a key of `model` pointless.
    """
    device = resolve_device(config.hardware.device)
    check_offload(config.model, device)
    if device.type == "cuda" and ranks.world_size > 1:
        gpus = torch.cuda.device_count()
        if ranks.local_rank >= gpus:
            raise UserError(
                f"rank {ranks.rank}: the launcher has started at least {ranks.local_rank + 1} processes on this "
                f"machine, which has {gpus} GPUs, and each process needs its own; use --nproc-per-node {gpus}, or "
                f"hardware.device: cpu"
            )
        device = torch.device("cuda", ranks.local_rank)
    if device.index is not None:
        torch.cuda.set_device(device)  # kernels that are not PyTorch's own run on the current one
    return device


def check_steps(plan: RunPlan, state: TrainerState | None, folder: Path) -> None:
    """Compare the steps of the run with those that are behind it.

    Raises:
        UserError: it is to have fewer than it has already.
    """
    if state is not None and state.steps_done > plan.num_steps:
        raise UserError(
            f"train.steps: the run in {str(folder)!r} has {state.steps_done} steps behind it already, more than "
            f"{plan.num_steps}; use at least {state.steps_done}, or another run.dir"
        )


def knows_budget(state: TrainerState, wanted: int | str, world_size: int) -> bool:
    """Whether the budget of a checkpoint is what the configuration asks for: with `auto`, on as many processes."""
    return state.micro_batch_tokens_wanted == wanted and (wanted != "auto" or state.processes == world_size)


def first_budget(config: Config, inputs: Inputs, state: TrainerState | None, world_size: int) -> int:
    """The token budget that a run begins or goes on with. With `auto` it is the most that can be of use."""
    wanted = config.train.micro_batch_tokens
    if state is not None and knows_budget(state, wanted, world_size):
        return state.micro_batch_tokens
    if wanted == "auto":
        return math.ceil(inputs.plan.completions_per_step / world_size) * inputs.longest_sequence_tokens
    return wanted


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


def columns_besides(rows: Rows, prompt_column: str) -> list[str]:
    """The names of the columns that reach the rewards."""
    return sorted({column for row in rows for column in row} - {prompt_column})


def _check_eval_columns(columns: Sequence[str], rewards: RewardRunner) -> None:
    for i, function in enumerate(rewards.functions):
        check_columns(
            function.function, name=function.name, args=function.args, columns=columns, field=f"eval.path, rewards[{i}]"
        )
