"""Decode attention and KV caches with shared prompts.

The keys and values of a prompt are stored once per group. A new token attends to its prompt, together with the group's
other completions in one dense block, and to its own completion. The two are merged by log-sum-exp, as in cascade
inference (https://flashinfer.ai/2024/02/02/cascade-inference.html). In layers with a window or chunks, each completion
sees its prompt and its own tokens from some position on.

R rows (completions), B prompts of a block, G most rows per prompt, P longest prompt, C tokens of the completions so
far, H query heads, K key heads, D head size; for attention in general N sequences, L queries, S keys.
"""

from collections.abc import Mapping, MutableMapping, Sequence

import numpy as np
import torch
from torch import Tensor

from cohort.models.attention.cascade import AttentionSpec, softcapped, wide_product

Layers = dict[int, tuple[Tensor, Tensor]]  # keys and values by layer
States = dict[int, tuple[Tensor, ...]]  # recurrent states by key, see `cohort.models.mixers`; keys are negative

_GROWTH = 64  # positions added to a full buffer, plus half of its length


class PromptCache:
    """KV cache of a block of prompts of similar length, shared by all their completions."""

    def __init__(self, lengths: Sequence[int], *, device: torch.device):
        """Make an empty cache for prompts of these lengths, on the model's device."""
        self._lengths = np.asarray(lengths)
        self._device = device
        self._layers: Layers = {}  # [B, K, P, D]
        self.states: States = {}  # [B, ...]
        self._biases: dict[bytes, Tensor | None] = {}  # by what is seen: layers of one kind share them

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def longest(self) -> int:
        """Length of the longest prompt."""
        return int(self._lengths.max())

    def write(self, first: int, count: int, captured: MutableMapping[int, tuple[Tensor, ...]]) -> None:
        """Move what is cached of prompts `first`, ..., `first + count - 1` from `captured` into the cache."""
        length, longest = self._lengths[first : first + count], self._lengths.max()
        # padding repeats the last token of a prompt, so all values are defined
        column = np.minimum(np.arange(longest), length[:, None] - 1)
        positions = torch.from_numpy((np.cumsum(length) - length)[:, None] + column).to(self._device)
        for layer in list(captured):
            if layer < 0:
                states = captured.pop(layer)
                buffers = self.states.setdefault(layer, tuple(x.new_empty(len(self), *x.shape[1:]) for x in states))
                for buffer, state in zip(buffers, states, strict=True):
                    buffer[first : first + count] = state
                continue
            key, value = captured.pop(layer)
            if layer not in self._layers:
                shape = (len(self), key.shape[1], longest, key.shape[3])
                # under autocast keys may be wider than values; attention casts them
                self._layers[layer] = value.new_empty(shape), value.new_empty(*shape[:3], value.shape[3])
            for buffer, new in zip(self._layers[layer], (key, value), strict=True):
                gathered = new.squeeze(0).index_select(1, positions.flatten()).unflatten(1, positions.shape)
                buffer[first : first + count] = gathered.transpose(0, 1)

    def keep(self, prompts: Sequence[int]) -> None:
        """Drop all other prompts."""
        self._lengths = self._lengths[prompts]
        for layer, (keys, values) in self._layers.items():
            self._layers[layer] = keys[prompts], values[prompts]
        self._biases = {}

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each prompt, [B]."""
        return self._lengths

    def _bias(self, first: np.ndarray, values: Tensor) -> Tensor | None:
        """Additive mask [B, 1, 1, P] of the keys from `first` [B] to the last of a prompt; None if all are seen.

        It is zero for prompts of which nothing is seen: attention is defined, and its log-sum-exp is not used.
        """
        key = first.tobytes()
        if key not in self._biases:
            column = np.arange(values.shape[2])
            hidden = (column >= self._lengths[:, None]) | (column < first[:, None])
            hidden &= (first < self._lengths)[:, None]
            zeros = torch.zeros(hidden.shape, dtype=values.dtype).masked_fill(torch.from_numpy(hidden), -torch.inf)
            if len(self._biases) > 7:  # those of earlier tokens
                self._biases = {}
            self._biases[key] = zeros.to(self._device)[:, None, None] if hidden.any() else None
        return self._biases[key]

    def attend(
        self, layer: int, query: Tensor, rows: Tensor, first: np.ndarray, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        """Attend to the prompts with the queries [R, H, D] of `rows` [B, G]; return [B * G, H, D] and log-sum-exps.

        Queries see a prompt from `first` [B] on. Where that is nothing, the log-sum-exps are -inf.
        """
        keys, values = self._layers[layer]
        bias, start = self._bias(first, values), int(min(first.min(), self.longest - 1))
        if start:
            keys, values, bias = keys[:, :, start:], values[:, :, start:], None if bias is None else bias[..., start:]
        num_rows, num_key_heads = rows.shape[1], keys.shape[1]
        folded = query.index_select(0, rows.flatten()).unflatten(1, (num_key_heads, -1)).unflatten(0, rows.shape)
        folded = folded.transpose(1, 2).flatten(2, 3)
        out, lse = _attention(folded, keys, values, bias, spec)
        if (first >= self._lengths).any():
            unseen = torch.from_numpy(first >= self._lengths).to(self._device)
            lse = lse.masked_fill(unseen[:, None, None], -torch.inf)
        out, lse = (x.unflatten(2, (num_rows, -1)).transpose(1, 2) for x in (out, lse))
        return out.flatten(2, 3).flatten(0, 1), lse.flatten(2, 3).flatten(0, 1)

    @property
    def num_bytes(self) -> int:
        """Size of the keys and values."""
        return _num_bytes(self._layers)


class DecodeBatch:
    """Completions that started together: shared prompt caches, and the KV cache of the completions."""

    def __init__(
        self, blocks: Sequence[PromptCache], rows: Sequence[Sequence[np.ndarray]], *, limit: int, device: torch.device
    ):
        """Start with empty completions.

        Args:
            blocks: filled caches of the prompts.
            rows: indices of the completions of each prompt of each block; together 0 .. R - 1.
            limit: maximum cached tokens of a completion.
            device: device of the model.
        """
        self._prompts: list[tuple[PromptCache, Sequence[np.ndarray]]] = list(zip(blocks, rows, strict=True))
        self._limit = limit
        self._device = device
        self._layers: Layers = {}  # [R, K, capacity >= C, D]
        self._length = 0  # C
        self._build_indices()
        counts = [len(r) for rows_of in rows for r in rows_of]
        prompts = np.empty(sum(counts), dtype=np.int64)  # of each completion
        prompts[np.concatenate([r for rows_of in rows for r in rows_of])] = np.arange(len(counts)).repeat(counts)
        index = torch.from_numpy(prompts).to(device)
        self.states: States = {  # [R, ...], of each completion
            key: tuple(torch.cat(parts)[index] for parts in zip(*(block.states[key] for block in blocks), strict=True))
            for key in blocks[0].states
        }
        for block in blocks:
            block.states = {}

    def __len__(self) -> int:
        return len(self._source)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Attention of one new token per completion: query [R, H, D], key and value [R, K, D]; returns [R, H, D]."""
        query = query.to(value.dtype)  # as autocast does
        keys, values = self._append(layer, key, value)
        first = _first_seen(self._prompt_tokens, self._length, spec) - self._prompt_tokens  # of its own tokens
        start, bias = max(0, int(first.min())), None
        if first.max() > start:
            hidden = torch.from_numpy(np.arange(start, self._length + 1) < first[:, None])
            bias = torch.zeros(hidden.shape, dtype=values.dtype).masked_fill(hidden, -torch.inf)
            bias = bias.to(self._device)[:, None, None]
        own, own_lse = _attention(
            query.unflatten(1, (keys.shape[1], -1)), keys[:, :, start:], values[:, :, start:], bias, spec
        )
        out, lse = own.flatten(1, 2), own_lse.flatten(1)
        parts = [
            block.attend(layer, query, index, _first_seen(block.lengths, self._length, spec), spec)
            for (block, _), index in zip(self._prompts, self._indices, strict=True)
        ]
        prompt, prompt_lse = (torch.cat(x).index_select(0, self._source) for x in zip(*parts, strict=True))
        share = torch.sigmoid(prompt_lse - lse).unsqueeze(-1)
        wide = torch.lerp(out.to(share.dtype), prompt.to(share.dtype), share)
        if spec.sinks is not None:
            wide = wide * torch.sigmoid(torch.logaddexp(lse, prompt_lse) - spec.sinks).unsqueeze(-1)
        return wide.to(own.dtype)

    def advance(self) -> None:
        """Count the new tokens, after all layers have attended to them."""
        self._length += 1

    def keep(self, rows: np.ndarray) -> None:
        """Drop all other completions. Compact a prompt block once at most half of it is in use."""
        number = np.full(len(self), -1)
        number[rows] = np.arange(len(rows))
        index = torch.from_numpy(rows).to(self._device)
        for layer in self._layers:
            keys, values = (resized(x, index, self._length, x.shape[2]) for x in self._layers[layer])
            self._layers[layer] = keys, values
        self.states = {key: tuple(x[index] for x in states) for key, states in self.states.items()}
        prompts: list[tuple[PromptCache, Sequence[np.ndarray]]] = []
        for block, rows_of in self._prompts:
            left = [n[n >= 0] for n in (number[r] for r in rows_of)]
            used = [i for i, r in enumerate(left) if len(r)]
            if len(used) <= len(block) / 2:
                block.keep(used)
                left = [left[i] for i in used]
            if used:
                prompts.append((block, left))
        self._prompts = prompts
        self._build_indices()

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Size of the prompt caches, and of the completions' cache with spare capacity."""
        own = _num_bytes(self._layers) + _num_bytes(self.states)
        return sum(block.num_bytes for block, _ in self._prompts), own

    def _append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of the new tokens; return those of the completions, [R, K, C + 1, D]."""
        length = self._length
        keys, values = self._layers.get(layer) or (
            x.new_empty(*x.shape[:2], 0, x.shape[2], dtype=value.dtype) for x in (key, value)
        )
        if length == keys.shape[2]:
            capacity = min(self._limit, length + _GROWTH + length // 2)
            keys, values = (resized(x, None, length, capacity) for x in (keys, values))
            self._layers[layer] = keys, values
        keys[:, :, length], values[:, :, length] = key, value
        return keys[:, :, : length + 1], values[:, :, : length + 1]

    def _build_indices(self) -> None:
        """Index rows by block and prompt, and back. Prompts with fewer rows than others are padded with row 0."""
        self._indices, sources, start = [], [], 0
        tokens = [(rows, n) for block, rows_of in self._prompts for rows, n in zip(rows_of, block.lengths, strict=True)]
        self._prompt_tokens = np.zeros(sum(len(rows) for rows, _ in tokens), dtype=np.int64)  # [R]
        for rows, n in tokens:
            self._prompt_tokens[rows] = n
        for _, rows_of in self._prompts:
            width = max(len(rows) for rows in rows_of)
            index = np.zeros((len(rows_of), width), dtype=np.int64)
            for prompt, rows in enumerate(rows_of):
                index[prompt, : len(rows)] = rows
                sources.append(np.stack([rows, start + prompt * width + np.arange(len(rows))]))
            start += index.size
            self._indices.append(torch.from_numpy(index).to(self._device))
        row, place = np.concatenate(sources, axis=1)
        self._source = torch.from_numpy(place[np.argsort(row)]).to(self._device)


def decode_attention(
    layer: int, query: Tensor, key: Tensor, value: Tensor, batches: Sequence[DecodeBatch], spec: AttentionSpec
) -> Tensor:
    """Decode attention of a layer for one new token per completion of each batch: [1, heads, S, D] to [1, S, H, D]."""
    sizes = [len(batch) for batch in batches]
    parts = (x.squeeze(0).transpose(0, 1).split(sizes) for x in (query, key, value))
    outs = [batch.attend(layer, q, k, v, spec) for batch, q, k, v in zip(batches, *parts, strict=True)]
    return torch.cat(outs).unsqueeze(0)


def _first_seen(prompt_tokens: np.ndarray, num_own: int, spec: AttentionSpec) -> np.ndarray:
    """First position of its sequence that a token sees after prompts of some lengths and `num_own` tokens."""
    position = prompt_tokens + num_own
    first = np.zeros_like(position)
    if spec.window is not None:
        first = np.maximum(first, position + 1 - spec.window)
    if spec.chunk is not None:
        first = np.maximum(first, position // spec.chunk * spec.chunk)
    return first


def _num_bytes(layers: Mapping[int, tuple[Tensor, ...]]) -> int:
    return sum(x.nbytes for layer in layers.values() for x in layer)


def resized(buffer: Tensor, rows: Tensor | None, used: int, capacity: int) -> Tensor:
    """Copy the used part of some rows of a buffer [R, K, C, D] to one of another capacity."""
    chosen = buffer[:, :, :used]
    chosen = chosen if rows is None else chosen.index_select(0, rows)
    resized = buffer.new_empty(len(chosen), buffer.shape[1], capacity, buffer.shape[3])
    resized[:, :, :used] = chosen
    return resized


def _attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Attention of q [N, K, L, D] to k and v [N, K, S, D] with a bias [N, 1, 1, S], and its log-sum-exp."""
    if q.device.type == "cpu" and q.shape[-1] == v.shape[-1] and spec.softcap is None:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias, scale=spec.scale)
    return products(q, k, v, bias, spec)


def products(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """`_attention` in two matrix products. With few queries the scores are small, so no fused kernel is needed."""
    scores = wide_product(q, k.mT) * spec.scale
    if spec.softcap is not None:
        scores = softcapped(scores, spec.softcap)
    if bias is not None:
        scores += bias
    lse = scores.logsumexp(dim=-1, keepdim=True)
    return (scores - lse).exp_().to(v.dtype) @ v, lse.squeeze(-1)
