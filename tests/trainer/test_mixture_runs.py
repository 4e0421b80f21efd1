"""Runs with several sources of data: resumed, on several ranks, scored again, and reported by source."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import cohort
from cohort.cli.evaluate import eval_config
from cohort.cli.rescore import rescore
from cohort.config import config_from_dict, load_config
from cohort.errors import UserError
from cohort.trainer.without_training import evaluate_model, sample_rows
from runs import assert_in_catalogue, assert_same_weights, changed, make_inputs, metric, train
from selection import slow
from tiny import copy_task_rows, write_jsonl

MAP = "def shout(row):\n    return None if row['level'] == 62 else {**row, 'answer': str(row['answer'])}\n"


def mixture(folder: Path, *, weights: tuple[float, float] | None, **sections: Any) -> dict[str, Any]:
    """A configuration with two sources, of which a share is held out, and a reward for one of them."""
    config = make_inputs(folder)
    write_jsonl(folder / "other.jsonl", [{"q": row.pop("question"), **row} for row in copy_task_rows(20, start=60)])
    (folder / "rows.py").write_text(MAP)
    first = {"path": str(folder / "train.jsonl"), "prompt": "question", "where": "level != 1"}
    second = {"path": str(folder / "other.jsonl"), "prompt": "q", "rows": 0.8, "map": f"{folder}/rows.py:shout"}
    for source, weight in zip((first, second), weights or (), strict=False):
        source["weight"] = weight
    config["rewards"][1]["where"] = {"source": "train"}
    config["eval"] = {"rows": 6, "every": 2, "success_threshold": 0.5}
    of_both = {"seed": 12}  # with which rows of both sources are held out
    return changed(changed({**config, "data": [first, second]}, train=of_both), **sections)


def prompts_of(run: Path, steps: int) -> list[tuple[int, ...]]:
    tables = [pq.read_table(run / "completions" / f"step-{step:06d}.parquet") for step in range(1, steps + 1)]
    return [tuple(table["prompt_id"].to_pylist()) for table in tables]


def test_a_mixture_resumes_bit_for_bit_and_is_reported_by_source(tmp_path):
    config = mixture(tmp_path, weights=(1, 2), train={"steps": 4})
    one, resumed = (changed(config, run={"dir": str(tmp_path / name)}) for name in ("one", "resumed"))
    train(one)
    train(changed(resumed, train={"steps": 2}))
    train(resumed, resume=True)
    assert_same_weights(tmp_path / "one" / "final", tmp_path / "resumed" / "final")
    run = tmp_path / "one"
    assert prompts_of(run, 4) == prompts_of(tmp_path / "resumed", 4)
    assert_in_catalogue(run)
    assert metric(run, "sources/other/num_groups") == [2.0] * 4 and metric(run, "sources/train/num_groups") == [1.0] * 4
    for name in ("reward", "accuracy", "mean_length"):
        assert len(metric(run, f"sources/other/{name}")) == 4
    by_source = [metric(run, f"eval/sources/{name}/num_groups")[0] for name in ("other", "train")]
    assert sum(by_source) == 6 and min(by_source) > 0
    recorded = pq.read_table(run / "completions" / "step-000001.parquet").to_pylist()
    assert {(row["source"], row["rewards/brevity"] is None) for row in recorded} == {("other", True), ("train", False)}
    held_out = pq.read_table(run / "completions" / "eval-000004.parquet")["source"].to_pylist()
    assert [float(held_out.count(name)) for name in ("other", "train")] == by_source
    for file in ("step-000004.parquet", "eval-000004.parquet"):
        scored = rescore(config_from_dict(config), run / "completions" / file)
        assert [
            (found.compared > 0, found.differing) for found in scored.disagreements if found.other == "recorded"
        ] == [
            (True, 0),
            (True, 0),
        ]
    sampled = sample_rows(config_from_dict(config), rows=3, generations=1).groups
    assert [group.prompt.id for group in sampled] == list(dict.fromkeys(prompts_of(run, 1)[0]))
    assert json.loads((run / "summary.json").read_text())["steps"] == 4


def test_a_source_without_short_prompts_is_refused_before_the_weights_are_loaded(tmp_path, monkeypatch):
    config = mixture(tmp_path, weights=(1, 2))
    for module in ("build", "open_run"):
        monkeypatch.setattr(f"cohort.trainer.{module}.load_policy", None)
    write_jsonl(tmp_path / "other.jsonl", [{"q": "1" * n, "answer": "1", "level": 2} for n in range(90, 99)])
    for start in (train, lambda raw: sample_rows(config_from_dict(raw), rows=1, generations=1)):
        with pytest.raises(UserError, match=r"max_prompt_tokens=64: no prompt of data\.sources\.1 \('other'\) is"):
            start(config)


@slow("one process reads the data, and test_launch trains with several")
@pytest.mark.parametrize("weights", [None, (3.0, 1.0)])
def test_a_mixture_is_the_same_on_any_number_of_ranks(tmp_path, weights):
    config = mixture(tmp_path, weights=weights, model={"dtype": "float64"}, train={"steps": 3})
    for processes in (1, 2, 3):
        cohort.train(changed(config, run={"dir": str(tmp_path / f"{processes}")}, hardware={"processes": processes}))
    for name in ("reward", "sources/train/accuracy", "eval/sources/other/reward"):
        values = [metric(tmp_path / f"{processes}", name) for processes in (1, 2, 3)]
        assert values[0] and values[1:] == [pytest.approx(values[0])] * 2
    assert prompts_of(tmp_path / "1", 3) == prompts_of(tmp_path / "2", 3) == prompts_of(tmp_path / "3", 3)


def test_held_out_rows_of_a_run_are_evaluated_again(tmp_path):
    run = train(mixture(tmp_path, weights=None, train={"steps": 1})).run_dir
    result = evaluate_model(eval_config(str(run), {}))
    assert result.accuracy == metric(run, "eval/accuracy")[-1]
    assert result.metrics["eval/sources/other/num_groups"] == metric(run, "eval/sources/other/num_groups")[-1]
    with pytest.raises(UserError, match="--seed: chooses which rows"):
        eval_config(str(run), {"seed": 1})
    other = eval_config(str(run), {"data": str(tmp_path / "heldout.jsonl"), "prompt": "question", "seed": 1})
    assert other.eval is not None and other.eval.rows is None and not other.data.sources


def test_held_out_sources_are_reported_by_source_and_evaluated_again(tmp_path):
    config = mixture(tmp_path, weights=None, train={"steps": 1})
    held_out = [{**source, "source": name, "rows": 3} for source, name in zip(config["data"], "ab", strict=True)]
    run = train({**config, "eval": {"sources": held_out, "every": 2, "success_threshold": 0.5}}).run_dir
    assert [metric(run, f"eval/sources/{name}/num_groups") for name in "ab"] == [[3.0, 3.0]] * 2
    assert metric(run, "eval/num_prompts") == [6.0, 6.0]
    assert_in_catalogue(run)
    again = evaluate_model(eval_config(str(run), {}))
    assert again.metrics["eval/sources/b/reward"] == metric(run, "eval/sources/b/reward")[-1]
    assert rescore(load_config(run / "config.yaml"), run / "completions" / "eval-000001.parquet").prompts == 6
    other = eval_config(str(run), {"data": str(tmp_path / "heldout.jsonl"), "prompt": "question"})
    assert other.eval is not None and not other.eval.sources
