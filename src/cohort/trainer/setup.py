"""Setting up a run: what rank 0 alone has, and what is checked before anything is trained."""

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from cohort.checkpoint import TrainerState
from cohort.config import Config
from cohort.data import PromptStream
from cohort.distributed import Ranks
from cohort.errors import UserError
from cohort.models import (
    check_offload,
    check_quantization,
    check_vocabulary,
    resolve_device,
    saved_bytes,
)
from cohort.plan import RunPlan
from cohort.plan.layout import check_cpu_offload, check_processes
from cohort.rollout import RolloutCollector
from cohort.run_files import DAMAGED
from cohort.trainer.collect_groups import Gatherer, build_gatherer
from cohort.trainer.parity import ParityGate
from cohort.trainer.rollout_engines import EngineSetup
from cohort.trainer.run_inputs import Inputs
from cohort.trainer.worker import Worker
from cohort.trainer.worker_calls import keep_waiting
from cohort.trainer.worker_group import WorkerGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything that the loop needs. The loop is rank 0's."""

    inputs: Inputs
    workers: WorkerGroup[Worker]
    data: PromptStream
    rollout: RolloutCollector
    gatherer: Gatherer
    parity: ParityGate | None  # None where the sampler is the trainer itself
    state: TrainerState | None  # of the checkpoint that the run goes on from


def build_run(
    config: Config,
    inputs: Inputs,
    workers: WorkerGroup[Worker],
    state: TrainerState | None,
    *,
    setup: EngineSetup,
    folder: Path,
    note: Callable[[str], None],
) -> Run:
    """What rank 0 alone has: the data's order, the rollout engine, and where the run stands.

    Args:
        config: of the run.
        inputs: of the run.
        workers: that train.
        state: of the checkpoint that the run goes on from.
        setup: of the rollout engine.
        folder: of the run.
        note: told what becomes of the rollout engine.

    Raises:
        UserError: the data do not go with the model, or with the checkpoint.
        TrainingError: the rollout engine cannot be started.
    """
    check_vocabulary(
        workers.local.policy, [*inputs.prompts.prompts, *(inputs.evaluation.prompts if inputs.evaluation else ())]
    )
    data = PromptStream(inputs.prompts, seed=config.train.seed, shuffle=config.data.shuffle)
    if state is not None:
        data.restore(state.data)
    with ExitStack() as if_it_fails:
        started = setup.start(workers, folder=folder, note=note)
        keep_ranks = partial(keep_waiting, workers)
        collector = RolloutCollector(started.engine, inputs.tokenizer, while_waiting=keep_ranks)
        if_it_fails.callback(collector.close)
        parity = started.gate(collector)
        gatherer = build_gatherer(config, inputs.plan, collector, data, inputs.rewards)
        if state is not None:
            gatherer.prefetcher.restore(state.pending)
        if_it_fails.pop_all()
    return Run(
        inputs=inputs,
        workers=workers,
        data=data,
        rollout=collector,
        gatherer=gatherer,
        parity=parity,
        state=state,
    )


def rank_device(config: Config, ranks: Ranks) -> torch.device:
    """The device of this rank.

    Raises:
        UserError: `hardware.device` does not exist on this machine, or makes a key pointless.
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
                f"rank {ranks.rank}: the launcher has started at least {ranks.local_rank + 1} processes on this "
                f"machine, which has {gpus} GPUs, and each process needs its own; use --nproc-per-node {gpus}, or "
                f"hardware.device: cpu"
            )
        device = torch.device("cuda", ranks.local_rank)
    if device.type == "cuda":
        use_expandable_segments()
        torch.cuda.set_device(device)  # kernels that are not PyTorch's own run on the current one
    return device


def use_expandable_segments() -> None:
    """Let segments of GPU memory grow, against fragmentation, unless the environment says how memory is allocated.

    In this process, and not by the environment, which vLLM's servers would inherit. Before anything is on the GPU.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


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


def check_disk_space(config: Config, worker: Worker, folder: Path) -> None:
    """Refuse to start a run whose checkpoints and final model cannot fit on the disk.

    Raises:
        UserError: names what is needed and what is free.
    """
    weights = saved_bytes(worker.policy)
    # A checkpoint is the model or its adapter, the optimizer's state, and a reference that is refreshed; one more is
    # being written while the kept ones are there.
    states = sum(engine.num_state_bytes for engine in worker.engines.values()) * worker.ranks.dp_size
    refreshed = weights if config.reference is not None and config.reference.refresh_every > 0 else 0
    checkpoint = sum(saved_bytes(engine.policy) for engine in worker.engines.values()) + states + refreshed
    kept = 0 if config.run.checkpoint_every == 0 else config.run.keep_checkpoints + 1
    ours = [p for p in (folder / "checkpoints").glob("*") if not p.name.startswith(DAMAGED)]  # these make room in time
    existing = sum(f.stat().st_size for p in ours for f in p.rglob("*") if f.is_file())
    needed = checkpoint * kept + weights - existing
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"run.dir: {str(folder)!r} has {_size(free)} free, and the run needs {_size(needed)} for "
            + (f"{kept} checkpoints and the final model" if kept else "the final model")
            + "; free some space, or give another folder"
            + (f", or lower run.keep_checkpoints (now {config.run.keep_checkpoints})" if kept else "")
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
