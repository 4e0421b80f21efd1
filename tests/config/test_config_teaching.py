"""Configurations in which nothing, or less than is there, would be learned are refused."""

from typing import Any

import pytest

from assigned import assign_advantages
from cohort.algorithms import build_algorithm
from cohort.config import AlgorithmConfig, config_from_dict
from cohort.errors import TrainingError, UserError
from configs import MINIMAL
from samples import scored


def config(**sections: Any) -> None:
    config_from_dict({**MINIMAL, **sections})


def test_groups_that_differ_in_their_penalties_are_not_replaced():
    in_reward = {"beta": 0.1, "kl_in": "reward"}
    with pytest.raises(UserError, match=r"rollout.resample: 2 would replace useful groups: with algorithm.kl_in"):
        config(algorithm=in_reward, rollout={"resample": 2})
    config(algorithm=in_reward)
    config(algorithm={"beta": 0.1, "kl_in": "loss"}, rollout={"resample": 2})


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce"])
def test_a_step_of_one_completion_has_nothing_to_compare(name: str):
    alone = {"rollout": {"num_generations": 1}, "train": {"prompts_per_step": 1}}
    with pytest.raises(UserError, match=r"train.prompts_per_step: 1 with .*batch_mean_std.*: 2 or more"):
        config(algorithm={"name": name}, **alone)
    config(algorithm={"name": name, "beta": 0.1, "kl_in": "reward"}, **alone)  # its tokens differ
    config(algorithm={"name": "ppo"}, **alone)
    config(algorithm={"name": name}, rollout={"num_generations": 1}, train={"prompts_per_step": 2})
    config(algorithm={"name": name}, rollout={"num_generations": 2}, train={"prompts_per_step": 1})


@pytest.mark.parametrize("name", ["GRPO", "gpro"])  # swapped letters are nearer than gspo
def test_a_name_in_capitals_or_misspelt_is_told_the_nearest(name: str):
    with pytest.raises(UserError, match=rf"algorithm.name: '{name}': is not one of .*; did you mean grpo\?"):
        config(algorithm={"name": name})


def test_groups_of_a_step_are_of_one_size():
    algorithm = build_algorithm(AlgorithmConfig(), max_completion_tokens=8)
    with pytest.raises(TrainingError, match="a step of no groups"):
        assign_advantages([], algorithm)
    with pytest.raises(TrainingError, match="groups of 2 and 3 completions; it must have groups of one size"):
        assign_advantages([scored([1.0, 0.0], [1, 1]), scored([1.0, 0.0, 1.0], [1, 1, 1])], algorithm)
