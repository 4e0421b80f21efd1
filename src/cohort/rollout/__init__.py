"""Prompts to groups of completions: one protocol, engines behind it."""

from cohort.rollout.base import RolloutEngine, Sampled, SampleRequest, SamplingParams, StreamKey, generate
from cohort.rollout.local import LocalEngine
from cohort.rollout.prefetch import Prefetcher, Prompts
from cohort.rollout.sampler import Sampler
from cohort.rollout.shares import merge_shares, split_requests

__all__ = [
    "LocalEngine",
    "Prefetcher",
    "Prompts",
    "RolloutEngine",
    "SampleRequest",
    "Sampled",
    "Sampler",
    "SamplingParams",
    "StreamKey",
    "generate",
    "merge_shares",
    "split_requests",
]
