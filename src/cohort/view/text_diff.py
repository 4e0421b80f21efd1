"""Compare two texts word by word, in bounded time."""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

Op = tuple[str, str, str]  # "equal", "replace", "delete" or "insert"; text of a; text of b
_WORDS = re.compile(r"\s+|\w+|[^\w\s]")
_MAX_PAIRS = 300_000  # equal pairs of words that one comparison may try


def diff_words(a: str, b: str) -> list[Op]:
    """Return how `a` becomes `b`. Joining the texts of either side gives that side.

    Words that occur once in each text, in the same order, divide the texts into parts (patience diff). Parts that would
    take long to compare, because the same few words repeat many times, are one "replace".
    """
    words_a, words_b = _WORDS.findall(a), _WORDS.findall(b)
    ops: list[Op] = []
    budget = [_MAX_PAIRS]
    for part_a, part_b in _parts(words_a, words_b):
        for kind, text_a, text_b in _compare(part_a, part_b, budget):
            if ops and ops[-1][0] == kind:
                ops[-1] = (kind, ops[-1][1] + text_a, ops[-1][2] + text_b)
            else:
                ops.append((kind, text_a, text_b))
    return ops


def _parts(a: Sequence[str], b: Sequence[str]) -> Iterator[tuple[Sequence[str], Sequence[str]]]:
    """Divide two texts at their common beginning and end and at words that both have once."""
    start = _num_equal(a, b)
    end = _num_equal(a[start:][::-1], b[start:][::-1])
    yield a[:start], b[:start]
    i, j = start, start
    for k, m in _anchors(a[start : len(a) - end], b[start : len(b) - end]):
        yield a[i : start + k], b[j : start + m]
        i, j = start + k, start + m
        yield a[i : i + 1], b[j : j + 1]
        i, j = i + 1, j + 1
    yield a[i : len(a) - end], b[j : len(b) - end]
    yield a[len(a) - end :], b[len(b) - end :]


def _num_equal(a: Sequence[str], b: Sequence[str]) -> int:
    """Return the number of words at which two texts begin equally."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _anchors(a: Sequence[str], b: Sequence[str]) -> list[tuple[int, int]]:
    """Return positions of words that both texts have once: the longest series in the order of both."""
    count_a, count_b = Counter(a), Counter(b)
    place_b = {word: j for j, word in enumerate(b) if count_b[word] == 1}
    pairs = [(i, place_b[word]) for i, word in enumerate(a) if count_a[word] == 1 and word in place_b]
    tails: list[int] = []  # smallest last position in b of an increasing series, by its length
    last: list[int] = []  # index of that pair
    before: list[int] = []
    for index, (_, j) in enumerate(pairs):
        length = bisect_left(tails, j)
        before.append(last[length - 1] if length else -1)
        if length == len(tails):
            tails.append(j)
            last.append(index)
        else:
            tails[length], last[length] = j, index
    chain: list[tuple[int, int]] = []
    index = last[-1] if last else -1
    while index >= 0:
        chain.append(pairs[index])
        index = before[index]
    return chain[::-1]


def _compare(a: Sequence[str], b: Sequence[str], budget: list[int]) -> Iterator[Op]:
    """Compare two parts, taking what it costs off the budget."""
    if not a and not b:
        return
    if a == b:
        yield "equal", "".join(a), "".join(b)
        return
    count_a, count_b = Counter(a), Counter(b)
    cost = len(a) + len(b) + sum(n * count_b[word] for word, n in count_a.items())
    if not a or not b or cost > budget[0]:
        yield "insert" if not a else "delete" if not b else "replace", "".join(a), "".join(b)
        return
    budget[0] -= cost
    for kind, i, i_end, j, j_end in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        yield kind, "".join(a[i:i_end]), "".join(b[j:j_end])
