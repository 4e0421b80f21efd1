"""Sample completions for prompts: rollouts are coroutines over one engine protocol."""

from cohort.rollout.collector import Rollout, RolloutCollector
from cohort.rollout.engines.base import (
    CallKey,
    Generate,
    Purpose,
    RolloutEngine,
    Sampled,
    SampleRequest,
    SamplingParams,
    StreamKey,
)
from cohort.rollout.engines.local.local_engine import LocalEngine
from cohort.rollout.engines.local.rank_shares import merge_shares, split_requests
from cohort.rollout.engines.local.sampler import Sampler
from cohort.rollout.prefetch import Prefetcher, Prompts

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
