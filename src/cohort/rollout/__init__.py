"""Sample groups of completions: one coroutine per trajectory, over one engine protocol."""

from typing import TYPE_CHECKING, Any

from cohort.rollout.collector import RolloutCollector, RolloutFunction
from cohort.rollout.engines.base import (
    CallKey,
    Generate,
    Purpose,
    RolloutEngine,
    SampledCompletion,
    SampleRequest,
    SamplingParams,
    StepKey,
)
from cohort.rollout.engines.local.local_engine import LocalEngine, split_requests
from cohort.rollout.prefetch import Prefetcher, Prompts

if TYPE_CHECKING:
    from cohort.rollout.engines.local.sampler import Sampler

__all__ = [
    "CallKey",
    "Generate",
    "LocalEngine",
    "Prefetcher",
    "Prompts",
    "Purpose",
    "RolloutCollector",
    "RolloutEngine",
    "RolloutFunction",
    "SampleRequest",
    "SampledCompletion",
    "Sampler",
    "SamplingParams",
    "StepKey",
    "split_requests",
]


def __getattr__(name: str) -> Any:
    # processes of environments import this package, but not torch, which takes seconds
    if name == "Sampler":
        from cohort.rollout.engines.local.sampler import Sampler

        return Sampler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
