"""Differences of two texts, word by word."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cohort_view.groups import diff_words
from selection import examples


def test_words_that_differ():
    assert diff_words("so x = 4, then stop", "so x = 5, then stop now") == [
        ("equal", "so x = ", "so x = "),
        ("replace", "4", "5"),
        ("equal", ", then stop", ", then stop"),
        ("insert", "", " now"),
    ]
    assert diff_words("same", "same") == [("equal", "same", "same")]
    assert diff_words("", "") == []
    assert diff_words("a b c", "c") == [("delete", "a b ", ""), ("equal", "c", "c")]


@given(*[st.lists(st.sampled_from(["a", "b", " ", "\n", "𝟙", "<p>", "é"]), max_size=30).map("".join)] * 2)
@examples(200)
def test_either_side_can_be_put_together_again(a, b):
    ops = diff_words(a, b)
    assert ("".join(op[1] for op in ops), "".join(op[2] for op in ops)) == (a, b)
    assert all(x == y for kind, x, y in ops if kind == "equal")
    assert all(one[0] != other[0] for one, other in pairwise(ops))


def test_few_words_that_repeat_are_not_compared_for_long():
    a, b = "x y " * 20_000, "y z " * 20_000
    ops = diff_words(a, b)
    assert {kind for kind, _, _ in ops} <= {"equal", "replace", "insert", "delete"}
    assert ("".join(op[1] for op in ops), "".join(op[2] for op in ops)) == (a, b)
