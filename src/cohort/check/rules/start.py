"""Verdicts: whether a run starts, and what its batches are."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cohort.check.findings import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What the framework does with one number of training processes."""

    starts: bool
    message: str | None = None  # the framework's own, where it refuses
    generation_batch_size: int | None = None  # completions that are sampled together
    steps_per_generation: int | None = None  # micro-steps that one such batch is trained in
    global_batch_size: int | None = None  # completions of one optimizer step
    prompts: int | None = None  # different prompts of one generation batch
    field: str | None = None  # the key that a refusal is about, where it is not the usual one

    def as_json(self) -> dict[str, Any]:
        """The verdict as `--json` prints it."""
        return {
            "starts": self.starts,
            "message": self.message,
            "generation_batch_size": self.generation_batch_size,
            "steps_per_generation": self.steps_per_generation,
        }


def refused(message: str, **numbers: Any) -> Start:
    """The framework stops with this message."""
    return Start(starts=False, message=message, **numbers)


# keys that only evaluation depends on: training is checked without them
EVALUATION = frozenset(
    (
        "per_device_eval_batch_size",
        "num_generations_eval",
        "eval_strategy",
        "evaluation_strategy",
        "save_strategy",
        "split_dataset_ratio",
    )
)
BatchSizes = Mapping[str, int]  # the numbers that decide whether a run starts, by the framework's own names


def _nothing(world_size: int, sizes: BatchSizes) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRules:
    """What the rules of a framework say about one launch."""

    version: str
    version_reason: str
    sizes: BatchSizes
    decides: frozenset[str]  # every key that the verdict depends on, said or not
    start: Callable[[int, BatchSizes], Start]  # for a number of processes and these sizes
    usual_field: str | None = "num_generations"  # the key that a refusal is about
    missing: Callable[[int, BatchSizes], tuple[str, ...]] = _nothing  # unset keys, with values that make it start
    sampling: str  # where completions are sampled, in words
    findings: tuple[Finding, ...] = ()
    blocked: str | None = None  # message of a contradiction (also a finding) that stops the run for any numbers


def divisors(*factors: int, smallest: int = 2) -> list[int]:
    """All divisors of a product from `smallest` on, sorted. Factors are taken apart singly: products may be large."""
    found = {1}
    for factor in factors:
        own = {part for n in range(1, math.isqrt(factor) + 1) if factor % n == 0 for part in (n, factor // n)}
        found = {a * b for a in found for b in own}
    return sorted(number for number in found if number >= smallest)
