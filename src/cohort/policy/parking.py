"""Weights that lie in host memory, and on the GPU only while they are computed with."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cohort.policy.pinning import PinnedMemory, bytes_for


class Parking:
    """The place of a frozen model's weights in host memory, pinned."""

    def __init__(self, model: Any, device: torch.device):
        """Move them there.

        Args:
            model: whole, not sharded.
            device: where it computes.
        """
        self._device = device
        self._tensors = [*model.parameters(), *model.buffers()]  # tied ones once
        memory = PinnedMemory(bytes_for(self._tensors), device)
        for tensor in self._tensors:
            tensor.data = memory.take(tensor.shape, tensor.dtype).copy_(tensor.data)

    @contextmanager
    def visit(self) -> Iterator[None]:
        """The weights are on the device inside; what is written to them there is lost."""
        hosts = [tensor.data for tensor in self._tensors]
        try:
            for tensor, host in zip(self._tensors, hosts, strict=True):
                tensor.data = host.to(self._device, non_blocking=True)
            yield
        finally:
            for tensor, host in zip(self._tensors, hosts, strict=True):
                tensor.data = host
