"""Publish weights to the rollout engine and check parity."""

from collections.abc import Callable

from cohort.errors import RankDesyncError, TrainingError
from cohort.ranks.stopping import SAME_SIGNAL_S
from cohort.trainer.parity import ParityGate
from cohort.trainer.setup import RunComponents


def publish_weights(components: RunComponents, steps_done: int) -> dict[str, float]:
    """Publish the weights, and return the metrics of the parity check (law 5) if one is due.

    A run that is being stopped publishes nothing, because its servers may be stopping too.
    """
    stop = components.workers.ranks.stop
    try:
        stop.check()
        components.collector.update_weights(policy_version=components.workers.local.engine.updates_done)
        if components.parity is None or not components.parity.is_due(steps_done):
            return {}
        return components.parity.check(steps_done)
    except RankDesyncError:
        raise
    except TrainingError:
        if stop.requested(within_s=SAME_SIGNAL_S) is None:
            raise
        return {}


def check_first_parity(gate: ParityGate | None, steps_done: int, notify: Callable[[str], None]) -> None:
    """Compare the servers' logprobs with the trainer's before the first step and report the result."""
    if gate is not None:
        metrics = gate.check(steps_done)
        notify(
            f"parity: the servers' logprobs match the trainer's (mean difference "
            f"{metrics['sampling/parity/mean']:.1e} nats, max {metrics['sampling/parity/max']:.1e})"
        )
