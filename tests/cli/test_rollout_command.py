"""`cohort rollout`: trajectories of each kind, without training."""

import io
import json
import sys
from pathlib import Path

import pytest

from cohort.chat import ResponseParser
from commands import assert_refused, set_up
from playing import LETTER_CALLS, save_turns_model
from selection import slow

CODE = '''
import json

def look(key: str) -> str:
    """Look up a value.

    Args:
        key: name of the value
    """
    return key * 3

class Game:
    def reset(self, question, **row):
        return f" Look, {question}!"

    def look(self, key: str) -> str:
        """Look.

        Args:
            key: where
        """
        return "there"

    def get_reward(self):
        return 0.5

class Broken(Game):
    def reset(self, **row):
        raise ConnectionError("the server is gone")

async def talk(row, model):
    print("here")
    user = await model.chat("be a user", train=False)
    await model.chat("hello " + user.content)
    return {"reward": 2, "politeness": 3}

def solve(row, base_url, api_key):
    from urllib.request import Request, urlopen
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5})
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    urlopen(Request(f"{base_url}/chat/completions", body.encode(), headers)).read()
    return 0.25
'''
ROLLOUT = {
    "max_prompt_tokens": 600,
    "max_completion_tokens": 40,
    "max_turns": 2,
    "max_trajectory_tokens": 1000,
    "engine": "local",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # a random model calls by single letters, which is not how its chat template renders calls
    monkeypatch.setattr(ResponseParser, "check_tools", lambda self: None)
    save_turns_model(tmp_path / "model")
    (tmp_path / "e.py").write_text(CODE)
    return tmp_path


def test_tool_calls_results_masks_and_rewards_are_shown(folder, cohort, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    run = set_up(folder, rollout={**ROLLOUT, "tools": ["e.py:look"]}, rewards=[{"use": "exact", "weight": 0.5}])
    ended = cohort("rollout", run, "--rows", 2)
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    assert lines[0] == "▌ trained   · masked: seen by the model, not trained"
    assert [line.split()[:2] for line in lines if line.startswith("row ")] == [["row", "1"], ["row", "4"]]
    prompt = lines.index(next(line for line in lines if line.startswith("prompt, ")))
    assert lines[prompt + 1] == "  · <|im_start|>system"
    called = next(n for n, line in enumerate(lines) if line.startswith("  → look(key="))
    key = lines[called].removeprefix('  → look(key="')[0]
    assert lines[called - 1].startswith("  ▌ ")
    # text follows the call, which the template would not write there
    assert lines[called + 1].startswith("history was rewritten") and lines[called + 1].endswith(" tokens masked")
    assert f"  · {key * 3}<|im_end|>" in lines[called + 2 :]
    assert any(line.startswith("turn 2, ") for line in lines)
    assert sum(line.startswith("end: ") for line in lines) == 2
    assert "reward: 0 = exact 0 (weight 0.5)" in lines
    assert lines[-2].startswith("2 trajectories: mean reward 0; ended: ")
    assert lines[-1].startswith("means: ")
    assert not (folder / "run").exists(), "nothing is written"


def test_the_tool_python_runs_code_and_the_sandbox_is_named(tmp_path, cohort, monkeypatch):
    monkeypatch.setattr(ResponseParser, "check_tools", lambda self: None)
    function = {"name": "python", "arguments": {"code": "6 * 7"}}
    monkeypatch.setitem(LETTER_CALLS["fields"]["tool_calls"]["transform"], "function", function)
    save_turns_model(tmp_path / "model")
    # no backend of this name is there, so that the code runs without one
    sandbox = {"backend": "container", "container": "no-such-program", "confinement": "none"}
    run = set_up(tmp_path, rollout={**ROLLOUT, "tools": ["python"]}, rewards=[{"use": "exact"}], sandbox=sandbox)
    ended = cohort("rollout", run, "--rows", 1, "--json")
    assert ended.code == 0, ended.err
    told = ["sandbox: none, holds nothing", "warning: sandbox.confinement: none: code of the model runs with"]
    assert [line[: len(text)] for line, text in zip(ended.err.splitlines(), told, strict=True)] == told
    (trajectory,) = json.loads(ended.out)
    results = [message["content"] for message in trajectory["messages"] if message["role"] == "tool"]
    assert set(results) == {"42\n"}


def test_environments_without_a_prompt_and_several_generations(folder, cohort):
    run = set_up(folder, rollout={**ROLLOUT, "environment": "e.py:Game"}, rewards=[])
    ended = cohort("rollout", run, "--rows", 1, "--generations", 2, "--full")
    assert ended.code == 0, ended.err
    assert "row 1, trajectory 2" in ended.out
    assert "reward: 0.5 = Game 0.5" in ended.out
    assert "Look, " in ended.out and "more lines" not in ended.out


def test_programs_as_json(folder, cohort):
    run = set_up(folder, rollout={**ROLLOUT, "environment": "e.py:talk"}, rewards=[])
    ended = cohort("rollout", run, "--rows", 1, "--json")
    assert ended.code == 0, ended.err
    assert ended.err == "here\n"
    (trajectory,) = json.loads(ended.out)
    assert (trajectory["reward"], trajectory["rewards"]) == (2.0, {"talk": 2.0})
    assert trajectory["metrics"] == {"politeness": 3.0}
    user, reply = trajectory["calls"]
    assert (user["trained"], reply["trained"]) == (False, True)
    (sequence,) = trajectory["sequences"]
    assert sequence["token_ids"][-len(reply["token_ids"]) :] == reply["token_ids"]
    assert sum(sequence["loss_mask"]) == len(reply["token_ids"])
    assert len(sequence["loss_mask"]) == reply["context_tokens"] + len(reply["token_ids"])


def test_agents(folder, cohort):
    run = set_up(folder, rollout={**ROLLOUT, "agent": "e.py:solve"}, rewards=[])
    ended = cohort("rollout", run, "--rows", 1)
    assert ended.code == 0, ended.err
    assert "turn 1, 5 tokens trained, " in ended.out and "reward: 0.25 = solve 0.25" in ended.out


@slow("it trains a step; other tests show trajectories")
def test_single_completions_are_those_of_the_first_step(folder, cohort):
    lengths = {"max_prompt_tokens": 64, "max_completion_tokens": 6, "engine": "local"}
    run = set_up(folder, rollout={**lengths, "num_generations": 3})
    ended = cohort("rollout", run, "--rows", 2, "--json")
    assert ended.code == 0, ended.err
    shown = [trajectory["calls"][0]["token_ids"] for trajectory in json.loads(ended.out)]
    assert cohort("train", run, "train.steps=1").code == 0
    import pyarrow.parquet as pq

    table = pq.read_table(folder / "run" / "completions" / "step-000001.parquet")
    assert shown == table["completion_token_ids"].to_pylist()[::3]


def test_a_terminal_without_unicode(folder, cohort, monkeypatch):
    run = set_up(folder, rollout={"max_prompt_tokens": 64, "max_completion_tokens": 6, "engine": "local"})
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    ended = cohort("rollout", run, "--rows", 1)
    assert ended.code == 0, ended.err
    stdout.flush()
    assert b"  \\u258c " in stdout.buffer.getvalue()


def test_failures_are_shown_in_full_and_the_command_fails(folder, cohort):
    run = set_up(folder, rollout={**ROLLOUT, "environment": "e.py:Broken"}, rewards=[])
    ended = cohort("rollout", run, "--rows", 1)
    assert "ConnectionError: the server is gone" in ended.out
    assert "end: environment_error; 0 turns, 0 trained tokens; 1 retry" in ended.out
    assert "reward: not scored" in ended.out
    assert (ended.code, ended.err) == (1, "error: rollout: every trajectory failed; the errors are above\n")


def test_what_training_refuses_is_refused(folder, cohort):
    run = set_up(folder, rollout={**ROLLOUT, "tools": ["e.py:lock"]})
    assert_refused(cohort("rollout", run), "rollout.tools", "'lock'")
