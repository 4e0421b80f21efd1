"""`cohort init`: the folders that it writes train as they are."""

import json

import pytest

from cohort.config import load_config
from cohort.demo.init import write_converted
from selection import slow

SCRIPT = """
import re
import torch
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

PATTERN = re.compile("[0-9]+")


def unused():
    return torch.ones(1)


def numbers(text):
    return PATTERN.findall(text)


def count(completions, **kwargs):
    return [len(numbers(c)) for c in completions]


args = GRPOConfig(output_dir="out", num_generations=4, per_device_train_batch_size=4, max_completion_length=8)
rows = load_dataset("json", data_files="rows.jsonl", split="train")
GRPOTrainer(model="MODEL", reward_funcs=count, args=args, train_dataset=rows).train()
"""


@pytest.mark.parametrize("task", ["math", *(pytest.param(t, marks=slow("math shows it")) for t in ("tools", "code"))])
def test_a_new_folder_trains_at_once(tmp_path, monkeypatch, cohort, task: str):
    monkeypatch.chdir(tmp_path)
    written = cohort("init", "first", "--task", task)
    assert written.code == 0
    assert written.out.endswith("Next: cohort train first/run.yaml\n")
    assert len((tmp_path / "first" / "train.jsonl").read_text().splitlines()) == 20
    readme = (tmp_path / "first" / "README.md").read_text()
    assert f"cohort view runs/{task}" in readme and "cohort train first/run.yaml " in readme
    ended = cohort("train", "first/run.yaml", "train.steps=2")
    assert (ended.code, ended.err) == (0, "")
    rows = [json.loads(line) for line in (tmp_path / "runs" / task / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert max(row["reward"] for row in rows) > 0


def test_a_script_of_trl_becomes_a_folder_with_its_rewards(tmp_path, monkeypatch, cohort):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    assert cohort("init", "mine", "--from", "train.py").code == 0
    rewards = (tmp_path / "mine" / "rewards.py").read_text()
    names: dict[str, object] = {}
    exec(rewards, names)
    assert names["count"](["1 and 22", "none"]) == [2, 0]  # type: ignore[operator]
    assert "torch" not in rewards and "trl" not in rewards and "unused" not in rewards
    assert "To do" not in (tmp_path / "mine" / "run.yaml").read_text()  # the rewards are there
    config = load_config(tmp_path / "mine" / "run.yaml")
    assert config.rewards[0].use == f"{tmp_path}/mine/rewards.py:count"
    assert config.rollout.num_generations == 4


def test_a_reward_that_the_script_does_not_define_stays_to_do(tmp_path):
    converted = (
        "# To do:\n# - rewards.py: reward 'a' as the function a (TRL's signature), from train.py:1\n"
        "# - rewards.py: reward 'b' as the function b (TRL's signature), from train.py:1\n"
        "rewards: [{use: 'rewards.py:a'}, {use: 'rewards.py:b'}]\nrun: {dir: out}\n"
    )
    (tmp_path / "train.py").write_text("def a(completions):\n    return completions\n")
    write_converted(tmp_path / "mine", tmp_path / "train.py", converted)
    written = (tmp_path / "mine" / "run.yaml").read_text()
    assert "the function a" not in written and "# To do:\n# - rewards.py: reward 'b'" in written


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["full"], "FOLDER: 'full' exists and is not empty; give a new folder"),
        (["new", "--task", "words"], "--task: 'words' is no task; must be one of math, tools, code"),
        (["new", "--task", "math", "--from", "train.py"], "--task has no effect with --from"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path, monkeypatch, cohort, arguments: list[str], message: str):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    monkeypatch.chdir(tmp_path)
    ended = cohort("init", *arguments)
    assert ended.code == 2
    assert message in ended.err
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
