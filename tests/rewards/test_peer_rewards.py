"""The rewards `open_r1.*` and `trl.*` against a table of the values of Open-R1's and TRL's own functions.

The table was recorded with Open-R1 at 1416fa0, TRL 1.16.0 and math-verify 0.9.0; `make test-extras` holds it to TRL.
"""

import json
import re
import sys
import types
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builtin_rewards import Builtin, call, load_builtin
from cohort.config import RewardConfig
from cohort.rewards import build_rewards
from cohort.rewards.load_rewards import BUILTINS
from cohort.rewards.math_workers import MathWorkers
from selection import slow

TABLE = json.loads(Path(__file__).with_name("peer_rewards.json").read_text(encoding="utf-8"))
TEXTS = [text for text, _ in TABLE["rows"]]
INPUTS = {
    "completions": [[{"role": "assistant", "content": text}] for text in TEXTS],
    "solution": [solution for _, solution in TABLE["rows"]],
    "completion_ids": [[ord(letter) % 7 for letter in text[: 3 * i]] for i, text in enumerate(TEXTS)],
}
CASES = [pytest.param(case, id=f"{case['use']}-{i}") for i, case in enumerate(TABLE["cases"])]
GRADED = ("accuracy", "cosine", "len", "reasoning_accuracy")  # each case starts a worker for math-verify


def test_the_table_covers_every_name():
    assert {case["use"] for case in TABLE["cases"]} == {name for name in BUILTINS if "." in name}
    assert all(len(case["values"]) == len(TEXTS) for case in TABLE["cases"])


def _marks(use: str) -> list[pytest.MarkDecorator]:
    is_quick = use.partition(".")[2] not in GRADED or use == "trl.accuracy"
    return [] if is_quick else [slow("trl.accuracy is graded by the same worker")]


@pytest.mark.parametrize(
    "case", [pytest.param(*case.values, id=case.id, marks=_marks(case.values[0]["use"])) for case in CASES]
)
def test_values_are_those_of_the_peer(case):
    values = call(load_builtin(case["use"], case["args"], workers=MathWorkers(count=1)), **INPUTS)
    assert values == [value if value is None else pytest.approx(value, abs=1e-12) for value in case["values"]]
    assert len({value for value in values if value is not None}) > 1  # the rows tell the values apart


@pytest.mark.extras
@pytest.mark.parametrize("case", [param for param in CASES if param.values[0]["use"].startswith("trl.")])
def test_the_table_is_what_trl_gives(case):
    from trl import rewards

    made = {
        "trl.cosine": rewards.get_cosine_scaled_reward,
        "trl.repetition_penalty": rewards.get_repetition_penalty_reward,
        "trl.soft_overlong": rewards.get_soft_overlong_punishment,
    }
    plain = {
        "trl.accuracy": rewards.accuracy_reward,
        "trl.reasoning_accuracy": rewards.reasoning_accuracy_reward,
        "trl.think_format": rewards.think_format_reward,
    }
    use, args = case["use"], case["args"]
    values = made[use](**args)(**INPUTS) if use in made else plain[use](**INPUTS, **args)
    assert values == [value if value is None else pytest.approx(value, abs=1e-12) for value in case["values"]]


# --- the linear matchers and the patterns that they stand for -----------------------------------------------------

PATTERNS = {
    "open_r1.format": r"^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$",
    "open_r1.code_format": r"^<think>\n.*?\n</think>\n<answer>\n.*?```python.*?```.*?\n</answer>$",
    "trl.think_format": r"^<think>(?!.*<think>)(.*?)</think>.*$",
}
PIECES = ["<think>", "</think>", "<answer>", "</answer>", "\n", "\n", "```", "```python", "x"]
WHOLE = ["<think>\n", "a", "\n</think>\n<answer>\n", "```python", "```", "\n</answer>"]
near_texts = st.lists(st.sampled_from([*WHOLE, *PIECES]), max_size=4).flatmap(
    lambda noise: st.integers(0, len(WHOLE)).map(lambda at: "".join([*WHOLE[:at], *noise, *WHOLE[at:]]))
)


@pytest.mark.parametrize("use", PATTERNS)
@given(text=near_texts | st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
def test_the_linear_matcher_agrees_with_the_pattern(use, text):
    expected = re.match(PATTERNS[use], text, re.DOTALL | re.MULTILINE) is not None
    assert Builtin(use)([text]) == [float(expected)]


def test_long_texts_take_linear_time():
    texts = ["<think>\n" + "\n</think>\n<answer>\n```python" * 100_000, "Step 1" * 300_000, "<think>" * 300_000]
    for use in ("open_r1.format", "open_r1.code_format", "open_r1.reasoning_steps"):
        assert Builtin(use)(texts) == [0.0, 0.0, 0.0]
    assert Builtin("trl.think_format")(texts) == [1.0, 0.0, 0.0]


# --- arguments ----------------------------------------------------------------------------------------------------


def test_languages_of_rows():
    text = "<think>\na\n</think>\n<answer>\n```%s\nx\n```\n</answer>"
    f = Builtin("open_r1.code_format")
    rows = {"language_column": "lang", "lang": ["cpp", "cpp"]}
    assert f([text % "cpp", text % "python"], **rows) == [1.0, 0.0]


def test_chinese_words_are_those_of_jieba(monkeypatch):
    monkeypatch.setitem(sys.modules, "jieba", types.SimpleNamespace(cut=iter))
    f, args = Builtin("open_r1.repetition_penalty"), {"ngram_size": 2, "max_penalty": -1.0, "language": "zh"}
    assert f(["我我我", "我你他", "我"], **args) == [-0.5, 0.0, 0.0]
    monkeypatch.setitem(sys.modules, "jieba", None)
    with pytest.raises(ValueError, match=r"needs the package jieba; install it with `pip install jieba`"):
        f.check()


def test_penalties_only_shape_and_have_the_name_of_their_source():
    penalties = [
        RewardConfig(use="trl.repetition_penalty"),
        RewardConfig(use="open_r1.repetition_penalty", args={"ngram_size": 2, "max_penalty": -1}),
        RewardConfig(use="trl.soft_overlong", args={"max_completion_len": 8, "soft_punish_cache": 2}),
    ]
    built = build_rewards([RewardConfig(use="trl.accuracy"), *penalties], columns=["solution"], max_completion_tokens=8)
    names = ["trl.accuracy", "trl.repetition_penalty", "open_r1.repetition_penalty", "trl.soft_overlong"]
    assert [(f.name, f.shapes) for f in built] == [(name, i > 0) for i, name in enumerate(names)]


def test_what_was_not_graded_is_not_scored():
    """A worker that does not answer in time; Open-R1's 1.0 is for gold answers that cannot be parsed, and no more."""
    for use in ("open_r1.accuracy", "open_r1.cosine", "open_r1.len", "trl.accuracy", "trl.cosine"):
        f = load_builtin(use, {"max_len": 4} if use == "trl.cosine" else {}, timeout_s=1e-9)
        inputs = {"completions": ["$1$", "$12$"], "completion_ids": [[1], [2]], "solution": ["$1$", "$1$"]}
        assert call(f, **inputs) == [None, None]
        assert f.last_counts == {"out_of_time": 2}
        if use == "open_r1.len":  # equal lengths are not graded
            assert call(f, completions=["$1$", "$2$"], solution=["$1$", "$1$"]) == [0.0, 0.0]
            assert f.last_counts == {}
