"""Runs of streams: those of the same rows in memory, after a resume and for any number of ranks (laws 3 and 4)."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

import cohort
from cohort.display import Display
from cohort.errors import UserError
from runs import assert_same_weights, changed, make_inputs, metric, stop_after, train
from selection import slow

STREAM = {"stream": True, "buffer_size": 7}


def test_a_stream_goes_on_bit_for_bit(tmp_path: Path):
    config = changed(make_inputs(tmp_path), data=STREAM)
    whole = train(changed(config, run={"dir": str(tmp_path / "whole")}))
    with pytest.raises(KeyboardInterrupt):
        cohort.train(config, display=stop_after(5))
    assert_same_weights(train(config, resume=True).final_dir, whole.final_dir)
    assert metric(whole.run_dir, "reward") == metric(tmp_path / "run", "reward")
    assert metric(whole.run_dir, "prompts/overlong") == [0] * 6


def test_an_unshuffled_stream_is_the_run_of_its_rows(tmp_path: Path):
    """From a file, and from Python."""
    config = changed(make_inputs(tmp_path), data={"shuffle": False}, train={"steps": 3}, eval={"every": 0})
    train(changed(config, run={"dir": str(tmp_path / "rows")}))
    train(changed(config, data={"stream": True}, run={"dir": str(tmp_path / "stream")}))
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    stream = datasets.Dataset.from_list(rows).to_iterable_dataset()
    own = changed(config, data={"stream": True, "path": stream}, run={"dir": str(tmp_path / "python")})
    sections: dict[str, Any] = {key: value for key, value in own.items() if key not in ("model", "data", "rewards")}
    eval_data = sections.pop("eval")
    cohort.Trainer(
        own["model"], own["data"], own["rewards"], eval_data=eval_data, display=Display(), **sections
    ).train()
    for name in ("stream", "python"):
        assert_same_weights(tmp_path / name / "final", tmp_path / "rows" / "final")


@slow("two runs of real processes")
def test_two_ranks_read_the_stream_of_one(tmp_path: Path):
    config = changed(make_inputs(tmp_path), data=STREAM, model={"dtype": "float64"}, train={"steps": 4})
    for processes in (1, 2):
        hardware = {"processes": processes, "device": "cpu"}
        cohort.train(changed(config, run={"dir": str(tmp_path / f"run-{processes}")}, hardware=hardware))
    assert metric(tmp_path / "run-1", "reward") == pytest.approx(metric(tmp_path / "run-2", "reward"))


def test_rows_of_a_stream_are_checked_when_they_are_read(tmp_path: Path):
    config = changed(make_inputs(tmp_path), data={"stream": True, "buffer_size": 9, "shuffle": False})
    lines = (tmp_path / "train.jsonl").read_text().splitlines()
    (tmp_path / "train.jsonl").write_text("\n".join([*lines[:10], '{"question": ["hello"]}']))
    with pytest.raises(UserError, match=r"data.prompt='question': row 11, message 1: a message is"):
        train(config)
    (tmp_path / "train.jsonl").write_text("\n".join([*lines[:10], '{"question": "' + "1" * 99 + '"}', *lines[10:]]))
    config = changed(config, run={"dir": str(tmp_path / "other")})
    with pytest.raises(UserError, match=r"rollout.max_prompt_tokens=64: the prompt in row 11 of data.path has 1\d\d"):
        train(changed(config, data={"overlong_prompts": "error"}))
    train(changed(config, run={"dir": str(tmp_path / "dropped")}))
    assert metric(tmp_path / "dropped", "prompts/overlong") == [0, 0, 0, 1, 1, 1]


def test_a_stream_needs_the_number_of_steps(tmp_path: Path):
    config = changed(make_inputs(tmp_path), data={"stream": True}, train={"steps": None, "epochs": 1})
    with pytest.raises(UserError, match=r"train.steps: missing; data.stream: true reads rows as they are sampled"):
        train(config)
    config = changed(config, data={"sampling": "by_success"}, train={"steps": 2, "epochs": None})
    with pytest.raises(UserError, match=r"sampling: by_success needs rows that are seen again"):
        train(config)
