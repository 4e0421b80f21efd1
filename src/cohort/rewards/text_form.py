"""Open-R1's and TRL's rewards for the form of a text: tags, steps, code blocks. All take time linear in its length."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from cohort.rewards.describe import completion_text
from cohort.rewards.function import column_values
from cohort.rewards.patterns import compile_pattern

TextScore = Callable[[Sequence[Any]], list[float]]
_ANSWER_BEGINS = "\n</think>\n<answer>\n"
_ANSWER_ENDS = re.compile(r"\n</answer>$", re.MULTILINE)
_TAGS = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
_STEPS = re.compile(r"Step \d+:|^\d+\.|\n[-*]|(?:First|Second|Next|Finally),")
_ENOUGH_STEPS = 3


def think_answer_format(completions: Sequence[Any]) -> list[float]:
    """`open_r1.format`: 1.0 for think and answer blocks whose tags stand on lines of their own, else 0.0."""
    return [float(_answer_position(completion_text(c), lambda text, at: at) >= 0) for c in completions]


def think_format(completions: Sequence[Any]) -> list[float]:
    """`trl.think_format`: 1.0 if the text starts with the only `<think>` and a `</think>` follows, else 0.0."""
    texts = [completion_text(completion) for completion in completions]
    return [float(text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text) for text in texts]


def tag_count(completions: Sequence[Any]) -> list[float]:
    """`open_r1.tag_count`: a quarter for each of four tags, with its line breaks, that occurs exactly once."""
    texts = [completion_text(completion) for completion in completions]
    return [sum(text.count(tag) == 1 for tag in _TAGS) / len(_TAGS) for text in texts]


def reasoning_steps(completions: Sequence[Any]) -> list[float]:
    """`open_r1.reasoning_steps`: a third for each numbered step, bullet or "First,", up to 1.0."""
    counts = [len(_STEPS.findall(completion_text(completion))) for completion in completions]
    return [min(1.0, count / _ENOUGH_STEPS) for count in counts]


class CodeFormatReward:
    """`open_r1.code_format`: as `open_r1.format`, with a code block in the answer; 1.0 or 0.0.

    Arguments (in `rewards[i].args`):
        language: regular expression for the language after the opening fence. Default "python".
        language_column: dataset column with each row's language, instead of `language`. Default None.
    """

    def required_columns(self, *, language: str = "python", language_column: str | None = None) -> Sequence[str]:
        """See `ChecksArguments`."""
        compile_pattern(language)
        return () if language_column is None else (language_column,)

    def __call__(
        self,
        completions: Sequence[Any],
        *,
        language: str = "python",
        language_column: str | None = None,
        **columns: Sequence[Any],
    ) -> list[float]:
        """Return one reward per completion."""
        languages = (
            [language] * len(completions) if language_column is None else column_values(columns, language_column)
        )
        bodies = {name: _code_block(compile_pattern(f"```{name}")) for name in set(languages)}
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
