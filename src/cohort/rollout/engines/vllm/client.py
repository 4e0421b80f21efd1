"""Request completions from a vLLM server and validate the answers strictly.

C tokens of a completion.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cohort.errors import UserError
from cohort.records import FinishReason, FloatArray, ModelCall
from cohort.rollout.engines.servers.handles import GenerateRequest, ServerError
from cohort.rollout.engines.servers.http_api import QUICK_TIMEOUT_S, HttpClient, RejectedError
from cohort.rollout.engines.servers.secret import Secret
from cohort.rollout.engines.vllm.server import POLICY_NAME

# vLLM returns this for NaN and missing logprobs.
_NO_LOGPROB = -9999.0
# Rounding may push a probability slightly above 1.
_LOGPROB_TOLERANCE = 1e-4


class GenerateClient(HttpClient):
    """Requests completions from vLLM servers. For one event loop."""

    def __init__(self, *, end_token_ids: frozenset[int], vocab_size: int, secret: Secret | None, timeout_s: float):
        """Create a client; connections are opened per request.

        Args:
            end_token_ids: tokens that end a completion. Nothing else does, except the token limit.
            vocab_size: token ids must be smaller.
            secret: as for `HttpClient`.
            timeout_s: maximum time per request.
        """
        super().__init__(secret=secret, timeout_s=timeout_s)
        self._end_token_ids = end_token_ids
        self._vocab_size = vocab_size

    async def max_model_len(self, url: str) -> int:
        """Return the server's maximum tokens of prompt and completion.

        Raises:
            ServerError: the server does not report it.
        """
        answer = await self._request(url, "GET", "/v1/models", timeout_s=QUICK_TIMEOUT_S)
        try:
            return next(int(card["max_model_len"]) for card in answer["data"] if card.get("max_model_len"))
        except (StopIteration, LookupError, TypeError, ValueError, AttributeError) as error:
            raise ServerError(f"{url}/v1/models reports no max_model_len: {answer!r:.200}") from error

    async def generate(self, url: str, request: GenerateRequest, *, allows: Callable[[int], bool]) -> list[ModelCall]:
        """Implement `Client.generate`."""
        try:
            answer = await self._request(
                url, "POST", "/inference/v1/generate", timeout_s=self._timeout_s, json=self._body(request)
            )
        except RejectedError as error:
            raise UserError(
                f"rollout: the vLLM server {url} rejects prompt {request.prompt_id} ({len(request.token_ids)} tokens, "
                f"rollout.max_completion_tokens: {request.sampling.max_completion_tokens}): {error}"
            ) from error
        try:
            return self._parse(answer, request, allows)
        except (_InvalidAnswerError, LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            why = str(error) if isinstance(error, _InvalidAnswerError) else f"unexpected format ({error!r})"
            raise ServerError(f"{url} sent an invalid answer for prompt {request.prompt_id}: {why}") from error

    def _body(self, request: GenerateRequest) -> dict[str, Any]:
        sampling = request.sampling
        return {
            "model": POLICY_NAME,
            "token_ids": request.token_ids.tolist(),
            "sampling_params": {
                "n": request.num_completions,
                "max_tokens": sampling.max_completion_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "seed": request.seed,
                "stop_token_ids": sorted(self._end_token_ids),
                "ignore_eos": True,  # only the run's end tokens
                "logprobs": 0,  # only for the sampled token
                # special tokens are part of the text in which `cut_at_stop` looks for stop strings
                **({"stop": sampling.stop, "skip_special_tokens": False} if sampling.stop else {"detokenize": False}),
            },
        }

    def _parse(self, answer: Any, request: GenerateRequest, allows: Callable[[int], bool]) -> list[ModelCall]:
        if len(answer["choices"]) != request.num_completions:
            raise _InvalidAnswerError(f"{len(answer['choices'])} completions instead of {request.num_completions}")
        choices = {choice["index"]: choice for choice in answer["choices"]}
        return [self._model_call(choices[index], request, allows) for index in range(request.num_completions)]

    def _model_call(
        self, choice: Mapping[str, Any], request: GenerateRequest, allows: Callable[[int], bool]
    ) -> ModelCall:
        limit = request.sampling.max_completion_tokens
        token_ids = np.asarray(choice["token_ids"])
        if token_ids.ndim != 1 or token_ids.dtype != np.int64 or not 0 < len(token_ids) <= limit:
            raise _InvalidAnswerError(f"token_ids must be 1 to {limit} token ids, got {choice['token_ids']!r:.100}")
        if token_ids.min() < 0 or token_ids.max() >= self._vocab_size:
            raise _InvalidAnswerError(
                f"token ids outside the vocabulary of {self._vocab_size}: {token_ids.min()} to {token_ids.max()}"
            )
        content = choice["logprobs"]["content"]
        if [entry["token_id"] for entry in content] != choice["token_ids"]:
            raise _InvalidAnswerError(f"the {len(content)} logprobs do not match the {len(token_ids)} tokens")
        ends = np.isin(token_ids, list(self._end_token_ids))
        if ends[:-1].any():
            raise _InvalidAnswerError("tokens after the end token")
        is_stopped = choice["finish_reason"] == "stop" and choice.get("stop_reason") in request.sampling.stop
        finish_reason: FinishReason = "stop" if ends[-1] or is_stopped else "length"
        if choice["finish_reason"] != finish_reason:
            raise _InvalidAnswerError(
                f"finish reason {choice['finish_reason']!r}, but the completion does {'' if ends[-1] else 'not '}end "
                "with an end token"
            )
        if finish_reason == "length" and len(token_ids) < limit:
            raise _InvalidAnswerError(f"cut off after {len(token_ids)} tokens instead of {limit}")
        return ModelCall(
            context_ids=request.token_ids,
            token_ids=token_ids,
            sampling_logprobs=_logprobs([entry["logprob"] for entry in content]),
            finish_reason=finish_reason,
            policy_version=_oldest_version(choice["weight_versions"], len(token_ids), allows),
        )


class _InvalidAnswerError(Exception):
    """The answer is invalid, for the reason in the message."""


def _logprobs(values: list[Any]) -> FloatArray:
    """Validate the logprobs of sampled tokens, [C]."""
    logprobs = np.asarray(values, dtype=np.float64)
    wrong = ~((logprobs > _NO_LOGPROB) & (logprobs <= _LOGPROB_TOLERANCE))  # NaN is neither
    if wrong.any():
        raise _InvalidAnswerError(f"invalid logprob {logprobs[wrong][0]}")
    return logprobs


def _oldest_version(spans: list[Mapping[str, Any]], num_tokens: int, allows: Callable[[int], bool]) -> int:
    """Return the oldest policy version of a completion's tokens, whose spans must cover all of them."""
    bounds = [0, *(span["end"] for span in spans)]
    if [span["start"] for span in spans] != bounds[:-1] or bounds[-1] != num_tokens or sorted(bounds) != bounds:
        raise _InvalidAnswerError(f"the weight versions do not cover the {num_tokens} tokens: {spans}")
    labels = [str(span["version"]) for span in spans]
    if not all(label.isdecimal() and allows(int(label)) for label in labels):
        raise _InvalidAnswerError(f"sampled with unexpected weight versions {labels}")
    return min(int(label) for label in labels)
