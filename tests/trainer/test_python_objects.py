"""Runs whose parts are Python objects: the same as from files, and resumed by the same script."""

from pathlib import Path
from typing import Any

import datasets
import pytest

import cohort
from cohort.chat import ResponseParser
from cohort.config import config_from_dict
from cohort.config.user_code import load_callable
from cohort.data import read_rows
from cohort.errors import UserError
from cohort.records import ScoredGroup
from cohort.trainer.parts import Parts
from cohort.trainer.without_training import evaluate_model, sample_rows
from playing import make_game, save_turns_model
from runs import assert_same_weights, changed, make_inputs, metric, stop_after, train

LOSS = """
def plain(x):
    return -x.advantages * x.logprobs
"""


def as_objects(config: dict[str, Any]) -> dict[str, Any]:
    """The same configuration with objects in place of paths."""
    data, heldout = (read_rows(config[section]["path"], field=section) for section in ("data", "eval"))
    rewards = [{**reward, "use": load_callable(reward["use"], field="use")} for reward in config["rewards"]]

    of_file = rewards[0]["use"]

    def digit(prompts: Any, completions: Any, answer: Any, **kwargs: Any) -> Any:  # a closure, with the same name
        return of_file(prompts=prompts, completions=completions, answer=answer)

    objects = {"data": {"path": iter(data)}, "eval": {"path": datasets.Dataset.from_list(heldout)}}
    return {**changed(config, **objects), "rewards": [digit, *rewards[1:]]}


def test_a_run_from_objects_is_the_run_from_files_and_resumes(tmp_path: Path):
    files = make_inputs(tmp_path)
    (tmp_path / "loss.py").write_text(LOSS)
    loss = f"{tmp_path}/loss.py:plain"
    files = {**files, "algorithm": {"policy_loss": loss}}
    from_files = train(files)
    objects = {
        **changed(as_objects(files), run={"dir": str(tmp_path / "objects")}),
        "algorithm": {"policy_loss": load_callable(loss, field="policy_loss")},
    }
    with pytest.raises(KeyboardInterrupt):
        cohort.train(objects, display=stop_after(4))
    # the same script again: the iterator is used up, so it makes another
    again = changed(objects, data={"path": read_rows(files["data"]["path"], field="data.path")})
    again = changed(again, data={"path": iter(again["data"]["path"])})
    from_objects = train(again, resume=True)
    assert_same_weights(from_objects.final_dir, from_files.final_dir)
    for name in ("reward", "rewards/digit/mean", "rewards/brevity/mean", "eval/accuracy"):
        assert metric(from_objects.run_dir, name) == metric(from_files.run_dir, name), name
    text = (from_objects.run_dir / "config.yaml").read_text()
    assert "path: object:list_iterator" in text and "use: object:digit" in text and "policy_loss:" in text


def test_other_rows_under_the_same_name_are_not_resumed(tmp_path: Path):
    objects = as_objects(make_inputs(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        cohort.train(objects, display=stop_after(3))
    rows = [{"question": f"other {n}", "answer": "1", "level": 0} for n in range(40)]
    with pytest.raises(UserError, match=r"data\.path: the saved position belongs to a different order of prompts"):
        train(changed(objects, data={"path": iter(rows)}), resume=True)


def test_tools_and_environment_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A class defined in a function, as in a notebook."""
    monkeypatch.setattr(ResponseParser, "check_tools", lambda self: None)
    save_turns_model(tmp_path / "base")

    lengths = {"max_prompt_tokens": 600, "max_completion_tokens": 6, "max_turns": 3, "max_trajectory_tokens": 400}
    config = {
        "model": {"path": str(tmp_path / "base")},
        "data": {"path": [{"prompt": "say 1"}, {"prompt": "say 2"}]},
        "rollout": {"environment": make_game(), "num_generations": 4, "engine": "local", **lengths},
        "train": {"steps": 1, "prompts_per_step": 2},
        "run": {"dir": str(tmp_path / "run")},
    }
    assert len(metric(train(config).run_dir, "rewards/Game/mean")) == 1
    sampled = sample_rows(config_from_dict(config), rows=2, generations=1)
    assert all(isinstance(group, ScoredGroup) and group.reward_parts["Game"] >= 0 for group in sampled.groups)


def test_given_parts_are_used_and_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = config_from_dict(make_inputs(tmp_path))
    parts = Parts(config)
    assert parts.tokenizer is parts.tokenizer and parts.rows is parts.rows and parts.rewards is parts.rewards
    monkeypatch.setattr("cohort.trainer.parts.load_tokenizer", None)  # must not be called
    assert Parts(config, tokenizer=parts.tokenizer).tokenizer is parts.tokenizer


def test_an_evaluation_of_objects(tmp_path: Path):
    files = make_inputs(tmp_path)
    of_files, of_objects = (evaluate_model(config_from_dict(config)) for config in (files, as_objects(files)))
    assert of_objects.metrics == of_files.metrics and len(of_objects.groups) == 10


def test_several_processes_take_only_what_they_can_import(tmp_path: Path):
    objects = as_objects(make_inputs(tmp_path))
    with pytest.raises(UserError) as caught:
        cohort.train({**objects, "hardware": {"processes": 2, "device": "cpu"}})
    assert str(caught.value) == (
        "data.path: 'object:list_iterator' exists in this process only, but the run has 2 processes and 0 restarts; "
        "use a path, or hardware.processes: 1 and hardware.max_restarts: 0"
    )
