"""Sums over the micro-batches of a step, and over ranks."""

from collections.abc import Mapping

import torch
from torch import Tensor

from cohort.distributed import Ranks


class Totals:
    """What is added up while a step's micro-batches are computed."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._largest_difference = torch.zeros((), dtype=torch.float64)
        self._num_inputs = 0
        self._num_positions = 0

    def add(self, sums: Mapping[str, Tensor], *, differences: Tensor, num_inputs: int, num_positions: int) -> None:
        """One micro-batch.

        Args:
            sums: by name, over its scored tokens; `loss` is a weighted sum.
            differences: [T] between the old policy's logprobs and the sampler's.
            num_inputs: tokens computed.
            num_positions: positions computed, padding included.
        """
        for name, value in {**sums, "difference": differences.sum()}.items():
            self._sums[name] = self._sums.get(name, 0.0) + value.double()
        if len(differences):
            self._largest_difference = torch.maximum(self._largest_difference.to(differences.device), differences.max())
        self._num_inputs += num_inputs
        self._num_positions += num_positions

    def over(self, ranks: Ranks, *, num_tokens: int, num_out_of_memory: int) -> tuple[dict[str, float], list[int]]:
        """The sums of all ranks.

        Args:
            ranks: all of them call this.
            num_tokens: scored tokens of the step, of all ranks.
            num_out_of_memory: micro-batches of this rank that did not fit.

        Returns:
            metrics as means over the step's tokens; and inputs, positions and out-of-memory events of all ranks.
        """
        names = sorted(self._sums)
        counts = [self._num_inputs, self._num_positions, num_out_of_memory]
        added = ranks.sums([*(self._sums[name].item() for name in names), *counts])
        sums = dict(zip(names, added, strict=False))
        metrics = {name: value / num_tokens for name, value in sums.items() if name != "loss"} if num_tokens else {}
        metrics["loss"] = sums.get("loss", 0.0)
        if "difference" in metrics:
            metrics["sampling/sampling_logp_difference/mean"] = metrics.pop("difference")
        metrics["sampling/sampling_logp_difference/max"] = ranks.largest(self._largest_difference.item())
        return metrics, [int(count) for count in added[len(names) :]]
