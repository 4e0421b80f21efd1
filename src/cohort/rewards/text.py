"""Rewards for what a completion says and for its form: exact answers, patterns, tags, repetition.

The penalties for repetition are from Appendix C.2 of "Demystifying Long Chain-of-Thought Reasoning in LLMs"
(arXiv:2502.03373). Both are shaping only: a completion that no other reward scores stays unscored.
"""

import importlib.util
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from cohort.rewards.completion_text import answer_text, completion_text
from cohort.rewards.function import check_choice, check_flag, check_number, column_values, compile_pattern


class ExactReward:
    """1.0 if the extracted answer equals the answer column as text, else 0.0; None if the column is empty.

    Arguments (in `rewards[i].args`):
        answer_column: dataset column with the answer; numbers are compared as text. Default "answer".
        pattern: regular expression with one group, the answer; the last match counts, and no match scores 0.0. Default
            None: all of the completion behind the last `</think>`, stripped.
    """

    __name__ = "exact"

    def required_columns(self, *, answer_column: str = "answer", pattern: str | None = None) -> Sequence[str]:
        """See `ChecksArguments`."""
        if pattern is not None:
            compile_pattern(pattern, num_groups=1)
        return (answer_column,)

    def __call__(
        self,
        completions: Sequence[Any],
        *,
        answer_column: str = "answer",
        pattern: str | None = None,
        **columns: Sequence[Any],
    ) -> list[float | None]:
        """Return one reward per completion."""
        regex = None if pattern is None else compile_pattern(pattern, num_groups=1)
        return [
            None if answer is None else float(_extract(answer_text(completion), regex) == str(answer).strip())
            for completion, answer in zip(completions, column_values(columns, answer_column), strict=True)
        ]


def _extract(text: str, regex: re.Pattern[str] | None) -> str | None:
    text = text.rpartition("</think>")[2]
    if regex is None:
        return text.strip()
    found = regex.findall(text)  # one group: its texts, in order
    return found[-1].strip() if found else None


class ExactSetReward:
    """1.0 if both sets of items are equal, else 0.0; None if the row has no answer. Order and repetitions do not count.

    Arguments (in `rewards[i].args`):
        answer_column: dataset column with a list, or with text that is split at the separator. Default "answer".
        separator: text between items. Default ",".
        pattern: regular expression with one group, the list of items; the last match counts, and no match scores 0.0.
            Default None: the whole completion after the last `</think>`.
        ignore_case: compare without upper and lower case. Default false.
    """

    def required_columns(
        self,
        *,
        answer_column: str = "answer",
        separator: str = ",",
        pattern: str | None = None,
        ignore_case: bool = False,
    ) -> Sequence[str]:
        """See `ChecksArguments`."""
        if not isinstance(separator, str) or not separator:
            raise ValueError(f"separator must be a text, got {separator!r}")
        if pattern is not None:
            compile_pattern(pattern, num_groups=1)
        check_flag("ignore_case", ignore_case)
        return (answer_column,)

    def __call__(
        self,
        completions: Sequence[Any],
        *,
        answer_column: str = "answer",
        separator: str = ",",
        pattern: str | None = None,
        ignore_case: bool = False,
        **columns: Sequence[Any],
    ) -> list[float | None]:
        """Return one reward per completion."""
        regex = None if pattern is None else compile_pattern(pattern, num_groups=1)

        def items(given: Any) -> set[str]:
            parts = given if isinstance(given, list | tuple | set) else str(given).split(separator)
            texts = {str(part).strip() for part in parts} - {""}
            return {text.casefold() for text in texts} if ignore_case else texts

        rewards: list[float | None] = []
        for completion, gold in zip(completions, column_values(columns, answer_column), strict=True):
            text: str | None = answer_text(completion).rpartition("</think>")[2]
            if regex is not None:
                text = ([match[1] for match in regex.finditer(text or "")] or [None])[-1]
            rewards.append(None if gold is None else float(text is not None and items(text) == items(gold)))
        return rewards


# One think block, then a non-empty answer. The lookahead excludes other think tags and leaves only one way to match, so
# matching takes linear time.
THINK_PATTERN = r"<think>(?:(?!</?think>).)*</think>\s*(?!\s)(?:(?!</?think>).)+"


class FormatReward:
    """1.0 if the completion matches, else 0.0.

    Arguments (in `rewards[i].args`):
        pattern: regular expression that must match the whole completion, stripped; a dot also matches a line break.
            Default: exactly one `<think>...</think>`, then a non-empty answer.
    """

    __name__ = "format"

    def required_columns(self, *, pattern: str = THINK_PATTERN) -> Sequence[str]:
        """See `ChecksArguments`."""
        compile_pattern(pattern, flags=re.DOTALL)
        return ()

    def __call__(self, completions: Sequence[Any], *, pattern: str = THINK_PATTERN) -> list[float]:
        """Return one reward per completion."""
        regex = compile_pattern(pattern, flags=re.DOTALL)
        return [float(regex.fullmatch(completion_text(c).strip()) is not None) for c in completions]


class RegexReward:
    """1.0 if the pattern is found in the completion, else 0.0.

    Arguments (in `rewards[i].args`):
        pattern: regular expression; a dot does not match a line break, and `^` and `$` match at each line. Use the
            inline flags `(?s)` and `(?i)` for others.
        whole: the pattern must match the whole completion, stripped. Default false.
        negate: 1.0 if the pattern does not match. Default false.
    """

    def required_columns(self, *, pattern: str, whole: bool = False, negate: bool = False) -> Sequence[str]:
        """See `ChecksArguments`."""
        compile_pattern(pattern, flags=re.MULTILINE)
        check_flag("whole", whole)
        check_flag("negate", negate)
        return ()

    def __call__(
        self, completions: Sequence[Any], *, pattern: str, whole: bool = False, negate: bool = False
    ) -> list[float]:
        """Return one reward per completion."""
        regex = compile_pattern(pattern, flags=re.MULTILINE)
        texts = [completion_text(completion) for completion in completions]
        matches = [regex.fullmatch(text.strip()) if whole else regex.search(text) for text in texts]
        return [float((match is not None) != negate) for match in matches]


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


class TokenRepetitionReward:
    """`max_penalty` times the share of repeated n-grams of tokens; 0.0 for fewer than `ngram_size` tokens.

    Arguments (in `rewards[i].args`):
        ngram_size: tokens of an n-gram. Default 3.
        max_penalty: the limit for a text that only repeats itself, at most 0. Default -1.0.
    """

    shapes = True

    def required_columns(self, *, ngram_size: int = 3, max_penalty: float = -1.0) -> Sequence[str]:
        """See `ChecksArguments`."""
        _check(ngram_size, max_penalty)
        return ()

    def __call__(
        self, completion_ids: Sequence[Sequence[int]], *, ngram_size: int = 3, max_penalty: float = -1.0
    ) -> list[float]:
        """Return one reward per completion."""
        return [_share_repeated(ids, ngram_size) * max_penalty or 0.0 for ids in completion_ids]


class WordRepetitionReward:
    """`max_penalty` times the share of repeated n-grams of lower-case words.

    Arguments (in `rewards[i].args`):
        ngram_size: words of an n-gram.
        max_penalty: the limit for a text that only repeats itself, at most 0.
        language: `en` splits words at white space; `zh` needs the package jieba. Default en.
    """

    shapes = True

    def required_columns(self, *, ngram_size: int, max_penalty: float, language: str = "en") -> Sequence[str]:
        """See `ChecksArguments`."""
        _check(ngram_size, max_penalty)
        check_choice("language", language, ("en", "zh"))
        if language == "zh" and importlib.util.find_spec("jieba") is None:
            raise ValueError("language: zh needs the package jieba; install it with `pip install jieba`")
        return ()

    def __call__(
        self, completions: Sequence[Any], *, ngram_size: int, max_penalty: float, language: str = "en"
    ) -> list[float]:
        """Return one reward per completion."""
        texts = [completion_text(completion) for completion in completions]
        return [_share_repeated(_words(text, language), ngram_size) * max_penalty or 0.0 for text in texts]


def _check(ngram_size: object, max_penalty: object) -> None:
    check_number("ngram_size", ngram_size, minimum=1, whole=True)
    check_number("max_penalty", max_penalty, maximum=0)


def _words(text: str, language: str) -> list[str]:
    if language == "en":
        return text.lower().split()
    import jieba

    return list(jieba.cut(text))


def _share_repeated(items: Sequence[Hashable], size: int) -> float:
    """Return 1 - distinct n-grams / all n-grams."""
    ngrams = [tuple(items[i : i + size]) for i in range(len(items) - size + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
