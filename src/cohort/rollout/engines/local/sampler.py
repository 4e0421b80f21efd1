"""Sample with PyTorch in the training process, from the training weights, on any device.

A request's context is prefilled once. Completions that have ended leave the batch and others join it.

N completions, or rows of a batch; V vocabulary.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cohort.errors import UserError
from cohort.models import Policy
from cohort.models.forward import find_body
from cohort.models.kv_cache import cache_argument
from cohort.ranks.stopping import NEVER_STOPPED, StopSignals
from cohort.rollout.engines.base import CallKey, SampledCompletion, SampleRequest
from cohort.rollout.engines.local.decoders import Decoder, SharedPromptDecoder
from cohort.rollout.stop_strings import StopWatch, decode_text


def uniform_stream(key: CallKey, count: int) -> NDArray[np.float64]:
    """Return the first `count` uniform numbers in [0, 1) of a call's random stream (Philox, counter-based)."""
    name = (*key.prompt_seed, key.index, *key.turn_seed)
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(name))).random(count)


def penalize_repetition(logits_NV: Tensor, seen_NS: Tensor, penalty: float) -> Tensor:
    """Divide positive logits of seen tokens by `penalty`, and multiply negative ones (CTRL, arXiv:1909.05858).

    `seen_NS` are the tokens' ids, each once or more often.
    """
    seen_logits_NS = logits_NV.gather(-1, seen_NS)
    penalized_NS = torch.where(seen_logits_NS > 0, seen_logits_NS / penalty, seen_logits_NS * penalty)
    return logits_NV.scatter(-1, seen_NS, penalized_NS)


def sample_tokens(
    logits_NV: Tensor,
    uniforms_N: Tensor,
    *,
    temperature: float,
    min_p: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Sample one token per row by inversion of the cumulative distribution.

    What is kept is normalized again before the next parameter is applied, in this order.

    Args:
        logits_NV: [N, V], float32 or wider.
        uniforms_N: [N] float64 in [0, 1).
        temperature: divides the logits; 0 is greedy.
        min_p: keep tokens with at least this fraction of the largest probability (arXiv:2407.01082); 0 keeps all.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens with at least this total probability.

    Returns:
        tokens [N] int64 and their logprobs [N] under the distribution sampled from (greedy: at temperature 1).
    """
    if temperature == 0:
        log_p = torch.log_softmax(logits_NV, dim=-1)
        tokens = log_p.argmax(dim=-1)
    else:
        logits_NV = logits_NV if temperature == 1 else logits_NV / temperature
        log_p = torch.log_softmax(_keep_likeliest(logits_NV, min_p=min_p, top_k=top_k, top_p=top_p), dim=-1)
        # float64: in float32 the sum over a large vocabulary would lose the tail
        cumulative = log_p.exp().cumsum(dim=-1, dtype=torch.float64)
        # right=True: the first token whose cumulative probability exceeds u, so one of probability 0 is never chosen
        tokens = torch.searchsorted(cumulative, (uniforms_N * cumulative[:, -1]).unsqueeze(-1), right=True).squeeze(-1)
        tokens.clamp_(max=logits_NV.shape[-1] - 1)
    return tokens, log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def _keep_likeliest(logits_NV: Tensor, *, min_p: float, top_k: int, top_p: float) -> Tensor:
    """Set logits below min-p, outside top-k, then outside top-p of the rest, to -inf. Keeps ties."""
    if min_p > 0:
        least = logits_NV.amax(dim=-1, keepdim=True) + math.log(min_p)
        logits_NV = logits_NV.masked_fill(logits_NV < least, -torch.inf)
    if 0 < top_k < logits_NV.shape[-1]:
        kth = logits_NV.topk(top_k, dim=-1).values[:, -1:]
        logits_NV = logits_NV.masked_fill(logits_NV < kth, -torch.inf)
    if top_p < 1:
        logits_NV = logits_NV.masked_fill(logits_NV < _last_of_top_p(logits_NV, top_p), -torch.inf)
    return logits_NV


# On CPUs the sort of a large vocabulary takes longer than all else in sampling. Only rows whose top-p has more tokens
# than this need it.
_SHORT_TOP_P = 256


def _last_of_top_p(logits_NV: Tensor, top_p: float) -> Tensor:
    """Return the logit [N, 1] of the last token of top-p. That of a row does not depend on other rows."""
    log_total_N1 = logits_NV.logsumexp(dim=-1, keepdim=True)
    if logits_NV.device.type != "cpu" or logits_NV.shape[-1] <= _SHORT_TOP_P:
        return _last_kept(logits_NV.sort(dim=-1, descending=True).values, log_total_N1, top_p)[0]
    last, is_found = _last_kept(logits_NV.topk(_SHORT_TOP_P, dim=-1).values, log_total_N1, top_p)
    (others,) = (~is_found.squeeze(-1)).nonzero(as_tuple=True)
    if len(others):
        ordered = logits_NV[others].sort(dim=-1, descending=True).values
        last[others] = _last_kept(ordered, log_total_N1[others], top_p)[0]
    return last


def _last_kept(ordered_NK: Tensor, log_total_N1: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Return the last logit of top-p among the K largest in descending order, and whether top-p ends among them."""
    p = (ordered_NK - log_total_N1).exp()
    before = p.cumsum(dim=-1) - p
    last = ordered_NK.masked_fill(before >= top_p, torch.inf).amin(dim=-1, keepdim=True)
    return last, before[:, -1:] >= top_p


# Dropping rows copies the cache of the others, so wait until this fraction of the batch has ended.
_DROP_WHEN_ENDED = 0.15
# Completions that start together share attention calls, so wait until this fraction of the batch is free.
_JOIN_WHEN_FREE = 0.25
# Packing costs about as much as it saves over this many steps, and the number of remaining steps is unknown.
_PACK_AFTER = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Sampled tokens of N rows; entries at and after `lengths` are undefined."""

    tokens: np.ndarray  # [N, max_completion_tokens] int64
    logprobs: np.ndarray  # [N, max_completion_tokens] float64
    lengths: np.ndarray  # [N]
    stopped: np.ndarray  # [N] whether a stop string ended the row


class Sampler:
    """Samples tokens from the policy's own weights."""

    def __init__(
        self,
        policy: Policy,
        *,
        end_token_ids: frozenset[int],
        max_num_seqs: int,
        tokenizer: Any | None = None,
        stop: StopSignals = NEVER_STOPPED,
    ):
        """Create a sampler; nothing is sampled yet.

        Args:
            policy: shared with the trainer, never copied.
            end_token_ids: each of them ends a completion.
            max_num_seqs: maximum completions in flight; exceeded only if one group has more.
            tokenizer: decodes tokens to find stop strings; None ignores them.
            stop: whether the run was asked to stop; checked at each token.

        Raises:
            UserError: the model has no KV cache.
        """
        if cache_argument(find_body(policy.model)) is None:
            raise UserError(
                f"rollout.engine: 'local' needs a model with a key/value cache; {type(policy.model).__name__} has none"
            )
        self._policy = policy
        self._end_ids = torch.tensor(sorted(end_token_ids), device=policy.device)
        self._max_num_seqs = max_num_seqs
        self._tokenizer = tokenizer
        self._stop = stop

    def sample(self, requests: Sequence[SampleRequest]) -> list[SampledCompletion]:
        """Sample a completion for each call of each request, in order.

        Args:
            requests: requests with the same `SamplingParams.distribution`.

        Raises:
            StopRequested: the run was asked to end.
            UserError: decoding this model with its cache is wrong.
        """
        model, traits = self._policy.model, self._policy.traits
        if traits.decoding == "none" and not self._policy.shares_prompts:
            raise UserError(f"rollout.engine: 'local' cannot sample {type(model).__name__}: {traits.decoding_reason}")
        was_training = model.training
        model.eval()
        try:
            with self._policy.sampling():
                return self._sample(requests)
        finally:
            model.train(was_training)

    def _sample(self, requests: Sequence[SampleRequest]) -> list[SampledCompletion]:
        if not requests:
            return []  # a rank may have no requests
        parts = [part for request in requests for part in self._split(request)]
        pads = self._policy.shares_prompts or self._policy.traits.decoding == "padded"
        batches: dict[int, list[int]] = {}  # parts that are decoded together
        for n, part in enumerate(parts):
            batches.setdefault(0 if pads else len(part.token_ids), []).append(n)
        completions: dict[int, list[SampledCompletion]] = {}
        for batch in batches.values():
            decoded = self._completions(self._decode([parts[n] for n in batch]))
            completions |= {n: list(islice(decoded, len(parts[n].keys))) for n in batch}
        return [completion for n in range(len(parts)) for completion in completions[n]]

    def _completions(self, rows: _Rows) -> Iterator[SampledCompletion]:
        ends = frozenset(self._end_ids.tolist())
        for tokens, logprobs, length, stopped in zip(
            rows.tokens, rows.logprobs, rows.lengths, rows.stopped, strict=True
        ):
            yield SampledCompletion(
                token_ids=tokens[:length],
                sampling_logprobs=logprobs[:length],
                finish_reason="stop" if stopped or int(tokens[length - 1]) in ends else "length",
                text=None if self._tokenizer is None else decode_text(self._tokenizer, tokens[:length]),
            )

    def _split(self, request: SampleRequest) -> Iterator[SampleRequest]:
        """Split a request that exceeds both `max_num_seqs` and the size of a group."""
        most = max(self._max_num_seqs, request.sampling.num_generations)
        for start in range(0, len(request.keys), most):
            yield replace(request, keys=request.keys[start : start + most])

    def _decode(self, requests: Sequence[SampleRequest]) -> _Rows:
        """Decode all requests, starting new ones as others end (continuous batching)."""
        device, sampling = self._policy.device, requests[0].sampling
        limit = max(request.sampling.max_completion_tokens for request in requests)
        uniforms = torch.from_numpy(np.stack([uniform_stream(key, limit) for r in requests for key in r.keys])).to(
            device
        )
        unused = torch.tensor(
            [limit - r.sampling.max_completion_tokens for r in requests for _ in r.keys], device=device
        )
        total = len(uniforms)
        stops = _StopStrings(requests, self._tokenizer)
        repetition = _RepetitionPenalty(sampling.repetition_penalty, device)
        shares = self._policy.shares_prompts
        decoder: Decoder = SharedPromptDecoder(self._policy, limit=limit) if shares else self._policy.cache_decoder()
        tokens = torch.zeros(total, limit, dtype=torch.int64, device=device)
        logprobs = torch.zeros(total, limit, dtype=torch.float64, device=device)
        lengths = torch.zeros(total, dtype=torch.int64, device=device)
        row = torch.zeros(0, dtype=torch.int64, device=device)  # completion of each row in flight
        t = torch.zeros_like(row)  # position of its next token
        running = torch.zeros_like(row, dtype=torch.bool)  # False: has ended but is not dropped yet
        waiting, num_started, num_steps = deque(requests), 0, 0
        logits: list[Tensor] = []
        while waiting or len(row):
            self._stop.check()
            if joining := self._next_requests(waiting, len(row), decoder):
                counts = [len(request.keys) for request in joining]
                logits.append(decoder.start([request.token_ids for request in joining], counts))
                new = torch.arange(num_started, num_started + sum(counts), device=device)
                num_started += len(new)
                row, t = torch.cat([row, new]), torch.cat([t, torch.zeros_like(new)])
                running = torch.cat([running, torch.ones_like(new, dtype=torch.bool)])
                repetition.start(joining)
            chosen, tokens_logprobs = sample_tokens(
                repetition.penalize(torch.cat(logits)),
                uniforms[row, t],
                temperature=sampling.temperature,
                min_p=sampling.min_p,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
            )
            repetition.append(chosen)
            tokens[row, t], logprobs[row, t] = chosen, tokens_logprobs.double()
            t = t + 1
            age = t + unused[row]  # equals `limit` at a call's last allowed token
            ends = running & (torch.isin(chosen, self._end_ids) | (age == limit))
            if stops.watches:
                ends |= stops.found_with(row, chosen, running)
            lengths[row] = torch.where(
                ends, t, lengths[row]
            )  # not a masked index, which would synchronize with the host
            running &= ~ends
            num_running, oldest = torch.stack([running.sum(), age.max()]).tolist()
            if num_running <= (1 - _DROP_WHEN_ENDED) * len(row) or oldest == limit:
                keep = running.nonzero().squeeze(-1)
                decoder.keep(keep)
                repetition.keep(keep)
                row, t, running, chosen = row[keep], t[keep], running[keep], chosen[keep]
            num_steps += 1
            if num_steps == _PACK_AFTER:
                self._policy.pack_weights()
            logits = [decoder.step(chosen)] if len(row) else []
        return _Rows(
            tokens=tokens.cpu().numpy(),
            logprobs=logprobs.cpu().numpy(),
            lengths=lengths.cpu().numpy(),
            stopped=stops.found,
        )

    def _next_requests(self, waiting: deque[SampleRequest], num_rows: int, decoder: Decoder) -> list[SampleRequest]:
        """Pop the requests that start now: those for which `max_num_seqs` leaves room."""
        free = self._max_num_seqs - num_rows
        if num_rows and not (decoder.can_join and free >= _JOIN_WHEN_FREE * self._max_num_seqs):
            return []
        joining: list[SampleRequest] = []
        while waiting and (len(waiting[0].keys) <= free or not (num_rows or joining)):
            joining.append(waiting.popleft())
            free -= len(joining[-1].keys)
        return joining


class _RepetitionPenalty:
    """The repetition penalty of the completions in flight, for tokens of their contexts and their own."""

    def __init__(self, penalty: float, device: torch.device):
        self._penalty = penalty
        self._seen = torch.zeros(0, 1, dtype=torch.int64, device=device)  # [R, S] ids of tokens, also several times

    def start(self, requests: Sequence[SampleRequest]) -> None:
        """Add the completions of these requests."""
        if self._penalty == 1:
            return
        contexts = [np.unique(request.token_ids) for request in requests]
        wider = max(map(len, contexts)) - self._seen.shape[1]
        if wider > 0:
            self._seen = torch.cat([self._seen, self._seen[:, :1].expand(-1, wider)], dim=1)
        rows = [np.resize(context, self._seen.shape[1]) for context in contexts]  # repeats the context
        rows = [row for row, request in zip(rows, requests, strict=True) for _ in request.keys]
        self._seen = torch.cat([self._seen, torch.from_numpy(np.stack(rows)).to(self._seen.device)])

    def penalize(self, logits: Tensor) -> Tensor:
        """Apply the penalty to the next logits [R, V]."""
        return logits if self._penalty == 1 else penalize_repetition(logits, self._seen, self._penalty)

    def append(self, tokens: Tensor) -> None:
        """Add a token to each completion [R]."""
        if self._penalty != 1:
            self._seen = torch.cat([self._seen, tokens.unsqueeze(1)], dim=1)

    def keep(self, rows: Tensor) -> None:
        """Drop all completions but these."""
        self._seen = self._seen[rows] if self._penalty != 1 else self._seen


class _StopStrings:
    """Watches for the stop strings of completions, on the host."""

    def __init__(self, requests: Sequence[SampleRequest], tokenizer: Any | None):
        calls = [request.sampling.stop for request in requests for _ in request.keys]
        self.found = np.zeros(len(calls), dtype=bool)  # [N]
        self.watches = {} if tokenizer is None else {n: StopWatch(tokenizer, c) for n, c in enumerate(calls) if c}

    def found_with(self, row: Tensor, chosen: Tensor, running: Tensor) -> Tensor:
        """Return for which of the completions `row` [R] the tokens `chosen` [R] complete a stop string."""
        rows, tokens, are_running = torch.stack([row, chosen, running.long()]).tolist()
        for n, token, is_running in zip(rows, tokens, are_running, strict=True):
            if is_running and n in self.watches:
                self.found[n] = self.watches[n].found_with(token)
        return running & torch.from_numpy(self.found[rows]).to(row.device)
