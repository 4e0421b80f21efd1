"""Sums over the micro-batches of a step, and over ranks."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cohort.distributed import Ranks

# What is counted, named as the fields of `TrainResult`.
COUNTS = (
    "num_inputs",
    "num_positions",
    "num_unshared_inputs",
    "num_prompt_inputs",
    "attention_pairs",
    "num_out_of_memory",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What one pass over a step's batch gives besides the gradients. Counts are of all ranks."""

    metrics: Mapping[str, float]
    num_inputs: int  # tokens that were to be computed
    num_positions: int  # positions that were, padding included
    num_unshared_inputs: int  # tokens, if every sequence were computed whole
    num_prompt_inputs: int  # prompt tokens among the inputs
    attention_pairs: int  # of an input and one that it sees, itself included
    num_micro_batches: int  # of each rank, empty ones included
    num_out_of_memory: int  # micro-batches that did not fit

    @classmethod
    def nothing(cls) -> "TrainResult":
        """Of a pass that was not made."""
        return cls(metrics={}, num_micro_batches=0, **dict.fromkeys(COUNTS, 0))

    def __add__(self, other: "TrainResult") -> "TrainResult":
        """Counts and metrics of both, added up."""
        names = (*COUNTS, "num_micro_batches")
        metrics = {n: self.metrics.get(n, 0.0) + other.metrics.get(n, 0.0) for n in {**self.metrics, **other.metrics}}
        return TrainResult(metrics=metrics, **{n: getattr(self, n) + getattr(other, n) for n in names})


class Totals:
    """What is added up while a step's micro-batches are computed."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._largest: dict[str, Tensor] = {}
        self._counts = dict.fromkeys(COUNTS, 0)

    def count(self, counts: Mapping[str, int]) -> None:
        """Add to some of `COUNTS`."""
        for name, count in counts.items():
            self._counts[name] += count

    def add(self, sums: Mapping[str, Tensor], *, largest: Mapping[str, Tensor]) -> None:
        """One micro-batch.

        Args:
            sums: by name, over its loss tokens; `loss` is a weighted sum.
            largest: by name, of its loss tokens, and not below 0.
        """
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value.double()
        for name, value in largest.items():
            self._largest[name] = torch.maximum(self._largest.get(name, value), value)

    def over(self, ranks: Ranks, *, num_tokens: int) -> tuple[dict[str, float], dict[str, int]]:
        """The sums of all ranks.

        Args:
            ranks: all of them call this.
            num_tokens: loss tokens of the step, of all ranks.

        Returns:
            metrics as means over the step's tokens, or the largest of all; and the counts of all ranks.
        """
        names = sorted(self._sums)
        added = ranks.sums([*(self._sums[name].item() for name in names), *self._counts.values()])
        sums = dict(zip(names, added, strict=False))
        metrics = {name: value / num_tokens for name, value in sums.items() if name != "loss"} if num_tokens else {}
        metrics["loss"] = sums.get("loss", 0.0)
        metrics |= {name: ranks.largest(self._largest[name].item()) for name in sorted(self._largest)}
        return metrics, dict(zip(COUNTS, map(int, added[len(names) :]), strict=True))
