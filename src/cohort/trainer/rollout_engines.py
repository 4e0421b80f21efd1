"""The interface for setting up a rollout engine, and the engine `local`: the training processes sample."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from cohort.config import Config
from cohort.ranks.worker_group import WorkerGroup
from cohort.rollout import LocalEngine, RolloutCollector, RolloutEngine
from cohort.trainer.inputs import Inputs
from cohort.trainer.parity import ParityGate
from cohort.trainer.worker import Worker, sample


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedEngine:
    """A running rollout engine that has the trainer's weights."""

    engine: RolloutEngine
    # Creates the parity gate; returns None if logprobs need no comparison.
    gate: Callable[[RolloutCollector], ParityGate | None] = lambda collector: None


class EngineSetup(Protocol):
    """A rollout engine that can be started: its requirements are met. Created before models are loaded."""

    @property
    def shares_gpus(self) -> bool:
        """Whether servers and training take turns on the same GPUs."""
        ...

    @property
    def keeps_base(self) -> bool:
        """Whether these servers keep their base model on the GPU during training."""
        ...

    def start(self, workers: WorkerGroup[Worker], *, folder: Path, notify: Callable[[str], None]) -> StartedEngine:
        """Start the engine.

        Args:
            workers: provide the weights.
            folder: run folder.
            notify: shows a message to the user, now and during the run.

        Raises:
            TrainingError: the engine cannot be started.
        """
        ...


class LocalSetup:
    """Set up sampling in the training processes, with the weights that they train."""

    shares_gpus = keeps_base = False

    def __init__(self, config: Config, inputs: Inputs):
        """Nothing to prepare."""

    def start(self, workers: WorkerGroup[Worker], *, folder: Path, notify: Callable[[str], None]) -> StartedEngine:
        """Create an engine that samples on all workers."""
        engine = LocalEngine(partial(sample, workers))
        engine.update_weights(policy_version=workers.local.engine.updates_done)
        return StartedEngine(engine=engine)
