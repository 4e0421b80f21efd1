"""Decode one token per completion and step, with KV caches that share prompts.

P prompts (contexts of calls), N completions, R of them in flight, S positions, V vocabulary.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from cohort.models import Policy
from cohort.models.attention import KVCache, PackedAttention
from cohort.models.attention.decoding import DecodeBatch, PromptCache
from cohort.packing.segments import NO_PARENT, build_attention_metadata, group_by_length
from cohort.packing.to_device import to_device
from cohort.records import IntArray

_PREFILL_TOKENS = 8192  # maximum prompt tokens prefilled in one row (more for a longer prompt); bounds memory


class Decoder(Protocol):
    """Decodes the completions in flight, in the order in which they started."""

    can_join: bool  # whether completions can be started while others are in flight

    def start(self, prompts: Sequence[IntArray], counts: Sequence[int]) -> Tensor:
        """Start `counts` completions of each prompt; return logits [N, V] of their first tokens."""
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """Append a token to each completion [R]; return the next logits [R, V]."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Drop all completions but these; `rows` must be ascending."""
        ...


class SharedPromptDecoder:
    """Stores each prompt's KV cache once, padded only to prompts of similar length."""

    can_join = True

    def __init__(self, policy: Policy, *, limit: int):
        """Decode up to `limit` tokens per completion with a policy whose layout is "shared" or "packed"."""
        self._policy = policy
        self._limit = limit
        self.waves: list[DecodeBatch] = []
        self._positions = torch.zeros(0, dtype=torch.int64, device=policy.device)  # [R] positions of the next tokens

    def start(self, prompts: Sequence[IntArray], counts: Sequence[int]) -> Tensor:
        """Start `counts` completions of each prompt; return logits [N, V] of their first tokens."""
        device = self._policy.device
        lengths = [len(p) for p in prompts]
        rows = np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])
        members = group_by_length(lengths)
        blocks, logits = zip(*(self._prefill([prompts[n] for n in block]) for block in members), strict=True)
        order = torch.tensor([n for block in members for n in block]).argsort()  # back to the order of prompts
        counts_P = torch.tensor(counts)
        self.waves.append(
            DecodeBatch(blocks, [[rows[n] for n in b] for b in members], limit=self._limit, device=device)
        )
        self._positions = torch.cat([self._positions, torch.tensor(lengths).repeat_interleave(counts_P).to(device)])
        return torch.cat(logits).index_select(0, order.repeat_interleave(counts_P).to(device))

    def step(self, tokens: Tensor) -> Tensor:
        """Append a token to each completion [R]; return the next logits [R, V]."""
        everything = torch.arange(len(tokens), device=tokens.device)
        attention = PackedAttention(position_ids=self._positions, decoding=self.waves)
        logits = self._policy.packed_logits(tokens, everything, attention)
        self._positions = self._positions + 1
        for wave in self.waves:
            wave.advance()
        return logits

    def keep(self, rows: Tensor) -> None:
        """Drop all completions but these; `rows` must be ascending."""
        self._positions = self._positions[rows]
        left = rows.cpu().numpy()
        bounds = np.cumsum([0, *(len(wave) for wave in self.waves)])
        parts = np.split(left, np.searchsorted(left, bounds[1:-1]))
        for wave, part, start in zip(self.waves, parts, bounds, strict=False):
            if 0 < len(part) < len(wave):
                wave.keep(part - start)
        self.waves = [wave for wave, part in zip(self.waves, parts, strict=True) if len(part)]

    def _prefill(self, prompts: Sequence[IntArray]) -> tuple[PromptCache, Tensor]:
        """Prefill a block of prompts in packed rows; return its cache and the logits after each prompt, [P, V]."""
        lengths = [len(p) for p in prompts]
        block = PromptCache(lengths, device=self._policy.device)
        logits = []
        start = 0
        while start < len(prompts):
            stop = start + 1
            while stop < len(prompts) and sum(lengths[start : stop + 1]) <= _PREFILL_TOKENS:
                stop += 1
            logits.append(self._prefill_row(block, start, prompts[start:stop]))
            start = stop
        return block, torch.cat(logits)

    def _prefill_row(self, block: PromptCache, first: int, prompts: Sequence[IntArray]) -> Tensor:
        """Prefill one packed row of prompts into `block`; return the logits after each."""
        lengths = [len(p) for p in prompts]
        captured = KVCache()
        row = (
            torch.from_numpy(np.concatenate(prompts)),
            torch.cat([torch.arange(n) for n in lengths]),
            torch.tensor(lengths).cumsum(0) - 1,
        )
        metadata = build_attention_metadata(lengths, [NO_PARENT] * len(prompts))
        (tokens, positions, last), attn_metadata = to_device((row, metadata), self._policy.device)
        attention = PackedAttention(position_ids=positions, attn_metadata=attn_metadata, captured=captured)
        logits = self._policy.packed_logits(tokens, last, attention)
        block.write(first, len(prompts), captured)
        return logits
