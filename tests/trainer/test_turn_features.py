"""Trajectories with turns have what single completions have: masks, dynamic sampling, evaluation, LoRA, a critic."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from assigned import assign_advantages
from cohort.algorithms import build_algorithm
from cohort.chat import ResponseParser
from cohort.config import AlgorithmConfig
from cohort.records import Prompt, ScoredGroup, Trajectory
from playing import save_turns_model
from runs import changed, metric, train
from samples import answer
from selection import slow
from tiny import write_jsonl

CODE = '''
def look(key: str) -> str:
    """Look up a value.

    Args:
        key: name of the value
    """
    return key * 3

def odd(prompts, completion_ids, **kwargs):
    """Groups of even prompts have equal rewards."""
    return [float(sum(ids)) * (int(p[-1]) % 2) for p, ids in zip(prompts, completion_ids)]

async def two_conversations(row, model):
    first = await model.chat("one")
    second = await model.chat("two")
    return {"reward": len(first.content) + len(second.content), "first": len(first.content)}
'''


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A configuration of one quick step of 2 x 3 trajectories."""
    # a random model calls by single letters, which is not how its chat template renders calls
    monkeypatch.setattr(ResponseParser, "check_tools", lambda self: None)
    save_turns_model(tmp_path / "base")
    (tmp_path / "e.py").write_text(CODE)
    write_jsonl(tmp_path / "train.jsonl", [{"prompt": f"say {n}"} for n in range(8)])
    lengths = {"max_prompt_tokens": 600, "max_completion_tokens": 24, "max_turns": 3}
    return {
        "model": {"path": str(tmp_path / "base")},
        "data": {"path": str(tmp_path / "train.jsonl"), "shuffle": False},
        "rollout": {"num_generations": 3, "engine": "local", **lengths},
        "train": {"steps": 1, "prompts_per_step": 2, "learning_rate": 1e-2},
        "run": {"dir": str(tmp_path / "run")},
    }


def test_truncated_trajectories_are_masked_in_all_turns_and_those_without_turns_left_are_not():
    prompt = Prompt(id=0, epoch=0, content="q", token_ids=np.array([7, 8]), columns={})
    first = answer(prompt, [5, 6]).calls[0]
    second = replace(first, context_ids=np.array([7, 8, 5, 6, 9]), token_ids=np.array([4]), finish_reason="length")
    second = replace(second, sampling_logprobs=np.zeros(1))
    rewritten = replace(second, context_ids=np.array([7, 9]))
    trajectories = (
        Trajectory(calls=(first, second), messages=(), text="", end="length"),
        Trajectory(calls=(first, rewritten), messages=(), text="", end="length"),
        Trajectory(calls=(first, second), messages=(), text="", end="max_turns"),
    )
    group = ScoredGroup(prompt=prompt, trajectories=trajectories, rewards=np.array([1.0, 2.0, 3.0]), reward_parts={})
    config = AlgorithmConfig(mask_truncated_completions=True)
    sequences = assign_advantages([group], build_algorithm(config, max_completion_tokens=8))
    assert [(s.trajectory, bool(s.loss_weights.any())) for s in sequences] == [
        (0, False),
        (1, False),
        (1, False),
        (2, True),
    ]
    assert (sequences[-1].loss_weights > 0).tolist() == [True] * 3, "both turns"


@slow("adapters and dynamic sampling have tests of single turns")
def test_an_adapter_dynamic_sampling_and_pass_at_k(tmp_path: Path, inputs: dict[str, Any]):
    run = changed(
        inputs,
        model={"adapter": {"rank": 2}},
        rollout={"tools": [f"{tmp_path}/e.py:look"], "resample": 1},
        eval={"path": inputs["data"]["path"], "max_prompts": 2, "num_samples": 2, "temperature": 1.0, "every": 0},
        algorithm={"mask_truncated_completions": True},
    )
    train({**run, "rewards": [{"use": f"{tmp_path}/e.py:odd"}]})
    folder = tmp_path / "run"
    assert metric(folder, "rollout/resampled_ratio") == [1 / 3]  # prompt 0, by prompt 2; which also has equal rewards
    assert metric(folder, "tools/call_frequency")[0] > 0 and metric(folder, "turns/max")[0] > 1
    assert metric(folder, "turns/masked_tokens")[0] > 0
    assert len(metric(folder, "eval/pass@2")) == 2 and len(metric(folder, "eval/turns/mean")) == 2
    assert (folder / "final" / "adapter_config.json").exists()
    for name in ("step-000001", "replaced-000001", "eval-000001"):
        rows = pq.read_table(folder / "completions" / f"{name}.parquet").to_pylist()
        assert all(len(row["calls"]) >= 1 and row["end"] for row in rows), name
        for row in rows:
            replies = [message for message in json.loads(row["messages"]) if message["role"] == "assistant"]
            assert len(replies) == len(row["calls"])
            assert sum(map(sum, row["loss_mask"])) == len(row["completion_token_ids"])


def test_a_critic_values_the_turns_of_separate_conversations(tmp_path: Path, inputs: dict[str, Any]):
    rollout = {"environment": f"{tmp_path}/e.py:two_conversations"}
    train(changed({**inputs, "algorithm": {"name": "ppo"}}, rollout=rollout, critic={"learning_rate": 1e-2}))
    (loss,) = metric(tmp_path / "run", "value_loss")
    assert loss > 0 and metric(tmp_path / "run", "value/grad_norm")[0] > 0
    assert metric(tmp_path / "run", "turns/mean") == [2.0]
    assert metric(tmp_path / "run", "environment/first")[0] > 0
    rows = pq.read_table(tmp_path / "run" / "completions" / "step-000001.parquet").to_pylist()
    assert {len(row["sequence_token_ids"]) for row in rows} == {2}
    assert all(row["environment/first"] >= 0 for row in rows)
