"""CPU offload of a frozen model's weights, copied to the GPU only while in use."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cohort.models.offload.pinned_memory import PinnedMemory, bytes_for


class OffloadedWeights:
    """Weights of a frozen model in pinned host memory."""

    def __init__(self, model: Any, device: torch.device):
        """Move the weights to the host.

        Args:
            model: a model that is not sharded.
            device: device that it computes on.
        """
        self._device = device
        self._tensors = [*model.parameters(), *model.buffers()]  # tied ones once
        memory = PinnedMemory(bytes_for(self._tensors), device)
        for tensor in self._tensors:
            tensor.data = memory.take(tensor.shape, tensor.dtype).copy_(tensor.data)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Context in which the weights are on the device. Changes to them are lost."""
        hosts = [tensor.data for tensor in self._tensors]
        try:
            for tensor, host in zip(self._tensors, hosts, strict=True):
                tensor.data = host.to(self._device, non_blocking=True)
            yield
        finally:
            for tensor, host in zip(self._tensors, hosts, strict=True):
                tensor.data = host
