"""Score conversations with a reward model behind a URL: vLLM's pooling API, or a plain JSON form.

The JSON form: `{"prompts": [...], "completions": [...]}`, each text or a list of messages, is answered with
`{"scores": [...]}`, a number or null for each.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cohort.rewards.conversation import messages_of
from cohort.rewards.describe import excerpt
from cohort.rewards.endpoint import Endpoint, Failure

_JSON_ROWS = 16  # completions of a request of the JSON form


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteModel:
    """A reward model behind a URL."""

    endpoint: Endpoint
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
