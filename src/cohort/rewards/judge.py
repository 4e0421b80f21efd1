"""The `judge` reward: scores of a language model behind an OpenAI-compatible endpoint."""

import hashlib
import json
import math
import os
import re
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cohort.config.rewards import REPLY, CriterionSettings, JudgeSettings, RewardConfig
from cohort.config.section import expand_home
from cohort.errors import UserError, excerpt, suggest
from cohort.rewards.builtin import BuiltinReward, Columns, RewardContext
from cohort.rewards.completion_text import transcript
from cohort.rewards.remote import Failure, NotJudged, RemoteClient

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


def read_prompt(path: str) -> JudgePrompt:
    """Read a prompt file.

    Raises:
        ValueError: it cannot be read, is empty, or does not show the completion.
    """
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
            prompt = read_prompt(reward.args["prompt"])
        except ValueError:  # an error when the reward is loaded
            continue
        hashes[f"rewards.{i}.args.prompt"] = hashlib.sha256(prompt.text.encode()).hexdigest()
    return hashes


def content_key(content: Any) -> str:
    """Return a key of JSON content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class ReplyCache:
    """Replies in an SQLite file. Several processes may use the same file, and one that is killed loses no reply."""

    def __init__(self, path: Path | None, *, lines: Path | None = None) -> None:
        """Open or create a cache.

        Args:
            path: the file; None: in memory only.
            lines: a file that may hold replies in JSON lines, which a new cache imports. It may be `path` itself.

        Raises:
            UserError: the file cannot be opened.
        """
        self.path = path
        self._in_memory: dict[str, str] = {}  # what the disk did not take
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                if lines is not None and (lines == path or not path.exists()) and _is_json_lines(lines):
                    _import_lines(lines, path)
            self._database = _open_database(path or ":memory:")
        except (OSError, sqlite3.Error) as error:
            raise UserError(
                f"args.cache: {str(path)!r} cannot be opened: {error}; set it to another file, on a local disk"
            ) from error

    def get(self, key: str) -> str | None:
        """Return the reply of a key, or None."""
        row = self._database.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
        return self._in_memory.get(key) if row is None else str(row[0], "utf-8", "surrogatepass")

    def put(self, key: str, reply: str) -> None:
        """Store a reply; in memory if the disk fails."""
        try:
            self._database.execute(_INSERT, (key, _encoded(reply)))
        except sqlite3.Error:
            self._in_memory[key] = reply


_INSERT = "INSERT OR REPLACE INTO replies VALUES (?, ?)"
_LOCK_TIMEOUT_S = 30.0  # for another process that writes


def _open_database(path: Path | str) -> sqlite3.Connection:
    # a reply is written when it is put, so that a killed process loses none, without waiting for the disk
    database = sqlite3.connect(path, timeout=_LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    database.execute("PRAGMA synchronous = OFF")
    database.execute("CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply BLOB NOT NULL)")
    return database


def _encoded(reply: str) -> bytes:
    return reply.encode(errors="surrogatepass")  # JSON may hold halves of surrogate pairs


def _is_json_lines(path: Path) -> bool:
    """Whether a file is a cache in JSON lines, which earlier versions wrote."""
    try:
        with path.open("rb") as file:
            return file.read(1) == b"{"
    except FileNotFoundError:
        return False


def _import_lines(lines: Path, path: Path) -> None:
    """Write the replies of a JSON Lines file to a new database, which appears at `path` once it is complete."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    database = _open_database(temporary)
    database.execute("BEGIN")
    with lines.open("rb") as file:
        for line in file:
            # half a line, of a process that was killed
            with suppress(ValueError, LookupError, TypeError, AttributeError):
                content = json.loads(line)
                database.execute(_INSERT, (content["key"], _encoded(content["reply"])))
    database.execute("COMMIT")
    database.close()
    os.replace(temporary, path)


_NUMBER = r"(-?(?:\d+(?:\.\d+)?|(?<!\.)\.\d+))"
_MARKS = r"[^\w\n]"  # around names, such as ** and -
_COLON = rf"{_MARKS}*?(?:\([^()\n]*\){_MARKS}*?)?:{_MARKS}*?"  # behind a name, and a range such as (1-10)
_ANY_NAME = rf"(?im)^{_MARKS}*(?:overall |final )?(?:score|rating|grade){_COLON}"


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


def rubric_of(settings: JudgeSettings) -> Rubric:
    """Return the criteria of a judge. What a criterion leaves out is as for all of them."""
    if settings.criteria is None:
        return Rubric((_criterion("score", CriterionSettings(), settings, _ANY_NAME),))
    return Rubric(
        tuple(
            _criterion(name, of_one or CriterionSettings(), settings, rf"(?im)^{_MARKS}*{re.escape(name)}{_COLON}")
            for name, of_one in settings.criteria.items()
        )
    )


def _criterion(name: str, own: CriterionSettings, common: JudgeSettings, start: str) -> Criterion:
    """Return a criterion; without a pattern its score is in a line that begins with `start`."""
    values = own.values or common.values
    words = None if values is None else {word.lower(): number for word, number in values.items()}
    what = _NUMBER if words is None else f"({'|'.join(map(re.escape, words))})\\b"
    return Criterion(
        name=name,
        weight=own.weight,
        pattern=re.compile(own.pattern or common.pattern or start + what),
        range=own.range or common.range,
        values=words,
    )


CACHE_NAME = "judge_replies.sqlite"
_OLD_CACHE_NAME = "judge_replies.jsonl"
_SAMPLING: Mapping[str, Any] = {"temperature": 0, "max_tokens": 1024}


class JudgeReward(BuiltinReward[JudgeSettings]):
    """The weighted mean of the scores that a judge gives a completion; None if it gives none.

    Equal requests are sent once: their replies are kept, by model, prompt and sampling parameters, in the run folder.
    Not judged, and counted by `last_counts`: completions whose request fails after all retries, or whose reply holds
    no valid score for a criterion. `last_details` has the replies and the scores of each criterion.
    """

    def __init__(self, settings: JudgeSettings, context: RewardContext) -> None:
        super().__init__(settings, context)
        self._asks_late = not context.ask_servers_first
        self._cache: ReplyCache | None = None
        self._rubric = rubric_of(settings)
        self._not_judged = NotJudged("judge")
        self.on_progress: Callable[[int, int], None] = lambda done, total: None  # see `ReportsProgress`

    @cached_property
    def _prompt(self) -> JudgePrompt:
        return read_prompt(self.settings.prompt)

    @cached_property
    def _endpoint(self) -> RemoteClient:
        return RemoteClient(self.settings, _chat_url(self.settings.url))

    def required_columns(self) -> Sequence[str]:
        """See `BuiltinReward`."""
        return [name for name in self._prompt.names if name not in ROLLOUT_PLACEHOLDERS]

    def check(self) -> None:
        """See `BuiltinReward`. Asks the server which models it has."""
        if not self._asks_late:
            self._check_server()

    async def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], columns: Columns
    ) -> list[float | None]:
        """Return one reward per completion.

        Raises:
            UserError: the server refuses the key or does not know the endpoint, and has judged nothing yet.
        """
        sampling = {**_SAMPLING, **self.settings.sampling, "model": self.settings.model}
        requests = []
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            values = {name: columns[name][i] for name in self.required_columns()}
            values |= {"prompt": transcript(prompt), "completion": transcript(completion)}
            messages = [{"role": "user", "content": self._prompt.render(values)}]
            requests.append({**sampling, "messages": messages})
        return self._scored(await self._replies(requests))

    async def _replies(self, requests: Sequence[Mapping[str, Any]]) -> list[str | Failure]:
        """Return the reply to each request, from the cache or the server."""
        cache = self._opened_cache()
        keys = [content_key(request) for request in requests]
        missing = {key: request for key, request in zip(keys, requests, strict=True) if cache.get(key) is None}
        to_ask = list(missing)
        if missing and self._asks_late:
            self._asks_late = False
            try:
                self._check_server()
            except ValueError as error:
                raise UserError(str(error)) from error

        def keep(i: int, answer: Any) -> str:
            reply = _reply_text(answer)
            cache.put(to_ask[i], reply)
            return reply

        answers = await self._endpoint.post_all(
            list(missing.values()), keep, budget_s=self.context.budget_s, on_progress=self.on_progress
        )
        asked = dict(zip(to_ask, answers, strict=True))
        cached = {key: cache.get(key) or "" for key in keys if key not in asked}
        self.last_counts = {kind: n for kind, n in (("cached", sum(key in cached for key in keys)),) if n}
        return [asked[key] if key in asked else cached[key] for key in keys]

    def _opened_cache(self) -> ReplyCache:
        path = None if self.settings.cache is None else Path(expand_home(self.settings.cache))
        lines, run_folder = path, self.context.run_folder
        if path is None and run_folder is not None and run_folder.is_dir():
            path, lines = run_folder / CACHE_NAME, run_folder / _OLD_CACHE_NAME
        if self._cache is None or self._cache.path != path:
            self._cache = ReplyCache(path, lines=lines)
        return self._cache

    def _scored(self, replies: Sequence[str | Failure]) -> list[float | None]:
        """Return the reward of each reply, and keep counts and details."""
        names = [criterion.name for criterion in self._rubric.criteria]
        details: dict[str, list[str | None]] = {name: [] for name in (REPLY, *names)}
        failures: list[Failure] = []
        rewards: list[float | None] = []
        for reply in replies:
            scores: dict[str, float] = {}
            if isinstance(reply, Failure):
                failures.append(reply)
            else:
                try:
                    scores = self._rubric.scores(reply)
                except ValueError as error:
                    failures.append(Failure("no_score", f"{error} in the reply {excerpt(reply, 200)}"))
            rewards.append(self._rubric.mean(scores) if scores else None)
            details[REPLY].append(f"{reply.kind}: {reply.message}" if isinstance(reply, Failure) else reply)
            for name in names:
                score = scores.get(name)
                details[name].append(None if score is None else f"{score:g}")
        self.last_counts = {**self.last_counts, **self._not_judged.count(failures)}
        self.last_details, self.warnings = details, self._not_judged.warnings()
        return rewards

    def _check_server(self) -> None:
        """Check that the server answers and, if it lists its models, has this one.

        Raises:
            ValueError: it does not.
        """
        answer = self._endpoint.get(f"{self._endpoint.url.removesuffix('/chat/completions')}/models")
        try:
            known = [str(card["id"]) for card in json.loads(answer)["data"]]
        except (ValueError, LookupError, TypeError):
            return  # not every server lists its models
        model = self.settings.model
        if known and model not in known:
            raise ValueError(f"model: the server at url has no model {model!r}{suggest(model, known, 'Models')}")


def _chat_url(url: str) -> str:
    """Return the address of chat completions: below /v1, unless the URL has a path."""
    base = url.rstrip("/").removesuffix("/chat/completions")
    has_path = base.partition("://")[2].count("/") > 0
    return f"{base}{'' if has_path else '/v1'}/chat/completions"


def _reply_text(answer: Any) -> str:
    """Return the text of a chat completion; empty if the model spent all its tokens on reasoning.

    Raises:
        LookupError, TypeError: it is not one.
    """
    content = answer["choices"][0]["message"]["content"]
    if content is not None and not isinstance(content, str):
        raise TypeError(f"content is {type(content).__name__}")
    return content or ""
