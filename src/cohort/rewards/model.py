"""The `model` reward: the score of a sequence-classification model, in this process or behind a URL.

The JSON form: `{"prompts": [...], "completions": [...]}`, each text or a list of messages, is answered with
`{"scores": [...]}`, a number or null for each.
"""

import asyncio
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from cohort.config.rewards import ModelSettings
from cohort.errors import excerpt
from cohort.rewards.builtin import BuiltinReward, RewardContext
from cohort.rewards.completion_text import messages_of
from cohort.rewards.remote import Failure, NotJudged, RemoteClient
from cohort.rewards.sequence_classifier import Classifier, check_classifier, pick_device

_JSON_ROWS = 16  # completions of a request of the JSON form


class RemoteModel:
    """A reward model behind a URL."""

    def __init__(self, settings: ModelSettings) -> None:
        """Find the key; see `RemoteClient`."""
        assert settings.url is not None
        url = f"{settings.url.rstrip('/').removesuffix('/pooling')}/pooling"
        self._settings = settings
        self._endpoint = RemoteClient(settings, settings.url if settings.api == "json" else url)

    def check(self) -> None:
        """Ask for the score of one short completion.

        Raises:
            ValueError: there is no answer, or it has another form.
        """
        [(body, size)] = self._requests(["2+2?"], ["4"])
        self._endpoint.post(body, lambda answer: self._parse(answer, size))

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
        answers = await self._endpoint.post_all(
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
        if self._settings.api == "json":
            starts = range(0, len(completions), _JSON_ROWS)
            parts = [(prompts[i : i + _JSON_ROWS], completions[i : i + _JSON_ROWS]) for i in starts]
            return [({"prompts": list(p), "completions": list(c)}, len(c)) for p, c in parts]
        options: dict[str, Any] = {
            "task": "classify",
            "use_activation": False,  # the output itself, as in this process
            "truncate_prompt_tokens": -1,  # to the longest that the server takes
            "truncation_side": self._settings.truncate,
        }
        if self._settings.model is not None:
            options["model"] = self._settings.model
        return [
            ({**options, "messages": [dict(m) for m in messages_of(prompt, completion)]}, 1)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]

    def _parse(self, answer: Any, size: int) -> list[float | None]:
        """Return the scores of an answer.

        Raises:
            LookupError, TypeError, ValueError: it has another form, length, or a score that is not finite.
        """
        scores = answer["scores"] if self._settings.api == "json" else [self._of_outputs(answer["data"][0]["data"])]
        if not isinstance(scores, list) or len(scores) != size:
            raise ValueError(f"expected a list of {size} scores")
        for score in scores:
            is_number = isinstance(score, int | float) and not isinstance(score, bool)
            if score is not None and not (is_number and abs(score) <= sys.float_info.max):
                raise ValueError(f"the score {excerpt(score)} is neither a finite number nor null")
        return [None if score is None else float(score) for score in scores]

    def _of_outputs(self, outputs: Any) -> Any:
        label = self._settings.label or 0
        assert isinstance(label, int)
        if not isinstance(outputs, list) or label >= len(outputs):
            raise ValueError(f"expected a list with output {label}")
        return outputs[label]


_NOT_FINITE = Failure("not_finite", "the model's output is not a finite number; try args.dtype: bfloat16 or float32")


class ModelReward(BuiltinReward[ModelSettings]):
    """A reward model's score of each completion; None if its server does not judge it, or the score is not finite."""

    def __init__(self, settings: ModelSettings, context: RewardContext) -> None:
        super().__init__(settings, context)
        self._classifier: Classifier | None = None
        self._not_judged = NotJudged("reward model")
        self.on_progress: Callable[[int, int], None] = lambda done, total: None  # see `ReportsProgress`

    @cached_property
    def _remote(self) -> RemoteModel:
        return RemoteModel(self.settings)

    def check(self) -> None:
        """See `BuiltinReward`. Asks a server for the score of a short completion."""
        if self.settings.path is not None:
            check_classifier(self.settings)
        else:
            self._remote.check()

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float | None]:
        """Return one reward per completion.

        Raises:
            UserError: the model cannot be loaded, or the server refuses the key.
        """
        if self.settings.path is None:
            budget_s = self.context.budget_s
            scores = self._remote.score(prompts, completions, budget_s=budget_s, on_progress=self.on_progress)
            return self._judged(asyncio.run(scores))
        if self._classifier is None:
            self._classifier = Classifier(self.settings, pick_device(self.settings.device, self.context.device))
        conversations = [messages_of(*pair) for pair in zip(prompts, completions, strict=True)]
        outputs = self._classifier.score(conversations, on_progress=self.on_progress)
        rewards = self._judged([value if math.isfinite(value) else _NOT_FINITE for value in outputs])
        if self._classifier.num_truncated:
            self.last_counts = {**self.last_counts, "truncated": self._classifier.num_truncated}
        return rewards

    def _judged(self, scores: Sequence[float | Failure | None]) -> list[float | None]:
        """Return None for failures, and count them."""
        self.last_counts = self._not_judged.count(score for score in scores if isinstance(score, Failure))
        self.warnings = self._not_judged.warnings()
        return [None if isinstance(score, Failure) else score for score in scores]
