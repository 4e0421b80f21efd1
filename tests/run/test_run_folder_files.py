"""Which keys make another run, and completions as files."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cohort.config import config_from_dict
from cohort.records import Prompt, ScoredGroup, TrainSequence, Trajectory, TurnStats
from cohort.rollout.engines.base import PackedCompletions
from cohort.run.completions import _completions_table, write_completions_file
from cohort.run.folder import config_changes
from configs import MINIMAL
from run_folders import open_folder
from samples import answer

# Which keys make another run


@pytest.mark.parametrize(
    ("overrides", "changed"),
    [
        (["hardware.device=cpu", "hardware.processes=auto"], []),
        (["hardware.processes=4", "hardware.timeout_s=5", "hardware.max_restarts=3"], []),
        (["train.micro_batch_tokens=auto"], []),
        (["run.checkpoint_every=7", "run.log=[wandb]", "run.dir=/elsewhere"], []),
        (["train.micro_batch_tokens=5", "rollout.max_num_seqs=5"], []),
        (["rewards.0.timeout_s=5"], []),
        (["train.steps=9"], []),  # at a constant rate a longer run begins like a shorter one
        (["train.epochs=9"], []),
        (["rewards.0.args.deadline_s=5"], ["rewards.0.args", "rewards.0.args.deadline_s"]),
        (["train.seed=1"], ["train.seed"]),
        (["train.learning_rate=1"], ["train.learning_rate"]),
        (["train.prompts_per_step=1"], ["train.prompts_per_step"]),
        (["rollout.num_generations=4"], ["rollout.num_generations"]),
        (["model.path=other"], ["model.path"]),
        (["data.shuffle=false"], ["data.shuffle"]),
        (
            ["rewards=[{use: math}, {use: exact}]"],
            [f"rewards.1.{key}" for key in ("args", "gate", "per_group", "scale", "use", "weight", "where")],
        ),
        (["rewards=[{use: code}]", "sandbox.memory=1GB"], ["rewards.0.use", "sandbox.memory"]),
        (["train.lr_schedule=linear", "train.steps=9"], ["train.lr_schedule", "train.steps"]),
        (["train.warmup_ratio=0.1"], ["train.warmup_ratio"]),
        (["algorithm.name=dapo"], ["algorithm.clip_high", "algorithm.loss_weight", "algorithm.name"]),
    ],
)
def test_config_changes(overrides, changed):
    old, new = config_from_dict(MINIMAL), config_from_dict(MINIMAL, overrides)
    assert list(config_changes(old, new)) == changed


JUDGE = {"use": "judge", "args": {"url": "http://a:1", "model": "m", "prompt": "p.txt", "max_concurrent": 4}}
MODEL = {"use": "model", "args": {"url": "http://a:2", "api_key_env": "KEY"}}
REWARDS = [JUDGE, MODEL, {"use": "model", "args": {"path": "rm"}}, {"use": "mine.py:f", "args": {"url": "a"}}]


@pytest.mark.parametrize(
    ("overrides", "changed"),
    [
        (["rewards.0.args.url=http://b:1", "rewards.0.args.max_concurrent=8", "rewards.0.args.cache=c.jsonl"], []),
        (["rewards.0.args.retries=1", "rewards.0.args.request_timeout_s=5"], []),
        (["rewards.1.args.url=http://b:1", "rewards.1.args.api_key_env=OTHER"], []),
        (["rewards.2.args.device=cpu", "rewards.2.args.batch_tokens=64"], []),
        (["rewards.2.args.dtype=float32"], ["rewards.2.args.dtype"]),
        (["rewards.0.args.model=n", "rewards.0.args.prompt=q.txt"], ["rewards.0.args.model", "rewards.0.args.prompt"]),
        (["rewards.3.args.url=b"], ["rewards.3.args.url"]),
        (["eval.every=3", "eval.before_training=false"], []),
        (["eval.temperature=0.5"], ["eval.temperature"]),
        (["sandbox.backend=bubblewrap", "sandbox.max_concurrent=3", "sandbox.confinement=none"], []),
        (["sandbox.backend=sandbox_fusion", "sandbox.url=http://c"], []),
        (
            ["sandbox.wall_s=3", "sandbox.packages=[numpy]"],
            ["sandbox.packages", "sandbox.packages.0", "sandbox.wall_s"],
        ),
    ],
)
def test_servers_sandboxes_and_evaluations_may_be_others_but_not_what_they_compute(overrides, changed):
    raw = {**MINIMAL, "rewards": [*REWARDS, {"use": "code"}], "eval": {"path": "held.jsonl"}}
    old, new = config_from_dict(raw), config_from_dict(raw, overrides)
    assert list(config_changes(old, new)) == changed
    assert list(config_changes(new, old)) == changed


def test_config_changes_with_a_schedule_has_both_values():
    settings = ["train.lr_schedule=cosine", "train.steps=9"]
    old, new = config_from_dict(MINIMAL, settings), config_from_dict(MINIMAL, [*settings, "train.steps=10"])
    assert config_changes(old, new) == {"train.steps": (9, 10)}
    old, new = (config_from_dict(MINIMAL, ["train.warmup_ratio=0.2", f"train.steps={n}"]) for n in (9, 10))
    assert config_changes(old, new) == {"train.steps": (9, 10)}
    assert config_changes(old, old) == {}


# Completions


def a_group(
    prompt: Prompt, rewards: list[float], parts: dict[str, list[float]], *, expected: str | None = None
) -> ScoredGroup:
    trajectories = tuple(
        answer(
            prompt,
            [5, 6 + i],
            logprobs=[-0.5, -0.25],
            finish="length" if i else "stop",
            version=3,
            text=f"answer {i}",
        )
        for i in range(len(rewards))
    )
    return ScoredGroup(
        prompt=prompt,
        trajectories=trajectories,
        rewards=np.array(rewards),
        reward_parts={name: np.array(part) for name, part in parts.items()},
        answer=expected,
    )


TEXT = Prompt(id=4, epoch=0, content="say ½", token_ids=np.array([1, 2]), columns={})
CHAT = Prompt(id=9, epoch=0, content=[{"role": "user", "content": "hi"}], token_ids=np.array([3]), columns={})
NAN = float("nan")
GROUPS = [
    a_group(TEXT, [1.0, NAN], {"exact": [1.0, NAN], "format": [0.0, NAN]}, expected="42"),
    a_group(CHAT, [0.5, 0.0], {"exact": [0.5, NAN], "format": [0.0, 0.0]}),
]
SEQUENCES = [
    TrainSequence.single_turn(np.arange(1), np.arange(2), advantages=advantage, index=n, group=n // 2)
    for n, advantage in enumerate((0.5, 0.0, 1.0, -1.0))
]


def test_completions_have_a_row_each_and_null_for_not_judged(tmp_path):
    folder = open_folder(tmp_path / "a")
    folder.write_completions("step", 12, GROUPS, SEQUENCES)
    folder.close()
    assert [p.name for p in (tmp_path / "a" / "completions").iterdir()] == ["step-000012.parquet"]
    table = pq.read_table(tmp_path / "a" / "completions" / "step-000012.parquet")
    assert table.schema.equals(
        pa.schema(
            {
                "step": pa.int64(),
                "group": pa.int64(),
                "prompt_id": pa.int64(),
                "prompt": pa.string(),
                "prompt_is_chat": pa.bool_(),
                "answer": pa.string(),
                "completion": pa.string(),
                "prompt_token_ids": pa.list_(pa.int32()),
                "completion_token_ids": pa.list_(pa.int32()),
                "sampling_logprobs": pa.list_(pa.float32()),
                "num_tokens": pa.int64(),
                "end": pa.string(),
                "finish_reason": pa.string(),
                "policy_version": pa.int64(),
                "reward": pa.float64(),
                "rewards/exact": pa.float64(),
                "rewards/format": pa.float64(),
                "advantage": pa.float64(),
            }
        )
    )
    rows = table.to_pylist()
    assert rows[1] == {
        "step": 12,
        "group": 0,
        "prompt_id": 4,
        "prompt": "say ½",
        "prompt_is_chat": False,
        "answer": "42",
        "completion": "answer 1",
        "prompt_token_ids": [1, 2],
        "completion_token_ids": [5, 7],
        "sampling_logprobs": [-0.5, -0.25],
        "num_tokens": 2,
        "end": "length",
        "finish_reason": "length",
        "policy_version": 3,
        "reward": None,
        "rewards/exact": None,
        "rewards/format": None,
        "advantage": 0.0,
    }
    assert [row["prompt_id"] for row in rows] == [4, 4, 9, 9]
    assert [row["group"] for row in rows] == [0, 0, 1, 1]
    assert [row["prompt_is_chat"] for row in rows] == [False, False, True, True]
    assert [row["answer"] for row in rows] == ["42", "42", None, None]
    assert [row["reward"] for row in rows] == [1.0, None, 0.5, 0.0]
    assert [row["rewards/exact"] for row in rows] == [1.0, None, 0.5, None]
    assert [row["advantage"] for row in rows] == [0.5, 0.0, 1.0, -1.0]
    assert json.loads(rows[2]["prompt"]) == [{"role": "user", "content": "hi"}]


def test_completions_of_an_evaluation_have_no_advantage(tmp_path):
    write_completions_file(tmp_path / "new" / "eval.parquet", step=0, groups=GROUPS)
    names = pq.read_schema(tmp_path / "new" / "eval.parquet").names
    assert "advantage" not in names
    assert names[-1] == "rewards/format"


def test_sampled_and_environment_tokens_of_several_turns_are_told_apart(tmp_path):
    first = answer(TEXT, [5, 6], logprobs=[-0.5, -0.25], version=3).calls[0]
    second = replace(first, context_ids=np.array([1, 2, 5, 6, 30, 31]), token_ids=np.array([7, 8]), policy_version=4)
    rewritten = replace(second, context_ids=np.array([1, 2, 40]))
    trajectories = (
        Trajectory(calls=(first, second), messages=(), text="", end="max_turns"),
        Trajectory(calls=(first, rewritten), messages=(), text="", end="answer"),
        Trajectory(calls=(), messages=(), text="", end="environment_error"),
        answer(TEXT, [9]),
    )
    rewards = np.array([1.0, 0.0, NAN, 0.5])
    group = ScoredGroup(prompt=TEXT, trajectories=trajectories, rewards=rewards, reward_parts={})
    write_completions_file(tmp_path / "c.parquet", step=1, groups=[group])
    rows = pq.read_table(tmp_path / "c.parquet").to_pylist()
    assert [row["end"] for row in rows] == ["max_turns", "answer", "environment_error", "answer"]
    assert [row["sequence_token_ids"] for row in rows] == [
        [[1, 2, 5, 6, 30, 31, 7, 8]],
        [[1, 2, 5, 6], [1, 2, 40, 7, 8]],
        [],
        [[1, 2, 9]],
    ]
    for row in rows:
        pairs = zip(row["sequence_token_ids"], row["loss_mask"], strict=True)
        sampled = [token for ids, mask in pairs for token, own in zip(ids, mask, strict=True) if own]
        assert sampled == row["completion_token_ids"]
    assert rows[0]["loss_mask"] == [[False, False, True, True, False, False, True, True]]
    assert [row["policy_version"] for row in rows] == [3, 3, None, 0]
    assert [row["finish_reason"] for row in rows] == ["stop", "stop", None, "stop"]
    assert [row["num_tokens"] for row in rows] == [4, 4, 0, 1]
    assert [row["reward"] for row in rows] == [1.0, 0.0, None, 0.5]


def test_trajectories_with_turns_have_messages_calls_counts_and_what_the_environment_measured(tmp_path):
    first = answer(TEXT, [5, 6], version=3).calls[0]
    user = replace(first, context_ids=np.array([9]), token_ids=np.array([30]), trained=False, policy_version=4)
    messages = (
        {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {"key": "ä"}}}]},
        {"role": "tool", "name": "look", "content": "1"},
    )
    stats = TurnStats(tool_calls=1, malformed_calls=2, attempts=2, model_s=0.5, environment_s=0.25)
    played = Trajectory(
        calls=(first, user), messages=messages, text="", end="answer", metrics={"score": 3.0}, stats=stats
    )
    failed = Trajectory(calls=(), messages=(), text="", end="environment_error", error="boom", stats=TurnStats())
    rewards, parts = np.array([1.0, NAN]), {"Game": np.array([1.0, NAN])}
    group = ScoredGroup(prompt=TEXT, trajectories=(played, failed), rewards=rewards, reward_parts=parts)
    write_completions_file(tmp_path / "c.parquet", step=1, groups=[group])
    one, other = pq.read_table(tmp_path / "c.parquet").to_pylist()
    assert json.loads(one["messages"]) == list(messages)
    assert one["calls"] == [
        {"context_tokens": 2, "token_ids": [5, 6], "trained": True, "finish_reason": "stop", "policy_version": 3},
        {"context_tokens": 1, "token_ids": [30], "trained": False, "finish_reason": "stop", "policy_version": 4},
    ]
    assert one["sequence_token_ids"] == [[1, 2, 5, 6]]
    counts = ("tool_calls", "tool_errors", "malformed_calls", "attempts", "model_s", "environment_s")
    assert [one[name] for name in counts] == [1, 0, 2, 2, 0.5, 0.25]
    assert (one["environment/score"], one["rewards/Game"], one["error"]) == (3.0, 1.0, None)
    assert (other["environment/score"], other["error"], other["calls"], other["messages"]) == (None, "boom", [], "[]")


def test_a_run_with_turns_has_the_same_columns_when_all_answer_at_once(tmp_path):
    at_once = replace(answer(TEXT, [5]), stats=TurnStats())
    group = ScoredGroup(prompt=TEXT, trajectories=(at_once,), rewards=np.array([1.0]), reward_parts={})
    write_completions_file(tmp_path / "c.parquet", step=1, groups=[group])
    assert {"messages", "calls", "tool_calls"} <= {*pq.read_schema(tmp_path / "c.parquet").names}


def test_an_answer_is_written_once_per_row_group(tmp_path):
    """A long answer does not make the file larger by the number of its group's completions."""
    of_one = replace(GROUPS[0], answer="".join(map(str, range(1000))))
    write_completions_file(tmp_path / "c.parquet", step=1, groups=[of_one] * 50)
    columns = pq.read_metadata(tmp_path / "c.parquet").row_group(0).to_dict()["columns"]
    column = next(column for column in columns if column["path_in_schema"] == "answer")
    assert column["has_dictionary_page"] and column["total_uncompressed_size"] < 4 * len(of_one.answer)


def test_files_of_many_tokens_are_divided_into_row_groups(tmp_path, monkeypatch):
    """One completion of a long file can be read without decoding the others."""
    answers = tuple(answer(TEXT, [5] * length) for length in (3, 5, 4, 4))
    group = ScoredGroup(prompt=TEXT, trajectories=answers, rewards=np.zeros(4), reward_parts={})
    rows = []
    for tokens in (100, 8, 1):
        monkeypatch.setattr("cohort.run.completions._ROW_GROUP_TOKENS", tokens)
        write_completions_file(tmp_path / "c.parquet", step=1, groups=[group])
        metadata = pq.read_metadata(tmp_path / "c.parquet")
        rows.append([metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)])
    assert rows == [[4], [2, 2], [1, 1, 1, 1]]


def test_completions_in_one_array_are_written_without_a_copy(tmp_path):
    """Those that a rank has sent; others, and columns of several turns, are copied. The rows are the same."""
    sampled = [answer(TEXT, range(length)).calls[0] for length in (*range(1, 51), 0, *range(1, 14))]
    shares = [PackedCompletions.of(sampled[:40]), PackedCompletions.of(sampled[40:])]
    received = [
        replace(call, token_ids=c.token_ids, sampling_logprobs=c.sampling_logprobs)
        for call, c in zip(sampled, [c for share in shares for c in share.unpack()], strict=True)
    ]
    tables = []
    for calls in (sampled, received, [*received[:40], *sampled[40:]], received[::-1], received[::2]):
        trajectories = tuple(Trajectory.single_turn(call, text="") for call in calls)
        group = ScoredGroup(prompt=TEXT, trajectories=trajectories, rewards=np.zeros(len(calls)), reward_parts={})
        tables.append(_completions_table(1, [group], None))
        write_completions_file(tmp_path / "c.parquet", step=1, groups=[group])
        rows = pq.read_table(tmp_path / "c.parquet").to_pylist()
        assert [row["completion_token_ids"] for row in rows] == [call.token_ids.tolist() for call in calls]
        assert [row["sampling_logprobs"] for row in rows] == [call.sampling_logprobs.tolist() for call in calls]
    assert [table["completion_token_ids"].num_chunks for table in tables] == [1, 4, 1, 1, 1]  # an empty one is nowhere
    chunks = tables[1]["completion_token_ids"].chunks
    addresses = [chunks[number].values.buffers()[1].address for number in (0, 1)]
    assert addresses == [share.token_ids.__array_interface__["data"][0] for share in shares]


def test_details_of_some_groups_are_null_for_the_others(tmp_path):
    """A judge behind a gate sees no completion of some rounds of a step."""
    judged = replace(GROUPS[0], reward_details={"judge/reply": ("Score: 1",) * len(GROUPS[0].trajectories)})
    others = GROUPS[1:]
    write_completions_file(tmp_path / "c.parquet", step=1, groups=[*others, judged])
    replies = pq.read_table(tmp_path / "c.parquet")["details/judge/reply"].to_pylist()
    unjudged = sum(len(g.trajectories) for g in others)
    assert replies == [None] * unjudged + ["Score: 1"] * len(judged.trajectories)
