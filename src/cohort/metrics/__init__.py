"""Metrics of a step and their loggers. Names are TRL's where the meaning is the same."""

from cohort.metrics.clock import PhaseClock
from cohort.metrics.loggers import MetricsWriter, check_loggers
from cohort.metrics.peak_memory import PeakMemory, largest_peaks
from cohort.metrics.reward_health import RewardWatch, reward_health_metrics
from cohort.metrics.rollouts import has_equal_rewards, rollout_metrics
from cohort.metrics.speed import device_peak_flops, flops_of, speed_metrics

__all__ = [
    "MetricsWriter",
    "PeakMemory",
    "PhaseClock",
    "RewardWatch",
    "check_loggers",
    "device_peak_flops",
    "flops_of",
    "has_equal_rewards",
    "largest_peaks",
    "reward_health_metrics",
    "rollout_metrics",
    "speed_metrics",
]
