"""Numbers about a step, and where they go. Names are TRL's where the meaning is the same."""

from cohort.metrics.clock import PhaseClock
from cohort.metrics.memory import peak_memory_bytes
from cohort.metrics.rollouts import rollout_metrics
from cohort.metrics.writers import MetricsWriter, check_loggers

__all__ = ["MetricsWriter", "PhaseClock", "check_loggers", "peak_memory_bytes", "rollout_metrics"]
