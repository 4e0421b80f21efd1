"""Reward functions in the forms that people publish give what they give in a script, wherever they run."""

import dataclasses
import re
import sys

import numpy as np
import pytest

from cohort.config import RewardConfig
from cohort.rewards import build_rewards
from published_rewards import HANGS, MAX_STEPS, QUICK, STEPS, USES, called_directly, copy_to, inputs, load, scored
from selection import slow
from tiny import make_model, make_tokenizer

ASYNCHRONOUS = [f"judge_rewards.py:{name}_reward" for name in ("judge", "rubric", "half_rubric")]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with a copy of the files; their modules end with the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = set(sys.modules)
    monkeypatch.chdir(copy_to(tmp_path / "own"))
    yield tmp_path / "own"
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture(scope="module")
def direct(tmp_path_factory):
    """What direct calls return and log, and the folder with the files that they write."""
    folder = copy_to(tmp_path_factory.mktemp("direct") / "own")
    return called_directly(QUICK, folder), folder


def only(steps, uses):
    """These functions' values."""
    return [{use: step.values[use] for use in uses} for step in steps]


def test_the_completions_tell_the_values_apart(direct):
    first, second = (step.values for step in direct[0])
    assert len(first) > 25
    for use, values in first.items():
        assert len({v for v in values if v is not None}) > 1 or use.endswith(":everything_by_name"), use
    changing = {use for use in first if first[use] != second[use]}
    assert changing == {f"schedule_rewards.py:{name}_reward" for name in ("curriculum", "annealed", "warmup")}


def test_in_the_run_they_give_what_they_give_in_a_script(folder, direct):
    assert scored(load(QUICK), QUICK) == direct[0]
    for file in ("rewards_log.csv", "completion_samples/countdown.txt"):
        assert (folder / file).read_text() == (direct[1] / file).read_text()
    cached, expected = ({file.name for file in (f / "embedding_cache").iterdir()} for f in (folder, direct[1]))
    assert cached == expected and len(cached) > 10


TOGETHER = """
import importlib, operator

def score(use, **arguments):
    file, _, name = use.partition(".py:")
    return operator.attrgetter(name)(importlib.import_module(file))(**arguments)

async def score_later(use, **arguments):
    return await score(use, **arguments)
"""


@pytest.mark.parametrize("form", ["score", "score_later"])
def test_in_a_child_process_they_give_what_they_give_in_a_script(folder, direct, form):
    """All in one process; below, each in its own."""
    (folder / "together.py").write_text(TOGETHER)
    config = RewardConfig(use=f"{folder}/together.py:{form}", isolate=True, args={"use": ""})
    (one,) = build_rewards([config], columns=[], max_completion_tokens=64)
    functions = [
        dataclasses.replace(one, name=use, args={"use": use}, where={"data": name})
        for name in QUICK
        for use in USES[name]
        if (use in ASYNCHRONOUS) == (form == "score_later")
    ]
    steps = scored(functions, QUICK)
    assert only(steps, steps[0].values) == only(direct[0], steps[0].values)
    if form == "score":
        assert [(s.metrics, s.extras) for s in steps] == [(s.metrics, s.extras) for s in direct[0]]


@slow("all in one process")
@pytest.mark.parametrize(("name", "use"), [(name, use) for name in QUICK for use in USES[name]])
def test_each_in_a_child_process_of_its_own(folder, direct, name, use):
    assert only(scored(load([name], only=[use], isolate=True), [name]), [use]) == only(direct[0], [use])


@slow("waits for time limits")
@pytest.mark.parametrize("isolate", [False, True])
def test_code_that_hangs_is_ended_by_the_function(folder, tmp_path, isolate, monkeypatch):
    monkeypatch.setenv("SNIPPET_TIMEOUT", "2")
    steps = called_directly([HANGS], copy_to(tmp_path / "direct"))
    assert steps[0].values == {use: [-1.0, 1.0] for use in USES[HANGS]}
    assert scored(load([HANGS], isolate=isolate), [HANGS]) == steps


@pytest.mark.extras
@pytest.mark.parametrize("name", QUICK)
def test_in_trls_trainer_they_give_and_log_the_same(folder, direct, tmp_path, name):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    functions, given = load([name]), inputs(name)
    rows = [dict(zip(given, row, strict=True)) for row in zip(*given.values(), strict=True)]
    rows = [{"prompt": row.pop("prompts"), **row} for row in rows]
    trainer = GRPOTrainer(
        model=make_model(),
        processing_class=make_tokenizer(),
        reward_funcs=[f.function for f in functions],
        args=GRPOConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True, bf16=False, max_steps=MAX_STEPS),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
    )
    columns = [{k: v for k, v in row.items() if k not in ("completions", "completion_ids")} for row in rows]
    for step, expected in zip(STEPS, direct[0], strict=True):
        trainer.state.global_step, trainer.state.max_steps = step, MAX_STEPS
        values = trainer._calculate_rewards(columns, given["prompts"], given["completions"], given["completion_ids"])
        for f, own in zip(functions, values.T.numpy(), strict=True):
            wanted = np.array([np.nan if v is None else v for v in expected.values[f.name]], dtype=np.float32)
            np.testing.assert_array_equal(own, wanted, err_msg=f.name)
        logged = {metric: sum(values) / len(values) for metric, values in trainer._pending_metrics.items()}
        extras = {c: [v for v in values if v is not None] for c, values in trainer._pending_extra_logs.items()}
        assert (logged, extras) == ((expected.metrics, expected.extras) if name == "texts" else ({}, {}))
        trainer._pending_metrics.clear()
        trainer._pending_extra_logs.clear()
    unnamed = build_rewards([RewardConfig(use=use) for use in USES[name]], columns=given, max_completion_tokens=64)
    # Cohort's names differ from each other: length_reward, length_reward_2
    assert trainer.reward_func_names == [re.sub(r"_2$", "", f.name) for f in unnamed]
