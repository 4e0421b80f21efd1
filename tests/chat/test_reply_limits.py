"""Replies of the worst kinds: read in linear time, and calls that are not whole are never made."""

import time

import pytest

from cohort.chat.formats import FORMATS, Format
from cohort.chat.replies import Thoughts, read_reply

LENGTH = 100_000  # characters
UNITS = ["\n", '{"name": ', "[f(", "<think>", "<arg_key>\n", "<parameter=a>"]


@pytest.mark.parametrize("form", FORMATS, ids=[f"{form.family}-{form.markers[0]}" for form in FORMATS])
def test_a_degenerate_reply_is_read_in_linear_time(form: Format):
    starts = [*form.call_starts[:1], " to=functions.f<|message|>"]
    units = [*UNITS, *starts, starts[0] + '{"a": [', starts[0] + "x" + form.close]
    for unit in units:
        text = (starts[0] + unit * (LENGTH // len(unit)))[:LENGTH]
        begin = time.perf_counter()
        pieces = list(read_reply(text, form, Thoughts(), is_cut=False))
        assert time.perf_counter() - begin < 2, unit  # a hundredth of a second; patterns that go back took 41
        assert sum(len(piece.text) for piece in pieces) <= LENGTH


@pytest.mark.parametrize("form", FORMATS, ids=[f"{form.family}-{form.markers[0]}" for form in FORMATS])
def test_the_example_of_a_format_is_a_call_and_no_part_of_it_is_another(form: Format):
    [piece] = read_reply(form.example, form, Thoughts())
    [call] = piece.calls
    assert call.name == "f" and dict(call.arguments) in ({"a": 1}, {"a": "1"})
    for end in range(len(form.example)):
        cut = [made for piece in read_reply(form.example[:end], form, Thoughts(), is_cut=True) for made in piece.calls]
        assert cut in ([], [call]), form.example[:end]
