"""Building a run: the parts that every rank has, those of rank 0 alone, and what is checked on the way."""

import math
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cohort.algorithms import build_algorithm
from cohort.checkpoint import TrainerState, load_engine_state
from cohort.config import Config
from cohort.data import PromptStream
from cohort.distributed import Ranks, Stopped
from cohort.engine import TrainEngine, learning_rate_factor
from cohort.errors import UserError
from cohort.metrics import PeakMemory
from cohort.plan import RunPlan
from cohort.policy import (
    Collectives,
    Policy,
    check_offload,
    check_vocabulary,
    end_token_ids,
    load_policy,
    resolve_device,
)
from cohort.rollout import LocalEngine, RolloutEngine, Sampler
from cohort.trainer.crew import Crew
from cohort.trainer.gather import Gatherer, build_gatherer
from cohort.trainer.inputs import Inputs
from cohort.trainer.vllm import ParityGate, Servers, make_parity_gate, start_engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything that the loop needs. The loop is rank 0's."""

    inputs: Inputs
    crew: Crew
    data: PromptStream
    rollout: RolloutEngine
    gatherer: Gatherer
    parity: ParityGate | None  # None where the sampler is the trainer itself
    state: TrainerState | None  # of the checkpoint that the run goes on from


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
    load = partial(
        load_policy,
        device=device,
        tokenizer=tokenizer,
        ranks=ranks,
        collectives=Collectives(),
        longest_sequence_tokens=order.longest_sequence_tokens,
    )
    algorithm = build_algorithm(
        config.algorithm,
        max_completion_tokens=rollout.max_completion_tokens,
        auto_correction="token_truncate" if rollout.engine == "vllm" else "none",
    )
    if config.model.adapter is not None:
        policy = load(
            config.model,
            adapter_checkpoint=order.checkpoint,
            keep_reference=algorithm.needs_reference,
            seed=train.seed,
        )
        reference = policy.as_reference() if algorithm.needs_reference else None
    else:
        path = config.model.path if order.checkpoint is None else str(order.checkpoint)
        policy = load(config.model.model_copy(update={"path": path}))
        reference = load(config.model, trainable=False) if algorithm.needs_reference else None
    ranks.first(lambda: _check_head(config, policy))
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


def build_run(
    config: Config,
    inputs: Inputs,
    crew: Crew,
    state: TrainerState | None,
    *,
    servers: Servers | None,
    folder: Path,
    note: Callable[[str], None],
) -> Run:
    """What rank 0 alone has: the data's order, the rollout engine, and where the run stands.

    Args:
        config: of the run.
        inputs: of the run.
        crew: that trains.
        state: of the checkpoint that the run goes on from.
        servers: that sample; None where the training processes do.
        folder: of the run.
        note: told what becomes of servers.

    Raises:
        UserError: the data do not go with the model, or with the checkpoint.
        TrainingError: no server can be started.
    """
    check_vocabulary(crew.policy, [*inputs.prompts.prompts, *(inputs.evaluation.prompts if inputs.evaluation else ())])
    data = PromptStream(inputs.prompts, seed=config.train.seed, shuffle=config.data.shuffle)
    if state is not None:
        data.restore(state.data)
    with ExitStack() as if_it_fails:
        engine: RolloutEngine
        parity = None
        if servers is None:
            engine = LocalEngine(crew.sample, inputs.tokenizer)
            engine.load_weights(policy_version=crew.engine.updates_done)
        else:
            engine = start_engine(config, servers, crew, tokenizer=inputs.tokenizer, folder=folder, note=note)
            if_it_fails.callback(engine.close)
            parity = make_parity_gate(config, servers, inputs, crew, engine)
        gatherer = build_gatherer(config, inputs.plan, engine, data, inputs.rewards)
        if state is not None:
            gatherer.prefetcher.restore(state.pending)
        if_it_fails.pop_all()
    return Run(
        inputs=inputs,
        crew=crew,
        data=data,
        rollout=engine,
        gatherer=gatherer,
        parity=parity,
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
    trained = (p for p in policy.model.parameters() if p.requires_grad)  # which are what is saved
    weights = sum(p.numel() * p.element_size() for p in trained)
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
