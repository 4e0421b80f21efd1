"""Sample groups of completions: one coroutine per trajectory, over one engine protocol."""

from cohort.rollout.collector import RolloutCollector, RolloutFunction
from cohort.rollout.engines.base import (
    CallKey,
    Completion,
    Generate,
    Purpose,
    RolloutEngine,
    SampleRequest,
    SamplingParams,
    StepKey,
)
from cohort.rollout.engines.local.local_engine import LocalEngine
from cohort.rollout.engines.local.rank_shares import split_requests
from cohort.rollout.engines.local.sampler import Sampler
from cohort.rollout.prefetch import Prefetcher, Prompts

__all__ = [
    "CallKey",
    "Completion",
    "Generate",
    "LocalEngine",
    "Prefetcher",
    "Prompts",
    "Purpose",
    "RolloutCollector",
    "RolloutEngine",
    "RolloutFunction",
    "SampleRequest",
    "Sampler",
    "SamplingParams",
    "StepKey",
    "split_requests",
]
