"""Set up the `local` rollout engine: the training processes sample with the weights that they train."""

from collections.abc import Callable
from pathlib import Path

from cohort.rollout.engines.local.local_engine import LocalEngine
from cohort.rollout.engines.setup import EngineInputs, StartedEngine, TrainingProcesses


class LocalSetup:
    """Set up sampling in the training processes."""

    shares_gpus = keeps_base = False

    def __init__(self, inputs: EngineInputs):
        """Nothing to prepare."""

    def start(self, processes: TrainingProcesses, *, folder: Path, notify: Callable[[str], None]) -> StartedEngine:
        """Create an engine that samples on all ranks."""
        engine = LocalEngine(processes.sample)
        engine.update_weights(policy_version=processes.num_updates)
        return StartedEngine(engine=engine)
