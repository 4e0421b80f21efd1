"""KV cache with repeatable rows that grows without copying at every token.

N rows, K key/value heads, S positions, D head dimension.
"""

import inspect
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

_ROOM = 64  # positions added when the buffer is full


class GrowingLayer(DynamicLayer):
    """Full-attention layer with preallocated buffers; `keys` and `values` are views of them.

    The transformers layer concatenates at every token, which copies the whole cache each time.
    """

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Start empty, in the dtype and on the device of the first states."""
        super().lazy_initialization(key_states, value_states)
        self._length = 0
        self._key_buffer = key_states[:, :, :0]
        self._value_buffer = value_states[:, :, :0]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append states [N, K, new, D] and return all keys and values [N, K, S, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self._length = self._length, self._length + key_states.shape[-2]
        if self._length > self._key_buffer.shape[-2]:
            room = _ROOM + start // 2
            self._key_buffer = _with_room(self._key_buffer, start, self._length + room)
            self._value_buffer = _with_room(self._value_buffer, start, self._length + room)
        self._key_buffer[:, :, start : self._length] = key_states
        self._value_buffer[:, :, start : self._length] = value_states
        self._refresh_views()
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row n with row `beam_idx[n]`; rows may repeat or be dropped."""
        if self.is_initialized:
            self._key_buffer = _rows(self._key_buffer, beam_idx, self._length)
            self._value_buffer = _rows(self._value_buffer, beam_idx, self._length)
            self._refresh_views()

    def _refresh_views(self) -> None:
        self.keys = self._key_buffer[:, :, : self._length]
        self.values = self._value_buffer[:, :, : self._length]


def _rows(buffer: Tensor, rows: Tensor, used: int) -> Tensor:
    """Select rows into a new buffer of the same capacity, copying only used positions."""
    chosen = buffer.new_empty(len(rows), *buffer.shape[1:])
    chosen[:, :, :used] = buffer[:, :, :used].index_select(0, rows)
    return chosen


def _with_room(buffer: Tensor, used: int, capacity: int) -> Tensor:
    shape = (*buffer.shape[:2], capacity, buffer.shape[3])
    larger = buffer.new_empty(shape)
    larger[:, :, :used] = buffer[:, :, :used]
    return larger


def make_cache(model_config: Any) -> Cache:
    """Create an empty cache whose plain full-attention layers are `GrowingLayer`s."""
    cache = DynamicCache(config=model_config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def cache_argument(model: Any) -> str | None:
    """Return the name of a model's cache argument (`cache` from transformers 5.24 on), or None if it takes no cache."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in parameters), None)
