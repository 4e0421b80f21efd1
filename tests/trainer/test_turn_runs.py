"""Small runs with tools, environment classes and programs, on the local engine."""

import signal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import cohort
from cohort.chat import ResponseParser
from cohort.cli.evaluate import eval_config
from cohort.errors import TrainingError, UserError
from cohort.trainer.without_training import evaluate_model
from playing import save_turns_model
from runs import assert_in_catalogue, in_a_process, metric, stop_after, train
from selection import slow
from tiny import write_jsonl

CODE = '''
import asyncio
import os
import signal
from pathlib import Path

def look(key: str) -> str:
    """Look up a value.

    Args:
        key: name of the value
    """
    return key * 3

class Game:
    def reset(self, seed, **row):
        self.seed, self.looks = seed, 0
        return f" seed {seed}"

    def look(self, key: str) -> str:
        """Look up a value.

        Args:
            key: name of the value
        """
        self.looks += 1
        return f"{key} {self.seed}"

    def get_reward(self):
        return self.looks + self.seed % 7 / 7

class Stepwise(Game):
    def step_reward(self):
        return self.looks / 4

class Talk:
    async def run(self, row, model):
        first = await model.chat("hello")
        await model.chat("user", train=False)
        second = await model.chat([{"role": "user", "content": "hello"}, first.message,
                                   {"role": "user", "content": "go on"}])
        return {"reward": len(second.content), "length": len(first.content)}

class Deadly(Talk):
    """Ends the run as `kill -9` does, once, between two turns of the second step."""

    def __init__(self):
        self.rows = 0

    async def run(self, row, model):
        self.rows += 1
        await model.chat("wait", train=False)
        kill = Path(__file__).with_name("kill")
        if self.rows > 8 and kill.exists():
            kill.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().run(row, model)

class Flaky(Game):
    """Fails for some seeds, with every instance."""

    broken = 3

    def get_reward(self):
        if self.seed % 4 < self.broken:
            raise ConnectionError("the server is gone")
        return self.seed % 7

def long(completions, **kwargs):
    return [float(len(str(completion))) for completion in completions]
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # a random model calls by single letters, which is not how its chat template renders calls
    monkeypatch.setattr(ResponseParser, "check_tools", lambda self: None)
    save_turns_model(tmp_path / "base")
    (tmp_path / "e.py").write_text(CODE)
    write_jsonl(tmp_path / "train.jsonl", [{"prompt": f"say {n}"} for n in range(8)])
    return tmp_path


def config(folder: Path, *, run: str = "run", data: bool = False, **sections: Any) -> dict[str, Any]:
    """Two quick steps; `rollout` has the environment or tools."""
    lengths = {"max_prompt_tokens": 600, "max_completion_tokens": 6, "max_turns": 3, "max_trajectory_tokens": 400}
    rollout = {"num_generations": 4, "engine": "local", **lengths, **sections.pop("rollout")}
    raw = {
        "model": {"path": str(folder / "base")},
        "rollout": rollout,
        "train": {"steps": 2, "prompts_per_step": 2, "learning_rate": 1e-2, **sections.pop("train", {})},
        "run": {"dir": str(folder / run), "checkpoint_every": 1},
        **sections,
    }
    for part in (rollout.get("environment"), *rollout.get("tools", ())):
        assert part is None or isinstance(part, str)
    return raw | ({"data": {"path": str(folder / "train.jsonl")}} if data else {})


def sampled(run: Path) -> list[Any]:
    """Tokens and rewards of all training completions."""
    tables = [pq.read_table(file).to_pydict() for file in sorted((run / "completions").glob("step-*"))]
    return [(table["completion_token_ids"], table["reward"]) for table in tables]


def test_tools_train(folder: Path):
    train(
        config(
            folder,
            data=True,
            rollout={"tools": [f"{folder}/e.py:look"]},
            rewards=[{"use": f"{folder}/e.py:long"}],
        )
    )
    assert max(metric(folder / "run", "completions/max_length")) > 6, "some trajectory has several calls"
    assert all(difference < 1e-4 for difference in metric(folder / "run", "sampling/sampling_logp_difference/max"))
    assert all(norm > 0 for norm in metric(folder / "run", "grad_norm"))
    assert_in_catalogue(folder / "run")


@slow("a program and tools train, and a class whose groups are dropped")
def test_an_environment_class_trains_without_data_and_the_same_seed_is_the_same_run(folder: Path):
    game = {"rollout": {"environment": f"{folder}/e.py:Game"}}
    train(config(folder, run="a", **game))
    train(config(folder, run="b", **game))
    first = sampled(folder / "a")
    assert first == sampled(folder / "b") and len(first) == 2
    assert first != sampled_with_seed(folder, 1, **game)
    assert all(metric(folder / "a", "rewards/Game/std"))
    assert max(metric(folder / "a", "completions/max_length")) > 6


def sampled_with_seed(folder: Path, seed: int, **sections: Any) -> list[Any]:
    train(config(folder, run="seed", train={"seed": seed}, **sections))
    return sampled(folder / "seed")


@slow("the same seed is the same run, in tests of environment classes")
def test_resumed_is_uninterrupted(folder: Path):
    game = {"rollout": {"environment": f"{folder}/e.py:Game"}, "train": {"steps": 4}}
    train(config(folder, run="whole", **game))
    with pytest.raises(KeyboardInterrupt):
        cohort.train(config(folder, run="parts", **game), display=stop_after(2))
    train(config(folder, run="parts", **game), resume=True)
    assert sampled(folder / "parts") == sampled(folder / "whole")


@slow("the same seed is the same run, in one process")
def test_one_and_three_processes_sample_the_same_trajectories(folder: Path):
    talk = {"rollout": {"environment": f"{folder}/e.py:Talk"}}
    for processes in (1, 3):
        cohort.train(config(folder, run=f"on-{processes}", hardware={"processes": processes, "device": "cpu"}, **talk))
    assert metric(folder / "on-3", "processes") == [3, 3]
    assert sampled(folder / "on-3") == sampled(folder / "on-1")


@slow("test_resume kills a run of single turns")
@pytest.mark.parametrize("processes", [1, 3])
def test_killed_in_the_middle_of_a_step_and_resumed_is_uninterrupted(folder: Path, processes: int):
    """By the same command, on one rank and three: every trajectory is the same, token by token."""
    deadly = {"rollout": {"environment": f"{folder}/e.py:Deadly"}, "train": {"steps": 3}}
    train(config(folder, run="whole", **deadly))
    (folder / "kill").touch()
    killed = config(folder, run="killed", hardware={"processes": processes, "device": "cpu"}, **deadly)
    assert in_a_process(cohort.train, killed) == (-signal.SIGKILL if processes == 1 else 1)
    assert len(sampled(folder / "killed")) == 1
    if processes == 3:
        assert "rank 0 was killed by SIGKILL" in (folder / "said").read_text()
    assert in_a_process(cohort.train, killed) == 0
    assert not (folder / "kill").exists()
    assert sampled(folder / "killed") == sampled(folder / "whole")
    assert metric(folder / "killed", "processes") == 3 * [processes]


@slow("tests/algorithms/test_step_rewards.py has their places")
def test_step_rewards_reach_the_tokens_of_their_turns(folder: Path):
    """With a critic, which takes token rewards; and summed for others."""
    steps = {"rollout": {"environment": f"{folder}/e.py:Stepwise"}, "train": {"steps": 1}}
    train(config(folder, run="ppo", algorithm={"name": "ppo"}, **steps))
    train(config(folder, run="grpo", **steps))
    for run in ("ppo", "grpo"):
        assert metric(folder / run, "rewards/Stepwise/std")[0] > 0
    assert sampled(folder / "ppo") == sampled(folder / "grpo")


def test_a_program_trains_with_a_simulated_user(folder: Path):
    train(config(folder, rollout={"environment": f"{folder}/e.py:Talk"}))
    assert metric(folder / "run", "completions/max_length")[0] <= 12, "the user's tokens are not trained"


def test_an_environment_that_fails_often_ends_the_run_with_its_error(folder: Path):
    flaky = {"rollout": {"environment": f"{folder}/e.py:Flaky", "environment_retries": 0, "max_failed_ratio": 0.1}}
    with pytest.raises(
        TrainingError, match=r"max_failed_ratio: 0\.1: \d of 8 trajectories failed(.|\n)*server is gone"
    ):
        train(config(folder, **flaky))


def test_groups_with_fewer_than_two_intact_members_are_dropped(folder: Path):
    """Each group of 2 of 6 seeds has one that fails with probability 3/4."""
    flaky = {
        "rollout": {
            "environment": f"{folder}/e.py:Flaky",
            "environment_retries": 0,
            "max_failed_ratio": 1,
            "num_generations": 3,
        }
    }
    train(config(folder, train={"steps": 1, "prompts_per_step": 12}, **flaky))
    (table,) = [pq.read_table(file).to_pydict() for file in (folder / "run" / "completions").glob("step-*")]
    (dropped,) = metric(folder / "run", "rollout/dropped_groups")
    assert 0 < dropped < 12
    assert len(table["reward"]) == 3 * (12 - dropped)
    for start in range(0, len(table["reward"]), 3):
        assert sum(reward is not None for reward in table["reward"][start : start + 3]) >= 2


def test_evaluation_during_and_after_a_run(folder: Path):
    game = {"rollout": {"environment": f"{folder}/e.py:Game"}, "eval": {"max_prompts": 3, "every": 1}}
    train(config(folder, train={"steps": 1}, **game))
    before, after = metric(folder / "run", "eval/rewards/Game/mean")
    result = evaluate_model(eval_config(str(folder / "run"), {}))
    assert result.metrics["eval/rewards/Game/mean"] == pytest.approx(after)
    assert len(result.groups) == 3 and before != after


def test_rows_without_prompts_are_held_out(folder: Path):
    write_jsonl(folder / "train.jsonl", [{"level": n} for n in range(8)])
    game = {"rollout": {"environment": f"{folder}/e.py:Game"}, "eval": {"rows": 3, "every": 1}}
    train(config(folder, data=True, train={"steps": 1}, **game))
    assert metric(folder / "run", "eval/num_prompts") == [3, 3]
    after = metric(folder / "run", "eval/rewards/Game/mean")[-1]
    again = evaluate_model(eval_config(str(folder / "run"), {}))
    assert again.metrics["eval/rewards/Game/mean"] == pytest.approx(after)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {"rollout": {"environment": "e.py:Game"}, "train": {"steps": None}},
            "train.steps: missing; a run without data",
        ),
        ({"rollout": {"tools": ["e.py:look"]}}, "data.path: missing; this key is required"),
        ({"rollout": {"tools": ["e.py:look"]}, "data": True}, "rewards: []: at least one reward is needed"),
        (
            {"rollout": {"environment": "e.py:Game"}, "rewards": [{"use": "e.py:long", "name": "Game"}]},
            "rewards[0].name: the environment gives a reward 'Game'; use another name",
        ),
        (
            {"rollout": {"environment": "e.py:Game"}, "eval": {"every": 0}},
            "eval.max_prompts: missing; it says how many trajectories to evaluate without eval.path",
        ),
    ],
)
def test_inputs_that_do_not_fit(folder: Path, sections: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    with pytest.raises(UserError) as caught:
        train(config(folder, **sections))
    assert expected in str(caught.value)
