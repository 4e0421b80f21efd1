"""The `reasoning_gym` reward: the scorer of a Reasoning Gym dataset, by its name. Needs the package reasoning-gym."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cohort.config.rewards import ReasoningGymSettings
from cohort.errors import UserError, did_you_mean, excerpt
from cohort.rewards.builtin import BuiltinReward, Columns, RewardContext
from cohort.rewards.completion_text import after_thinking, answer_text
from cohort.rewards.function import require_package

if TYPE_CHECKING:
    from cohort.rollout.environments.libraries.reasoning_gym import SandboxScorer


class ReasoningGymReward(BuiltinReward[ReasoningGymSettings]):
    """The score of the text in the last answer tags, from 0.0 to 1.0, by the dataset's own scorer, in the sandbox.

    Rows are Reasoning Gym's entries: columns `question`, `answer` and `metadata` (a mapping, or its JSON text). Not
    judged (None), and counted by `last_counts`: answers for which the scorer raises or takes too long, or the sandbox
    fails. The sandbox's packages must have reasoning-gym.
    """

    def __init__(self, settings: ReasoningGymSettings, context: RewardContext) -> None:
        super().__init__(settings, context)
        self._found: SandboxScorer | None = None

    def required_columns(self) -> Sequence[str]:
        """See `BuiltinReward`."""
        return ("answer", "metadata")

    def check(self) -> None:
        """See `BuiltinReward`."""
        require_package("reasoning_gym", extra="reasoning-gym")
        if self.settings.dataset is not None:
            _check_name(self.settings.dataset)
        self._scorer().check()

    def __call__(self, completions: Sequence[Any], columns: Columns) -> list[float | None]:
        """Return one reward per completion.

        Raises:
            UserError: a row's metadata is no mapping, or names no scorer.
        """
        from cohort.rollout.environments.libraries.reasoning_gym import Answer

        answers = []
        for i, completion in enumerate(completions):
            entry = {"answer": columns["answer"][i], "metadata": _mapping(columns["metadata"][i])}
            if "question" in columns:
                entry["question"] = columns["question"][i]
            name = self.settings.dataset or str(entry["metadata"].get("source_dataset"))
            try:
                _check_name(name)
            except ValueError as error:
                raise UserError(f"metadata.source_dataset: {error}") from error
            text = answer_text(completion)
            given = answer_in_tags(text) if self.settings.answer_tags else after_thinking(text).strip()
            answers.append(Answer(name, given, entry))
        rewards = self._scorer().score_all(answers, budget_s=self.context.budget_s)
        num_missing = rewards.count(None)
        self.last_counts = {"not_judged": num_missing} if num_missing else {}
        return rewards

    def _scorer(self) -> "SandboxScorer":
        from cohort.rollout.environments.libraries.reasoning_gym import SandboxScorer  # its parents are slow

        if self._found is None:
            self._found = SandboxScorer(self.context.sandbox.open())
        return self._found


def answer_in_tags(text: str) -> str | None:
    """Return the text in the last `<answer>...</answer>`, as Reasoning Gym's `extract_answer` does, in linear time."""
    before, end, _ = text.rpartition("</answer>")
    found = re.findall("<answer>(.*?)</answer>", before + end, re.DOTALL)
    return found[-1].strip() if found else None


def _check_name(name: str) -> None:
    """Check the name of a dataset.

    Raises:
        ValueError: there is no such dataset.
    """
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise ValueError(f"Reasoning Gym has no dataset {name!r}{did_you_mean(name, sorted(DATASETS))}")


def _mapping(metadata: Any) -> Mapping[str, Any]:
    try:
        value = json.loads(metadata) if isinstance(metadata, str) else metadata
    except ValueError:
        value = None
    if not isinstance(value, Mapping):
        raise UserError(f"the column 'metadata' holds {excerpt(metadata)}; it must hold a mapping, or its JSON text")
    return value
