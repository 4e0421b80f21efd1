"""Trajectories of several turns in plans and limits: numbers worked out by hand."""

import pytest

from cohort.plan import schedule_run
from cohort.plan.advice import explain_no_limit, largest
from cohort.plan.predict import predict_run
from cohort.plan.schedule import max_useful_budget, min_budget, plan_micro_batches
from cohort.plan.shape import preset_shape
from cohort.plan.timing import step_times
from plans import EIGHT, on_gpus, plan_of
from plans import config as plain
from test_plan_times import SMALL, config, machine

# 100 prompt tokens, then at most 800: 3 calls of 200 sampled tokens, and 200 tokens of tools; 6 groups of 4
THREE = ("rollout.tools=[t.py:look]", "rollout.max_turns=3", "rollout.max_trajectory_tokens=800")
LOCAL = (*THREE, "rollout.engine=local")


def test_limits_of_a_trajectory() -> None:
    single, turns = config().rollout, config(*THREE).rollout
    assert (single.max_new_tokens, single.max_trained_tokens) == (200, 200)
    assert single.max_new_tokens_key == "rollout.max_completion_tokens"
    assert (turns.max_new_tokens, turns.max_trained_tokens) == (800, 600)
    assert turns.max_new_tokens_key == "rollout.max_trajectory_tokens"
    by_default = config(*THREE[:2]).rollout
    assert (by_default.max_new_tokens, by_default.max_trained_tokens) == (600, 600)
    short = config(*THREE[:2], "rollout.max_trajectory_tokens=300").rollout
    assert (short.max_new_tokens, short.max_trained_tokens) == (300, 300)


@pytest.mark.parametrize(("turns", "expected"), [((), 50), (THREE, 800)])
def test_evaluations_limit_a_call_where_there_are_turns(turns: tuple[str, ...], expected: int) -> None:
    evaluated = config("eval.path=e.jsonl", "eval.max_completion_tokens=50", *turns)
    assert evaluated.eval_max_new_tokens == expected


def test_a_schedule_and_micro_batches_have_whole_trajectories() -> None:
    turns = config(*THREE)
    assert schedule_run(turns, num_prompts=6).max_new_tokens == 800
    assert min_budget(turns) == 900
    group = 100 + 4 * 799  # the last token is not an input
    assert max_useful_budget(turns, 2) == 3 * group
    plan = plan_micro_batches(turns, 1, 2 * group)
    assert (plan.packed_tokens, plan.completions_per_micro_batch, plan.loss_tokens) == (2 * group, 8, 8 * 600)
    split = plan_micro_batches(turns, 1, 1800)  # two trajectories beside their prompt
    assert (split.packed_tokens, split.shared_prefix_tokens, split.loss_tokens) == (2 * 799, 100, 1200)


def test_training_computes_tool_results_too() -> None:
    found = step_times(config(*THREE), SMALL, machine(flops=7.0), num_training=3, num_sampling=1)
    seen = (100 * 50 + 3200 * (100 + 400)) / 3300
    per_token = 6 * 100 + 3 * 4 * 8 * 2 * seen
    assert found.training_s == pytest.approx(6 * 3300 * per_token / (3 * 7.0))


@pytest.mark.parametrize(
    ("keys", "prefilled"),
    [
        (THREE, 3 * 100 + 12 * 200),  # prompts once per group, and what tools return
        (LOCAL, 3 * 100 + 12 * 2 * (100 + 400)),  # the whole context of the second and third turn: 500 in the mean
    ],
)
def test_sampling_has_more_prefills(keys: tuple[str, ...], prefilled: int) -> None:
    """3 prompts, 12 trajectories: 600 sampled tokens each, which see 100 + 400 in the mean."""
    found = step_times(config(*keys), SMALL, machine(flops=7.0, bandwidth=1e12), num_training=1, num_sampling=2)
    assert found.sampling_s == pytest.approx((600 * 12 * (2 * 100 + 4 * 8 * 2 * 500) + 2 * 100 * prefilled) / 7.0)


def test_a_server_has_room_for_whole_trajectories() -> None:
    """90 % of 100,000 bytes less 1,998 of weights; a trajectory's are (800 + 100 / 4) x 32 = 26,400 bytes: 3 fit."""
    full, capped = (
        step_times(config(*THREE, *more), SMALL, machine(flops=1e12, memory=size), num_training=1, num_sampling=1)
        for more, size in (((), 100_000), (("rollout.max_num_seqs=3",), 10**12))
    )
    assert full.sampling_s == pytest.approx(capped.sampling_s)


def test_the_local_sampler_holds_a_prompt_per_trajectory() -> None:
    shape = preset_shape("0.5b")
    tokens = {
        keys: predict_run(config(*keys, "rollout.max_num_seqs=8"), shape, EIGHT).workload.sampled_tokens
        for keys in (("rollout.engine=local",), LOCAL)
    }
    assert tokens == {("rollout.engine=local",): 4 * 200 + 100, LOCAL: 4 * 800 + 4 * 100}


def test_a_plan_names_the_key_of_trajectories() -> None:
    shape, turns = preset_shape("7b"), ("rollout.tools=[t.py:look]", "rollout.max_turns=3")
    plan = predict_run(plain(*turns), shape, EIGHT)
    assert (
        "every trajectory is planned with 12291 tokens after the prompt (rollout.max_trajectory_tokens, by default "
        "max_turns x max_completion_tokens) in 3 turns (rollout.max_turns); the time that tools and environments take "
        "is not predicted"
    ) in plan.notes
    turns = (*turns, "model.gradient_checkpointing=false")  # with checkpointing, all positions fit
    beyond = predict_run(plain(*turns, "rollout.max_trajectory_tokens=32257"), shape, EIGHT)
    text = "rollout.max_prompt_tokens + rollout.max_trajectory_tokens = 32769 exceeds the model's 32768 positions"
    assert any(note.startswith(text) for note in beyond.notes)
    longest = largest(beyond, "length")
    assert isinstance(longest, int)
    fits = [
        predict_run(plain(*turns, f"rollout.max_trajectory_tokens={n}"), shape, EIGHT).fits
        for n in (longest, longest + 1)
    ]
    assert fits == [True, False]
    assert not any("turns" in note for note in predict_run(plain(), shape, EIGHT).notes)


def test_the_limit_of_trajectories_is_named() -> None:
    tiny = on_gpus(1, "4090", "1GB")
    turns = ("rollout.tools=[t.py:look]", "hardware.processes=1")
    told = explain_no_limit(plan_of("7b", *turns, on=tiny), "length")
    assert told.startswith("even rollout.max_trajectory_tokens: 1 needs ")
