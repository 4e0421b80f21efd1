"""The configuration: defaults, overrides, paths, the round trip, and what each message says."""

import re
from pathlib import Path
from typing import Any

import pydantic
import pytest
import yaml

from cohort.config import AlgorithmConfig, config_from_dict
from cohort.errors import UserError
from configs import MINIMAL, message

# Defaults


def test_sections_that_are_left_out_have_the_defaults_of_the_page_of_keys(tmp_path, monkeypatch):
    """The page, which a test compares with the schema, has the default of every key."""
    monkeypatch.chdir(tmp_path)
    config = config_from_dict({**MINIMAL, "eval": {"path": "held.jsonl"}})
    page = (Path(__file__).parents[2] / "docs" / "config.md").read_text(encoding="utf-8")
    titles = {"rewards": "rewards` (a list of these)", "rollout": "rollout` with `engine: auto`"}
    titles["optim"] = "optim` with `name: adamw`"
    given = {"model.path": "m", "data.path": "d.jsonl", "eval.path": "held.jsonl", "rewards.use": "math"}
    given["run.dir"] = str(tmp_path / "runs/run")
    for name, values in config.model_dump(mode="json").items():
        if name in ("algorithm", "reference", "critic"):
            assert values == ({"name": "grpo"} if name == "algorithm" else None)
            continue
        shown = [f"{name}`", titles.get(name, f"{name}`")]  # of a union, keys of all members come first
        table = "".join(page.partition(f"## `{title}")[2].partition("\n## ")[0] for title in shown)
        defaults = dict(re.findall(r"^\| `(\w+)` \| [^|]* \| `?(.*?)`? \|", table, re.MULTILINE))
        for key, value in (values[0] if name == "rewards" else values).items():
            assert value == given.get(f"{name}.{key}", yaml.safe_load(defaults[key])), f"{name}.{key}"


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ({}, AlgorithmConfig(clip_low=0.2, clip_high=0.2, std_epsilon=1e-4)),
        ({"beta": 0.1}, AlgorithmConfig(beta=0.1)),
        ({"name": "dapo"}, AlgorithmConfig(name="dapo", clip_low=0.2, clip_high=0.28)),
        ({"name": "dr_grpo"}, AlgorithmConfig(name="dr_grpo", clip_low=0.2, clip_high=0.2)),
        # the numbers of an algorithm are for its own components
        ({"name": "dapo", "policy_loss": "gspo"}, AlgorithmConfig(name="dapo", policy_loss="gspo", clip_high=4e-4)),
        (
            {"name": "dapo", "loss_weight": "constant"},
            AlgorithmConfig(loss_weight="constant", name="dapo", clip_high=0.28),
        ),
    ],
)
def test_the_algorithm_is_grpo_unless_named(algorithm, expected):
    config = config_from_dict({**MINIMAL, "algorithm": algorithm})
    assert config.algorithm == expected
    assert type(config.algorithm) is type(expected)


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce"])
def test_one_completion_is_enough_for_what_needs_no_peers(name: str):
    config = config_from_dict({**MINIMAL, "algorithm": {"name": name}, "rollout": {"num_generations": 1}})
    assert config.rollout.num_generations == 1


@pytest.mark.parametrize("old", [{"record_tokens": False}, {"record_tokens": False, "completions_every": 0}])
def test_configurations_of_runs_that_recorded_no_tokens_still_load(old):
    """A run writes every key, and `false` was the default."""
    raw = {**MINIMAL, "run": {**old, "record_tokens_max_size": "1GB"}}
    assert config_from_dict(raw).run.record_tokens is False
    assert config_from_dict(MINIMAL).run.record_tokens == "auto"
    assert config_from_dict({**MINIMAL, "run": {"completions_every": 0}}).run.completions_every == 0


def test_freeze():
    config = config_from_dict(MINIMAL)
    for section, key in ((config, "model"), (config.train, "seed"), (config.rewards[0], "weight")):
        with pytest.raises(pydantic.ValidationError, match="frozen"):
            setattr(section, key, 1)


# Overrides


def test_overrides_change_sections_lists_and_the_algorithm():
    config = config_from_dict(
        MINIMAL,
        [
            "train.steps=7",
            "train.learning_rate=1e-5",  # YAML 1.1 reads this as text
            "rewards.0.weight=0.5",
            "rewards.0.args.answer_column='#### a'",
            "algorithm.name=dapo",
            "eval.path=held.jsonl",
            "run.log=[tensorboard, wandb]",
            "data.system_prompt=a=b",
            "data.chat_template_kwargs={enable_thinking: false}",
        ],
    )
    assert config.train.steps == 7
    assert config.train.learning_rate == 1e-5
    assert config.rewards[0].weight == 0.5
    assert config.rewards[0].args == {"answer_column": "#### a"}
    assert config.algorithm == AlgorithmConfig(name="dapo")
    assert config.eval is not None
    assert config.eval.path == "held.jsonl"
    assert config.run.log == ("tensorboard", "wandb")
    assert config.data.system_prompt == "a=b"
    assert config.data.chat_template_kwargs == {"enable_thinking": False}


def test_arguments_of_a_built_in_reward_may_stand_beside_its_name():
    def rewards(**reward: Any) -> Any:
        return config_from_dict({**MINIMAL, "rewards": [reward]}).rewards

    (number,) = rewards(use="number", abs_tol=1, weight=2, args={"rel_tol": 0.5})
    assert (number.args, number.weight) == ({"abs_tol": 1, "rel_tol": 0.5}, 2)
    with pytest.raises(UserError, match=r"abs_tol: is given beside `use` and in args; remove one of the two"):
        rewards(use="number", abs_tol=1, args={"abs_tol": 1})
    for given in ({"use": "number", "wieght": 1}, {"use": "rewards.py:mine", "abs_tol": 1}):
        with pytest.raises(UserError, match=f"{list(given)[1]}: unknown key"):
            rewards(**given)


def test_overrides_leave_the_mapping_as_it_is():
    raw = {**MINIMAL, "train": {"steps": 3}, "rewards": [{"use": "math"}]}
    config_from_dict(raw, ["train.steps=4", "rewards.0.weight=2"])
    assert raw == {**MINIMAL, "train": {"steps": 3}, "rewards": [{"use": "math"}]}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps", "override 'train.steps': must look like key.sub=value, such as train.steps=100"),
        ("=5", "override '=5': must look like key.sub=value, such as train.steps=100"),
        ("train.steps=[1", "override 'train.steps=[1': the value is not valid YAML: line 1, column 3: expected ','"),
        ("model.path.x=1", "override 'model.path.x=1': model.path is 'm', which has no keys"),
        ("rewards.1.use=x", "override 'rewards.1.use=x': '1': must be a list position from 0 to 0"),
        ("rewards.x=1", "override 'rewards.x=1': 'x': must be a list position from 0 to 0"),
        ("rewards.²=1", "override 'rewards.²=1': '²': must be a list position from 0 to 0"),
    ],
)
def test_overrides_that_cannot_work(override, expected):
    assert message(MINIMAL, override).startswith(expected)


def test_keys_for_all_sources_of_a_list_are_no_overrides():
    sources = {**MINIMAL, "data": [{"path": "a.jsonl"}, {"path": "b.jsonl"}]}
    assert message(sources, "data.shuffle=false") == (
        "override 'data.shuffle=false': data is a list of sources; a key for all of them stands beside the list: write "
        "data: {sources: [...], shuffle: false}"
    )
    said = "override 'data.rows=5': data is a list of sources; say it of one: data.0.rows=5"
    assert message(sources, "data.rows=5") == said
    assert message(sources, "data.2.rows=5").endswith("'2': must be a list position from 0 to 1")
    beside = {**MINIMAL, "data": {"sources": sources["data"]}}
    assert not config_from_dict(beside, ["data.shuffle=false"]).data.shuffle


@pytest.mark.parametrize("given", [{}, {"processes": 1}, {"processes": 8}, {"processes": "auto"}])
def test_numbers_that_may_be_left_to_the_program(given):
    config = config_from_dict({**MINIMAL, "hardware": given})
    assert config.hardware.processes == given.get("processes", "auto")
    assert config_from_dict(MINIMAL, ["train.micro_batch_tokens=auto"]).train.micro_batch_tokens == "auto"
    assert config_from_dict(MINIMAL, ["train.micro_batch_tokens=1"]).train.micro_batch_tokens == 1
