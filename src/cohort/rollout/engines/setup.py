"""How a run sets up its rollout engine: what an engine gets of the run, and what it gives back."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from cohort.config import Config
from cohort.models import AdapterSpec, Policy
from cohort.records import Prompt, RolloutGroup
from cohort.rollout.collector import RolloutCollector
from cohort.rollout.engines.base import RolloutEngine, SampledCompletion, SampleRequest, SamplingParams, StepKey
from cohort.rollout.engines.servers.cuda_ipc import IpcHandle

# Receives an iterator of (name as in a saved model, full tensor), and CUDA IPC handles of the ranks' buffers by GPU.
SendWeights = Callable[[Iterator[tuple[str, Tensor]], Mapping[str, IpcHandle]], None]
# Samples the same prompts on every server; returns the groups by server address. See `ServerEngine`.
SampleOnEachServer = Callable[
    [RolloutCollector, Sequence[Prompt], SamplingParams, StepKey], Mapping[str, Sequence[RolloutGroup]]
]

# Starts processes that sample whole groups; returns options of `RolloutCollector`. See `ServerEngine.start_workers`.
StartWorkers = Callable[..., dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInputs:
    """What is known of a run before its weights are loaded."""

    config: Config
    tokenizer: Any
    adapter: AdapterSpec | None  # None: all weights are trained
    longest_sequence_tokens: int  # longest prompt plus the tokens after it, evaluation included
    engine: Any = None  # the user's object, with `rollout.engine: object`


class TrainingProcesses(Protocol):
    """The training processes of a run, which have its weights. For rank 0's training thread.

    Weights are sharded over ranks, so what reads them is a collective: all ranks take part in each call.
    """

    @property
    def policy(self) -> Policy:
        """The policy, as rank 0 has it."""
        ...

    @property
    def num_updates(self) -> int:
        """Optimizer steps done: the policy version of the current weights."""
        ...

    def sample(self, requests: Sequence[SampleRequest]) -> list[SampledCompletion]:
        """Sample completions on all ranks, one per call, in order. All requests have the same purpose."""
        ...

    def send_weights(self, send: SendWeights, dtype: torch.dtype, *, share: bool = False) -> None:
        """Gather the weights tensor by tensor, in the order of `weight_specs(policy, dtype)`, and pass them to `send`.

        Args:
            send: need not consume the iterator to its end.
            dtype: dtype of the tensors.
            share: share every rank's copy of the tensors with other processes on its GPU (CUDA IPC).
        """
        ...

    def save_adapter(self, folder: Path) -> None:
        """Write the trained adapter as a folder.

        Raises:
            TrainingError: the disk is full.
        """
        ...

    def gpus(self) -> frozenset[str]:
        """Return the UUIDs of the ranks' GPUs; none on CPU."""
        ...

    def empty_cache(self) -> None:
        """Release the GPU memory that PyTorch caches on all ranks."""
        ...

    def keep_alive(self) -> None:
        """Renew the other ranks' deadlines. Call this regularly while rank 0 waits."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedEngine:
    """A running rollout engine that has the trainer's weights."""

    engine: RolloutEngine
    # for the parity gate; None if the engine samples with the trainer's own weights
    sample_on_each_server: SampleOnEachServer | None = None
    servers_dtype: torch.dtype | None = None  # of their weights; None without servers
    start_workers: StartWorkers | None = None  # None if trajectories can only run in this process
    num_own_servers: int = 0  # that this run has started


class EngineSetup(Protocol):
    """A rollout engine that can be started: its requirements are met. Created before models are loaded."""

    def __init__(self, inputs: EngineInputs):
        """Check the requirements of the engine.

        Raises:
            UserError: one is missing, or the engine does not support this run.
        """
        ...

    @property
    def shares_gpus(self) -> bool:
        """Whether servers and training take turns on the same GPUs."""
        ...

    @property
    def keeps_base(self) -> bool:
        """Whether these servers keep their base model on the GPU during training."""
        ...

    def start(self, processes: TrainingProcesses, *, folder: Path, notify: Callable[[str], None]) -> StartedEngine:
        """Start the engine.

        Args:
            processes: provide the weights.
            folder: run folder.
            notify: shows a message to the user, now and during the run.

        Raises:
            TrainingError: the engine cannot be started.
        """
        ...
