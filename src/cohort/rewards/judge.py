"""The `judge` reward: scores of a language model behind an OpenAI-compatible endpoint."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2

from cohort.config.paths import expand_home
from cohort.errors import UserError, suggest
from cohort.rewards.conversation import transcript
from cohort.rewards.describe import excerpt
from cohort.rewards.endpoint import Endpoint, Failure, check_endpoint_arguments
from cohort.rewards.function import column_values, keyword_parameters
from cohort.rewards.judge_prompt import ROLLOUT_PLACEHOLDERS, JudgePrompt, read_prompt
from cohort.rewards.reply_cache import ReplyCache, content_key
from cohort.rewards.rubric import Rubric, read_rubric

CACHE_NAME = "judge_replies.jsonl"
_SAMPLING: Mapping[str, Any] = {"temperature": 0, "max_tokens": 1024}
_REPLY = "reply"  # detail column with the judge's text


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """The checked arguments."""

    endpoint: Endpoint
    model: str
    prompt: JudgePrompt
    rubric: Rubric
    sampling: Mapping[str, Any]
    cache: Path | None  # None: in memory


class JudgeReward:
    """The weighted mean of the scores that a judge gives a completion; None if it gives none.

    Equal requests are sent once: their replies are kept, by model, prompt and sampling parameters, in the run folder.
    Not judged, and counted by `last_counts`: completions whose request fails after all retries, or whose reply holds
    no valid score for a criterion.

    Arguments (in `rewards[i].args`):
        url: address of the server, such as http://host:8000; a path other than /v1 is kept.
        model: name of the model, as the server has it.
        prompt: file with the prompt. `{prompt}`, `{completion}` and `{column}` are filled in.
        pattern: regular expression with one group, whose last match in the reply is the score. Default: the number
            in a line such as `Score: 7`; for a criterion, in a line that begins with its name.
        range: [low, high] of the scores, mapped to [0, 1]; a score outside is not valid. Default None: as they are.
        values: {word: number}, if the group is a word. Default None.
        criteria: {name: {weight, pattern, range, values}}. Default None: one score.
        sampling: parameters of the request. Default {temperature: 0, max_tokens: 1024}.
        api_key_env: environment variable with the key. Default None.
        max_concurrent: requests at a time. Default 32.
        request_timeout_s: seconds for one attempt. Default 60.
        retries: attempts after the first one. Default 4.
        cache: file of the replies. Default None: in the run folder, if there is one.
    """

    __name__ = "judge"

    def __init__(
        self, *, budget_s: float = 240.0, run_folder: Path | None = None, ask_server_first: bool = True
    ) -> None:
        """Create the reward.

        Args:
            budget_s: seconds for all completions of a call; the rest is not judged.
            run_folder: folder for the replies; used once it exists.
            ask_server_first: whether `required_columns` asks the server. False: once a reply is missing.
        """
        self._asks_late = not ask_server_first
        self._budget_s = budget_s
        self._run_folder = run_folder
        self._found: Endpoint | None = None  # the endpoint that has answered
        self._cache: ReplyCache | None = None
        self._prompts: dict[str, JudgePrompt] = {}  # by file; each is read once, so it does not change during a run
        self._examples: dict[str, str] = {}  # kind of failure -> its first example
        self._failures: Counter[str] = Counter()
        self.on_progress: Callable[[int, int], None] = lambda done, total: None  # see `ReportsProgress`
        self.last_counts: dict[str, int] = {}  # completions of the last call by what is noteworthy about them
        self.last_details: dict[str, list[str | None]] = {}  # of the last call: column -> one for each completion

    @property
    def warnings(self) -> list[str]:
        """Warnings for the run's summary."""
        return [
            f"judge: {number} completions were not judged ({kind}), for example: {self._examples[kind]}"
            for kind, number in self._failures.items()
        ]

    def required_columns(
        self,
        *,
        url: str,
        model: str,
        prompt: str,
        pattern: str | None = None,
        range: Sequence[float] | None = None,
        values: Mapping[str, float] | None = None,
        criteria: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        api_key_env: str | None = None,
        max_concurrent: int = 32,
        request_timeout_s: float = 60.0,
        retries: int = 4,
        cache: str | None = None,
    ) -> Sequence[str]:
        """See `ChecksArguments`. Asks the server once which models it has."""
        settings = self._settings({name: value for name, value in locals().items() if name != "self"})
        if settings.endpoint != self._found and not self._asks_late:
            _check_server(settings)
            self._found = settings.endpoint
        return [name for name in settings.prompt.names if name not in ROLLOUT_PLACEHOLDERS]

    async def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns_and_args: Any
    ) -> list[float | None]:
        """Return one reward per completion.

        Raises:
            UserError: the server refuses the key or does not know the endpoint, and has judged nothing yet.
        """
        names = keyword_parameters(self.required_columns).names
        settings = self._settings({name: value for name, value in columns_and_args.items() if name in names})
        if settings.endpoint == self._found:
            settings = replace(settings, endpoint=self._found)  # it knows whether it has answered
        self._found = settings.endpoint
        placeholders = [name for name in settings.prompt.names if name not in ROLLOUT_PLACEHOLDERS]
        columns = {name: column_values(columns_and_args, name) for name in placeholders}
        requests = []
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            values = {name: column[i] for name, column in columns.items()}
            values |= {"prompt": transcript(prompt), "completion": transcript(completion)}
            messages = [{"role": "user", "content": settings.prompt.render(values)}]
            requests.append({**settings.sampling, "model": settings.model, "messages": messages})
        return self._scored(settings.rubric, await self._replies(settings, requests))

    def _settings(self, args: Mapping[str, Any]) -> "_Settings":
        """Check the arguments. Raises ValueError if one of them is invalid."""
        file = str(args["prompt"])
        if file not in self._prompts:
            self._prompts[file] = read_prompt(args["prompt"])
        return _settings(**{**args, "prompt": self._prompts[file]})

    async def _replies(self, settings: _Settings, requests: Sequence[Mapping[str, Any]]) -> list[str | Failure]:
        """Return the reply to each request, from the cache or the server."""
        cache = self._opened_cache(settings)
        keys = [content_key(request) for request in requests]
        missing = {key: request for key, request in zip(keys, requests, strict=True) if cache.get(key) is None}
        to_ask = list(missing)
        if missing and self._asks_late:
            self._asks_late = False
            try:
                _check_server(settings)
            except ValueError as error:
                raise UserError(str(error)) from error

        def keep(i: int, answer: Any) -> str:
            reply = _reply_text(answer)
            cache.put(to_ask[i], reply)
            return reply

        answers = await settings.endpoint.post_all(
            list(missing.values()), keep, budget_s=self._budget_s, on_progress=self.on_progress
        )
        asked = dict(zip(to_ask, answers, strict=True))
        cached = {key: cache.get(key) or "" for key in keys if key not in asked}
        self.last_counts = {kind: n for kind, n in (("cached", sum(key in cached for key in keys)),) if n}
        return [asked[key] if key in asked else cached[key] for key in keys]

    def _opened_cache(self, settings: _Settings) -> ReplyCache:
        path = settings.cache
        if path is None and self._run_folder is not None and self._run_folder.is_dir():
            path = self._run_folder / CACHE_NAME
        if self._cache is None or self._cache.path != path:
            self._cache = ReplyCache(path)
        return self._cache

    def _scored(self, rubric: Rubric, replies: Sequence[str | Failure]) -> list[float | None]:
        """Return the reward of each reply, and keep counts and details."""
        counts = Counter(self.last_counts)
        details: dict[str, list[str | None]] = {name: [] for name in (_REPLY, *(c.name for c in rubric.criteria))}
        rewards: list[float | None] = []
        for reply in replies:
            scores: dict[str, float] = {}
            if isinstance(reply, Failure):
                self._not_judged(counts, reply.kind, reply.message)
            else:
                try:
                    scores = rubric.scores(reply)
                except ValueError as error:
                    self._not_judged(counts, "no_score", f"{error} in the reply {excerpt(reply, 200)}")
            rewards.append(rubric.mean(scores) if scores else None)
            details[_REPLY].append(f"{reply.kind}: {reply.message}" if isinstance(reply, Failure) else reply)
            for criterion in rubric.criteria:
                score = scores.get(criterion.name)
                details[criterion.name].append(None if score is None else f"{score:g}")
        self.last_counts, self.last_details = dict(counts), details
        return rewards

    def _not_judged(self, counts: Counter[str], kind: str, example: str) -> None:
        counts["not_judged"] += 1
        counts[kind] += 1
        self._failures[kind] += 1
        self._examples.setdefault(kind, example)


def _settings(
    *,
    url: str,
    model: str,
    prompt: JudgePrompt,
    pattern: str | None = None,
    range: Sequence[float] | None = None,
    values: Mapping[str, float] | None = None,
    criteria: Mapping[str, Any] | None = None,
    sampling: Mapping[str, Any] | None = None,
    api_key_env: str | None = None,
    max_concurrent: int = 32,
    request_timeout_s: float = 60.0,
    retries: int = 4,
    cache: str | None = None,
) -> _Settings:
    """Check the arguments.

    Raises:
        ValueError: one of them is invalid.
    """
    if not isinstance(model, str) or not model:
        raise ValueError(f"model: {model!r} must be the name of a model of the server")
    if cache is not None and (not isinstance(cache, str) or not cache):
        raise ValueError(f"cache: {cache!r} must be a file")
    if sampling is not None and not isinstance(sampling, Mapping):
        raise ValueError(f"sampling: {excerpt(sampling)} must be a mapping such as {{temperature: 0}}")
    for key in ("model", "messages", "stream", "n"):
        if key in (sampling or {}):
            raise ValueError(f"sampling.{key}: is set by this reward; remove it")
    check_endpoint_arguments(max_concurrent=max_concurrent, request_timeout_s=request_timeout_s, retries=retries)
    rubric = read_rubric(pattern=pattern, range=range, values=values, criteria=criteria)
    if any(criterion.name == _REPLY for criterion in rubric.criteria):
        raise ValueError(f"criteria.{_REPLY}: is the name of the column with the judge's text; use another name")
    return _Settings(
        endpoint=Endpoint(
            url=_chat_url(url),
            api_key_env=api_key_env,
            max_concurrent=max_concurrent,
            request_timeout_s=request_timeout_s,
            retries=retries,
        ),
        model=model,
        prompt=prompt,
        rubric=rubric,
        sampling={**_SAMPLING, **(sampling or {})},
        cache=None if cache is None else Path(expand_home(cache)),
    )


def _chat_url(url: object) -> str:
    """Return the address of chat completions: below /v1, unless the URL has a path."""
    if not isinstance(url, str):
        raise ValueError(f"url: {url!r} must be an address such as http://host:8000")
    base = url.rstrip("/").removesuffix("/chat/completions")
    has_path = base.partition("://")[2].count("/") > 0
    return f"{base}{'' if has_path else '/v1'}/chat/completions"


def _check_server(settings: _Settings) -> None:
    """Check that the server answers and, if it lists its models, has this one.

    Raises:
        ValueError: it does not.
    """
    response: httpx2.Response = settings.endpoint.get(
        f"{settings.endpoint.url.removesuffix('/chat/completions')}/models"
    )
    try:
        known = [str(card["id"]) for card in response.json()["data"]]
    except (ValueError, LookupError, TypeError):
        return  # not every server lists its models
    if known and settings.model not in known:
        raise ValueError(
            f"model: the server at url has no model {settings.model!r}{suggest(settings.model, known, 'Models')}"
        )


def _reply_text(answer: Any) -> str:
    """Return the text of a chat completion; empty if the model spent all its tokens on reasoning.

    Raises:
        LookupError, TypeError: it is not one.
    """
    content = answer["choices"][0]["message"]["content"]
    if content is not None and not isinstance(content, str):
        raise TypeError(f"content is {type(content).__name__}")
    return content or ""
