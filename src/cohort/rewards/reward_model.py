"""The `model` reward: the score of a sequence-classification model, in this process or behind a URL."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cohort.rewards.arguments import check_choice, check_number
from cohort.rewards.conversation import messages_of
from cohort.rewards.endpoint import Endpoint, Failure, check_endpoint_arguments
from cohort.rewards.function import keyword_parameters
from cohort.rewards.remote_model import RemoteModel
from cohort.rewards.sequence_classifier import Classifier, ModelSettings, check_classifier, pick_device

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
        endpoint=Endpoint(url=url, api_key_env=args.get("api_key_env"), **options),
        api=api,
        model=args.get("model"),
        label=label,
        truncate=args.get("truncate", "left"),
    )
