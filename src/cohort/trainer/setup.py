"""Set up a run on rank 0: devices, checks, the token budget, and the parts that the training loop uses."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from cohort.config import Config
from cohort.data import PromptStream, StreamedPrompts
from cohort.errors import UserError
from cohort.models import (
    check_offload,
    check_quantization,
    check_vocabulary,
    resolve_device,
    saved_bytes,
)
from cohort.plan import RunSchedule
from cohort.plan.layout import check_cpu_offload, check_processes
from cohort.ranks.collectives import Ranks
from cohort.ranks.worker_group import WorkerGroup
from cohort.rollout import RolloutCollector
from cohort.rollout.engines import engine_setup
from cohort.rollout.engines.setup import EngineInputs, EngineSetup
from cohort.run.files import DAMAGED
from cohort.trainer.checkpoint import TrainerState
from cohort.trainer.collect_groups import GroupCollector, build_group_collector
from cohort.trainer.inputs import Inputs
from cohort.trainer.open_run import OpenRun
from cohort.trainer.parity import ParityGate, make_parity_gate
from cohort.trainer.worker import RewardRanks, TrainingWorkers, Worker, keep_waiting


def open_engine(config: Config, inputs: Inputs) -> EngineSetup:
    """Set up the engine of `rollout.engine`.

    Raises:
        UserError: a requirement of the engine is missing, or it does not support this run.
    """
    return engine_setup(config.rollout.engine)(
        EngineInputs(
            config=config,
            tokenizer=inputs.tokenizer,
            adapter=inputs.adapter,
            longest_sequence_tokens=inputs.longest_sequence_tokens,
            engine=inputs.engine,
        )
    )


def can_reuse_budget(state: TrainerState, wanted: int | str, world_size: int) -> bool:
    """Whether the checkpoint's budget still applies: same setting and, for `auto`, same number of processes."""
    return state.micro_batch_tokens_wanted == wanted and (wanted != "auto" or state.processes == world_size)


def initial_budget(config: Config, inputs: Inputs, state: TrainerState | None, ranks: Ranks) -> int:
    """Initial token budget of a new or resumed run. With `auto`: the largest that is useful."""
    wanted = config.train.micro_batch_tokens
    if state is not None and can_reuse_budget(state, wanted, ranks.world_size):
        return state.micro_batch_tokens
    if wanted == "auto":
        shard = inputs.worst_case_shard(ranks.dp_size)
        return shard.num_sequences * shard.sequence_tokens
    return wanted


def find_auto_budget(
    config: Config,
    inputs: Inputs,
    workers: WorkerGroup[Worker],
    state: TrainerState | None,
    notify: Callable[[str], None],
) -> None:
    """Find the token budget by trying, if `train.micro_batch_tokens` is `auto` and no checkpoint has one."""
    wanted, ranks = config.train.micro_batch_tokens, workers.ranks
    if wanted != "auto" or (state and can_reuse_budget(state, wanted, ranks.world_size)):
        return
    largest = workers.local.engine.budget.tokens
    found = workers.call(Worker.find_budget, inputs.worst_case_shard(ranks.dp_size), largest)[0]
    reason = "one rank's share of a step fits" if found == largest else "the largest that fits"
    notify(f"using train.micro_batch_tokens={found} ({reason})")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComponents:
    """Everything that the training loop uses, on rank 0."""

    inputs: Inputs
    workers: WorkerGroup[Worker]
    data: PromptStream | StreamedPrompts
    collector: RolloutCollector
    group_collector: GroupCollector
    parity: ParityGate | None  # None for the local engine, which shares the trainer's weights
    state: TrainerState | None  # state of the checkpoint to resume from


def build_run(
    run: OpenRun, workers: WorkerGroup[Worker], state: TrainerState | None, *, setup: EngineSetup, folder: Path
) -> RunComponents:
    """Start the rollout engine and restore the data order and pending prompts.

    Args:
        run: closes the engine.
        workers: workers of all ranks.
        state: state of the checkpoint to resume from; None for a new run.
        setup: setup of the rollout engine.
        folder: run folder.

    Raises:
        UserError: the data do not match the model or the checkpoint.
        TrainingError: the rollout engine cannot be started.
    """
    config, inputs = run.config, run.inputs
    held_out = inputs.evaluation.prompts if inputs.evaluation else ()
    if workers.ranks.world_size > 1:
        workers.local.scorer, inputs.rewards.on_ranks = inputs.rewards.scorer, RewardRanks(workers)
    check_vocabulary(workers.local.policy, chain(inputs.prompts.prompts, held_out), inputs.tokenizer)
    check = partial(check_vocabulary, workers.local.policy, tokenizer=inputs.tokenizer)
    data = inputs.prompt_stream(config, check=check)
    if state is not None:
        data.restore(state.data)
    started = setup.start(TrainingWorkers(workers), folder=folder, notify=run.notify)
    collector = run.collector(
        started.engine,
        while_waiting=partial(keep_waiting, workers),
        workers=workers,
        start_workers=started.start_workers,
        num_own_servers=started.num_own_servers,
    )
    parity = make_parity_gate(config, inputs.prompts.prompts, workers, started, collector)
    group_collector = build_group_collector(config, inputs.schedule, collector, data, inputs.rewards)
    if state is not None:
        group_collector.prefetcher.restore(state.pending)
    return RunComponents(
        inputs=inputs,
        workers=workers,
        data=data,
        collector=collector,
        group_collector=group_collector,
        parity=parity,
        state=state,
    )


def rank_device(config: Config, ranks: Ranks) -> torch.device:
    """Return the device of this rank and make it the current one.

    Raises:
        UserError: `hardware.device` does not exist on this machine, or a key has no effect on it.
    """
    device = resolve_device(config.hardware.device)
    check_offload(config.model, device)
    check_cpu_offload(config, on_gpu=device.type != "cpu", processes=ranks.world_size)
    check_processes(config, ranks.world_size)
    for field, kind in config.quantized():
        check_quantization(kind, field=field)
    if device.type == "cuda" and ranks.world_size > 1:
        gpus = torch.cuda.device_count()
        if ranks.local_rank >= gpus:
            raise UserError(
                f"rank {ranks.rank}: the launcher started at least {ranks.local_rank + 1} processes on this machine, "
                f"which has {gpus} GPUs, but each process needs its own; use --nproc-per-node {gpus}, or "
                f"hardware.device: cpu"
            )
        device = torch.device("cuda", ranks.local_rank)
    if device.type == "cuda":
        use_expandable_segments()
        torch.cuda.set_device(device)  # custom kernels run on the current device
    return device


def use_expandable_segments() -> None:
    """Reduce fragmentation with expandable segments, unless the environment configures the CUDA allocator.

    Set through PyTorch rather than the environment, which servers would inherit. Call before the first allocation.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def check_steps(schedule: RunSchedule, state: TrainerState | None, folder: Path) -> None:
    """Check that a resumed run has at least as many steps as it has already done.

    Raises:
        UserError: it has fewer.
    """
    if state is not None and state.steps_done > schedule.num_steps:
        raise UserError(
            f"train.steps: the run in {str(folder)!r} has already done {state.steps_done} steps, more than "
            f"{schedule.num_steps}; use at least {state.steps_done}, or another run.dir"
        )


def check_disk_space(config: Config, worker: Worker, folder: Path) -> None:
    """Check that the disk has room for the run's checkpoints and final model.

    Raises:
        UserError: it has not.
    """
    weights = saved_bytes(worker.policy)
    # A checkpoint holds the model or its adapter, the optimizer state, and a reference if it is refreshed. While one is
    # written, the kept ones still exist.
    states = sum(engine.num_state_bytes for engine in worker.engines.values()) * worker.ranks.dp_shard
    refreshed = weights if config.reference is not None and config.reference.refresh_every > 0 else 0
    checkpoint = sum(saved_bytes(engine.policy) for engine in worker.engines.values()) + states + refreshed
    kept = 0 if config.run.checkpoint_every == 0 else config.run.keep_checkpoints + 1
    old = [p for p in (folder / "checkpoints").glob("*") if not p.name.startswith(DAMAGED)]  # will be replaced
    existing = sum(f.stat().st_size for p in old for f in p.rglob("*") if f.is_file())
    needed = checkpoint * kept + weights - existing
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"run.dir: {str(folder)!r} has {_size(free)} free, but the run needs {_size(needed)} for "
            + (f"{kept} checkpoints and the final model" if kept else "the final model")
            + "; free some space, or use another folder"
            + (f", or lower run.keep_checkpoints (now {config.run.keep_checkpoints})" if kept else "")
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
