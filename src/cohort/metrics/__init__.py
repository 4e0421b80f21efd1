"""Metrics of a step and their loggers. Names are TRL's where the meaning is the same."""

from cohort.metrics.clock import PhaseClock
from cohort.metrics.memory import PeakMemory, largest_peaks
from cohort.metrics.rollouts import has_equal_rewards, rollout_metrics
from cohort.metrics.speed import device_peak_flops, flops_of, speed_metrics
from cohort.metrics.writers import MetricsWriter, check_loggers

__all__ = [
    "MetricsWriter",
    "PeakMemory",
    "PhaseClock",
    "check_loggers",
    "device_peak_flops",
    "flops_of",
    "has_equal_rewards",
    "largest_peaks",
    "rollout_metrics",
    "speed_metrics",
]
