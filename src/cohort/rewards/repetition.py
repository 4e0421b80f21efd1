"""The rewards `trl.repetition_penalty` (of tokens) and `open_r1.repetition_penalty` (of words).

Appendix C.2 of "Demystifying Long Chain-of-Thought Reasoning in LLMs" (arXiv:2502.03373). Both are shaping only: a
completion that no other reward scores stays unscored.
"""

import importlib.util
from collections.abc import Hashable, Sequence
from typing import Any

from cohort.rewards.arguments import check_choice, check_number
from cohort.rewards.describe import completion_text


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
