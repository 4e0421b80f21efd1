"""Rewards for what a completion says and for its form: exact answers, patterns, tags, repetition.

The penalties for repetition are from Appendix C.2 of "Demystifying Long Chain-of-Thought Reasoning in LLMs"
(arXiv:2502.03373). Both are shaping only: a completion that no other reward scores stays unscored.
"""

import importlib.util
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from cohort.config.rewards import (
    CodeFormatSettings,
    ExactSetSettings,
    ExactSettings,
    FormatSettings,
    NoSettings,
    RegexSettings,
    RepetitionSettings,
    WordRepetitionSettings,
)
from cohort.rewards.builtin import AnswerReward, BuiltinReward, Columns, RewardContext
from cohort.rewards.completion_text import completion_text


class ExactReward(AnswerReward[ExactSettings]):
    """1.0 if the extracted answer equals the answer column as text, else 0.0; None if the column is empty."""

    def is_right(self, text: str | None, gold: str) -> bool:
        """See `AnswerReward`."""
        return text is not None and text.strip() == gold

    def gold(self, answer: Any) -> str:
        """See `AnswerReward`."""
        return str(answer).strip()


class ExactSetReward(AnswerReward[ExactSetSettings]):
    """1.0 if both hold the same items, in any order and with repetitions, else 0.0; None if the row has no answer."""

    def is_right(self, text: str | None, gold: set[str]) -> bool:
        """See `AnswerReward`."""
        return text is not None and self.gold(text) == gold

    def gold(self, answer: Any) -> set[str]:
        """See `AnswerReward`. Return the items of a list or a text."""
        parts = answer if isinstance(answer, list | tuple | set) else str(answer).split(self.settings.separator)
        texts = {str(part).strip() for part in parts} - {""}
        return {text.casefold() for text in texts} if self.settings.ignore_case else texts


class FormatReward(BuiltinReward[FormatSettings]):
    """1.0 if the completion matches, else 0.0."""

    per_group = True

    def __call__(self, completions: Sequence[Any]) -> list[float]:
        """Return one reward per completion."""
        regex = re.compile(self.settings.pattern, re.DOTALL)
        return [float(regex.fullmatch(completion_text(c).strip()) is not None) for c in completions]


class RegexReward(BuiltinReward[RegexSettings]):
    """1.0 if the pattern is found in the completion, else 0.0."""

    per_group = True

    def __call__(self, completions: Sequence[Any]) -> list[float]:
        """Return one reward per completion."""
        regex = re.compile(self.settings.pattern, re.MULTILINE)
        texts = [completion_text(completion) for completion in completions]
        matches = [regex.fullmatch(text.strip()) if self.settings.whole else regex.search(text) for text in texts]
        return [float((match is not None) != self.settings.negate) for match in matches]


class TextReward(BuiltinReward[NoSettings]):
    """A function of a completion's text, without settings."""

    per_group = True

    def __init__(self, settings: NoSettings, context: RewardContext, *, score: Callable[[str], float]) -> None:
        """Create the reward; `score` returns that of a text."""
        super().__init__(settings, context)
        self._score = score

    def __call__(self, completions: Sequence[Any]) -> list[float]:
        """Return one reward per completion."""
        return [float(self._score(completion_text(completion))) for completion in completions]


_ANSWER_BEGINS = "\n</think>\n<answer>\n"
_ANSWER_ENDS = re.compile(r"\n</answer>$", re.MULTILINE)
_TAGS = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
_STEPS = re.compile(r"Step \d+:|^\d+\.|\n[-*]|(?:First|Second|Next|Finally),")
_ENOUGH_STEPS = 3


def think_answer_format(text: str) -> float:
    """`open_r1.format`: 1.0 for think and answer blocks whose tags stand on lines of their own, else 0.0."""
    return _answer_position(text, lambda _, position: position) >= 0


def think_format(text: str) -> float:
    """`trl.think_format`: 1.0 if the text starts with the only `<think>` and a `</think>` follows, else 0.0."""
    return text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text


def tag_count(text: str) -> float:
    """`open_r1.tag_count`: a quarter for each of four tags, with its line breaks, that occurs exactly once."""
    return sum(text.count(tag) == 1 for tag in _TAGS) / len(_TAGS)


def reasoning_steps(text: str) -> float:
    """`open_r1.reasoning_steps`: a third for each numbered step, bullet or "First,", up to 1.0."""
    return min(1.0, len(_STEPS.findall(text)) / _ENOUGH_STEPS)


class CodeFormatReward(BuiltinReward[CodeFormatSettings]):
    """`open_r1.code_format`: as `open_r1.format`, with a code block in the answer; 1.0 or 0.0."""

    per_group = True

    def required_columns(self) -> Sequence[str]:
        """See `BuiltinReward`."""
        return () if self.settings.language_column is None else (self.settings.language_column,)

    def __call__(self, completions: Sequence[Any], columns: Columns) -> list[float]:
        """Return one reward per completion."""
        column = self.settings.language_column
        languages = [self.settings.language] * len(completions) if column is None else columns[column]
        bodies = {name: _code_block(re.compile(f"```{name}")) for name in set(languages)}
        return [
            float(_answer_position(completion_text(completion), bodies[name]) >= 0)
            for completion, name in zip(completions, languages, strict=True)
        ]


def _code_block(opening_fence: re.Pattern[str]) -> Callable[[str, int], int]:
    """Return a function that finds the end of the first code block from a position on; -1 if there is none."""

    def end_of_block(text: str, position: int) -> int:
        opening = opening_fence.search(text, position)
        closing = text.find("```", opening.end()) if opening else -1
        return closing + len("```") if closing >= 0 else -1

    return end_of_block


def _answer_position(text: str, body: Callable[[str, int], int]) -> int:
    """Return where the closing answer tag of a text in think and answer blocks starts; -1 if it is in another form.

    Args:
        text: the completion.
        body: takes the text and the position where the answer begins, and returns a position at or before which the
            answer must not end; -1 if the answer lacks what it needs.
    """
    if not text.startswith("<think>\n"):
        return -1
    # The first place where the answer can begin leaves the most for what follows, so no other needs to be tried.
    begins = text.find(_ANSWER_BEGINS, len("<think>\n"))
    position = body(text, begins + len(_ANSWER_BEGINS)) if begins >= 0 else -1
    ends = _ANSWER_ENDS.search(text, position) if position >= 0 else None
    return ends.start() if ends else -1


class RepetitionReward(BuiltinReward[RepetitionSettings | WordRepetitionSettings]):
    """`max_penalty` times the share of repeated n-grams: of tokens, or of lower-case words for Open-R1's settings."""

    shapes = per_group = True

    def check(self) -> None:
        """See `BuiltinReward`."""
        is_chinese = isinstance(self.settings, WordRepetitionSettings) and self.settings.language == "zh"
        if is_chinese and importlib.util.find_spec("jieba") is None:
            raise ValueError("language: zh needs the package jieba; install it with `pip install jieba`")

    def __call__(self, completions: Sequence[Any], completion_ids: Sequence[Sequence[int]]) -> list[float]:
        """Return one reward per completion."""
        s = self.settings
        items: Sequence[Sequence[Hashable]] = completion_ids
        if isinstance(s, WordRepetitionSettings):
            items = [_words(completion_text(completion), s.language) for completion in completions]
        return [_share_repeated(of_one, s.ngram_size) * s.max_penalty or 0.0 for of_one in items]


def _words(text: str, language: str) -> list[str]:
    if language == "en":
        return text.lower().split()
    import jieba

    return list(jieba.cut(text))


def _share_repeated(items: Sequence[Hashable], size: int) -> float:
    """Return 1 - distinct n-grams / all n-grams."""
    ngrams = [tuple(items[i : i + size]) for i in range(len(items) - size + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
