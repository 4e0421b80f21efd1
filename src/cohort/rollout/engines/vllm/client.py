"""Request completions from a vLLM server and validate the answers strictly.

C tokens of a completion.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Self

import httpx2
import numpy as np

from cohort.errors import UserError, describe_error
from cohort.records import FinishReason, FloatArray, ModelCall
from cohort.rollout.engines.servers.handles import BusyError, GenerateRequest, ServerError
from cohort.rollout.engines.servers.secret import Secret, request_headers
from cohort.rollout.engines.vllm.server import POLICY_NAME
from cohort.rollout.engines.vllm.server_proof import CONNECTED, check_server_async

_CONNECT_TIMEOUT_S = 10.0
_QUICK_TIMEOUT_S = 10.0  # for endpoints that answer at once
_REJECTED = (400, 413, 422)
_BUSY = (429, 503)
_UNAUTHORIZED = 401
# vLLM returns this for NaN and missing logprobs.
_NO_LOGPROB = -9999.0
# Rounding may push a probability slightly above 1.
_LOGPROB_TOLERANCE = 1e-4


class GenerateClient:
    """Requests completions from vLLM servers. For one event loop."""

    def __init__(self, *, end_token_ids: frozenset[int], vocab_size: int, secret: Secret | None, timeout_s: float):
        """Create a client; connections are opened per request.

        Args:
            end_token_ids: tokens that end a completion. Nothing else does, except the token limit.
            vocab_size: token ids must be smaller.
            secret: sent with every request, after the server's proof if it is mutual; None for servers without one.
            timeout_s: maximum time per request.
        """
        self._end_token_ids = end_token_ids
        self._vocab_size = vocab_size
        self._secret = secret
        self._timeout_s = timeout_s
        self._http: dict[bool, httpx2.AsyncClient] = {}  # key: whether certificates are verified

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        for http in self._http.values():
            await http.aclose()

    async def healthy(self, url: str) -> bool:
        """Whether the server answers and its engine is alive.

        Raises:
            ServerError: it demands another secret, or is not the run's server.
        """
        try:
            async with asyncio.timeout(_QUICK_TIMEOUT_S):
                response = await self._send(url, "GET", "/health")
        except (httpx2.HTTPError, httpx2.InvalidURL, TimeoutError):
            return False
        _check_secret(response)
        return response.status_code == 200

    async def max_model_len(self, url: str) -> int:
        """Return the server's maximum tokens of prompt and completion.

        Raises:
            ServerError: the server does not report it.
        """
        answer = await self._request(url, "GET", "/v1/models", timeout_s=_QUICK_TIMEOUT_S)
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
        except _RejectedError as error:
            raise UserError(
                f"rollout: the vLLM server {url} rejects prompt {request.prompt_id} ({len(request.token_ids)} tokens, "
                f"rollout.max_completion_tokens: {request.sampling.max_completion_tokens}): {error}"
            ) from error
        try:
            return self._parse(answer, request, allows)
        except (_InvalidAnswerError, LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            why = str(error) if isinstance(error, _InvalidAnswerError) else f"unexpected format ({error!r})"
            raise ServerError(f"{url} sent an invalid answer for prompt {request.prompt_id}: {why}") from error

    def _client(self, url: str) -> httpx2.AsyncClient:
        verify = url.startswith("https:")  # loading certificates is slow, and most servers are local
        if verify not in self._http:
            self._http[verify] = httpx2.AsyncClient(
                verify=verify,
                headers=request_headers(self._secret),
                timeout=httpx2.Timeout(self._timeout_s, connect=_CONNECT_TIMEOUT_S),
                # One connection per request: servers close idle ones after some seconds, and a request on such a
                # connection would look like a crashed server.
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
                trust_env=False,  # ignore proxies from the environment
            )
        return self._http[verify]

    async def _send(self, url: str, method: str, path: str, *, json: Any = None) -> httpx2.Response:
        """Send a request on a new connection, once the server has proved who it is if the secret is mutual."""

        async def trace(event: str, info: Any) -> None:
            if event == CONNECTED and self._secret is not None and self._secret.mutual:
                await check_server_async(info["return_value"], url, self._secret)

        return await self._client(url).request(method, f"{url}{path}", json=json, extensions={"trace": trace})

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

    async def _request(self, url: str, method: str, path: str, *, timeout_s: float, json: Any = None) -> Any:
        """Send a request and return the parsed body of its answer."""
        try:
            async with asyncio.timeout(timeout_s):  # for the whole answer, however slowly it arrives
                response = await self._send(url, method, path, json=json)
        except TimeoutError as error:
            raise ServerError(f"{url}{path}: no answer within {timeout_s:g} s") from error
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ServerError(f"{url}{path}: {describe_error(error)}") from error
        _check_secret(response)
        if response.status_code != 200:
            said = f"{response.status_code} {' '.join(response.text.split()):.300}"
            if response.status_code in _REJECTED:
                raise _RejectedError(said)
            raise (BusyError if response.status_code in _BUSY else ServerError)(f"{url}{path}: {said}")
        try:
            return response.json()
        except ValueError as error:
            raise ServerError(f"{url}{path} sent an answer that is not JSON: {response.content[:80]!r}") from error

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


def _check_secret(response: httpx2.Response) -> None:
    if response.status_code == _UNAUTHORIZED:
        raise ServerError(
            f"{response.url}: the server demands another secret (HTTP {_UNAUTHORIZED}); rollout.secret_file must be "
            f"the file with which it was started"
        )


class _RejectedError(Exception):
    """The server rejected a request as invalid."""


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
