"""Prompts to groups of completions: one protocol, engines behind it."""

from cohort.rollout.base import RolloutEngine, SamplingParams, StreamKey
from cohort.rollout.local import LocalEngine

__all__ = ["LocalEngine", "RolloutEngine", "SamplingParams", "StreamKey"]
