"""Set up the `local` rollout engine: the training processes sample."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from cohort.config import Config
from cohort.rollout import LocalEngine
from cohort.trainer.rollout_engines import StartedEngine
from cohort.trainer.run_inputs import Inputs
from cohort.trainer.worker import Worker
from cohort.trainer.worker_calls import sample
from cohort.trainer.worker_group import WorkerGroup


class LocalSetup:
    """Set up sampling in the training processes, with the weights that they train."""

    shares_gpus = False

    def __init__(self, config: Config, inputs: Inputs):
        """Nothing to prepare."""

    def start(self, workers: WorkerGroup[Worker], *, folder: Path, notify: Callable[[str], None]) -> StartedEngine:
        """Create an engine that samples on all workers."""
        engine = LocalEngine(partial(sample, workers))
        engine.update_weights(policy_version=workers.local.engine.updates_done)
        return StartedEngine(engine=engine)
