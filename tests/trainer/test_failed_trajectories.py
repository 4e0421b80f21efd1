"""Trajectories that infrastructure broke: how many a step may have, and what the run says."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, cast

import numpy as np
import pytest

from cohort.errors import TrainingError
from cohort.records import EndReason, ModelCall, Prompt, RolloutGroup, Trajectory
from cohort.rewards import RewardRunner
from cohort.rewards.function import RewardFunction
from cohort.rollout import Prefetcher
from cohort.trainer.collect_groups import GroupCollector, StepGroups
from playing import play

CALL = ModelCall(
    context_ids=np.array([1]),
    token_ids=np.array([2]),
    sampling_logprobs=np.zeros(1),
    finish_reason="stop",
    policy_version=0,
)
BROKEN = ("environment_error", "environment_error")
INTACT = ("answer", "answer")


def group(number: int, ends: Sequence[EndReason]) -> RolloutGroup:
    prompt = Prompt(id=number, epoch=0, content="", token_ids=np.array([1]), columns={"n": number})
    return RolloutGroup(
        prompt=prompt,
        trajectories=tuple(
            Trajectory(calls=(CALL,), messages=(), text="", end=end, error=None if end == "answer" else f"error {i}")
            for i, end in enumerate(ends)
        ),
    )


class Rounds:
    """Groups of each round, as a prefetcher has them."""

    def __init__(self, *rounds: Sequence[Sequence[EndReason]]):
        self._rounds = iter(rounds)
        self._num_groups = 0
        self.collector = self.prompts = self

    def record(self, outcomes: Any) -> dict[str, float]:
        self.recorded = list(outcomes)
        return {}

    def take(self, step: int, count: int) -> list[RolloutGroup]:
        ends = next(self._rounds)
        assert len(ends) == count
        self._num_groups += count
        return [group(self._num_groups - count + i, of_group) for i, of_group in enumerate(ends)]

    def release(self, groups: Any) -> None:
        pass

    def staleness(self, trajectories: Any) -> float:
        return 0.0

    def counts(self) -> dict[str, int]:
        return {}


class Given(Rounds):
    """Groups that were played."""

    def __init__(self, groups: list[RolloutGroup]):
        self._groups = groups
        self.collector = self

    def take(self, step: int, count: int) -> list[RolloutGroup]:
        return self._groups


def collect(rounds: Rounds, **options: Any) -> StepGroups:
    """The groups of a step of 4 whose first is without signal."""
    reward = RewardFunction(
        name="r", function=lambda n, **_: [float(i % 2) if number else 1.0 for i, number in enumerate(n)]
    )
    rewards = RewardRunner([reward], columns=["n"])
    collector = GroupCollector(cast(Prefetcher, rounds), rewards, prompts_per_step=4, **options)
    return collector.collect(0, lambda name: nullcontext())


def test_the_reason_comes_first_and_tracebacks_go_to_the_log_folder(tmp_path, monkeypatch):
    """The environment of a user fails on his line 2; the run's message has no frame."""
    (tmp_path / "e.py").write_text("async def run(row, model):\n    raise KeyError('word')\n")
    monkeypatch.chdir(tmp_path)
    (broken,) = play(tmp_path, lambda context, key: "hi", [{"prompt": "p"}], environment="e.py:run")
    reason = f"KeyError: 'word' (at {tmp_path}/e.py:2)"
    error = broken.trajectories[0].error or ""
    assert error.startswith(f"{reason}\n\nTraceback") and error.endswith("KeyError: 'word'")
    rewards = RewardRunner([RewardFunction(name="r", function=lambda completions: [])], columns=[])
    rewards.log_folder = tmp_path / "logs"
    collector = GroupCollector(
        cast(Prefetcher, Given([broken])), rewards, prompts_per_step=1, max_rounds=0, max_failed_ratio=0.5
    )
    with pytest.raises(TrainingError) as caught:
        collector.collect(0, lambda name: nullcontext())
    number = len(broken.trajectories)
    assert str(caught.value) == (
        f"rollout.max_failed_ratio: 0.5: {number} of {number} trajectories failed; the first errors:\n\n{reason}\n\n"
        f"The tracebacks are in {tmp_path}/logs/environment.txt"
    )
    assert (tmp_path / "logs" / "environment.txt").read_text().startswith(error)


def test_failures_are_counted_over_all_rounds_of_a_step():
    """Two of ten trajectories, though both of the only group of the last round."""
    rounds = Rounds([INTACT] * 4, [BROKEN])
    collected = collect(rounds, max_rounds=1, max_failed_ratio=0.2)
    assert len(collected.groups) == 4
    # the results that sampling by success knows: prompt, right and judged completions
    assert rounds.recorded == [(0, 2, 2), (1, 1, 2), (2, 1, 2), (3, 1, 2), (4, 0, 0)]
    with pytest.raises(TrainingError, match=r"max_failed_ratio: 0\.1: 2 of 10 trajectories failed; .*\n\nerror 0"):
        collect(Rounds([INTACT] * 4, [BROKEN]), max_rounds=1, max_failed_ratio=0.1)


def test_a_step_without_a_group_to_compare_says_why():
    half = ("answer", "environment_error")
    with pytest.raises(TrainingError) as caught:
        collect(Rounds([half] * 4), max_rounds=0)
    assert str(caught.value).endswith("fewer than two trajectories are intact; the first errors:\n\nerror 1")
