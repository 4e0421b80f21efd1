"""What a step trains on: sampling ahead within a bound, stragglers, resuming, and groups that teach nothing."""

import json
import random
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cohort
from assigned import assign_advantages
from cohort.algorithms import build_algorithm
from cohort.config import AlgorithmConfig
from cohort.data import PromptSet, PromptStream
from cohort.display import Display
from cohort.health.reward_health import reward_health_metrics
from cohort.metrics.rollouts import rollout_metrics
from cohort.records import Prompt, RolloutGroup
from cohort.rewards import RewardRunner
from cohort.rewards.function import RewardFunction
from cohort.rollout import LocalEngine, Prefetcher, RolloutCollector, Sampler, SamplingParams, StepKey
from cohort.run.files import checkpoints
from cohort.trainer.checkpoint import load_trainer_state
from cohort.trainer.collect_groups import GroupCollector, StepGroups
from engines import ScriptedEngine, ThreadEngine, sample_in_a_thread
from runs import Killed, assert_same_weights, changed, in_a_process, make_inputs, metric, stop_after, train
from selection import examples, mostly_slow, slow
from tiny import make_policy, make_tokenizer

SAMPLING = SamplingParams(num_generations=4, max_completion_tokens=6, temperature=1.0)


def stream(num_prompts: int, *, shuffle: bool = False) -> PromptStream:
    """Prompts whose ids are not their places."""
    prompts = tuple(
        Prompt(id=3 * n, epoch=0, content=f"say {n}", token_ids=np.array([5 + n % 90]), columns={"n": n})
        for n in range(num_prompts)
    )
    return PromptStream(PromptSet(prompts=prompts, num_dropped_overlong=0), seed=0, shuffle=shuffle)


def prefetch(engine: Any, prompts: PromptStream, **options: Any) -> Prefetcher:
    settings = {"seed": 7, "prompts_per_step": 3, "num_steps": 100, "updates_per_step": 1, **options}
    COLLECTORS.append(RolloutCollector(engine, make_tokenizer()))
    return Prefetcher(COLLECTORS[-1], prompts, SAMPLING, **settings)


COLLECTORS: list[RolloutCollector] = []  # of `prefetch`, until they are closed


def close_collectors() -> None:
    while COLLECTORS:
        COLLECTORS.pop().close()


@pytest.fixture(autouse=True)
def closed_collectors() -> Iterator[None]:
    yield
    close_collectors()


def visits(groups: list[RolloutGroup]) -> list[tuple[int, int]]:
    return [(group.prompt.id, group.prompt.epoch) for group in groups]


def test_no_step_ahead_is_to_ask_and_wait():
    engine, prompts = ScriptedEngine(iter([5, 1, 3, 2, 2, 9]).__next__), stream(10)
    prefetcher = prefetch(engine, prompts)
    assert visits(prefetcher.take(4, 3)) == [(0, 0), (3, 0), (6, 0)]  # in the order of the prompts, the slow one first
    assert prefetcher.state() == []
    assert visits(prefetcher.take(5, 3)) == [(9, 0), (12, 0), (15, 0)]
    assert engine.asked == [(4, 0, 0), (4, 3, 0), (4, 6, 0), (5, 9, 0), (5, 12, 0), (5, 15, 0)]
    assert prefetcher.counts() == {"stale_dropped": 0, "carried_over": 0}


def test_a_straggler_is_left_to_a_later_step_and_not_waited_for():
    engine, prompts = ScriptedEngine(iter([9, *[1] * 99]).__next__), stream(20)
    prefetcher = prefetch(engine, prompts, max_staleness=1)
    assert visits(prefetcher.take(0, 3)) == [(3, 0), (6, 0), (9, 0)]  # the first three that are there
    assert engine.asked == [(0, 3 * n, 0) for n in range(6)]  # one step ahead, and no more
    assert engine.num_out == 1 and prefetcher.counts() == {"stale_dropped": 0, "carried_over": 1}
    assert prefetcher.state() == [{"step": 0, "prompt_id": 3 * n, "epoch": 0} for n in (0, 4, 5)]
    engine.update_weights(policy_version=1)
    taken = prefetcher.take(1, 3)
    assert visits(taken) == [(12, 0), (15, 0), (18, 0)]
    assert [prefetcher.staleness(group.trajectories) for group in taken] == [1, 1, 0]
    for _ in range(9):
        engine.turn()
    taken = prefetcher.take(2, 3)
    assert visits(taken)[0] == (0, 0)  # it is the oldest
    assert prefetcher.staleness(taken[0].trajectories) == 2
    assert prefetcher.counts() == {"stale_dropped": 0, "carried_over": 0}


def test_groups_passed_over_are_counted_over_all_takes_of_a_step():
    engine = ScriptedEngine(iter([2, 9, 1, 5, 5]).__next__)
    prefetcher = prefetch(engine, stream(20), prompts_per_step=1, max_staleness=2)
    assert visits(prefetcher.take(0, 1)) == [(6, 0)] and prefetcher.counts()["carried_over"] == 2
    assert visits(prefetcher.take(0, 1)) == [(0, 0)] and prefetcher.counts()["carried_over"] == 1  # the one between


def test_what_is_too_old_is_dropped_and_replaced():
    engine, prompts = ScriptedEngine(iter([3, *[1] * 99]).__next__), stream(20)
    prefetcher = prefetch(engine, prompts, max_staleness=1, drop_stale=True, updates_per_step=2)
    for step in range(2):
        prefetcher.take(step, 3)
        engine.update_weights(policy_version=2 * (step + 1))
    engine.turn()
    assert prefetcher.state()[0] == {"step": 0, "prompt_id": 0, "epoch": 0}
    taken = prefetcher.take(2, 3)
    assert (0, 0) not in visits(taken) and prefetcher.counts()["stale_dropped"] == 1
    assert [prefetcher.staleness(group.trajectories) for group in taken] == [1, 1, 0]
    assert len(engine.asked) == 3 * 4 + 1  # four steps' prompts, and one more in its place
    assert prefetcher.take(3, 1) and prefetcher.counts()["stale_dropped"] == 0  # of that step


def test_nothing_is_asked_for_beyond_the_last_step():
    engine, prompts = ScriptedEngine(lambda: 1), stream(30)
    prefetcher = prefetch(engine, prompts, max_staleness=3, num_steps=5)
    for step in range(5):
        prefetcher.take(step, 3)
    assert len(engine.asked) == 15 and prefetcher.state() == []


@examples(150)
@given(
    delays=st.randoms(use_true_random=False),
    max_staleness=st.integers(0, 3),
    drop_stale=st.booleans(),
    prompts_per_step=st.integers(1, 5),
    takes=st.lists(st.integers(1, 3), min_size=1, max_size=12),
    kills=st.sets(st.integers(0, 11)),
    slow=st.sampled_from([0.0, 0.2, 0.6]),
)
def test_every_prompt_is_trained_once_or_dropped_once_or_pending(
    delays: random.Random,
    max_staleness: int,
    drop_stale: bool,
    prompts_per_step: int,
    takes: list[int],
    kills: set[int],
    slow: float,
):
    """A step takes as many times as `takes` says, and after some of them the run is killed and goes on."""

    def turns() -> int:
        return delays.randint(2, 30) if delays.random() < slow else 1

    options = {
        "max_staleness": max_staleness,
        "drop_stale": drop_stale,
        "prompts_per_step": prompts_per_step,
        "num_steps": len(takes),
        "updates_per_step": 2,
    }
    prompts = stream(7, shuffle=True)  # several epochs
    engine = ScriptedEngine(turns)
    prefetcher = prefetch(engine, prompts, **options)
    trained: list[tuple[int, int]] = []
    first_asked: dict[tuple[int, int], int] = {}
    num_dropped = 0
    for step, rounds in enumerate(takes):
        for count in [prompts_per_step, *[1] * (rounds - 1)]:
            taken = prefetcher.take(step, count)
            assert len(taken) == count
            trained += visits(taken)
            assert engine.num_out <= max_staleness * prompts_per_step
            if drop_stale:
                assert max(prefetcher.staleness(group.trajectories) for group in taken) <= max_staleness
        num_dropped += prefetcher.counts()["stale_dropped"]
        for asked_in, *visit in engine.asked:  # the same random streams, however often it is asked for
            assert first_asked.setdefault(tuple(visit), asked_in) == asked_in
        engine.update_weights(policy_version=2 * (step + 1))
        if step in kills:
            saved = json.loads(json.dumps({"data": prompts.state(), "pending": prefetcher.state()}))
            prompts = stream(7, shuffle=True)
            prompts.restore(saved["data"])
            engine = ScriptedEngine(turns, version=2 * (step + 1))
            prefetcher = prefetch(engine, prompts, **options)
            prefetcher.restore(saved["pending"])
            assert prefetcher.state() == saved["pending"]  # also where it is killed again before it takes
    pending = [(entry["prompt_id"], entry["epoch"]) for entry in prefetcher.state()]
    assert len(pending) <= max_staleness * prompts_per_step
    given_out = visits_of(stream(7, shuffle=True).take(prompts.state()["epoch"] * 7 + prompts.state()["position"]))
    assert max(Counter(trained + pending).values()) == 1
    dropped = set(given_out) - set(trained) - set(pending)
    assert len(dropped) == num_dropped and (drop_stale or not dropped)
    assert len(given_out) == len(trained) + len(pending) + num_dropped
    close_collectors()


def visits_of(prompts: list[Prompt]) -> list[tuple[int, int]]:
    return [(prompt.id, prompt.epoch) for prompt in prompts]


class SynchronousGatherer(GroupCollector):
    """The naive way: ask for a step's prompts, wait for all, score them."""

    def collect(self, step: int, phase: Any) -> StepGroups:
        data, collector = self.prefetcher.prompts, self.prefetcher.collector
        prompts = data.take(self.prompts_per_step)
        with phase("rollout"):
            key = StepKey(purpose="train", seed=self.prefetcher.seed, step=step)
            groups = collector.collect(prompts, self.prefetcher.sampling, key)
        with phase("reward"):
            scored = self.rewards.score(groups)
        outcomes = self._outcomes(scored, next(iter(scored[0].reward_parts)))
        metrics = {**rollout_metrics(scored), **reward_health_metrics(scored), **outcomes, "rollout/staleness_max": 0.0}
        return StepGroups(groups=scored, replaced=[], dropped=[], metrics=metrics)


@pytest.mark.parametrize(
    "in_thread", mostly_slow([False, True], True, reason="the local engine, without a thread"), ids=["local", "thread"]
)
def test_no_staleness_is_the_synchronous_run_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_thread: bool
):
    config = changed(make_inputs(tmp_path), train={"updates_per_rollout": 2})
    with monkeypatch.context() as patched:
        patched.setattr("cohort.trainer.collect_groups.GroupCollector", SynchronousGatherer)
        expected = train(changed(config, run={"dir": str(tmp_path / "whole")}))
    if in_thread:
        sample_in_a_thread(monkeypatch.setattr, max_staleness=0)
    actual = train(config)
    assert_same_weights(actual.final_dir, expected.final_dir)
    for name in ("loss", "grad_norm"):
        assert metric(actual.run_dir, name) == metric(expected.run_dir, name)
    for file in (expected.run_dir / "completions").iterdir():
        tables = [pq.read_table(run.run_dir / "completions" / file.name) for run in (actual, expected)]
        if in_thread:  # which samples one prompt at a time: the same tokens, and logprobs of another rounding
            tables = [table.drop_columns("sampling_logprobs") for table in tables]
        assert tables[0].equals(tables[1])
    states = [load_trainer_state(run.run_dir / "checkpoints" / "step-6") for run in (actual, expected)]
    assert states[0].pending == states[1].pending == [] and states[0].data == states[1].data
    assert metric(actual.run_dir, "rollout/staleness_max") == [0] * 6


def trained_prompts(run: Path) -> list[int]:
    """Ids of the prompts of each group trained on."""
    files = sorted((run / "completions").glob("step-*.parquet"))
    return [row["prompt_id"] for file in files for row in pq.read_table(file).to_pylist()[::4]]


def one_epoch(folder: Path) -> dict[str, Any]:
    """Ten steps of four prompts: every prompt once."""
    return changed(
        make_inputs(folder),
        train={"steps": 10, "prompts_per_step": 4},
        eval={"every": 0, "before_training": False, "max_prompts": 2},
        algorithm={"sampling_correction": "token_truncate"},
        run={"checkpoint_every": 1},
    )


@slow("a whole run")
def test_a_run_ahead_with_stragglers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sample_in_a_thread(monkeypatch.setattr, max_staleness=2)
    run = train(one_epoch(tmp_path)).run_dir
    assert sorted(trained_prompts(run)) == list(range(40))
    assert max(metric(run, "rollout/carried_over")) > 0
    staleness = metric(run, "rollout/staleness_max")
    assert staleness[0] == 0 and max(staleness) >= 2
    steps = [pq.read_table(run / "completions" / f"step-{n + 1:06d}.parquet").to_pylist() for n in range(10)]
    assert staleness == [n - min(row["policy_version"] for row in rows) for n, rows in enumerate(steps)]
    weights = metric(run, "sampling/importance_weight/mean")
    assert weights[0] == pytest.approx(1, abs=1e-5) and any(abs(w - 1) > 1e-4 for w in weights[1:])
    assert load_trainer_state(run / "checkpoints" / "step-10").pending == []


@slow("as in the test of the prefetcher, with a whole run")
def test_stale_groups_of_a_run_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sample_in_a_thread(monkeypatch.setattr, max_staleness=1, drop_stale=True)
    run = train(one_epoch(tmp_path)).run_dir
    dropped = sum(metric(run, "rollout/stale_dropped"))
    trained = Counter(trained_prompts(run))
    assert dropped > 0 and max(metric(run, "rollout/staleness_max")) == 1
    assert sum(trained.values()) == 40 and len(trained) >= 40 - dropped  # new ones came from the next epoch


def train_slowly(config: dict[str, Any], *killed: Any) -> None:
    """In a process of its own: with a sampler that takes its time."""
    sample_in_a_thread(patch, max_staleness=2)
    cohort.train(config, display=Killed(*killed) if killed else Display())


def patch(name: str, value: object) -> None:
    module, _, attribute = name.rpartition(".")
    setattr(resolve_name(module), attribute, value)


@slow("every prompt is trained once: Hypothesis has it, without processes")
def test_killed_while_it_samples_ahead_and_resumed(tmp_path: Path):
    """SIGKILL after some steps, twice: every prompt of the epoch is trained on exactly once all the same."""
    config, run, chance, pending = one_epoch(tmp_path), tmp_path / "run", random.Random(0), []
    for step in (3, 7):
        assert in_a_process(train_slowly, config, step, chance.random() * 0.05) == -signal.SIGKILL
        pending.append(load_trainer_state(checkpoints(run / "checkpoints")[-1]).pending)
    assert all(pending), "nothing was out when the run was killed: this test would show nothing"
    assert in_a_process(train_slowly, config) == 0
    assert sorted(trained_prompts(run)) == list(range(40))
    steps_of = {row["prompt_id"]: row["step"] for row in rows_of(run)}
    assert len({steps_of[entry["prompt_id"]] for entry in pending[1]}) <= 4  # they come first, but for the slow ones


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [row for file in sorted((run / "completions").glob("step-*")) for row in pq.read_table(file).to_pylist()]


def rewards(function: Any) -> RewardRunner:
    return RewardRunner([RewardFunction(name="r", function=function)], columns=["n"])


def only_odd_ones_differ(completions: list[str], n: list[int], **_: Any) -> list[float]:
    return [float(i % 4 if number % 2 else 1) for i, number in enumerate(n)]


def local_engine() -> LocalEngine:
    sampler = Sampler(make_policy(), end_token_ids=frozenset({1}), max_num_seqs=16)
    return LocalEngine(sampler.sample)


def places(groups: Any) -> list[int]:
    return [group.prompt.columns["n"] for group in groups]


def test_groups_of_equal_rewards_are_replaced_by_those_of_new_prompts():
    prefetcher = prefetch(local_engine(), stream(20), prompts_per_step=4)
    group_collector = GroupCollector(prefetcher, rewards(only_odd_ones_differ), prompts_per_step=4, max_rounds=2)
    first = group_collector.collect(0, lambda name: nullcontext())
    # rounds: 0 1 2 3, then 4 5 for 0 2, then 6 for one of 0 2 4, which is no better: the first of them is trained on
    assert places(first.groups) == [0, 1, 3, 5] and places(first.replaced) == [2, 4, 6]
    assert first.metrics["rollout/resampled_ratio"] == 3 / 7
    assert first.metrics["frac_reward_zero_std"] == 4 / 7  # of all that were sampled
    assert (first.metrics["frac_all_right"], first.metrics["frac_all_wrong"]) == (4 / 7, 0)
    second = group_collector.collect(1, lambda name: nullcontext())
    assert places(second.groups) == [7, 9, 11, 13] and places(second.replaced) == [8, 10, 12]
    everything = GroupCollector(
        prefetch(local_engine(), stream(20), prompts_per_step=4),
        rewards(only_odd_ones_differ),
        prompts_per_step=4,
        max_rounds=0,
        success_threshold=2.0,
    ).collect(0, lambda name: nullcontext())
    assert (everything.metrics["frac_all_right"], everything.metrics["frac_all_wrong"]) == (0, 0.5)
    assert places(everything.groups) == [0, 1, 2, 3] and everything.metrics["rollout/resampled_ratio"] == 0
    # what is left in counts as it always does: four groups of four completions
    algorithm = build_algorithm(AlgorithmConfig(), max_completion_tokens=6)
    for collected in (first, everything):
        sequences = assign_advantages(collected.groups, algorithm)
        assert sum(s.loss_weights.sum() for s in sequences) == pytest.approx(1)
    mean = np.mean([g.rewards.mean() for g in (*first.groups, *first.replaced)])
    assert first.metrics["reward"] == pytest.approx(mean)


def test_a_round_of_groups_that_nobody_scores_is_no_mistake():
    def scores_the_first_four(n: list[int], **_: Any) -> list[float | None]:
        return [float(i % 4 if number else 1) if number < 4 else None for i, number in enumerate(n)]

    make = partial(GroupCollector, rewards=rewards(scores_the_first_four), prompts_per_step=4, max_rounds=1)
    collected = make(prefetch(local_engine(), stream(20))).collect(0, lambda name: nullcontext())
    assert places(collected.groups) == [0, 1, 2, 3] and places(collected.replaced) == [4]
    late = prefetch(local_engine(), stream(20))
    late.take(0, 4)
    with pytest.raises(cohort.UserError, match="no reward scored any of the 16 completions"):
        make(late).collect(1, lambda name: nullcontext())  # the first round is a whole step


def test_replaced_groups_come_from_what_was_sampled_ahead():
    engine = ThreadEngine(make_policy(), make_tokenizer(), one_in=1000)
    prefetcher = prefetch(engine, stream(40), prompts_per_step=4, max_staleness=1)
    group_collector = GroupCollector(prefetcher, rewards(only_odd_ones_differ), prompts_per_step=4, max_rounds=2)
    collected = [group_collector.collect(step, lambda name: nullcontext()) for step in range(3)]
    used = [n for g in collected for n in places([*g.groups, *g.replaced])]
    assert sorted([*used, *(entry["prompt_id"] // 3 for entry in prefetcher.state())]) == list(range(len(used) + 4))
    assert all(len(g.groups) == 4 for g in collected)


@slow("two whole runs")
def test_a_run_that_resamples_keeps_what_it_sampled_and_resumes(tmp_path: Path):
    config = changed(make_inputs(tmp_path), rollout={"resample": 2}, run={"checkpoint_every": 1})
    (tmp_path / "my_rewards.py").write_text(
        "def digit(completions, level, **kwargs):\n"
        "    return [float(len(c)) if n % 3 else 1.0 for c, n in zip(completions, level)]\n"
    )
    config["rewards"] = config["rewards"][:1]
    expected = train(changed(config, run={"dir": str(tmp_path / "whole")}))
    ratios = metric(expected.run_dir, "rollout/resampled_ratio")
    assert max(ratios) > 0
    for step, ratio in enumerate(ratios, start=1):
        file = expected.run_dir / "completions" / f"replaced-{step:06d}.parquet"
        replaced = pq.read_table(file).num_rows // 4 if file.exists() else 0
        assert not file.exists() or pq.read_table(file)["answer"].null_count == 0
        assert ratio == pytest.approx(replaced / (3 + replaced))
    with pytest.raises(KeyboardInterrupt):
        cohort.train(config, display=stop_after(4))
    actual = train(config)
    assert_same_weights(actual.final_dir, expected.final_dir)
    assert metric(actual.run_dir, "rollout/resampled_ratio") == ratios
    both = [{p.name for p in (run.run_dir / "completions").iterdir()} for run in (actual, expected)]
    assert both[0] == both[1]
