"""`cohort reward`: tables of recorded completions, scored again."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from cohort.cli.app import app
from cohort.records import RolloutGroup, ScoredGroup, TurnStats
from cohort.rewards.judge import ReplyCache, content_key
from cohort.run.completions import write_completions_file
from reward_samples import group
from tiny import write_jsonl

CONFIG = """
model: {path: m}
data: {path: train.jsonl, prompt: question}
rewards:
- {use: exact, gate: true}
- {use: "mine.py:length", weight: 0.5}
- {use: regex, name: digits, args: {pattern: '^\\d+$'}}
eval: {path: heldout.jsonl}
train: {steps: 1}
"""
MINE = """
def length(completions, completion_ids, question, prompts):
    assert question == prompts
    return [float(len(ids)) for ids in completion_ids]
"""


def scored(rollout: RolloutGroup, **parts: list[float]) -> ScoredGroup:
    """The group with recorded rewards, of which the first is the sum."""
    (rewards, *_) = values = [np.array(part) for part in parts.values()]
    of = {"prompt": rollout.prompt, "trajectories": rollout.trajectories}
    return ScoredGroup(**of, rewards=rewards, reward_parts=dict(zip(parts, values, strict=True)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("train.jsonl"), [{"question": f"{i}+1", "answer": str(i + 1)} for i in range(3)])
    write_jsonl(Path("heldout.jsonl"), [{"question": "7+7", "answer": "14"}])
    Path("run.yaml").write_text(CONFIG)
    Path("mine.py").write_text(MINE)
    groups = []
    for i, texts in enumerate((["1", "2"], ["2", "2"], ["x", "3"])):
        exact = [1.0, 1.0] if i == 0 else [float(text == str(i + 1)) for text in texts]
        groups.append(scored(group(f"{i}+1", texts, prompt_id=i), exact=exact))
    write_completions_file(Path("step-000001.parquet"), step=1, groups=groups)
    return tmp_path


def run(*args: str) -> str:
    result = CliRunner().invoke(app, ["reward", "run.yaml", *args])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_file_of_a_run_gets_its_columns_from_the_dataset(folder):
    output = run("--completions", "step-000001.parquet")
    lines = [line.split() for line in output.splitlines()]
    assert lines[0] == ["6", "completions", "of", "3", "prompts"]
    table = {line[0]: line[1:] for line in lines[3:7]}
    assert table["exact"][:6] == ["6", "0.6667", "0.4714", "0", "1", "1/3"]
    assert table["length"][:6] == ["6", "1.333", "0.9428", "0", "2", "1/3"]  # 2 tokens each, 0 behind the gate
    assert table["digits"][:6] == ["6", "0.6667", "0.4714", "0", "1", "1/3"]
    assert table["sum"][:6] == ["6", "2", "1.414", "0", "3", "1/3"] and table["sum"][6] == "-"
    assert all(float(table[name][6]) >= 0 for name in ("exact", "length", "digits"))
    assert "exact and recorded differ for 1 of 6 completions\n  row 1: exact 0, recorded 1: '2'" in output
    assert "exact and length differ for 4 of 6 completions\n  row 0: exact 1, length 2: '1'" in output
    assert "exact and digits differ for 0 of 6 completions" in output


def test_of_a_stream_no_more_rows_are_read_than_the_file_has(folder):
    Path("run.yaml").write_text(CONFIG.replace("prompt: question}", "prompt: question, stream: true}"))
    before = run("--completions", "step-000001.parquet")
    with Path("train.jsonl").open("a") as lines:
        lines.write("{broken\n")
    assert run("--completions", "step-000001.parquet").splitlines()[:3] == before.splitlines()[:3]
    assert "exact and digits differ for 0 of 6 completions" in before
    Path("train.jsonl").write_text('{"question": "0+1", "answer": "1"}\n' * 2)
    result = CliRunner().invoke(app, ["reward", "run.yaml", "--completions", "step-000001.parquet"])
    assert "prompt_id 2 is not a row of the dataset, which has 2 rows" in result.output


def test_a_text_that_happens_to_be_json_is_no_chat(folder):
    Path("mine.py").write_text("def chat(prompts):\n    return [float(not isinstance(p, str)) for p in prompts]\n")
    row = {"prompt": json.dumps([{"role": "user", "content": "hi"}]), "completion": "1"}
    means = {}
    for name, columns in (("text", {"prompt_is_chat": False}), ("chat", {"prompt_is_chat": True}), ("own", {})):
        write_jsonl(Path("own.jsonl"), [row | columns])
        lines = run("rewards=[{use: 'mine.py:chat'}]", "--completions", "own.jsonl").splitlines()
        means[name] = lines[3].split()[2]
    assert means == {"text": "0", "chat": "1", "own": "0"}


def test_groups_of_one_prompt_in_one_step(folder):
    one = scored(group("1+1", ["1", "2"], prompt_id=1), exact=[0.0, 0.0])
    write_completions_file(Path("twice.parquet"), step=1, groups=[one, one])
    lines = run("--completions", "twice.parquet", "--only", "exact").splitlines()
    assert lines[0] == "4 completions of 2 prompts"
    rows = [{"group": name, "prompt": "?", "completion": "x"} for name in ("x", "y")]  # a column of the dataset
    write_jsonl(Path("own.jsonl"), rows)
    lines = run("rewards=[{use: exact, args: {answer_column: group}}]", "--completions", "own.jsonl").splitlines()
    assert lines[3].split()[:3] == ["exact", "2", "0.5"]


def test_only_a_reward_behind_a_gate_has_the_values_of_the_run(folder):
    output = run("--completions", "step-000001.parquet", "--only", "length", "--examples", "0")
    table = {line.split()[0]: line.split()[1:] for line in output.splitlines() if line}
    assert list(table) == ["6", "reward", "length", "sum"]
    assert table["length"][:6] == ["6", "1.333", "0.9428", "0", "2", "1/3"]  # as above, not 2 for all
    assert table["sum"][1:5] == ["0.6667", "0.4714", "0", "1"]  # its own part alone, of weight 0.5


JUDGED = """
model: {path: m}
data: {path: train.jsonl, prompt: question}
rewards:
- {use: exact, name: right}
- {use: exact, name: right}
- {use: judge, args: {url: "http://127.0.0.1:9", model: m, prompt: judge.txt, cache: replies.jsonl, retries: 0}}
train: {steps: 1}
"""


def test_only_needs_no_server_of_other_rewards(folder):
    Path("run.yaml").write_text(JUDGED)
    Path("judge.txt").write_text("Is {completion} right?")
    lines = run("--completions", "step-000001.parquet", "--only", "right_2").splitlines()
    assert [line.split()[0] for line in lines if line][:4] == ["6", "reward", "right_2", "sum"]
    result = CliRunner().invoke(app, ["reward", "run.yaml", "--completions", "step-000001.parquet"])
    assert result.exit_code == 2 and "error: reward 'judge': url: http://127.0.0.1:9/v1/models does" in result.output


def test_replies_that_are_all_cached_need_no_server(folder):
    Path("run.yaml").write_text(JUDGED)
    Path("judge.txt").write_text("Is {completion} right?")
    cache = ReplyCache(Path("replies.jsonl"))
    for text in "123x":
        message = {"role": "user", "content": f"Is {text} right?"}
        cache.put(content_key({"temperature": 0, "max_tokens": 1024, "model": "m", "messages": [message]}), "Score: 4")
    lines = run("--completions", "step-000001.parquet", "--only", "judge").splitlines()
    assert next(line.split() for line in lines if line.startswith("judge"))[:3] == ["judge", "6", "4"]


def test_as_json(folder):
    found = json.loads(run("--completions", "step-000001.parquet", "--json"))
    assert (found["completions"], found["prompts"], found["notes"]) == (6, 3, [])
    assert [of_one["name"] for of_one in found["rewards"]] == ["exact", "length", "digits", "sum"]
    exact, *_, total = found["rewards"]
    assert (exact["scored"], exact["mean"], exact["equal_groups"]) == (6, 4 / 6, 1)
    assert total["seconds"] is None and total["max"] == 3
    assert found["disagreements"][0] == {
        "reward": "exact",
        "other": "recorded",
        "differing": 1,
        "compared": 6,
        "examples": [{"row": 1, "exact": 0.0, "recorded": 1.0, "completion": "2"}],
    }


def test_a_dataset_in_another_order_is_noticed(folder):
    lines = Path("train.jsonl").read_text().splitlines(keepends=True)
    Path("train.jsonl").write_text("".join(reversed(lines)))
    result = CliRunner().invoke(app, ["reward", "run.yaml", "--completions", "step-000001.parquet"])
    assert result.exit_code == 2
    assert (
        "--completions: row 0 has the prompt '0+1', but row 0 of data.path has '2+1': the dataset has" in result.output
    )
    messages = [{"role": "user", "content": "0+1", "name": None}]  # as Arrow reads what has no name
    write_jsonl(Path("train.jsonl"), [{"question": messages, "answer": "1"}])
    row = {"prompt_id": 0, "completion": "1", "prompt": json.dumps([{"role": "user", "content": "0+1"}])}
    write_jsonl(Path("own.jsonl"), [row])
    assert "1 completions of 1 prompts" in run("--completions", "own.jsonl", "--only", "digits")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"completion": None}, "row 1: completion: None must be text or messages"),
        ({"completion": 5}, "row 1: completion: 5 must be text or messages"),
        ({"completion": []}, "row 1: completion: [] must be text or messages"),
        ({"completion": "2", "prompt": 5}, "row 1: prompt: 5 must be text or messages"),
        ({"completion": "2", "prompt_is_chat": 3}, "row 1: prompt_is_chat: 3 must be true or false"),
        (
            {"completion": "2", "prompt": "[{", "prompt_is_chat": True},
            "row 1: prompt: '[{' must be messages as JSON",
        ),
        ({"completion": "2", "prompt_id": [1]}, "row 1: prompt_id: [1] must be a whole number"),
        ({"completion": "2", "messages": "[5]"}, "row 1: messages: '[5]' must be messages as JSON"),
        ({"completion": "2", "completion_token_ids": 7}, "row 1: completion_token_ids: 7 must be a list of token ids"),
        ({"completion": "2", "rewards/exact": "q"}, "row 1: rewards/exact: 'q' must be a number"),
    ],
)
def test_rows_that_are_no_completions(folder, row, words):
    rows = [{"completion": "2", "answer": "2", "rewards/exact": 1}, {"answer": "2", **row}]
    write_jsonl(Path("own.jsonl"), rows)
    result = CliRunner().invoke(app, ["reward", "run.yaml", "--completions", "own.jsonl"])
    assert result.exit_code == 2
    assert f"error: --completions: {words}" in result.output


def test_code_is_run_in_the_sandbox_which_is_named(folder):
    Path("run.yaml").write_text(
        "model: {path: m}\ndata: {path: train.jsonl, prompt: question}\nrewards: [{use: code}]\ntrain: {steps: 1}\n"
        "sandbox: {backend: container, container: no-such-program, confinement: none}\n"
    )
    row = {"prompt": "one more", "tests": ["assert f(1) == 2"]}
    rows = [row | {"completion": f"```python\ndef f(x):\n    return x + {n}\n```"} for n in (1, 2)]
    write_jsonl(Path("own.jsonl"), rows)
    lines = run("--completions", "own.jsonl").splitlines()
    assert lines[0].startswith("2 completions of ")
    assert lines[1] == "sandbox: none, holds nothing"
    assert lines[2].startswith("warning: sandbox.confinement: none: code of the model runs with")
    (table,) = [line.split() for line in lines if line.startswith("code ")]
    assert table[:6] == ["code", "2", "0.5", "0.5", "0", "1"]


def test_held_out_completions_and_files_with_columns_of_their_own(folder):
    held_out = scored(group("7+7", ["14", "15"], prompt_id=0), exact=[0.0, 0.0])
    write_completions_file(Path("eval-000001.parquet"), step=1, groups=[held_out])
    assert "row 0: exact 1, recorded 0: '14'" in run("--completions", "eval-000001.parquet")
    messages = [{"role": "assistant", "content": "5"}]
    rows = [
        {"prompt": "2+3", "completion": messages, "answer": "5"},
        {"prompt": "2+3", "completion": "6", "answer": "5"},
    ]
    write_jsonl(Path("own.jsonl"), rows)
    output = run("--completions", "own.jsonl", "--only", "exact")
    assert "2 completions of 1 prompts" in output
    assert next(line for line in output.splitlines() if line.startswith("exact")).split()[1:3] == ["2", "0.5"]


def test_rows_without_a_prompt_keep_their_own_columns(folder):
    Path("run.yaml").write_text(
        "model: {path: m}\ndata: {path: train.jsonl}\nrewards: [{use: exact}]\ntrain: {steps: 1}\n"
    )
    same = {"prompt": "?", "completion": "7"}
    rows = [{"completion": str(i), "answer": str(i)} for i in range(4)] + [{**same, "answer": a} for a in "78"]
    write_jsonl(Path("own.jsonl"), rows)
    lines = run("--completions", "own.jsonl").splitlines()
    assert lines[0] == "6 completions of 6 prompts"
    assert next(line for line in lines if line.startswith("exact")).split()[1:3] == ["6", "0.8333"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "--completions is missing"),
        (["--completions", "train.jsonl"], "'train.jsonl' has no column 'completion'"),
        (
            ["--completions", "step-000001.parquet", "--only", "digit"],
            "--only: there is no reward 'digit'",
        ),
        (
            ["--completions", "step-000001.parquet", "data.path=heldout.jsonl"],
            "prompt_id 1 is not a row of",
        ),
    ],
)
def test_what_cannot_be_scored(folder, args, words):
    result = CliRunner().invoke(app, ["reward", "run.yaml", *args])
    assert result.exit_code == 2
    assert words in result.output


def test_rows_that_an_environment_brought_keep_the_messages_of_their_turns(folder):
    Path("run.yaml").write_text(
        'model: {path: m}\nrollout: {environment: game.py:Game}\ntrain: {steps: 1}\nrewards: [{use: "mine.py:turns"}]\n'
    )
    Path("mine.py").write_text("def turns(completions):\n    return [float(len(turns)) for turns in completions]\n")
    turns = [{"role": "assistant", "content": "2"}, {"role": "tool", "content": "no"}, {"role": "assistant"}]
    row = {"prompt_id": 900, "prompt": json.dumps([{"role": "user", "content": "guess"}]), "prompt_is_chat": True}
    row["completion"] = "2"
    rows = [{**row, "messages": json.dumps(turns)}, {**row, "messages": json.dumps(turns[:1])}]
    write_jsonl(Path("step.jsonl"), rows)
    assert run("--completions", "step.jsonl").splitlines()[3].split()[:6] == ["turns", "2", "2", "1", "1", "3"]


def test_prompts_end_with_the_text_of_reset_as_in_the_run(folder):
    Path("run.yaml").write_text(
        "model: {path: m}\ndata: {path: train.jsonl, prompt: question}\nrollout: {environment: game.py:Game}\n"
        "train: {steps: 1}\nrewards: [{use: 'mine.py:ends'}]\n"
    )
    Path("mine.py").write_text("def ends(prompts, **kw):\n    return [float(p == '1+1 (level 2)') for p in prompts]\n")
    played = group("1+1", ["a", "b"], prompt_id=1)
    trajectories = tuple(replace(t, observation=" (level 2)", stats=TurnStats()) for t in played.trajectories)
    one = scored(replace(played, trajectories=trajectories), ends=[1.0, 1.0])
    write_completions_file(Path("step.parquet"), step=1, groups=[one])
    lines = run("--completions", "step.parquet").splitlines()
    assert next(line for line in lines if line.startswith("ends")).split()[:4] == ["ends", "2", "1", "0"]
