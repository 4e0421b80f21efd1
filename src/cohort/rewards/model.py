"""The `model` reward: the score of a sequence-classification model, in this process or behind a URL.

The JSON form: `{"prompts": [...], "completions": [...]}`, each text or a list of messages, is answered with
`{"scores": [...]}`, a number or null for each.
"""

import asyncio
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cohort.errors import excerpt
from cohort.rewards.completion_text import messages_of
from cohort.rewards.function import check_choice, check_number, keyword_parameters
from cohort.rewards.remote import Failure, RemoteClient, check_endpoint_arguments
from cohort.rewards.sequence_classifier import Classifier, ModelSettings, check_classifier, pick_device

_JSON_ROWS = 16  # completions of a request of the JSON form


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteModel:
    """A reward model behind a URL."""

    endpoint: RemoteClient
    api: str  # "pooling" or "json"
    model: str | None  # as the server names it
    label: int  # index of the output that is the score
    truncate: str  # "left" or "right"

    def check(self) -> None:
        """Ask for the score of one short completion.

        Raises:
            ValueError: there is no answer, or it has another form.
        """
        [(body, size)] = self._requests(["2+2?"], ["4"])
        self.endpoint.post(body, lambda answer: self._parse(answer, size))

    async def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        *,
        budget_s: float,
        on_progress: Callable[[int, int], None],
    ) -> list[float | Failure | None]:
        """Return the score of each completion; None where the server has none. Progress is told in requests.

        Raises:
            UserError: the server refuses the key or does not know the endpoint.
        """
        requests = self._requests(prompts, completions)
        answers = await self.endpoint.post_all(
            [body for body, _ in requests],
            lambda i, answer: self._parse(answer, requests[i][1]),
            budget_s=budget_s,
            on_progress=on_progress,
        )
        scores: list[float | Failure | None] = []
        for (_, size), answer in zip(requests, answers, strict=True):
            scores += [answer] * size if isinstance(answer, Failure) else answer
        return scores

    def _requests(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[tuple[Mapping[str, Any], int]]:
        """Return the body of each request and the number of its completions."""
        if self.api == "json":
            starts = range(0, len(completions), _JSON_ROWS)
            parts = [(prompts[i : i + _JSON_ROWS], completions[i : i + _JSON_ROWS]) for i in starts]
            return [({"prompts": list(p), "completions": list(c)}, len(c)) for p, c in parts]
        options: dict[str, Any] = {
            "task": "classify",
            "use_activation": False,  # the output itself, as in this process
            "truncate_prompt_tokens": -1,  # to the longest that the server takes
            "truncation_side": self.truncate,
        }
        if self.model is not None:
            options["model"] = self.model
        return [
            ({**options, "messages": [dict(m) for m in messages_of(prompt, completion)]}, 1)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]

    def _parse(self, answer: Any, size: int) -> list[float | None]:
        """Return the scores of an answer.

        Raises:
            LookupError, TypeError, ValueError: it has another form, length, or a score that is not finite.
        """
        scores = answer["scores"] if self.api == "json" else [self._of_outputs(answer["data"][0]["data"])]
        if not isinstance(scores, list) or len(scores) != size:
            raise ValueError(f"expected a list of {size} scores")
        for score in scores:
            is_number = isinstance(score, int | float) and not isinstance(score, bool)
            if score is not None and not (is_number and abs(score) <= sys.float_info.max):
                raise ValueError(f"the score {excerpt(score)} is neither a finite number nor null")
        return [None if score is None else float(score) for score in scores]

    def _of_outputs(self, outputs: Any) -> Any:
        if not isinstance(outputs, list) or not 0 <= self.label < len(outputs):
            raise ValueError(f"expected a list with output {self.label}")
        return outputs[self.label]


_LOCAL = ("path", "label", "device", "dtype", "max_tokens", "truncate", "batch_tokens", "trust_remote_code")
_ENDPOINT = ("url", "api_key_env", "max_concurrent", "request_timeout_s", "retries")
_NOT_FINITE = Failure("not_finite", "the model's output is not a finite number; try args.dtype: bfloat16 or float32")
_REMOTE = (*_ENDPOINT, "api", "model", "label", "truncate")


class ModelReward:
    """A reward model's score of each completion; None if its server does not judge it, or the score is not finite.

    Arguments (in `rewards[i].args`), for a model in this process:
        path: model folder, or Hugging Face id.
        label: which output is the score, by name or index. Default None: the only one.
        device: "train" (that of the policy), "cpu", "cuda" or "cuda:1". Default "train".
        dtype: "auto" (that of the files), "float32", "bfloat16" or "float16". Default "auto".
        max_tokens: longest text in tokens. Default None: the model's.
        truncate: "left" or "right": from which side longer texts are cut. Default "left", which keeps the completion.
        batch_tokens: tokens of a batch, padding included. Default 16384.
        trust_remote_code: run model code from the folder. Default false.

    For a server:
        url: its address.
        api: "pooling" (vLLM) or "json". Default "pooling".
        model: name of the model, as the server has it; "pooling" only. Default None: the only one.
        label, truncate: as above; `label` is an index, and `truncate` is for "pooling" only.
        api_key_env, max_concurrent, request_timeout_s, retries: as for `judge`.
    """

    __name__ = "model"

    def __init__(self, *, budget_s: float = 240.0, train_device: str = "auto") -> None:
        """Create the reward.

        Args:
            budget_s: seconds for all completions of a call to a server; the rest is not judged.
            train_device: device of the policy, as in `hardware.device`.
        """
        self._budget_s = budget_s
        self._train_device = train_device
        self._classifier: Classifier | None = None
        self._checked: RemoteModel | None = None  # the server that has answered
        self._failures: Counter[str] = Counter()
        self._examples: dict[str, str] = {}
        self.on_progress: Callable[[int, int], None] = lambda done, total: None  # see `ReportsProgress`
        self.last_counts: dict[str, int] = {}  # completions of the last call by what is noteworthy about them

    @property
    def warnings(self) -> list[str]:
        """Warnings for the run's summary."""
        return [
            f"reward model: {number} completions were not judged ({kind}), for example: {self._examples[kind]}"
            for kind, number in self._failures.items()
        ]

    def required_columns(
        self,
        *,
        path: str | None = None,
        url: str | None = None,
        label: str | int | None = None,
        truncate: str | None = None,
        device: str | None = None,
        dtype: str | None = None,
        max_tokens: int | None = None,
        batch_tokens: int | None = None,
        trust_remote_code: bool | None = None,
        api: str | None = None,
        model: str | None = None,
        api_key_env: str | None = None,
        max_concurrent: int | None = None,
        request_timeout_s: float | None = None,
        retries: int | None = None,
    ) -> Sequence[str]:
        """See `ChecksArguments`. Asks a server once for the score of a short completion."""
        args = {name: value for name, value in locals().items() if name != "self" and value is not None}
        settings = _settings(args)
        if isinstance(settings, ModelSettings):
            check_classifier(settings)
        elif settings != self._checked:
            settings.check()
            self._checked = settings
        return ()

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **args: Any) -> list[float | None]:
        """Return one reward per completion.

        Raises:
            UserError: the model cannot be loaded, or the server refuses the key.
        """
        names = keyword_parameters(self.required_columns).names
        settings = _settings({name: value for name, value in args.items() if name in names and value is not None})
        if isinstance(settings, RemoteModel):
            remote = self._checked if settings == self._checked else settings  # it knows whether it has answered
            scores = remote.score(prompts, completions, budget_s=self._budget_s, on_progress=self.on_progress)
            return self._judged(asyncio.run(scores))
        if self._classifier is None:
            self._classifier = Classifier(settings, pick_device(settings.device, self._train_device))
        conversations = [messages_of(*pair) for pair in zip(prompts, completions, strict=True)]
        outputs = self._classifier.score(conversations, on_progress=self.on_progress)
        rewards = self._judged([value if math.isfinite(value) else _NOT_FINITE for value in outputs])
        if self._classifier.num_truncated:
            self.last_counts["truncated"] = self._classifier.num_truncated
        return rewards

    def _judged(self, scores: Sequence[float | Failure | None]) -> list[float | None]:
        """Return None for failures, and count them."""
        counts: Counter[str] = Counter()
        for score in scores:
            if isinstance(score, Failure):
                counts["not_judged"] += 1
                counts[score.kind] += 1
                self._failures[score.kind] += 1
                self._examples.setdefault(score.kind, score.message)
        self.last_counts = dict(counts)
        return [None if isinstance(score, Failure) else score for score in scores]


def _settings(args: Mapping[str, Any]) -> ModelSettings | RemoteModel:
    """Check the arguments that are given.

    Raises:
        ValueError: one of them is invalid or has no effect.
    """
    if ("path" in args) == ("url" in args):
        raise ValueError("path or url: give one of them, a model folder or the address of a server")
    kind, allowed = ("path", _LOCAL) if "path" in args else ("url", _REMOTE)
    for name in args:
        if name not in allowed:
            raise ValueError(f"{name}: has no effect with {kind}; remove it")
    if kind == "path":
        return ModelSettings(**args)
    api = args.get("api", "pooling")
    check_choice("api", api, ("pooling", "json"))
    if api == "json":
        for name in ("model", "label", "truncate"):
            if name in args:
                raise ValueError(f"{name}: has no effect with api: json; remove it")
    label = args.get("label", 0)
    check_number("label", label, minimum=0, whole=True)
    check_choice("truncate", args.get("truncate", "left"), ("left", "right"))
    options: dict[str, Any] = {"max_concurrent": 32, "request_timeout_s": 60.0, "retries": 4}
    options |= {name: args[name] for name in options if name in args}
    check_endpoint_arguments(**options)
    if not isinstance(args["url"], str):
        raise ValueError(f"url: {args['url']!r} must be an address such as http://host:8000")
    url = args["url"] if api == "json" else f"{args['url'].rstrip('/').removesuffix('/pooling')}/pooling"
    return RemoteModel(
        endpoint=RemoteClient(url=url, api_key_env=args.get("api_key_env"), **options),
        api=api,
        model=args.get("model"),
        label=label,
        truncate=args.get("truncate", "left"),
    )
