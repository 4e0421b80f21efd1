"""Post JSON to an HTTP endpoint: bounded concurrency, retries with backoff, a deadline for all requests."""

import asyncio
import json
import os
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpx2

from cohort.errors import UserError, describe_error
from cohort.rewards.function import check_number

_CONNECT_TIMEOUT_S = 10.0
_FIRST_BACKOFF_S = 0.5
_LONGEST_BACKOFF_S = 30.0
_RETRIED = (408, 409, 425, 429)  # and all from 500
_MISCONFIGURED = (401, 403, 404, 405)  # or, of a server that has answered others, a refusal of one request
_REFUSED = tuple(f"http_{status}" for status in _MISCONFIGURED)
_LOCAL = ("127.0.0.1", "localhost", "::1")
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request has no answer."""

    kind: str  # for counts: connection, timeout, http_503, rejected, invalid_answer or out_of_time
    message: str


@dataclass(slots=True)
class _Call:
    """State of one call of `post_all`."""

    client: httpx2.AsyncClient
    slots: asyncio.Semaphore
    deadline: float  # of the event loop's clock
    is_down: bool = False  # nothing listens, after all retries of a request: others do not repeat theirs


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteClient:
    """A URL that answers JSON with JSON. It keeps no connections between calls, so it works with any event loop.

    Statuses of a wrong configuration are errors until the first request succeeds. From then on they are failures of
    their request: gateways refuse flagged texts by 403, and proxies answer 404 while a server restarts.
    """

    url: str
    api_key_env: str | None = None  # environment variable with a key, sent as a bearer token
    max_concurrent: int = 32
    request_timeout_s: float = 60.0  # for one attempt
    retries: int = 4  # attempts after the first one
    _client_options: dict[str, Any] = field(init=False, repr=False)
    _has_answered: threading.Event = field(init=False, repr=False, compare=False, default_factory=threading.Event)

    def __post_init__(self) -> None:
        """Check the URL and find the key.

        Raises:
            ValueError: the URL is not one of HTTP, or the variable is not set.
        """
        try:
            url = httpx2.URL(self.url)
        except (httpx2.InvalidURL, TypeError) as error:
            raise ValueError(f"url: {self.url!r} is not a URL: {error}") from error
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError(f"url: {self.url!r} must look like http://host:8000")
        if url.userinfo:
            raise ValueError("url: must not hold a user name or password; name an environment variable in api_key_env")
        headers = {"Content-Type": "application/json"}
        if self.api_key_env is not None:
            key = os.environ.get(self.api_key_env) if isinstance(self.api_key_env, str) else None
            if not key:
                raise ValueError(
                    f"api_key_env: the environment variable {self.api_key_env!r} is not set; export it, or leave "
                    "api_key_env out for a server without a key"
                )
            headers["Authorization"] = f"Bearer {key}"
        options = {
            "headers": headers,
            "verify": url.scheme == "https",  # loading certificates is slow, and most servers are local
            "trust_env": url.host not in _LOCAL,  # proxies from the environment
            "timeout": httpx2.Timeout(self.request_timeout_s, connect=min(_CONNECT_TIMEOUT_S, self.request_timeout_s)),
        }
        object.__setattr__(self, "_client_options", options)

    def get(self, url: str) -> httpx2.Response:
        """Return the answer to one GET, whatever its status.

        Raises:
            ValueError: nothing answers, or it refuses the key.
        """
        try:
            with httpx2.Client(**self._client_options) as client:
                response = client.get(url)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ValueError(f"url: {url} does not answer ({describe_error(error)}); start the server first") from error
        if response.status_code in (401, 403):
            raise ValueError(f"url: {url} refuses the key: {_said(response)}; set api_key_env to a variable with it")
        return response

    def post(self, body: Any, parse: Callable[[Any], _Value]) -> _Value:
        """Return the answer to one POST, without retries.

        Args:
            body: JSON.
            parse: turns the parsed body of the answer into a value; raises LookupError, TypeError or ValueError.

        Raises:
            ValueError: nothing answers, or something else than expected.
        """
        try:
            with httpx2.Client(**self._client_options) as client:
                response = client.post(self.url, content=_encoded(body))
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ValueError(
                f"url: {self.url} does not answer ({describe_error(error)}); start the server first"
            ) from error
        if response.status_code != 200:
            raise ValueError(f"url: {self.url} answers a test request with {_said(response)}")
        try:
            value = parse(response.json())
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"url: {self.url} answers a test request with {_said(response)}: {error}") from error
        self._has_answered.set()
        return value

    async def post_all(
        self,
        bodies: Sequence[Any],
        parse: Callable[[int, Any], _Value],
        *,
        budget_s: float,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[_Value | Failure]:
        """Post all bodies, and return the parsed answers in their order. Failures are retried, then returned.

        Args:
            bodies: JSON of each request.
            parse: called with a request's number and the parsed body of its answer, as soon as it is there. What
                raises LookupError, TypeError or ValueError is an invalid answer.
            budget_s: seconds for all of them.
            on_progress: called with the number of requests that are over and of all requests.

        Raises:
            UserError: the endpoint does not exist or refuses the key, and has never answered.
        """
        loop = asyncio.get_running_loop()
        done = 0

        async def post(i: int, body: Any) -> _Value | Failure:
            nonlocal done
            value = await self._post(call, i, body, parse)
            done += 1
            on_progress(done, len(bodies))
            return value

        limits = httpx2.Limits(max_connections=self.max_concurrent)
        async with httpx2.AsyncClient(**self._client_options, limits=limits) as client:
            call = _Call(client, asyncio.Semaphore(self.max_concurrent), loop.time() + budget_s)
            tasks = [asyncio.create_task(post(i, body)) for i, body in enumerate(bodies)]
            try:
                if tasks:
                    await asyncio.wait(tasks, timeout=budget_s, return_when=asyncio.FIRST_EXCEPTION)
                late = Failure("out_of_time", f"no answer from {self.url} within {budget_s:g} s for all requests")
                values = [task.result() if task.done() else late for task in tasks]
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        refused = [v.message for v in values if isinstance(v, Failure) and v.kind in _REFUSED]
        if refused and not self._has_answered.is_set():
            raise UserError(f"{refused[0]}; check url, model and api_key_env")
        return values

    async def _post(self, call: _Call, i: int, body: Any, parse: Callable[[int, Any], _Value]) -> _Value | Failure:
        """Post one body, with retries."""
        loop = asyncio.get_running_loop()
        backoff_s = _FIRST_BACKOFF_S
        async with call.slots:
            for attempt in range(self.retries + 1):
                value, failure, retry_after_s = await self._attempt(call, i, body, parse)
                if failure is None:
                    call.is_down = False
                    self._has_answered.set()
                    return value  # type: ignore[return-value]
                if failure.kind == "rejected" or failure.kind in _REFUSED:
                    return failure
                wait_s = backoff_s * random.uniform(0.5, 1.0) if retry_after_s is None else retry_after_s
                if attempt == self.retries or call.is_down or loop.time() + wait_s >= call.deadline:
                    call.is_down = failure.kind == "connection"
                    return failure
                await asyncio.sleep(wait_s)
                backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)
        raise AssertionError("the last attempt returns")

    async def _attempt(
        self, call: _Call, i: int, body: Any, parse: Callable[[int, Any], _Value]
    ) -> tuple[_Value | None, Failure | None, float | None]:
        """Return the parsed answer, or why there is none and the seconds that the server asks to wait."""
        try:
            async with asyncio.timeout(self.request_timeout_s):  # for the whole answer, however slowly it arrives
                response = await call.client.post(self.url, content=_encoded(body))
        except (TimeoutError, httpx2.TimeoutException):
            return None, Failure("timeout", f"{self.url}: no answer within {self.request_timeout_s:g} s"), None
        except httpx2.HTTPError as error:
            return None, Failure("connection", f"{self.url}: {describe_error(error)}"), None
        status = response.status_code
        if status in _MISCONFIGURED:
            return None, Failure(f"http_{status}", f"{self.url} answers {_said(response)}"), None
        if status in _RETRIED or status >= 500:
            return None, Failure(f"http_{status}", f"{self.url}: {_said(response)}"), _retry_after_s(response)
        if status != 200:
            return None, Failure("rejected", f"{self.url}: {_said(response)}"), None
        try:
            return parse(i, response.json()), None, None
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            return None, Failure("invalid_answer", f"{self.url}: {error!r} in {_said(response)}"), None


def check_endpoint_arguments(*, max_concurrent: object, request_timeout_s: object, retries: object) -> None:
    """Check the arguments of rewards that are passed to `RemoteClient`.

    Raises:
        ValueError: one of them is out of range.
    """
    check_number("max_concurrent", max_concurrent, minimum=1, whole=True)
    check_number("request_timeout_s", request_timeout_s, above=0)
    check_number("retries", retries, minimum=0, whole=True)


def _encoded(body: Any) -> bytes:
    """Return JSON in ASCII: UTF-8 has no form of the lone surrogates that texts may have."""
    return json.dumps(body).encode()


def _retry_after_s(response: httpx2.Response) -> float | None:
    """Return the header Retry-After in seconds: a number, or a date."""
    text = response.headers.get("retry-after")
    if text is None:
        return None
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return None


def _said(response: httpx2.Response) -> str:
    text = f"{response.status_code} {' '.join(response.text.split()):.300}"
    key = response.request.headers.get("authorization", "").removeprefix("Bearer ")
    return text.replace(key, "***") if key else text
