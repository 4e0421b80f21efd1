"""Sampling with torch in the training process, on any device, from the training weights themselves.

A prompt is computed once and its cache repeated; completions that have ended leave the batch. P prompts, N completions
of them, S prompt positions.
"""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cohort.errors import UserError
from cohort.policy import Policy
from cohort.records import Prompt
from cohort.rollout.base import Sampled, SampleRequest, SamplingParams, StreamKey
from cohort.rollout.kv_cache import make_cache
from cohort.rollout.sampling import sample_tokens, uniform_stream

# Dropping rows copies the cache, so it waits until this share of the batch has ended.
_DROP_WHEN_ENDED = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Raw tokens of N rows; entries at and after `lengths` mean nothing."""

    tokens: np.ndarray  # [N, max_completion_tokens] int64
    logprobs: np.ndarray  # [N, max_completion_tokens] float64
    lengths: np.ndarray  # [N]


class Sampler:
    """Samples tokens from the policy's own weights."""

    def __init__(self, policy: Policy, *, end_token_ids: frozenset[int], max_num_seqs: int):
        """Sample from `policy`.

        Args:
            policy: shared with the trainer, never copied.
            end_token_ids: each of them ends a completion.
            max_num_seqs: rows in flight at a time; at least one request is.

        Raises:
            UserError: the model has no key/value cache.
        """
        if "past_key_values" not in inspect.signature(policy.model.base_model.forward).parameters:
            raise UserError(
                f"rollout.engine: 'local' needs a model with a key/value cache; {type(policy.model).__name__} has none"
            )
        self._policy = policy
        self._end_ids = torch.tensor(sorted(end_token_ids), device=policy.device)
        self._max_num_seqs = max_num_seqs

    def sample(
        self, requests: Sequence[SampleRequest], sampling: SamplingParams, key: StreamKey
    ) -> list[tuple[Sampled, ...]]:
        """The completions of each request, in order."""
        model = self._policy.model
        was_training = model.training
        model.eval()
        try:
            # one autocast around all: it casts the weights once. Not inference mode: what a model caches of such
            # tensors, like the tables of its rotary embedding, could not be used in training.
            with torch.no_grad(), self._policy.whole(), self._policy.autocast():
                return [sampled for wave in self._waves(requests) for sampled in self._wave(wave, sampling, key)]
        finally:
            model.train(was_training)

    def _waves(self, requests: Sequence[SampleRequest]) -> Iterator[Sequence[SampleRequest]]:
        """Whole requests, as many at a time as `max_num_seqs` admits."""
        wave: list[SampleRequest] = []
        for request in requests:
            if wave and sum(len(r.indices) for r in wave) + len(request.indices) > self._max_num_seqs:
                yield wave
                wave = []
            wave.append(request)
        if wave:
            yield wave

    def _wave(
        self, requests: Sequence[SampleRequest], sampling: SamplingParams, key: StreamKey
    ) -> Iterator[tuple[Sampled, ...]]:
        uniforms = np.stack(
            [uniform_stream(key, r.prompt, i, sampling.max_completion_tokens) for r in requests for i in r.indices]
        )
        raw = self._rows(requests, sampling, torch.from_numpy(uniforms).to(self._policy.device))
        ends = frozenset(self._end_ids.tolist())
        start = 0
        for request in requests:
            rows = range(start, start + len(request.indices))
            start = rows.stop
            yield tuple(
                Sampled(
                    token_ids=raw.tokens[n, : raw.lengths[n]],
                    sampling_logprobs=raw.logprobs[n, : raw.lengths[n]],
                    finish_reason="stop" if int(raw.tokens[n, raw.lengths[n] - 1]) in ends else "length",
                )
                for n in rows
            )

    def _rows(self, requests: Sequence[SampleRequest], sampling: SamplingParams, uniforms: Tensor) -> _Rows:
        """Prefill P prompts, repeat each as often as it is asked for, decode until every row has ended."""
        device, limit = self._policy.device, sampling.max_completion_tokens
        logits, cache, mask, positions = self._prefill([r.prompt for r in requests])
        counts = torch.tensor([len(r.indices) for r in requests], device=device)
        rows = torch.arange(len(requests), device=device).repeat_interleave(counts)
        cache.reorder_cache(rows)
        logits, positions = logits[rows], positions[rows]
        mask = torch.cat([mask[rows], mask.new_ones(len(rows), limit)], dim=1)
        width = mask.shape[1] - limit
        tokens = torch.zeros(len(rows), limit, dtype=torch.int64, device=device)
        logprobs = torch.zeros(len(rows), limit, dtype=logits.dtype, device=device)
        lengths = torch.full((len(rows),), limit, device=device)
        row = torch.arange(len(rows), device=device)  # which completion each row of the batch is
        running = torch.ones(len(rows), dtype=torch.bool, device=device)
        for t in range(limit):
            chosen, logprob = sample_tokens(
                logits, uniforms[row, t], temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k
            )
            # a row that has ended stays in the batch for a while; what it makes goes nowhere
            tokens[row[running], t], logprobs[row[running], t] = chosen[running], logprob[running]
            ends = running & torch.isin(chosen, self._end_ids)
            lengths[row[ends]] = t + 1
            running &= ~ends
            num_running = int(running.sum())
            if num_running == 0 or t + 1 == limit:
                break
            if num_running <= (1 - _DROP_WHEN_ENDED) * len(row):
                keep = running.nonzero().squeeze(-1)
                cache.reorder_cache(keep)
                row, chosen, mask, positions = row[keep], chosen[keep], mask[keep], positions[keep]
                running = running[keep]
            logits = self._policy.next_token_logits(
                input_ids=chosen.unsqueeze(-1),
                attention_mask=mask[:, : width + t + 1],
                position_ids=(positions + t).unsqueeze(-1),
                past_key_values=cache,
            )
        return _Rows(
            tokens=tokens.cpu().numpy(), logprobs=logprobs.double().cpu().numpy(), lengths=lengths.cpu().numpy()
        )

    def _prefill(self, prompts: Sequence[Prompt]) -> tuple[Tensor, Any, Tensor, Tensor]:
        """Each prompt once, padded on the left: logits [P, V], cache, mask [P, S], next position [P]."""
        width = max(len(p.token_ids) for p in prompts)
        input_ids = np.full((len(prompts), width), self._policy.pad_token_id, dtype=np.int64)
        mask = np.zeros((len(prompts), width), dtype=np.int64)
        for i, prompt in enumerate(prompts):
            input_ids[i, width - len(prompt.token_ids) :] = prompt.token_ids
            mask[i, width - len(prompt.token_ids) :] = 1
        device = self._policy.device
        mask_PS = torch.from_numpy(mask).to(device)
        cache = make_cache(self._policy.model.config)
        logits = self._policy.next_token_logits(
            input_ids=torch.from_numpy(input_ids).to(device),
            attention_mask=mask_PS,
            position_ids=(mask_PS.cumsum(dim=-1) - 1).clamp(min=0),
            past_key_values=cache,
        )
        return logits, cache, mask_PS, mask_PS.sum(dim=-1)
