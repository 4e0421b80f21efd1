"""Warnings about turns: once each, and only if most go wrong."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from cohort.config import config_from_dict
from cohort.health.reward_health import RewardWatch
from cohort.trainer.step_metrics import StepWarnings
from cohort.trainer.worker import Worker

FINE = {
    "tools/malformed_ratio": 0.5,
    "tools/failure_frequency": 0.4,
    "ends/max_turns": 0.1,
    "turns/model_s": 0.2,
    "turns/environment_s": 0.9,
}
STALE = {"rollout/staleness_max": 1.0}  # so that logprobs are not compared


def warnings(**rollout: Any) -> tuple[StepWarnings, list[str]]:
    raw: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": [{"use": "math"}]}
    config = config_from_dict({**raw, "rollout": rollout or {"tools": ["t.py:look"], "max_turns": 5}})
    shown: list[str] = []
    worker = cast(Worker, SimpleNamespace())
    return StepWarnings(rollout=config.rollout, worker=worker, notify=shown.append, reward_watch=RewardWatch({})), shown


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"tools/malformed_ratio": 0.51}, "warning: 51% of the tool calls cannot be parsed; "),
        ({"tools/failure_frequency": 1.0}, "warning: 100% of the tool calls fail; "),
        ({"ends/max_turns": 0.75}, "warning: 75% of the trajectories end by rollout.max_turns: 5; "),
        (
            {"turns/environment_s": 3.0},
            "warning: a trajectory spends 3.0 s in tools and environments and 0.2 s in the model, ",
        ),
    ],
)
def test_each_is_said_once(changed: dict[str, float], expected: str):
    watch, shown = warnings()
    watch.metrics(1, STALE)
    watch.metrics(2, STALE | FINE)
    assert shown == []
    for step in (3, 4):
        watch.metrics(step, STALE | FINE | changed)
    assert [text[: len(expected)] for text in shown] == [expected]


def test_a_slow_model_is_no_slow_environment():
    watch, shown = warnings()
    watch.metrics(1, {**STALE, **FINE, "turns/model_s": 4.0, "turns/environment_s": 3.0})
    assert shown == []


@pytest.mark.parametrize(
    ("rollout", "limits"),
    [
        ({"max_completion_tokens": 300}, "rollout.max_completion_tokens: 300"),
        ({}, "rollout.max_completion_tokens: 256 or rollout.max_trajectory_tokens: 1280"),  # with tools
    ],
)
def test_cut_completions_are_said_once_with_the_cure(rollout: dict[str, int], limits: str):
    watch, shown = warnings(**rollout)
    shares = [0.6, 0.49, 0.5, 0.9, 0.7, 0.9, 0.9, 0.2, 0.9, 0.9, 0.9]
    for step, share in enumerate(shares):
        watch.metrics(step, {**STALE, "frac_reward_zero_std": 0.0, "completions/clipped_ratio": share})
        assert bool(shown) == (step >= 4)  # 0.5, 0.9 and 0.7
    assert shown == [
        f"warning: 70% of the completions of the last 3 steps were cut at {limits}, and what is cut has seldom reached "
        f"its answer; raise it, or add the reward overlong, which teaches shorter ones"
    ]
