"""Requests to vLLM servers: their control endpoints, one method each, and completions, whose answers are validated.

Without retries. The endpoints for weights, pausing and caches require a server started with VLLM_SERVER_DEV_MODE=1
(https://docs.vllm.ai/en/latest/training/). C tokens of a completion.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

from cohort.errors import UserError
from cohort.records import FinishReason, FloatArray, ModelCall, as_float32
from cohort.rollout.engines.servers.handles import GenerateRequest, ServerError
from cohort.rollout.engines.servers.http_api import QUICK_TIMEOUT_S, HttpClient, RejectedError, ServerApi
from cohort.rollout.engines.servers.secret import Secret
from cohort.rollout.engines.vllm.server import POLICY_NAME

# vLLM returns this for NaN and missing logprobs.
_NO_LOGPROB = -9999.0
# Rounding may push a probability slightly above 1.
_LOGPROB_TOLERANCE = 1e-4


class VllmApi(ServerApi):
    """The control endpoints of one server. Thread-safe."""

    def version(self) -> str:
        """Return vLLM's version, such as 0.32.0."""
        return cast(str, self._field("/version", self._request("GET", "/version"), "version", str))

    def world_size(self) -> int:
        """Return the number of workers (GPUs), all of which need the weights."""
        return cast(int, self._field("/get_world_size", self._request("GET", "/get_world_size"), "world_size", int))

    def pause(self) -> None:
        """Pause all requests until `resume`. Their KV cache is dropped."""
        self._request("POST", "/pause", params={"mode": "keep"})

    def resume(self) -> None:
        """Resume paused requests."""
        self._request("POST", "/resume")

    def init_weight_transfer(self, info: dict[str, Any]) -> None:
        """Have the server's workers rendezvous with the trainer."""
        self._request("POST", "/init_weight_transfer_engine", json={"init_info": info})

    def start_weight_update(self) -> None:
        """Begin an update. Fails while another one is in progress."""
        self._request("POST", "/start_weight_update")

    def update_weights(self, info: dict[str, Any]) -> None:
        """Run one step of an update on all workers."""
        self._request("POST", "/update_weights", json={"update_info": info})

    def finish_weight_update(self, version: int | None) -> None:
        """Finish an update. New tokens are labeled `version`; None keeps the label."""
        name = None if version is None else str(version)
        self._request("POST", "/finish_weight_update", json={"weight_version": name})

    def set_weight_version(self, version: int) -> None:
        """Label new tokens `version` without a weight update."""
        self._request("POST", "/update_weight_version", json={"new_version": str(version)})

    def weight_version(self) -> int | None:
        """Return the version of the current weights; None for those that the server loaded at startup."""
        said = self._field("/weight_info", self._request("GET", "/weight_info"), "weight_version", str)
        return int(said) if re.fullmatch(r"\d+", said) else None

    def reset_prefix_cache(self) -> None:
        """Drop the prefix cache. Running requests recompute their KV cache."""
        params = {"reset_running_requests": "true"}
        answer = self._request("POST", "/reset_prefix_cache", params=params)
        if not self._field("/reset_prefix_cache", answer, "success", bool):
            raise self._error("/reset_prefix_cache", "keys and values are still in use")

    def sleep(self, level: int) -> None:
        """Free GPU memory. Level 1 offloads weights to host memory; level 2 discards them. Requests are kept."""
        self._request("POST", "/sleep", params={"level": level, "mode": "keep"})

    def release_kv_cache(self) -> None:
        """Free the KV cache and what PyTorch caches, but no weights. Requests must be paused."""
        self._request("POST", "/release_kv_cache_memory")
        self._request("POST", "/collective_rpc", json={"method": "free_cached_memory"})  # as `sleep` does

    def wake_up(self, tags: list[str]) -> None:
        """Reallocate memory for "weights" or "kv_cache", all of which must be asleep.

        The contents of weights are undefined after level 2, and always those of the KV cache.
        """
        self._request("POST", "/wake_up", params={"tags": tags})

    def model_names(self) -> list[str]:
        """Return the model names that requests may use."""
        models = self._field("/v1/models", self._request("GET", "/v1/models"), "data", list)
        return [str(model.get("id")) for model in models]

    def load_lora_adapter(self, name: str, path: str) -> None:
        """Load an adapter's folder as `name`, once. If `name` exists, also requests in flight continue with it."""
        if name in self.model_names():
            # Not by the endpoint's `load_inplace`: vLLM 0.32 repeats it, and reads the folder, at every token.
            self._request("POST", "/collective_rpc", json={"method": "replace_adapter", "kwargs": {"folder": path}})
        else:
            self._request("POST", "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})


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
                "repetition_penalty": sampling.repetition_penalty,
                "temperature": sampling.temperature,
                "min_p": sampling.min_p,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
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
            sampling_logprobs=as_float32(_logprobs([entry["logprob"] for entry in content])),
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
