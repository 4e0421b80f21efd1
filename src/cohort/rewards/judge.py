"""The `judge` reward: scores of a language model behind an OpenAI-compatible endpoint."""

import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2

from cohort.config import RewardConfig
from cohort.config.section import expand_home
from cohort.errors import UserError, excerpt, suggest
from cohort.rewards.completion_text import transcript
from cohort.rewards.function import check_number, column_values, compile_pattern, keyword_parameters
from cohort.rewards.remote import Failure, RemoteClient, check_endpoint_arguments

ROLLOUT_PLACEHOLDERS = ("prompt", "completion")
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}|\{([A-Za-z_]\w*)\}")


@dataclass(frozen=True, slots=True)
class JudgePrompt:
    """A prompt with placeholders `{name}`. `{{name}}` stands for `{name}`; other braces stand for themselves."""

    text: str

    @property
    def names(self) -> list[str]:
        """Names of the placeholders, in order."""
        found = (match[2] for match in _PLACEHOLDER.finditer(self.text))
        return list(dict.fromkeys(name for name in found if name))

    def render(self, values: Mapping[str, Any]) -> str:
        """Fill in the placeholders, once: what is filled in may hold braces."""

        def value(match: re.Match[str]) -> str:
            return f"{{{match[1]}}}" if match[1] else str(values[match[2]])

        return _PLACEHOLDER.sub(value, self.text)


def read_prompt(path: object) -> JudgePrompt:
    """Read a prompt file.

    Raises:
        ValueError: it cannot be read, is empty, or does not show the completion.
    """
    if not isinstance(path, str) or not path:
        raise ValueError(f"prompt: {path!r} must be a file with the judge's prompt")
    try:
        text = Path(expand_home(path)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompt: {path!r} cannot be read: {error}") from error
    prompt = JudgePrompt(text)
    if "completion" not in prompt.names:
        shown = ", ".join(f"{{{name}}}" for name in prompt.names) or "none"
        raise ValueError(f"prompt: {path!r} has no placeholder {{completion}}; its placeholders: {shown}")
    return prompt


def prompt_hashes(rewards: Sequence[RewardConfig]) -> dict[str, str]:
    """Return key -> SHA-256 of the prompt file, for the judges of a run whose file can be read."""
    hashes = {}
    for i, reward in enumerate(rewards):
        if reward.use != "judge":
            continue
        try:
            prompt = read_prompt(reward.args.get("prompt"))
        except ValueError:  # an error when the reward is loaded
            continue
        hashes[f"rewards.{i}.args.prompt"] = hashlib.sha256(prompt.text.encode()).hexdigest()
    return hashes


def content_key(content: Any) -> str:
    """Return a key of JSON content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class ReplyCache:
    """Replies in a JSON-lines file, one line for each. Several processes may use the same file.

    A line is appended by one write, so a killed process leaves at most a last line that does not end, which is skipped.
    Only keys and positions are in memory.
    """

    def __init__(self, path: Path | None) -> None:
        """Open or create a cache.

        Args:
            path: the file; None: in memory only.
        """
        self.path = path
        self._places: dict[str, tuple[int, int]] = {}  # key -> offset and bytes of its line
        self._in_memory: dict[str, str] = {}
        self._read_to = 0
        self._file = -1
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            self._read_lines()

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)

    def get(self, key: str) -> str | None:
        """Return the reply of a key, or None."""
        if key not in self._places:
            return self._in_memory.get(key)
        offset, size = self._places[key]
        return str(json.loads(os.pread(self._file, size, offset))["reply"])

    def put(self, key: str, reply: str) -> None:
        """Keep a reply. If the disk fails, it is kept in memory."""
        if self._file < 0:
            self._in_memory[key] = reply
            return
        line = json.dumps({"key": key, "reply": reply}).encode() + b"\n"
        end = os.lseek(self._file, 0, os.SEEK_END)
        if end and os.pread(self._file, 1, end - 1) != b"\n":  # a process was killed while it wrote
            line = b"\n" + line
        try:
            os.write(self._file, line)
        except OSError:
            self._in_memory[key] = reply
            return
        self._read_lines()  # those of other processes too

    def _read_lines(self) -> None:
        """Read the lines that were added since the last time."""
        with open(self._file, "rb", closefd=False) as lines:
            lines.seek(self._read_to)
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                with suppress(ValueError, LookupError, TypeError):  # half a line
                    self._places[json.loads(line)["key"]] = (self._read_to, len(line))
                self._read_to += len(line)


_NUMBER = r"(-?(?:\d+(?:\.\d+)?|(?<!\.)\.\d+))"
_MARKS = r"[^\w\n]"  # around names, such as ** and -
_COLON = rf"{_MARKS}*?(?:\([^()\n]*\){_MARKS}*?)?:{_MARKS}*?"  # behind a name, and a range such as (1-10)
_ANY_NAME = rf"(?im)^{_MARKS}*(?:overall |final )?(?:score|rating|grade){_COLON}"
_KEYS = ("weight", "pattern", "range", "values")


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """One score of a reply: the last match of a pattern's group."""

    name: str
    weight: float
    pattern: re.Pattern[str]
    range: tuple[float, float] | None  # mapped to [0, 1]; None: the score as it is
    values: Mapping[str, float] | None  # of words instead of numbers, in lower case

    def score(self, reply: str) -> float:
        """Return the score in a reply.

        Raises:
            ValueError: the pattern matches nowhere, or what it finds is no score.
        """
        found = [text for text in self.pattern.findall(reply) if text]
        if not found:
            raise ValueError(f"no match of {self.pattern.pattern!r}")
        text = found[-1].strip()
        if self.values is not None:
            if text.lower() not in self.values:
                raise ValueError(f"{text!r} is none of {', '.join(self.values)}")
            return self.values[text.lower()]
        try:
            score = float(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a number") from None
        if not math.isfinite(score):
            raise ValueError(f"{text!r} is not a finite number")
        if self.range is None:
            return score
        low, high = self.range
        if not low <= score <= high:
            raise ValueError(f"{score:g} is outside of range [{low:g}, {high:g}]")
        return (score - low) / (high - low)


@dataclass(frozen=True, slots=True)
class Rubric:
    """Criteria whose weighted mean is a completion's score."""

    criteria: tuple[Criterion, ...]

    def scores(self, reply: str) -> dict[str, float]:
        """Return the score of each criterion.

        Raises:
            ValueError: one of them is missing or invalid.
        """
        scores = {}
        for criterion in self.criteria:
            try:
                scores[criterion.name] = criterion.score(reply)
            except ValueError as error:
                raise ValueError(f"{criterion.name}: {error}") from None
        return scores

    def mean(self, scores: Mapping[str, float]) -> float:
        """Return the weighted mean of the criteria's scores."""
        total = sum(criterion.weight for criterion in self.criteria)
        return sum(criterion.weight * scores[criterion.name] for criterion in self.criteria) / total


def read_rubric(*, pattern: object, range: object, values: object, criteria: object) -> Rubric:
    """Read the arguments of a judge. What a criterion leaves out is as for all of them.

    Raises:
        ValueError: one of them is invalid.
    """
    given = {"pattern": pattern, "range": range, "values": values}
    if criteria is None:
        return Rubric((_criterion("score", {}, given, ""),))
    if not isinstance(criteria, Mapping) or not criteria:
        raise ValueError(
            f"criteria: {excerpt(criteria)} must be a mapping such as {{correctness: {{weight: 2}}, style: {{}}}}"
        )
    if pattern is not None and len(criteria) > 1:
        raise ValueError("pattern: would find the same score for all criteria; set criteria.NAME.pattern instead")
    return Rubric(tuple(_criterion(str(name), of_one, given, f"criteria.{name}.") for name, of_one in criteria.items()))


def _criterion(name: str, settings: Any, common: Mapping[str, Any], field: str) -> Criterion:
    settings = {} if settings is None else settings
    if not isinstance(settings, Mapping):
        raise ValueError(f"{field.removesuffix('.')}: {excerpt(settings)} must be a mapping of {', '.join(_KEYS)}")
    for key in settings:
        if key not in _KEYS:
            raise ValueError(f"{field}{key}: unknown key{suggest(str(key), _KEYS, 'Keys')}")
    chosen = {**common, **settings}
    weight = chosen.get("weight", 1.0)
    check_number(f"{field}weight", weight, above=0)
    if chosen["range"] is not None and chosen["values"] is not None:
        raise ValueError(f"{field}range: has no effect with values; remove one of them")
    values = _values(chosen["values"], f"{field}values")
    pattern = chosen["pattern"] if chosen["pattern"] is not None else _default_pattern(name, field, values)
    try:
        compiled = compile_pattern(pattern, num_groups=1)
    except ValueError as error:
        raise ValueError(f"{field}{error}") from None
    return Criterion(
        name=name,
        weight=weight,
        pattern=compiled,
        range=_range(chosen["range"], f"{field}range"),
        values=values,
    )


def _default_pattern(name: str, field: str, values: Mapping[str, float] | None) -> str:
    """Return the pattern of a line such as `Correctness: 7`."""
    what = _NUMBER if values is None else f"({'|'.join(map(re.escape, values))})\\b"
    start = rf"(?im)^{_MARKS}*{re.escape(name)}{_COLON}" if field else _ANY_NAME
    return start + what


def _range(value: object, field: str) -> tuple[float, float] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"{field}: {excerpt(value)} must be [low, high], such as [1, 10]")
    for bound in value:
        check_number(field, bound)
    if not value[0] < value[1]:
        raise ValueError(f"{field}: [{value[0]:g}, {value[1]:g}] must be [low, high] with low below high")
    return float(value[0]), float(value[1])


def _values(value: object, field: str) -> Mapping[str, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or not value:
        raise ValueError(f"{field}: {excerpt(value)} must be a mapping such as {{correct: 1, incorrect: 0}}")
    words = {}
    for word, number in value.items():
        if not isinstance(word, str):  # YAML reads yes and no as booleans
            raise ValueError(f"{field}: {word!r} must be a word; put it in quotes")
        check_number(f"{field}.{word}", number)
        words[word.lower()] = float(number)
    return words


CACHE_NAME = "judge_replies.jsonl"
_SAMPLING: Mapping[str, Any] = {"temperature": 0, "max_tokens": 1024}
_REPLY = "reply"  # detail column with the judge's text


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """The checked arguments."""

    endpoint: RemoteClient
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
        self._found: RemoteClient | None = None  # the endpoint that has answered
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
        endpoint=RemoteClient(
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
