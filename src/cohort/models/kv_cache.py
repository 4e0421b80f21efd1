"""Decode with the cache of transformers: one with repeatable rows, and what a model's own cache can hold.

P prompts, N rows or completions, R of them in flight, K key/value heads, S positions, D head dimension, V outputs per
position.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from cohort.errors import describe_error
from cohort.models.attention.decoding import resized
from cohort.models.forward import find_body
from cohort.records import IntArray

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
            capacity = self._length + _ROOM + start // 2
            self._key_buffer = resized(self._key_buffer, None, start, capacity)
            self._value_buffer = resized(self._value_buffer, None, start, capacity)
        self._key_buffer[:, :, start : self._length] = key_states
        self._value_buffer[:, :, start : self._length] = value_states
        self._refresh_views()
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row n with row `beam_idx[n]`; rows may repeat or be dropped."""
        if self.is_initialized:
            capacity = self._key_buffer.shape[-2]
            self._key_buffer = resized(self._key_buffer, beam_idx, self._length, capacity)
            self._value_buffer = resized(self._value_buffer, beam_idx, self._length, capacity)
            self._refresh_views()

    def _refresh_views(self) -> None:
        self.keys = self._key_buffer[:, :, : self._length]
        self.values = self._value_buffer[:, :, : self._length]


def make_cache(model_config: Any) -> Cache:
    """Create an empty cache whose plain full-attention layers are `GrowingLayer`s."""
    cache = DynamicCache(config=model_config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def cache_argument(model: Any) -> str | None:
    """Return the name of a model's cache argument (`cache` from transformers 5.24 on), or None if it takes no cache."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in parameters), None)


# "padded": prompts of different length can share a batch, padded on the left. "unpadded": only prompts of one length
# can. "none": the model cannot be decoded with a cache.
CachedDecoding = Literal["padded", "unpadded", "none"]

# Layers that work on each token or that mask padding. Others, such as block-sparse attention, group tokens by their
# place in the row, which padding moves; short prompts may not show it.
_PADDABLE = frozenset(
    {"full_attention", "sliding_attention", "chunked_attention", "linear_attention", "conv", "hybrid", "hybrid_sliding"}
    | {"moe", "dense", "sparse"}
)
_FAILURES = (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError)
# Prompts of the probe, and the first tokens of their completions.
_PROBE = (
    (np.array([1, 2, 3, 8, 2]), ((5, 6), (6, 5))),
    (np.array([4]), ((7, 8),)),
    (np.array([3, 9, 4]), ((2, 7),)),
)


class CacheDecoder:
    """Decodes one token per completion and step: prompts are padded on the left, and repeated for their completions."""

    can_join = False

    def __init__(self, model: Any, next_outputs: Callable[..., Tensor], *, pad_token_id: int):
        """Decode with a model that has a cache.

        Args:
            model: the whole model.
            next_outputs: calls the model, or its body, and returns the outputs [R, V] of the last position.
            pad_token_id: fills the padding.
        """
        self._next_outputs = next_outputs
        self._pad_token_id = pad_token_id
        self._device = next(model.parameters()).device
        self._config = model.config
        self._cache_argument = cache_argument(find_body(model)) or "cache"

    def start(self, prompts: Sequence[IntArray], counts: Sequence[int]) -> Tensor:
        """Start `counts` completions of each prompt; return the outputs [N, V] that predict their first tokens.

        Nothing may be in flight.
        """
        device, width = self._device, max(len(p) for p in prompts)
        input_ids = torch.full((len(prompts), width), self._pad_token_id)
        self._mask = torch.zeros_like(input_ids)
        for i, prompt in enumerate(prompts):
            input_ids[i, width - len(prompt) :] = torch.from_numpy(prompt)
            self._mask[i, width - len(prompt) :] = 1
        self._mask = self._mask.to(device)
        self._cache = make_cache(self._config)
        self._positions = self._mask.sum(dim=-1)  # positions of the next tokens
        outputs = self._compute(input_ids.to(device), (self._mask.cumsum(dim=-1) - 1).clamp(min=0))
        rows = torch.arange(len(prompts)).repeat_interleave(torch.tensor(counts)).to(device)
        self.keep(rows)
        return outputs[rows]

    def step(self, tokens: Tensor) -> Tensor:
        """Append a token to each completion [R]; return the next outputs [R, V]."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        outputs = self._compute(tokens.unsqueeze(-1), self._positions.unsqueeze(-1))
        self._positions = self._positions + 1
        return outputs

    def keep(self, rows: Tensor) -> None:
        """Replace row n with row `rows[n]`; rows may repeat or be dropped."""
        self._cache.reorder_cache(rows)
        self._mask, self._positions = self._mask[rows], self._positions[rows]

    def _compute(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        cache = {self._cache_argument: self._cache}
        return self._next_outputs(input_ids=input_ids, attention_mask=self._mask, position_ids=position_ids, **cache)


def choose_decoding(
    model: Any, module: Any, output: Callable[[Any], Tensor], *, is_narrow: bool
) -> tuple[CachedDecoding, str | None]:
    """Choose the first of "padded" and "unpadded" that gives the outputs of a forward pass without a cache.

    Args:
        model: the whole model.
        module: the model or its body, as called in training.
        output: selects the tensor [rows, positions, V] of the module's outputs.
        is_narrow: matrix products are in bfloat16.

    Returns:
        the way, and if it is not "padded", the reason, as words that follow "because"; None if the model has no cache.
    """
    if cache_argument(find_body(model)) is None:
        return "none", None
    others = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - _PADDABLE
    reason = f"padding would move the tokens of its {', '.join(sorted(others))}" if others else None
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            expected = torch.cat(list(_without_cache(model, module, output)))
            ways: tuple[CachedDecoding, ...] = ("padded", "unpadded")
            for way in ways[bool(others) :]:
                problem = _problem(model, module, output, expected, padded=way == "padded", is_narrow=is_narrow)
                if problem is None:
                    return way, reason
                reason = f"decoding {way} prompts {problem}"
            return "none", reason
    except _FAILURES:
        return "padded", None  # the model's own forward pass fails; training reports it
    finally:
        model.train(was_training)


def _without_cache(model: Any, module: Any, output: Callable[[Any], Tensor]) -> Iterator[Tensor]:
    """Yield the outputs [3, V] of each completion of the probe at the last token of its prompt, and at its tokens."""
    device = next(model.parameters()).device
    vocabulary = model.config.get_text_config().vocab_size
    for prompt, completions in _PROBE:
        for completion in completions:
            row = torch.tensor([*prompt, *completion], device=device) % vocabulary
            positions = torch.arange(len(row), device=device)
            out = output(module(input_ids=row[None], position_ids=positions[None], use_cache=False))
            yield out[0, len(prompt) - 1 :].float()


def _problem(
    model: Any, module: Any, output: Callable[[Any], Tensor], expected: Tensor, *, padded: bool, is_narrow: bool
) -> str | None:
    """Describe how decoding the probe's prompts, in one batch or one by one, goes wrong; None if it is right."""
    device = next(model.parameters()).device
    vocabulary = model.config.get_text_config().vocab_size

    def next_outputs(**inputs: Any) -> Tensor:
        return output(module(**inputs, use_cache=True))[:, -1].float()

    def decode(prompts: Sequence[tuple[IntArray, Sequence[tuple[int, int]]]]) -> Tensor:
        decoder = CacheDecoder(model, next_outputs, pad_token_id=0)
        outputs = [decoder.start([p % vocabulary for p, _ in prompts], [len(c) for _, c in prompts])]
        tokens = torch.tensor(list(chain.from_iterable(c for _, c in prompts)), device=device) % vocabulary
        outputs += [decoder.step(column) for column in tokens.unbind(1)]
        return torch.stack(outputs, dim=1).flatten(0, 1)

    try:
        actual = decode(_PROBE) if padded else torch.cat([decode([prompt]) for prompt in _PROBE])
    except _FAILURES as failure:
        return f"fails ({describe_error(failure, 200)})"
    # of the whole, because bfloat16 may send a token to another expert
    error = ((actual - expected).norm() / expected.norm().clamp(min=1e-30)).item()
    limit = 0.2 if is_narrow else 1e-4
    if error <= limit:
        return None
    return f"gives outputs that differ from the model's (relative error {error:.1g}, rounding is below {limit:.0e})"
