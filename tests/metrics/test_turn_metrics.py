"""Metrics of trajectories with turns, by hand."""

import math

import numpy as np
import pytest

from cohort.metrics.rollouts import rollout_metrics, turn_metrics
from cohort.records import ModelCall, Prompt, ScoredGroup, Trajectory, TurnStats
from cohort.rollout.environments.trajectory import num_masked_tokens
from samples import answer

PROMPT = Prompt(id=0, epoch=0, content="q", token_ids=np.array([1, 2]), columns={})


def a_call(context: list[int], sampled: list[int], *, trained: bool = True) -> ModelCall:
    return ModelCall(
        context_ids=np.array(context),
        token_ids=np.array(sampled),
        sampling_logprobs=np.zeros(len(sampled)),
        finish_reason="stop",
        policy_version=0,
        trained=trained,
    )


TWO_TURNS = Trajectory(
    calls=(a_call([1, 2], [5, 6]), a_call([1, 2, 5, 6, 30, 31, 32], [7])),
    messages=(),
    text="",
    end="answer",
    metrics={"score": 4.0},
    stats=TurnStats(tool_calls=2, tool_errors=1, malformed_calls=2, masked_tokens=3, model_s=3.0, environment_s=1.0),
)
WITH_SIMULATED_USER = Trajectory(
    calls=(a_call([1, 2], [5]), a_call([9], [8], trained=False)),
    messages=(),
    text="",
    end="max_turns",
    metrics={"score": 2.0, "length": 7.0},
    stats=TurnStats(attempts=2, model_s=1.0, environment_s=2.0),
)
FAILED = Trajectory(calls=(), messages=(), text="", end="environment_error", stats=TurnStats(attempts=3, tool_calls=2))


def test_all_of_them():
    assert turn_metrics([TWO_TURNS, WITH_SIMULATED_USER, FAILED]) == {
        "ends/answer": pytest.approx(1 / 3),
        "ends/max_turns": pytest.approx(1 / 3),
        "ends/length": 0.0,
        "ends/timeout": 0.0,
        "ends/environment_error": pytest.approx(1 / 3),
        "turns/retries": 3.0,
        "turns/mean": 1.5,
        "turns/max": 2.0,
        "turns/model_calls": 2.0,
        "turns/masked_tokens": 1.5,
        "turns/rewritten": 0.0,
        "turns/model_s": 2.0,
        "turns/environment_s": 1.5,
        "tools/call_frequency": pytest.approx(4 / 3),
        "tools/failure_frequency": 0.25,
        "tools/malformed_ratio": pytest.approx(1 / 3),
        "environment/length": 7.0,
        "environment/score": 3.0,
    }


def test_masked_tokens_of_a_rewritten_history_are_those_after_the_common_prompt():
    calls = (a_call([1, 2], [5, 6]), a_call([1, 2, 6, 30], [7]), a_call([40, 41], [8]))
    assert num_masked_tokens(calls) == 0 + 2 + 2
    assert num_masked_tokens(TWO_TURNS.calls) == 3 and num_masked_tokens(WITH_SIMULATED_USER.calls) == 0


def test_single_completions_have_none_and_groups_with_turns_have_theirs():
    def of(*trajectories: Trajectory) -> dict[str, float]:
        rewards = np.arange(float(len(trajectories)))
        group = ScoredGroup(prompt=PROMPT, trajectories=trajectories, rewards=rewards, reward_parts={})
        return rollout_metrics([group])

    assert not [name for name in of(answer(PROMPT, [5])) if name.startswith(("turns/", "tools/", "ends/"))]
    of_two = of(TWO_TURNS, WITH_SIMULATED_USER)
    assert of_two["turns/max"] == 2.0
    assert [of_two[name] for name in ("num_groups", "reward", "reward_min", "reward_max")] == [1.0, 0.5, 0.0, 1.0]


def test_only_failures_leave_no_number_that_is_not_one():
    metrics = turn_metrics([FAILED])
    assert metrics["ends/environment_error"] == 1.0
    assert all(map(math.isfinite, metrics.values()))
    assert "turns/mean" not in metrics
