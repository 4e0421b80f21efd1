"""Gates, scales, bounds and selection of rows, on a group and in the configuration."""

import math
from dataclasses import replace

import numpy as np
import pytest

from cohort.config import RewardConfig, config_from_dict
from cohort.errors import UserError
from cohort.records import RolloutGroup
from cohort.rewards import RewardRunner, build_rewards
from reward_samples import group, reward

NAN = math.nan


def fixed(values, seen=None):
    """A reward with a value for each text, which records the texts that it is called with."""

    def function(completions):
        if seen is not None:
            seen.append(list(completions))
        return [values[text] for text in completions]

    return function


def test_behind_a_gate_only_what_it_lets_through_counts():
    seen: list[list[str]] = []
    first = reward(fixed({"a": 1.0, "b": 0.5, "c": None, "d": 2.0}), name="first", gate=True, weight=0.1)
    second = reward(fixed({"a": 5.0, "d": None}, seen), name="second")
    (scored,) = RewardRunner([first, second]).score([group("q", ["a", "b", "c", "d"])])
    assert seen == [["a", "d"]]
    np.testing.assert_array_equal(scored.reward_parts["first"], [1.0, 0.5, NAN, 2.0])
    np.testing.assert_array_equal(scored.reward_parts["second"], [5.0, 0.0, NAN, NAN])
    np.testing.assert_allclose(scored.rewards, [5.1, 0.05, NAN, 0.2])


def test_gates_follow_each_other_and_do_not_affect_earlier_rewards():
    seen: list[list[str]] = []
    functions = [
        reward(fixed(dict.fromkeys("abc", 3.0)), name="before"),
        reward(fixed({"a": 1.0, "b": 1.0, "c": 0.0}), name="one", gate=True),
        reward(fixed({"a": 1.0, "b": None}, seen), name="two", gate=True),
        reward(fixed({"a": -7.0}, seen), name="last"),
    ]
    (scored,) = RewardRunner(functions).score([group("q", ["a", "b", "c"])])
    assert seen == [["a", "b"], ["a"]]
    assert scored.reward_parts["before"].tolist() == [3.0, 3.0, 3.0]
    np.testing.assert_array_equal(scored.reward_parts["two"], [1.0, NAN, 0.0])
    np.testing.assert_array_equal(scored.reward_parts["last"], [-7.0, NAN, 0.0])


def test_a_function_that_a_gate_leaves_nothing_is_not_called_and_counts_nothing():
    class Judge:
        last_counts = {"timeout": 1}  # noqa: RUF012

        def __call__(self, completions):
            return [None for _ in completions]

    gate = reward(lambda completions: [float(text == "good") for text in completions], name="gate", gate=True)
    runner = RewardRunner([gate, reward(Judge(), name="judge")])
    runner.score([group("q", ["good"])])
    assert runner.counts() == {"judge/timeout": 1}
    (scored,) = runner.score([group("q", ["bad"])])
    assert scored.rewards.tolist() == [0.0] and runner.counts() == {}


def test_async_rewards_behind_a_gate():
    async def judge(completions):
        return [float(len(text)) for text in completions]

    gate = reward(fixed({"aa": 1.0, "b": 0.0}), name="gate", gate=True)
    (scored,) = RewardRunner([gate, reward(judge, name="judge")]).score([group("q", ["aa", "b"])])
    assert scored.reward_parts["judge"].tolist() == [2.0, 0.0]


def test_rows_are_selected_by_columns():
    seen: list[list[str]] = []
    functions = [
        reward(fixed({"a": 1.0}, seen), name="math", where={"source": "math"}),
        reward(fixed({"b": 2.0, "c": 3.0}, seen), name="code", where={"source": ["code", "apps"], "level": 1}),
    ]
    groups = [
        group("p", ["a"], source="math", level=1),
        group("q", ["b"], prompt_id=1, source="code", level="1"),
        group("r", ["c"], prompt_id=2, source="apps", level=1),
        group("s", ["d"], prompt_id=3, source="code", level=2),
        group("t", ["e"], prompt_id=4, source=None, level=1),
    ]
    scored = RewardRunner(functions).score(groups)
    assert seen == [["a"], ["b", "c"]]
    np.testing.assert_array_equal([g.rewards[0] for g in scored], [1.0, 2.0, 3.0, NAN, NAN])
    np.testing.assert_array_equal([g.reward_parts["math"][0] for g in scored], [1.0, NAN, NAN, NAN, NAN])


def test_a_gate_does_not_concern_rows_that_it_is_not_for():
    gate = reward(fixed({"a": 0.0}), name="gate", gate=True, where={"source": "math"})
    after = reward(fixed({"b": 2.0}), name="after")
    scored = RewardRunner([gate, after]).score([group("p", ["a"], source="math"), group("q", ["b"], source="code")])
    assert [g.reward_parts["after"][0] for g in scored] == [0.0, 2.0]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"scale": 0.5}, [-1.0, 0.0, 2.0, NAN]),
        ({"scale": (0.0, 4.0)}, [-0.5, 0.0, 1.0, NAN]),
        ({"clip": (-1.0, 3.0)}, [-1.0, 0.0, 3.0, NAN]),
        ({"scale": (-2.0, 2.0), "clip": (0.0, 1.0)}, [0.0, 0.5, 1.0, NAN]),
    ],
)
def test_scale_comes_before_clip_and_weight_after_both(settings, expected):
    values = {"a": -2.0, "b": 0.0, "c": 4.0, "d": None}
    function = reward(fixed(values), name="r", weight=10.0, **settings)
    (scored,) = RewardRunner([function]).score([group("q", list("abcd"))])
    np.testing.assert_array_equal(scored.reward_parts["r"], expected)
    np.testing.assert_array_equal(scored.rewards, 10 * np.array(expected))


def test_the_gate_looks_at_the_scaled_value():
    gate = reward(fixed({"a": 10.0, "b": 9.0}), name="gate", gate=True, scale=0.1)
    (scored,) = RewardRunner([gate, reward(fixed({"a": 5.0}), name="r")]).score([group("q", ["a", "b"])])
    assert scored.reward_parts["r"].tolist() == [5.0, 0.0]


# --- configuration ------------------------------------------------------------------------------------------------


def config(*rewards):
    return config_from_dict(
        {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": list(rewards), "train": {"steps": 1}}
    )


def test_settings_reach_the_function():
    settings = config(
        {"use": "format", "gate": True, "weight": 0.1},
        {"use": "exact", "where": {"source": ["a", "b"]}, "scale": [1, 10], "clip": [0, 1]},
    )
    first, second = build_rewards(settings.rewards, columns=["answer", "source"], max_completion_tokens=8)
    assert (first.gate, first.scale, first.clip, first.where) == (True, 1.0, None, {})
    assert (second.gate, second.scale, second.clip) == (False, (1.0, 10.0), (0.0, 1.0))
    assert second.where == {"source": ["a", "b"]}


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        ([{"use": "exact", "gate": True}], "rewards[0].gate: true has no effect on the last reward"),
        ([{"use": "exact", "clip": [1, 0]}], "clip: [1, 0] must be [low, high] with low below high"),
        ([{"use": "exact", "scale": [1, 1]}], "scale: [1, 1] must be [low, high] with low below high"),
        ([{"use": "exact", "scale": 0}], "scale: 0 makes every reward 0"),
    ],
)
def test_settings_without_sense_are_refused(rewards, words):
    with pytest.raises(UserError) as caught:
        config(*rewards)
    assert words in str(caught.value)


def test_a_column_to_select_by_must_be_there():
    with pytest.raises(UserError, match=r"rewards\[0\].where: 'sourse' is not a column.*did you mean source\?"):
        build_rewards(
            [RewardConfig(use="exact", where={"sourse": "a"})], columns=["answer", "source"], max_completion_tokens=8
        )


def played(rollout: RolloutGroup, *rewards: float) -> RolloutGroup:
    """The group as the environment `game` played and rewarded it."""
    given = zip(rollout.trajectories, rewards, strict=True)
    return replace(rollout, trajectories=tuple(replace(t, rewards={"game": value}) for t, value in given))


def test_rows_of_an_environment_without_an_answer_are_for_its_reward_alone():
    configs = [RewardConfig(use="exact", where={"source": "math"})]
    functions = build_rewards(configs, columns=["answer", "source"], max_completion_tokens=8, given=["game"])
    groups = [group("q", ["1", "2"], answer="1", source="math"), played(group("p", ["a", "b"]), 0.5, 2.0)]
    math, game = RewardRunner(functions, columns=["answer", "source"]).score(groups)
    assert math.rewards.tolist() == [1.0, 0.0] and game.rewards.tolist() == [0.5, 2.0]
    assert np.isnan(game.reward_parts["exact"]).all() and np.isnan(math.reward_parts["game"]).all()


def test_a_gate_holds_for_the_reward_of_an_environment():
    configs = [RewardConfig(use="exact", gate=True, weight=0.0)]
    functions = build_rewards(configs, columns=["answer"], max_completion_tokens=8, given=["game"])
    (scored,) = RewardRunner(functions).score([played(group("q", ["1", "2"], answer="1"), 3.0, 3.0)])
    assert scored.rewards.tolist() == [3.0, 0.0]


def test_a_last_gate_needs_an_environment_after_it():
    raw = {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": [{"use": "exact", "gate": True}]}
    with pytest.raises(UserError, match="no effect on the last reward"):
        config_from_dict(raw)
    assert config_from_dict({**raw, "rollout": {"environment": "game.py:Game"}}).rewards[0].gate


@pytest.mark.parametrize(
    ("value", "wanted", "matches"),
    [
        (1.0, 1, True),  # a column of integers with gaps
        (1, "1", True),
        ("1", 1, True),
        (1.5, 1, False),
        (True, True, True),
        ("true", True, True),
        (True, "true", True),
        (True, 1, False),
        (None, None, True),
        (None, "None", False),
        ("a", ["b", "a"], True),
        (2.0, [1, 2], True),
    ],
)
def test_where_compares_numbers_as_numbers_and_the_rest_as_text(value, wanted, matches):
    runner = RewardRunner([reward(fixed({"a": 1.0}), name="one", where={"n": wanted})], columns=["n"])
    (scored,) = runner.score([group("q", ["a"], n=value)], require_scores=False)
    assert scored.rewards.tolist() == pytest.approx([1.0 if matches else math.nan], nan_ok=True)
