"""Sample completions for prompts: rollouts are coroutines over one engine protocol."""

from cohort.rollout.base import (
    CallKey,
    Generate,
    Purpose,
    RolloutEngine,
    Sampled,
    SampleRequest,
    SamplingParams,
    StreamKey,
)
from cohort.rollout.collector import Rollout, RolloutCollector
from cohort.rollout.local import LocalEngine
from cohort.rollout.prefetch import Prefetcher, Prompts
from cohort.rollout.sampler import Sampler
from cohort.rollout.shares import merge_shares, split_requests

__all__ = [
    "CallKey",
    "Generate",
    "LocalEngine",
    "Prefetcher",
    "Prompts",
    "Purpose",
    "Rollout",
    "RolloutCollector",
    "RolloutEngine",
    "SampleRequest",
    "Sampled",
    "Sampler",
    "SamplingParams",
    "StreamKey",
    "merge_shares",
    "split_requests",
]
