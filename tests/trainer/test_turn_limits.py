"""Limits of trajectories in a run's inputs, and the same run in child processes."""

from pathlib import Path
from typing import Any

import pytest

import cohort.trainer.build
from cohort.config import config_from_dict
from cohort.errors import UserError
from cohort.rollout.engines.vllm.server import server_options
from cohort.trainer.inputs import Inputs, build_inputs
from runs import train
from selection import slow
from test_turn_runs import config, folder, sampled
from tiny import write_jsonl

__all__ = ["folder"]  # a fixture


def inputs(folder: Path, **sections: Any) -> Inputs:
    """The inputs of a run with prompts of 600 tokens, 3 turns of 6 and 400 tokens after the prompt."""
    rollout = {"environment": f"{folder}/e.py:Game", **sections.pop("rollout", {})}
    return build_inputs(config_from_dict(config(folder, rollout=rollout, **sections)))


def test_the_longest_sequence_is_a_whole_trajectory(folder: Path):
    write_jsonl(folder / "e.jsonl", [{"prompt": "say"}])
    evaluation = {"path": str(folder / "e.jsonl"), "max_completion_tokens": 2000}  # of one call
    for found in (inputs(folder), inputs(folder, eval=evaluation)):
        assert found.longest_sequence_tokens == 600 + 400 - 1
        shard = found.worst_case_shard(1)
        assert (shard.prompt_tokens, shard.completion_tokens) == (600, 400)


def test_a_trajectory_that_the_model_has_no_positions_for_is_refused(folder: Path):
    text = (
        r"rollout.max_trajectory_tokens: 5000 plus the longest prompt of 600 tokens is 5600, but the model has 4096 "
        r"positions; use at most 3496"
    )
    with pytest.raises(UserError, match=text):
        inputs(folder, rollout={"max_trajectory_tokens": 5000})


def test_the_overlong_reward_has_the_limit_of_all_sampled_tokens(folder: Path):
    def reward(tokens: int) -> list[dict[str, Any]]:
        return [{"use": "overlong", "args": {"buffer_tokens": tokens}}]

    assert inputs(folder, rewards=reward(18))  # 3 turns of 6
    with pytest.raises(UserError, match="buffer_tokens: 19 must be at most 18, the most tokens"):
        inputs(folder, rewards=reward(19))


def test_servers_have_room_for_whole_trajectories(folder: Path):
    rollout = {"environment": f"{folder}/e.py:Game", "engine": "vllm", "max_trajectory_tokens": 700}
    raw = config(folder, rollout=rollout, eval={"max_prompts": 4, "max_completion_tokens": 2000})
    assert server_options(config_from_dict(raw), gpus="").max_model_len == 600 + 700


@slow("tests of child processes play the same environments")
def test_a_run_in_child_processes_samples_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch):
    limits = []

    def build(*args: Any, **kwargs: Any) -> Any:
        limits.append(kwargs["max_completion_tokens"])
        return build_algorithm(*args, **kwargs)

    build_algorithm = cohort.trainer.build.build_algorithm
    monkeypatch.setattr(cohort.trainer.build, "build_algorithm", build)
    for run, isolate in (("a", False), ("b", True)):
        train(config(folder, run=run, rollout={"environment": f"{folder}/e.py:Game", "isolate": isolate}))
    assert sampled(folder / "a") == sampled(folder / "b")
    assert limits == [18, 18]  # Dr. GRPO's constant: 3 turns of 6
