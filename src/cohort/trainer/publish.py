"""Hand new weights to the rollout engine, and check that it samples with them."""

from collections.abc import Callable

from cohort import stopping
from cohort.errors import OutOfStepError, TrainingError
from cohort.trainer.parity import ParityGate
from cohort.trainer.setup import Run


def publish_weights(run: Run, steps_done: int) -> dict[str, float]:
    """Publish the weights; metrics of the parity check (law 5), where it is due.

    Nothing is published if the run has been asked to end, as servers may be ending too.
    """
    try:
        stopping.check()
        run.rollout.load_weights(policy_version=run.workers.local.engine.updates_done)
        if run.parity is None or not run.parity.due(steps_done):
            return {}
        return run.parity.check(steps_done)
    except OutOfStepError:
        raise
    except TrainingError:
        if stopping.requested(within_s=stopping.SAME_SIGNAL_S) is None:
            raise
        return {}


def check_first_parity(gate: ParityGate | None, steps_done: int, note: Callable[[str], None]) -> None:
    """Compare the servers' logprobs with the trainer's before the first step, where there is a gate, and say so."""
    if gate is not None:
        metrics = gate.check(steps_done)
        note(
            f"parity: the servers' logprobs are the trainer's, to {metrics['sampling/parity/mean']:.1e} nats in "
            f"the mean and {metrics['sampling/parity/max']:.1e} at most"
        )
