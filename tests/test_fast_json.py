"""Fast JSON is what Python's module makes of the same values, and reads."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort import fast_json

TEXT = st.text(st.characters(codec=None, categories=None), max_size=8)  # halves of surrogate pairs included
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=12,
)


@given(VALUES)
def test_as_pythons(value: Any):
    content = fast_json.encode(value, default=str)
    assert json.loads(content) == value == fast_json.decode(content) == fast_json.decode(json.dumps(value).encode())
    assert b"\0" not in content


def test_the_spelling_is_the_same_for_half_a_pair():
    assert fast_json.encode({"a": [1, "é"]}) == '{"a":[1,"é"]}'.encode()
    assert fast_json.encode({"a": [1, "\ud83d"]}) == rb'{"a":[1,"\ud83d"]}'


def test_many_levels_half_a_pair_and_numbers_that_json_lacks():
    value: list[Any] = ["\ud83d", float("inf"), 2**80]
    for _ in range(500):
        value = [value]
    assert fast_json.decode(fast_json.encode(value, default=str)) == value


def test_what_is_not_json_is_converted():
    values = {"numbers": np.arange(2), "object": np.float32(0.5), "half": "\ud83d"}
    for chosen in (values, {"numbers": values["numbers"], "object": values["object"]}):
        content = fast_json.encode(chosen, default=lambda value: value.tolist())
        assert fast_json.decode(content) == {**chosen, "numbers": [0, 1], "object": 0.5}


def test_what_is_no_json_is_refused():
    with pytest.raises(ValueError, match="Expecting"):
        fast_json.decode(b'{"a": ')
    circular: list[Any] = []
    circular.append(circular)
    with pytest.raises(ValueError, match="Circular"):
        fast_json.encode(circular, default=str)
