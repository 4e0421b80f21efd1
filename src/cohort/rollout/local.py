"""Sampling with torch in the training process, on any device, from the training weights themselves.

A group's prompt is computed once and its cache repeated; completions that have ended leave the batch. P prompts, G
generations each, N = P x G rows, S prompt positions.
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
from cohort.records import Completion, Prompt, RolloutGroup
from cohort.rollout.base import SamplingParams, StreamKey
from cohort.rollout.kv_cache import make_cache
from cohort.rollout.sampling import sample_tokens, uniform_stream

# Dropping rows copies the cache, so it waits until this share of the batch has ended.
_DROP_WHEN_ENDED = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sampled:
    """Raw tokens of N rows; entries at and after `lengths` mean nothing."""

    tokens: np.ndarray  # [N, max_completion_tokens] int64
    logprobs: np.ndarray  # [N, max_completion_tokens] float64
    lengths: np.ndarray  # [N]


class LocalEngine:
    """The `local` rollout engine. It shares the policy's weights, so loading weights only counts the version."""

    def __init__(self, policy: Policy, tokenizer: Any, *, end_token_ids: frozenset[int], max_num_seqs: int):
        """Sample from `policy`.

        Args:
            policy: shared with the trainer, never copied.
            tokenizer: gives the text of a completion.
            end_token_ids: each of them ends a completion.
            max_num_seqs: rows in flight at a time; at least one whole group is.

        Raises:
            UserError: the model has no key/value cache.
        """
        if "past_key_values" not in inspect.signature(policy.model.base_model.forward).parameters:
            raise UserError(
                f"rollout.engine: 'local' needs a model with a key/value cache; {type(policy.model).__name__} has none"
            )
        self._policy = policy
        self._tokenizer = tokenizer
        self._end_ids = torch.tensor(sorted(end_token_ids), device=policy.device)
        self._max_num_seqs = max_num_seqs
        self._policy_version = 0

    def load_weights(self, *, policy_version: int) -> None:
        """Note the version; the weights are the trainer's own."""
        self._policy_version = policy_version

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, key: StreamKey) -> list[RolloutGroup]:
        """One group per prompt, in the order of the prompts."""
        model = self._policy.model
        was_training = model.training
        model.eval()
        try:
            # one autocast around all: it casts the weights once. Not inference mode: what a model caches of such
            # tensors, like the tables of its rotary embedding, could not be used in training.
            with torch.no_grad(), self._policy.autocast():
                return [group for wave in self._waves(prompts, sampling) for group in self._wave(wave, sampling, key)]
        finally:
            model.train(was_training)

    def _waves(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> Iterator[Sequence[Prompt]]:
        """Whole groups, as many at a time as `max_num_seqs` admits."""
        size = max(1, self._max_num_seqs // sampling.num_generations)
        for start in range(0, len(prompts), size):
            yield prompts[start : start + size]

    def _wave(self, prompts: Sequence[Prompt], sampling: SamplingParams, key: StreamKey) -> list[RolloutGroup]:
        num = sampling.num_generations
        uniforms = np.stack(
            [uniform_stream(key, p, i, sampling.max_completion_tokens) for p in prompts for i in range(num)]
        )
        raw = self._sample(prompts, sampling, torch.from_numpy(uniforms).to(self._policy.device))
        tokens = [row[:length] for row, length in zip(raw.tokens, raw.lengths, strict=True)]
        ended = np.isin([row[-1] for row in tokens], self._end_ids.cpu().numpy())
        texts = self._tokenizer.batch_decode([row.tolist() for row in tokens], skip_special_tokens=True)
        completions = [
            Completion(
                token_ids=row,
                sampling_logprobs=logprobs[: len(row)],
                finish_reason="stop" if stop else "length",
                policy_version=self._policy_version,
                text=text,
            )
            for row, logprobs, stop, text in zip(tokens, raw.logprobs, ended, texts, strict=True)
        ]
        return [
            RolloutGroup(prompt=prompt, completions=tuple(completions[p * num : (p + 1) * num]))
            for p, prompt in enumerate(prompts)
        ]

    def _sample(self, prompts: Sequence[Prompt], sampling: SamplingParams, uniforms: Tensor) -> _Sampled:
        """Prefill P prompts, repeat each G times, decode until every row has ended."""
        device, limit = self._policy.device, sampling.max_completion_tokens
        logits, cache, mask, positions = self._prefill(prompts)
        rows = torch.arange(len(prompts), device=device).repeat_interleave(sampling.num_generations)
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
        return _Sampled(
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
