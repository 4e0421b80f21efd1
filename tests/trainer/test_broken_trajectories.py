"""Trajectories that infrastructure broke are counted and masked: no reward, no part in a baseline, no trained token."""

import asyncio
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from assigned import assign_advantages
from cohort.algorithms import build_algorithm
from cohort.config import ALGORITHMS, AlgorithmConfig
from cohort.errors import TrainingError
from cohort.metrics.rollouts import rollout_metrics
from cohort.records import Prompt, RolloutGroup, ScoredGroup, Trajectory
from cohort.rewards import RewardRunner
from cohort.rollout import CallKey, Generate, Prefetcher, RolloutCollector, SamplingParams
from cohort.trainer.collect_groups import GroupCollector
from cohort.trainer.evaluation import Evaluation, evaluate
from engines import ScriptedEngine
from reward_samples import reward
from samples import answer
from test_collect_groups import stream
from tiny import make_tokenizer

PROMPT = Prompt(id=0, epoch=0, content="q", token_ids=np.array([7, 8]), columns={})
BEFORE_ITS_FIRST_CALL = Trajectory(calls=(), messages=(), text="", end="environment_error")
SAMPLING = SamplingParams(num_generations=4, max_completion_tokens=6, temperature=1.0)


def timed_out(*token_ids: int, text: str = "") -> Trajectory:
    return replace(answer(PROMPT, token_ids, text=text), end="timeout")


def a_group(*trajectories: Trajectory) -> RolloutGroup:
    return RolloutGroup(prompt=PROMPT, trajectories=trajectories)


def by_length(seen: list[str]) -> RewardRunner:
    def lengths(completions: list[str]) -> list[float]:
        seen.extend(completions)
        return [float(len(text)) for text in completions]

    lengths.last_counts = {"timeout": 1}
    return RewardRunner([reward(lengths)])


def scored_with_broken(seen: list[str]) -> tuple[ScoredGroup, ...]:
    groups = [
        a_group(answer(PROMPT, [5], text="a"), timed_out(6, 6, 6, text="broken"), answer(PROMPT, [9, 9], text="abc")),
        a_group(BEFORE_ITS_FIRST_CALL, answer(PROMPT, [3], text="abcdefgh"), answer(PROMPT, [4], text="ab")),
    ]
    return tuple(by_length(seen).score(groups))


def test_no_reward_function_sees_it():
    seen: list[str] = []
    first, second = scored_with_broken(seen)
    assert seen == ["a", "abc", "abcdefgh", "ab"]
    np.testing.assert_array_equal(first.rewards, [1, np.nan, 3])
    np.testing.assert_array_equal(second.reward_parts["r"], [np.nan, 8, 2])


def test_it_takes_no_part_in_the_baseline_and_has_no_trained_token():
    algorithm = build_algorithm(AlgorithmConfig(name="dr_grpo", loss_weight="token_mean"), max_completion_tokens=8)
    sequences = assign_advantages(scored_with_broken([]), algorithm)
    assert [s.trajectory for s in sequences] == [0, 2, 4, 5]
    assert [s.advantages.tolist() for s in sequences] == [[-1], [1, 1], [3], [-3]]
    assert [s.loss_weights.tolist() for s in sequences] == [[0.2], [0.2, 0.2], [0.2], [0.2]]


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if not AlgorithmConfig(name=name).needs_critic])
def test_its_tokens_change_nothing_of_the_others(name: str):
    algorithm = build_algorithm(AlgorithmConfig(name=name, beta=0.0, top_entropy_quantile=1.0), max_completion_tokens=8)
    found = []
    for broken in (BEFORE_ITS_FIRST_CALL, timed_out(*range(2, 9))):
        members = (answer(PROMPT, [5], text="a"), broken, answer(PROMPT, [9, 9], text="abc"))
        sequences = assign_advantages(by_length([]).score([a_group(*members)]), algorithm, reward_weights={"r": 1.0})
        found.append([(s.trajectory, s.advantages.tolist(), s.loss_weights.tolist()) for s in sequences])
    assert found[0] == found[1]


def test_it_is_counted():
    metrics = rollout_metrics(scored_with_broken([]))
    assert metrics["completions/broken"] == 2
    assert metrics["frac_unscored"] == pytest.approx(1 / 3)
    assert metrics["reward"] == 14 / 4
    assert (metrics["completions/mean_length"], metrics["completions/max_length"]) == (5 / 4, 2)


def test_a_step_in_which_all_broke_is_an_error():
    seen: list[str] = []
    runner, groups = by_length(seen), [a_group(timed_out(5), BEFORE_ITS_FIRST_CALL)]
    with pytest.raises(TrainingError, match="all 2 trajectories in step 3 ended with environment_error or timeout"):
        runner.score(groups, during="step 3")
    (scored,) = runner.score(groups, require_scores=False)  # of another round of the step
    assert np.isnan(scored.rewards).all() and seen == [] and runner.counts() == {}
    metrics = rollout_metrics([scored])
    assert metrics["completions/broken"] == 2 and np.isnan(metrics["completions/clipped_ratio"])
    assert metrics["num_groups"] == 1 and np.isnan([metrics["reward_min"], metrics["reward_max"]]).all()


async def break_two(
    generate: Generate, tokenizer: Any, prompt: Prompt, sampling: SamplingParams, key: CallKey
) -> Trajectory:
    """The first member breaks before its call, the second after it, the third one's text is its prompt's number."""
    await asyncio.sleep(0)
    call = await generate(prompt.token_ids, sampling, key)
    if key.index == 0:
        return BEFORE_ITS_FIRST_CALL
    trajectory = Trajectory.single_turn(call, text=str(prompt.columns["n"]) if key.index == 2 else "xyz")
    return replace(trajectory, end="timeout") if key.index == 1 else trajectory


def test_a_step_goes_on_with_the_others():
    with closing(
        RolloutCollector(ScriptedEngine(lambda: 1), make_tokenizer(), rollout_function=break_two)
    ) as collector:
        options = {"seed": 0, "prompts_per_step": 2, "num_steps": 1, "updates_per_step": 1}
        prefetcher = Prefetcher(collector, stream(4), SAMPLING, **options)
        group_collector = GroupCollector(prefetcher, by_length([]), prompts_per_step=2, max_rounds=0)
        collected = group_collector.collect(0, lambda name: nullcontext())
    assert collected.metrics["completions/broken"] == 4
    assert collected.metrics["rollout/staleness_max"] == 0
    assert collected.metrics["rewards/r/timeout"] == 1
    for group in collected.groups:
        np.testing.assert_array_equal(group.rewards, [np.nan, np.nan, 1, 3])


def test_an_evaluation_is_of_the_others():
    evaluation = Evaluation(
        prompts=[replace(PROMPT, id=n, columns={"n": 10**n}) for n in range(3)],
        num_dropped_overlong=0,
        sampling=replace(SAMPLING, num_generations=3),
        seed=0,
        success_reward="r",
        success_threshold=2.0,
        prompts_at_a_time=2,
    )
    with closing(
        RolloutCollector(ScriptedEngine(lambda: 1), make_tokenizer(), rollout_function=break_two)
    ) as collector:
        result = evaluate(evaluation, collector, by_length([]))
    # one of each three is scored; its texts are 1, 10 and 100
    assert result.accuracy == result.metrics["eval/pass@3"] == pytest.approx(2 / 3)
    assert result.metrics["eval/completions/broken"] == 6
