"""How the engine that `rollout.engine` names is set up for a run."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from cohort.config import Config
from cohort.rollout import RolloutCollector, RolloutEngine
from cohort.trainer.parity import ParityGate
from cohort.trainer.run_inputs import Inputs
from cohort.trainer.worker import Worker
from cohort.trainer.worker_group import WorkerGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedEngine:
    """An engine that samples from the trainer's weights."""

    engine: RolloutEngine
    # Compares its numbers with the trainer's; None where they are the trainer's own, or are not to be compared.
    gate: Callable[[RolloutCollector], ParityGate | None] = lambda collector: None


class EngineSetup(Protocol):
    """An engine that has what it needs, before models are loaded. Nothing is started yet."""

    @property
    def shares_gpus(self) -> bool:
        """Whether servers take turns with training on its GPUs."""
        ...

    def start(self, workers: WorkerGroup[Worker], *, folder: Path, note: Callable[[str], None]) -> StartedEngine:
        """Start the engine.

        Args:
            workers: whose weights it samples from.
            folder: of the run.
            note: told what a person should know, now and later.

        Raises:
            TrainingError: it cannot be started.
        """
        ...


def find_engine(config: Config, inputs: Inputs) -> EngineSetup:
    """The engine of a run: what `SamplingConfig.setup` of its section names, called with both arguments.

    Raises:
        UserError: the engine lacks something, or cannot sample what the run asks for.
    """
    module, _, name = config.rollout.setup.partition(":")
    find = cast(Callable[[Config, Inputs], EngineSetup], getattr(import_module(module), name))
    return find(config, inputs)
