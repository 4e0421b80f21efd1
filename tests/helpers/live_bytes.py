"""How much memory tensors take that are made while something is done, by counting their storages."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that are made inside and still there, and the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self._count(tensor.untyped_storage(), given)
        return out

    def _count(self, storage: Any, given: set[int]) -> None:
        place, num_bytes = storage.data_ptr(), storage.nbytes()
        if not num_bytes or place in given or place in self._seen:
            return
        self._seen.add(place)
        self.now += num_bytes
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, place, num_bytes)

    def _gone(self, place: int, num_bytes: int) -> None:
        self._seen.discard(place)
        self.now -= num_bytes
