"""Post JSON to a server through the openai SDK: bounded concurrency, retries with pauses, a deadline for all requests.

The SDK retries connections that fail, timeouts, 408, 409, 429 and all from 500, and waits as long as the server asks.
"""

import asyncio
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import httpx2

from cohort.config.rewards import ServerSettings
from cohort.errors import UserError, describe_error
from cohort.rewards.function import require_package

if TYPE_CHECKING:
    import openai

_CONNECT_TIMEOUT_S = 10.0
_MISCONFIGURED = (401, 403, 404, 405)  # or, of a server that has answered others, a refusal of one request
_REFUSED = tuple(f"http_{status}" for status in _MISCONFIGURED)
_RETRIED = (408, 409, 429)  # and all from 500
_LOCAL = ("127.0.0.1", "localhost", "::1")
_INVALID = (LookupError, TypeError, ValueError, AttributeError, RecursionError)  # raised by answers of another form
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request has no answer."""

    kind: str  # for counts: connection, timeout, http_503, rejected, invalid_answer or out_of_time
    message: str


class NotJudged:
    """Counts the completions of a run that were not judged, by kind of failure, with an example of each."""

    def __init__(self, who: str) -> None:
        """Create it; `who` begins the warnings."""
        self._who = who
        self._failures: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def count(self, failures: Iterable[Failure]) -> dict[str, int]:
        """Add the failures of a call, and return their counts."""
        counts: Counter[str] = Counter()
        for failure in failures:
            counts["not_judged"] += 1
            counts[failure.kind] += 1
            self._failures[failure.kind] += 1
            self._examples.setdefault(failure.kind, failure.message)
        return dict(counts)

    def warnings(self) -> list[str]:
        """Return warnings for the run's summary."""
        return [
            f"{self._who}: {number} completions were not judged ({kind}), for example: {self._examples[kind]}"
            for kind, number in self._failures.items()
        ]


@dataclass(slots=True)
class _Call:
    """State of one call of `post_all`."""

    client: "openai.AsyncOpenAI"
    slots: asyncio.Semaphore
    is_down: bool = False  # nothing listens, after all retries of a request: others do not repeat theirs


class RemoteClient:
    """A URL that answers JSON with JSON. It keeps no connections between calls, so it works with any event loop.

    Statuses of a wrong configuration are errors until the first request succeeds. From then on they are failures of
    their request: gateways refuse flagged texts by 403, and proxies answer 404 while a server restarts.
    """

    def __init__(self, settings: ServerSettings, url: str) -> None:
        """Check the URL and find the key.

        Raises:
            ValueError: the URL is not one of HTTP, the key's variable is not set, or the SDK is not installed.
        """
        require_package("openai", extra="judge")
        self.url = url
        self._settings = settings
        self._key = _read_key(settings.api_key_env)
        self._identity: dict[str, Any] = {"base_url": url, "api_key": self._key or "none"}
        self._has_answered = False
        parsed = _parsed(url)
        # loading certificates is slow, and most servers are local; local ones are behind no proxy
        self._options: dict[str, Any] = {"verify": parsed.scheme == "https", "trust_env": parsed.host not in _LOCAL}

    def get(self, url: str) -> str:
        """Return the answer to one GET, whatever its status.

        Raises:
            ValueError: nothing answers, or it refuses the key.
        """
        import openai

        try:
            return self._ask(url)
        except openai.APIStatusError as error:
            if error.status_code in (401, 403):
                raise ValueError(
                    f"url: {url} refuses the key: {self._said(error)}; set api_key_env to a variable with it"
                ) from error
            return error.response.text

    def post(self, body: Any, parse: Callable[[Any], _Value]) -> _Value:
        """Return the answer to one POST, without retries.

        Args:
            body: JSON.
            parse: turns the parsed body of the answer into a value; raises LookupError, TypeError or ValueError.

        Raises:
            ValueError: nothing answers, or something else than expected.
        """
        import openai

        try:
            said = self._ask(self.url, body)
        except openai.APIStatusError as error:
            raise ValueError(f"url: {self.url} answers a test request with {self._said(error)}") from error
        try:
            value = parse(json.loads(said))
        except _INVALID as error:
            raise ValueError(f"url: {self.url} answers a test request with {_short(said)}: {error}") from error
        self._has_answered = True
        return value

    def _ask(self, url: str, body: Any = None) -> str:
        """Return the answer to one GET, or one POST of a body."""
        import openai

        limit_s = self._settings.request_timeout_s
        http_client = httpx2.Client(timeout=limit_s, **self._options)
        with openai.OpenAI(timeout=limit_s, http_client=http_client, **self._identity) as client:
            try:
                if body is None:
                    return str(client.get(url, cast_to=str, options=self._request(retries=0)))
                return str(client.post(url, cast_to=str, body=_sendable(body), options=self._request(retries=0)))
            except openai.APIConnectionError as error:
                raise ValueError(
                    f"url: {url} does not answer ({describe_error(error.__cause__ or error)}); start the server first"
                ) from error

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
        done = 0

        async def post(i: int, body: Any) -> _Value | Failure:
            nonlocal done
            value = await self._post(call, i, body, parse)
            done += 1
            on_progress(done, len(bodies))
            return value

        async with self._open() as client:
            call = _Call(client, asyncio.Semaphore(self._settings.max_concurrent))
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
        if refused and not self._has_answered:
            raise UserError(f"{refused[0]}; check url, model and api_key_env")
        return values

    async def _post(self, call: _Call, i: int, body: Any, parse: Callable[[int, Any], _Value]) -> _Value | Failure:
        """Post one body. The SDK repeats requests that fail, and this function those with an invalid answer."""
        import openai

        failure = Failure("invalid_answer", "")
        async with call.slots:
            for attempt in range(self._settings.retries + 1):
                retries = 0 if call.is_down else self._settings.retries - attempt
                options = self._request(retries=retries)
                try:
                    text = str(await call.client.post(self.url, cast_to=str, body=_sendable(body), options=options))
                except openai.APIError as error:
                    failure = self._failure(error)
                    call.is_down = failure.kind == "connection"
                    return failure
                call.is_down = False
                try:
                    value = parse(i, json.loads(text))
                except _INVALID as error:
                    failure = Failure("invalid_answer", f"{self.url}: {error!r} in {_short(text)}")
                    continue
                self._has_answered = True
                return value
        return failure

    def _failure(self, error: "openai.APIError") -> Failure:
        import openai

        if isinstance(error, openai.APITimeoutError):
            return Failure("timeout", f"{self.url}: no answer within {self._settings.request_timeout_s:g} s")
        if not isinstance(error, openai.APIStatusError):
            return Failure("connection", f"{self.url}: {describe_error(error.__cause__ or error)}")
        status = error.status_code
        if status in _MISCONFIGURED:
            return Failure(f"http_{status}", f"{self.url} answers {self._said(error)}")
        is_retried = status in _RETRIED or status >= 500
        return Failure(f"http_{status}" if is_retried else "rejected", f"{self.url}: {self._said(error)}")

    def _said(self, error: "openai.APIStatusError") -> str:
        text = f"{error.status_code} {_short(error.response.text)}"
        return text.replace(self._key, "***") if self._key else text

    def _open(self) -> "openai.AsyncOpenAI":
        import openai

        limit_s = self._settings.request_timeout_s
        timeout = httpx2.Timeout(limit_s, connect=min(_CONNECT_TIMEOUT_S, limit_s))
        limits = httpx2.Limits(max_connections=self._settings.max_concurrent)
        http_client = _BoundedClient(limit_s, limits=limits, **self._options)
        return openai.AsyncOpenAI(timeout=timeout, http_client=http_client, **self._identity)

    def _request(self, *, retries: int) -> "openai.RequestOptions":
        import openai

        headers = {} if self._key else {"Authorization": openai.Omit()}
        return {"max_retries": retries, "headers": headers}


class _BoundedClient(httpx2.AsyncClient):
    """A client that limits the time for a whole answer, however slowly it arrives."""

    def __init__(self, limit_s: float, **options: Any) -> None:
        super().__init__(**options)
        self._limit_s = limit_s

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request and read the answer."""
        try:
            async with asyncio.timeout(self._limit_s):
                return await super().send(request, **options)
        except TimeoutError as error:
            raise httpx2.ReadTimeout("the answer takes too long", request=request) from error


def _parsed(url: str) -> httpx2.URL:
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise ValueError(f"url: {url!r} is not a URL: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"url: {url!r} must look like http://host:8000")
    if parsed.userinfo:
        raise ValueError("url: must not hold a user name or password; name an environment variable in api_key_env")
    return parsed


def _read_key(variable: str | None) -> str:
    """Return the key in an environment variable; "" for a server without a key."""
    if variable is None:
        return ""
    if not (key := os.environ.get(variable)):
        raise ValueError(
            f"api_key_env: the environment variable {variable!r} is not set; export it, or leave api_key_env out for a "
            "server without a key"
        )
    return key


def _sendable(body: Any) -> Any:
    """Return JSON without lone surrogates, for which UTF-8 has no form."""
    return json.loads(json.dumps(body, ensure_ascii=False).encode(errors="replace"))


def _short(text: str) -> str:
    return f"{' '.join(text.split()):.300}"
