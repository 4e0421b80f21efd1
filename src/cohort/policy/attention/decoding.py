"""Attention of decoding: the keys and values of each prompt once, those of each completion beside it.

A new token attends to its prompt, of which all completions of the group read the same copy as one dense block, and to
the tokens that its completion has so far. The two are merged by their log-sum-exp, as in cascade inference
(https://flashinfer.ai/2024/02/02/cascade-inference.html).

R rows (completions), B prompts of a block, G the most rows of one of them, P the longest prompt, C tokens of the
completions so far, H query heads, K key heads, D their dimension.
"""

from collections.abc import MutableMapping, Sequence

import numpy as np
import torch
from torch import Tensor

from cohort.policy.attention.cascade import wide_product

Layers = dict[int, tuple[Tensor, Tensor]]  # keys and values of each layer

_ROOM = 64  # positions added, beside half of those that are there, when a buffer is full
# Prompts of at most this many tokens are one block; among longer ones the shortest has 3/4 of the longest's.
_SHORT = 64
_SIMILAR = 0.75


def similar_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Numbers of the prompts of each block, longest first. Padding is at most a quarter of a block of long ones."""
    blocks: list[list[int]] = []
    for n in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        longest = lengths[blocks[-1][0]] if blocks else 0
        if blocks and (longest <= _SHORT or lengths[n] >= _SIMILAR * longest):
            blocks[-1].append(n)
        else:
            blocks.append([n])
    return blocks


class PromptBlock:
    """Keys and values of prompts of similar length, held once however many completions go on from them."""

    def __init__(self, lengths: Sequence[int], *, device: torch.device):
        """Make an empty block on the model's device, of prompts with so many tokens each."""
        self._lengths = np.asarray(lengths)
        self._device = device
        self._layers: Layers = {}  # [B, K, P, D]
        self._bias: Tensor | None = None  # [B, 1, 1, P], -inf at padding; none where there is no padding

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return int(self._lengths.max())

    def write(self, first: int, count: int, captured: MutableMapping[int, tuple[Tensor, Tensor]]) -> None:
        """Take over what a row of the prompts `first`, ..., `first + count - 1` made; it is removed from `captured`."""
        length, longest = self._lengths[first : first + count], self._lengths.max()
        # padding repeats a prompt's last token, so that no number in it is undefined
        column = np.minimum(np.arange(longest), length[:, None] - 1)
        positions = torch.from_numpy((np.cumsum(length) - length)[:, None] + column).to(self._device)
        for layer in list(captured):
            key, value = captured.pop(layer)
            if layer not in self._layers:
                shape = (len(self), key.shape[1], longest, key.shape[3])
                # autocast leaves keys wide where it makes values narrow, and casts them for attention
                self._layers[layer] = value.new_empty(shape), value.new_empty(*shape[:3], value.shape[3])
            for buffer, new in zip(self._layers[layer], (key, value), strict=True):
                gathered = new.squeeze(0).index_select(1, positions.flatten()).unflatten(1, positions.shape)
                buffer[first : first + count] = gathered.transpose(0, 1)
        if self._bias is None and self._lengths.min() < longest:
            is_padding = torch.from_numpy(np.arange(longest) >= self._lengths[:, None])
            zeros = torch.zeros(is_padding.shape, dtype=value.dtype)
            self._bias = zeros.masked_fill(is_padding, -torch.inf).to(self._device)[:, None, None]

    def keep(self, prompts: Sequence[int]) -> None:
        """Forget all but these prompts."""
        self._lengths = self._lengths[prompts]
        for layer, (keys, values) in self._layers.items():
            self._layers[layer] = keys[prompts], values[prompts]
        if self._bias is not None:
            self._bias = self._bias[prompts]

    def attend(self, layer: int, query: Tensor, rows: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        """Outputs [B * G, H, D] and their log-sum-exp [B * G, H] of `rows` [B, G] among the queries [R, H, D]."""
        keys, values = self._layers[layer]
        num_rows, num_key_heads = rows.shape[1], keys.shape[1]
        folded = query.index_select(0, rows.flatten()).unflatten(1, (num_key_heads, -1)).unflatten(0, rows.shape)
        out, lse = _attention(folded.transpose(1, 2).flatten(2, 3), keys, values, self._bias, scale)
        out, lse = (x.unflatten(2, (num_rows, -1)).transpose(1, 2) for x in (out, lse))
        return out.flatten(2, 3).flatten(0, 1), lse.flatten(2, 3).flatten(0, 1)

    @property
    def num_bytes(self) -> int:
        """Of keys and values."""
        return _num_bytes(self._layers)


class Wave:
    """Completions that began together: blocks of their prompts, and keys and values of their own."""

    def __init__(
        self, blocks: Sequence[PromptBlock], rows: Sequence[Sequence[np.ndarray]], *, limit: int, device: torch.device
    ):
        """Begin with no tokens.

        Args:
            blocks: the prompts, written.
            rows: for each prompt of each block the numbers of its completions; together 0 .. R - 1.
            limit: the most tokens of a completion that are attended to.
            device: of the model.
        """
        self._prompts: list[tuple[PromptBlock, Sequence[np.ndarray]]] = list(zip(blocks, rows, strict=True))
        self._limit = limit
        self._device = device
        self._layers: Layers = {}  # [R, K, C and some room, D]
        self._length = 0  # C
        self._lay_out()

    def __len__(self) -> int:
        return len(self._source)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Attention of a new token of each completion: query [R, H, D], its key and value [R, K, D]; [R, H, D]."""
        query = query.to(value.dtype)  # as autocast does for attention
        keys, values = self._append(layer, key, value)
        own, own_lse = _attention(query.unflatten(1, (keys.shape[1], -1)), keys, values, None, scale)
        parts = [
            block.attend(layer, query, index, scale)
            for (block, _), index in zip(self._prompts, self._indices, strict=True)
        ]
        prompt, prompt_lse = (torch.cat(x).index_select(0, self._source) for x in zip(*parts, strict=True))
        share = torch.sigmoid(prompt_lse - own_lse.flatten(1)).unsqueeze(-1)
        wide = torch.lerp(own.flatten(1, 2).to(share.dtype), prompt.to(share.dtype), share)
        return wide.to(own.dtype)

    @property
    def longest_path(self) -> int:
        """Tokens of the longest prompt, with what its completions have and the new token."""
        return max(block.longest for block, _ in self._prompts) + self._length + 1

    def advance(self) -> None:
        """Every layer has attended to the new tokens."""
        self._length += 1

    def keep(self, rows: np.ndarray) -> None:
        """Forget all but these completions; and their prompts, once no more than half of a block is in use."""
        number = np.full(len(self), -1)
        number[rows] = np.arange(len(rows))
        index = torch.from_numpy(rows).to(self._device)
        for layer in self._layers:
            keys, values = (_resized(x, index, self._length, x.shape[2]) for x in self._layers[layer])
            self._layers[layer] = keys, values
        prompts: list[tuple[PromptBlock, Sequence[np.ndarray]]] = []
        for block, rows_of in self._prompts:
            left = [n[n >= 0] for n in (number[r] for r in rows_of)]
            used = [i for i, r in enumerate(left) if len(r)]
            if len(used) <= len(block) / 2:
                block.keep(used)
                left = [left[i] for i in used]
            if used:
                prompts.append((block, left))
        self._prompts = prompts
        self._lay_out()

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Of keys and values: of the prompts, and of the completions with their room."""
        return sum(block.num_bytes for block, _ in self._prompts), _num_bytes(self._layers)

    def _append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The completions' keys and values with those of the new token, [R, K, C + 1, D]."""
        length = self._length
        keys, values = self._layers.get(layer) or (
            x.new_empty(*x.shape[:2], 0, x.shape[2], dtype=value.dtype) for x in (key, value)
        )
        if length == keys.shape[2]:
            capacity = min(self._limit, length + _ROOM + length // 2)
            keys, values = (_resized(x, None, length, capacity) for x in (keys, values))
            self._layers[layer] = keys, values
        keys[:, :, length], values[:, :, length] = key, value
        return keys[:, :, : length + 1], values[:, :, : length + 1]

    def _lay_out(self) -> None:
        """Which rows go where in a block's call, and back. A prompt with fewer rows than others is given some again."""
        self._indices, sources, start = [], [], 0
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


def attention_of_decoding(
    layer: int, query: Tensor, key: Tensor, value: Tensor, waves: Sequence[Wave], scale: float | None
) -> Tensor:
    """Attention of one layer, one new token of each completion of each wave: [1, heads, S, D] to [1, S, H, D]."""
    sizes = [len(wave) for wave in waves]
    parts = (x.squeeze(0).transpose(0, 1).split(sizes) for x in (query, key, value))
    outs = [wave.attend(layer, q, k, v, scale) for wave, q, k, v in zip(waves, *parts, strict=True)]
    return torch.cat(outs).unsqueeze(0)


def _num_bytes(layers: Layers) -> int:
    return sum(x.nbytes for layer in layers.values() for x in layer)


def _resized(buffer: Tensor, rows: Tensor | None, used: int, capacity: int) -> Tensor:
    """Some rows of a buffer [R, K, C, D] with another capacity; only what is in use is copied."""
    chosen = buffer[:, :, :used]
    chosen = chosen if rows is None else chosen.index_select(0, rows)
    resized = buffer.new_empty(len(chosen), buffer.shape[1], capacity, buffer.shape[3])
    resized[:, :, :used] = chosen
    return resized


def _attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    """Attention of q [N, K, L, D] to all of k and v [N, K, S, D] with a bias [N, 1, 1, S]; and its log-sum-exp."""
    if q.device.type == "cpu" and q.shape[-1] == v.shape[-1]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias, scale=scale)
    return products(q, k, v, bias, scale)


def products(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    """The same by two products. With few queries the scores are small beside the keys, and need no fused kernel."""
    scores = wide_product(q, k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores += bias
    lse = scores.logsumexp(dim=-1, keepdim=True)
    return (scores - lse).exp_().to(v.dtype) @ v, lse.squeeze(-1)
