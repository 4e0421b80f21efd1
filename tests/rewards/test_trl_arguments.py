"""TRL's arguments of reward functions: `trainer_state`, `log_metric`, `log_extra`, `environments`."""

import dataclasses
from pathlib import Path

import pyarrow.parquet
import pytest

from cohort.config import RewardConfig
from cohort.errors import UserError
from cohort.rewards import RewardRunner, TrainerProgress, build_rewards
from commands import set_up
from reward_samples import group, reward, score_texts
from runs import metric

FILE = """
def schedule(completions, trainer_state=None, **kwargs):
    log_metric, log_extra = kwargs["log_metric"], kwargs["log_extra"]
    log_metric("steps_seen", trainer_state.global_step)
    log_metric("steps_seen", trainer_state.global_step + 1)
    log_metric("history", len(trainer_state.log_history))
    log_extra("length", [len(c) for c in completions])
    log_extra("kind", ["long" if len(c) > 3 else None for c in completions])
    assert trainer_state.max_steps == 3 and trainer_state.total_flos is None
    assert trainer_state.num_train_epochs >= trainer_state.epoch
    return [trainer_state.global_step + len(c) for c in completions]
"""


@pytest.mark.parametrize("isolate", [False, True])
def test_a_schedule_moves_and_what_is_logged_arrives(tmp_path: Path, cohort, isolate: bool):
    config = set_up(
        tmp_path,
        files={"schedule.py": FILE},
        rewards=[{"use": f"{tmp_path}/schedule.py:schedule", "isolate": isolate}],
    )
    ended = cohort("train", config)
    assert ended.code == 0, ended.err
    assert metric(tmp_path / "run", "steps_seen") == [0.5, 1.5, 2.5]  # the mean of what is logged
    assert metric(tmp_path / "run", "history") == [0, 1, 2]
    (file,) = (tmp_path / "run" / "completions").glob("step-*2.parquet")
    rows = pyarrow.parquet.read_table(file).to_pylist()
    assert all(row["details/length"] == str(len(row["completion"])) for row in rows)
    assert all(row["details/kind"] == ("long" if len(row["completion"]) > 3 else None) for row in rows)
    assert all(row["reward"] == 1 + len(row["completion"]) for row in rows)


def test_a_metric_of_the_run_is_not_replaced(tmp_path: Path, cohort):
    files = {
        "own.py": "def f(completions, log_metric):\n    log_metric('reward', 1)\n    return [1.0] * len(completions)\n"
    }
    ended = cohort("train", set_up(tmp_path, files=files, rewards=[{"use": f"{tmp_path}/own.py:f"}]))
    assert (ended.code, "log_metric('reward', ...): the run itself has a metric of this name" in ended.err) == (2, True)


def test_wrong_values_are_errors():
    def columns(completions, log_extra):
        log_extra("kind", ["a"])
        return [1.0, 2.0]

    def word(completions, log_metric):
        log_metric("kind", "a")

    with pytest.raises(UserError, match=r"reward 'r': log_extra\('kind', ...\): 1 values for 2 completions"):
        score_texts(columns, ["a", "b"])
    with pytest.raises(UserError, match=r"reward 'r': log_metric\('kind', 'a'\): the value must be a number"):
        score_texts(word, ["a", "b"])


def test_environments_are_given_with_kwargs_where_there_are_any():
    seen = []

    def f(completions, **kwargs):
        seen.append(kwargs.get("environments"))
        return [1.0, 2.0]

    played = group("p", ["a", "b"])
    trajectories = tuple(dataclasses.replace(t, environment=n) for t, n in zip(played.trajectories, "xy", strict=True))
    RewardRunner([reward(f)]).score([dataclasses.replace(played, trajectories=trajectories)])
    RewardRunner([reward(f)]).score([played])
    assert seen == [["x", "y"], None]


def test_columns_named_as_one_prompt_or_completion_are_for_those_who_name_them():
    def with_all(completions, **kwargs):
        assert not {"prompt", "completion"} & kwargs.keys()
        return [1.0]

    def with_prompt(prompt, **kwargs):
        assert prompt == ["p"] and "completion" not in kwargs
        return [1.0]

    runner = RewardRunner(
        [reward(with_all), reward(with_prompt)], columns=["prompt", "completion"], prompt_column="prompt"
    )
    assert runner.score([group("p", ["a"], completion="c")])[0].rewards.tolist() == [2.0]


def test_its_defaults_are_those_before_a_run():
    runner = RewardRunner([reward(lambda completions, trainer_state: [trainer_state.global_step])])
    assert runner.score([group("p", ["a"])])[0].rewards.tolist() == [0.0]
    assert TrainerProgress().log_history == ()


def test_trl_has_no_other_field():
    from transformers import TrainerState

    assert {f.name for f in dataclasses.fields(TrainerState)} <= {f.name for f in dataclasses.fields(TrainerProgress)}


def test_functions_in_a_child_take_the_names_they_have(tmp_path: Path):
    (tmp_path / "own.py").write_text("def f(completions, trainer_state):\n    return [trainer_state.max_steps]\n")
    config = RewardConfig(use=f"{tmp_path}/own.py:f", isolate=True)
    runner = RewardRunner(build_rewards([config], columns=[], max_completion_tokens=8))
    runner.trainer_progress = lambda: TrainerProgress(max_steps=7)
    assert runner.score([group("p", ["a"])])[0].rewards.tolist() == [7.0]
