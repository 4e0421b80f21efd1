"""Texts inside of calls that are nearly right: nothing is dropped, and nothing but `Malformed` is raised."""

from collections.abc import Callable

import pytest

from cohort.chat.calls import Cursor, Malformed, _python_calls, arguments_of


def python(text: str) -> object:
    return _python_calls(Cursor(text, 0, 0))


def test_arguments_as_a_text_are_all_of_it():
    assert arguments_of(' {"a": 1} ') == {"a": 1}
    assert arguments_of("") == {}


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (arguments_of, '{"a": 1} {"b": 2}'),
        (arguments_of, '{"a": 1} or so'),
        (arguments_of, '{"a": '),
        (arguments_of, f'{{"a": {"1" * 5000}}}'),
        (python, f"[f(a={'-' * 3000}1)]"),
        (python, f"[a{'.b' * 3000}(x=1)]"),
        (python, "[f(a=-True)]"),
    ],
    ids=["two", "more", "broken", "long number", "deep", "long name", "minus true"],
)
def test_others_are_malformed_and_not_cut_off(read: Callable[[str], object], text: str):
    with pytest.raises(Malformed) as refused:
        read(text)
    assert not refused.value.at_end
