"""Environments of libraries, as they are: each plays by a script, and its example trains a random model."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

import cohort
from cohort.config.hardware import SandboxConfig
from cohort.config.rollout import EnvironmentSpec
from cohort.errors import UserError
from cohort.records import Trajectory, join_calls
from cohort.rollout.engines.base import CallKey
from cohort.rollout.environments.sources import EnvironmentSource, find_source
from cohort.sandbox import SharedSandbox
from playing import call, play, save_turns_model
from runs import Notes, changed, metric
from waiting import free_port, until

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "libraries"
MODULES = {
    "reasoning_gym": "reasoning_gym",
    "textarena": "textarena",
    "skyrl_gym": "skyrl_gym",
    "openenv": "openenv.core",
    "verifiers": "verifiers.v1",
}
NAMES = {
    "reasoning_gym": "leg_counting",
    "textarena": "GuessTheNumber-v0",
    "skyrl_gym": "gsm8k_multi_turn",
    "openenv": "openenv",
    "verifiers": "verifiers_letters",
}


def need(library: str) -> None:
    pytest.importorskip(MODULES[library], reason=f"{library} is not installed", exc_type=ImportError)
    if library == "verifiers" and shutil.which("uv", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("uv is not installed, by which verifiers starts its programs")


def source(use: str, **args: Any) -> EnvironmentSource:
    sandbox = SharedSandbox(SandboxConfig(packages=("reasoning-gym",), confinement="none"))
    return find_source(EnvironmentSpec(use=use, args=args), field="rollout.environment", sandbox=sandbox)


def refusal(use: str, **args: Any) -> str:
    with pytest.raises(UserError) as refused:
        source(use, **args)
    return str(refused.value)


def trajectories(folder: Path, script: Any, rows: list[dict[str, Any]], environment: Any, **rollout: Any) -> list[Any]:
    """Two trajectories per row."""
    groups = play(folder, script, rows, environment=environment, **rollout)
    found: list[Trajectory] = [trajectory for group in groups for trajectory in group.trajectories]
    for trajectory in found:
        assert trajectory.error is None
    return found


@contextmanager
def served(script: Path, *arguments: str) -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen([sys.executable, str(script), *arguments, str(port)])
    try:

        def answers() -> bool:
            assert process.poll() is None
            try:
                return httpx2.get(f"http://127.0.0.1:{port}/health").status_code == 200
            except httpx2.HTTPError:
                return False

        until(answers, every_s=0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("library", MODULES)
def test_a_library_that_is_not_installed_is_named_with_its_extra(monkeypatch, library):
    module = MODULES[library]
    for name in (module.partition(".")[0], module):
        monkeypatch.setitem(sys.modules, name, None)
    assert f"pip install 'cohort-rl[{library.replace('_', '-')}]'" in refusal(f"{library}:anything")


@pytest.mark.extras
@pytest.mark.parametrize("library", MODULES)
def test_the_example_trains(tmp_path, monkeypatch, library):
    need(library)
    monkeypatch.chdir(EXAMPLES)
    save_turns_model(tmp_path / "model")
    config = yaml.safe_load((EXAMPLES / f"{library}.yaml").read_text())
    config = changed(
        config,
        rollout={"num_generations": 2, "max_prompt_tokens": 3000, "max_completion_tokens": 8, "max_turns": 2},
        train={"steps": 2, "prompts_per_step": 2},
        run={"dir": str(tmp_path / "run")},
    )
    config["model"] = {"path": str(tmp_path / "model")}
    if "sandbox" in config:
        config["sandbox"]["confinement"] = "none"
    config.pop("eval", None)
    if "data" in config:
        config["data"]["path"] = str(EXAMPLES / config["data"]["path"])

    def train() -> None:
        notes = Notes()
        run = cohort.train(config, display=notes).run_dir
        assert len(metric(run, f"rewards/{NAMES[library]}/mean")) == 2
        assert metric(run, "completions/broken") == [0, 0]
        assert not [note for note in notes.told if "ignored" in note]

    if library == "openenv":
        with served(EXAMPLES / "openenv_server.py", "--port") as url:
            config["rollout"]["environment"]["use"] = f"openenv:{url}"
            train()
    else:
        train()


@pytest.mark.extras
def test_reasoning_gym_scores_answers_of_its_own_rows(tmp_path):
    need("reasoning_gym")
    use, args = "reasoning_gym:leg_counting", {"max_animals": 3, "system_prompt": "direct"}
    made = source(use, **args)
    assert made.rows is not None
    rows = made.rows(3, 0)
    assert rows == made.rows(3, 0) and len(rows) == 3
    train, held_out = ({row["question"] for row in made.rows(200, seed)} for seed in (0, 1))
    assert len(train & held_out) < 20, "near seeds share few tasks"

    def script(context: str, key: CallKey) -> str:
        assert rows[key.prompt_id]["question"] in context and "Answer the question directly" in context
        return f"So <answer>{rows[key.prompt_id]['answer']}</answer>" if key.index else "no idea"

    sandbox = {"packages": ["reasoning-gym"], "confinement": "none"}
    played = trajectories(tmp_path, script, rows, {"use": use, "args": args}, sandbox=sandbox)
    assert [t.rewards["leg_counting"] for t in played] == [0.0, 1.0] * 3

    assert "did you mean leg_counting" in refusal("reasoning_gym:leg_countin")
    assert "max_animals must be >= min_animals" in refusal(use, max_animals=1)
    assert "remove it" in refusal(use, seed=3)


@pytest.mark.extras
@pytest.mark.parametrize("isolate", [False, True])
def test_textarena_plays_a_game_of_several_turns(tmp_path, isolate):
    need("textarena")
    use = "textarena:GuessTheNumber-v0"

    def script(context: str, key: CallKey) -> str:
        """A binary search, so a game of 20 numbers ends within 5 turns."""
        low, high = 1, 20
        for line in context.split("<|im_start|>")[1:]:
            if line.startswith("assistant\n["):
                guess = int(line.partition("[")[2].partition("]")[0])
            elif "target number is higher" in line:
                low = guess + 1
            elif "target number is lower" in line:
                high = guess - 1
        return f"[{(low + high) // 2}]"

    made = source(use)
    assert made.rows is not None
    rows = made.rows(3, 5)
    played = trajectories(tmp_path, script, rows, use, isolate=isolate, max_turns=6)
    assert [t.rewards["GuessTheNumber-v0"] for t in played] == [1.0] * 6
    for one, other in zip(played[::2], played[1::2], strict=True):
        assert one.messages == other.messages, "a group plays the same game"
    assert len({len(t.calls) for t in played}) > 1, "and other groups others"

    (cut, _) = trajectories(tmp_path, lambda context, key: "[1]", rows[:1], use, isolate=isolate, max_turns=1)
    assert cut.end == "max_turns" and cut.rewards == {"GuessTheNumber-v0": 0.0} and cut.metrics["finished"] == 0


@pytest.mark.extras
def test_textarena_trains_the_first_of_several_players(tmp_path):
    need("textarena")
    use = "textarena:TicTacToe-v0"
    environment = {"use": use, "args": {"num_players": 2}}
    moves = {0: "0", 1: "2", 2: "4", 3: "1", 4: "8"}  # the first player has the diagonal
    played = trajectories(tmp_path, lambda c, key: f"[{moves[key.turn]}]", [{"seed": 1}], environment, max_turns=5)
    for trajectory in played:
        assert trajectory.rewards == {"TicTacToe-v0": 1.0}
        assert [call.trained for call in trajectory.calls] == [True, False, True, False, True]
    assert "cannot be played" in refusal(use)  # with one player
    assert "did you mean TicTacToe-v0" in refusal("textarena:TicTacToe-v1")


@pytest.mark.extras
@pytest.mark.parametrize("isolate", [False, True])
def test_skyrl_gym_plays_rows_in_its_form(tmp_path, isolate):
    need("skyrl_gym")
    use = "skyrl_gym:gsm8k_multi_turn"
    row = {"prompt": [{"role": "user", "content": "2+3?"}], "reward_spec": {"ground_truth": "5"}, "extra_info": {}}

    def script(context: str, key: CallKey) -> str:
        return "#### 5" if key.turn == key.index else "#### 4"

    first, second = trajectories(tmp_path, script, [row], use, isolate=isolate, max_turns=4)
    assert first.rewards == {"gsm8k_multi_turn": 1.0} and first.metrics == {"steps": 1}
    assert second.rewards == {"gsm8k_multi_turn": pytest.approx(1 + 0.2 / 4)} and second.metrics == {"steps": 2}
    assert second.messages[1]["content"].startswith("Please provide")
    assert "did you mean gsm8k" in refusal("skyrl_gym:gsm8")


@pytest.mark.extras
@pytest.mark.parametrize("isolate", [False, True])
def test_openenv_plays_replies_as_actions(tmp_path, isolate):
    need("openenv")
    with served(EXAMPLES / "openenv_server.py", "--port") as url:
        environment = {"use": f"openenv:{url}", "args": {"observation": "text"}}
        played = trajectories(
            tmp_path, lambda c, key: str(key.turn + 1), [{"seed": 1}], environment, isolate=isolate, max_turns=9
        )
        for trajectory in played:
            assert trajectory.rewards == {"openenv": 1.0} and len(trajectory.calls) == 3
            assert [m["content"] for m in trajectory.messages] == ["1", "Higher.", "2", "Higher.", "3"]
        assert "'observatio' is none of" in refusal(f"openenv:{url}", observatio="text")
    assert "cannot be used" in refusal(f"openenv:{url}")


@pytest.mark.extras
def test_openenv_plays_with_the_tools_of_a_server(tmp_path):
    need("openenv")
    replies = [call("look", '{"key": "k"}'), call("peek"), call("look", '{"key": 3}'), "k is 7"]
    with served(ROOT / "tests" / "helpers" / "openenv_tools.py", "tools") as url:
        played = trajectories(tmp_path, lambda c, key: replies[key.turn], [{"seed": 1}], f"openenv:{url}", max_turns=5)
    for trajectory in played:
        answers = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
        assert answers[0] == "k is 7"
        assert "there is no tool 'peek'" in answers[1] and "must be of type string" in answers[2]
        assert len(trajectory.calls) == 4


@pytest.mark.extras
def test_openenv_plays_actions_of_several_fields_in_one_session_at_a_time(tmp_path):
    need("openenv")
    moves = [call("step", json.dumps({"x": x, "y": 1})) for x in (0, 1)]
    with served(ROOT / "tests" / "helpers" / "openenv_tools.py", "board") as url:
        environment = {"use": f"openenv:{url}", "args": {"max_sessions": 1}}
        rows = [{"seed": seed} for seed in range(4)]
        played = trajectories(tmp_path, lambda c, key: moves[key.turn], rows, environment, environment_retries=0)
    assert [t.rewards["openenv"] for t in played] == [1.0] * 8
    assert {len(t.calls) for t in played} == {1, 2}


@pytest.mark.extras
def test_verifiers_plays_a_taskset_unchanged(tmp_path, monkeypatch):
    need("verifiers")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    use = "verifiers:verifiers_letters"
    made = source(use)
    assert made.rows is not None and sorted(row["task"] for row in made.rows(3, 0)) == [*range(8)]
    played = trajectories(
        tmp_path, lambda c, key: "grdn" if key.index else "...", [{"task": 0}], use, isolate=True, max_turns=2
    )
    assert [t.rewards for t in played] == [{"verifiers_letters": 0.0}, {"verifiers_letters": 1.0}]
    assert played[1].metrics == {"length": 4.0}
    assert "cannot be loaded" in refusal("verifiers:no_such_taskset")


@pytest.mark.extras
def test_verifiers_plays_a_taskset_with_tools(tmp_path, monkeypatch):
    """Its training client would render messages without their tools here, by the fallback of its `renderer`."""
    need("verifiers")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # of the processes of its tools
    replies = [call("lookup_look", '{"key": "k"}'), "7"]
    (one, other) = trajectories(tmp_path, lambda c, key: replies[key.turn], [{"task": 0}], "verifiers:verifiers_tools")
    for trajectory in (one, other):
        assert trajectory.rewards == {"verifiers_tools": 1.0} and trajectory.stats.tool_calls == 1
        assert [m["content"] for m in trajectory.messages if m["role"] == "tool"] == ["k is 7"]
        assert len(join_calls(trajectory.calls)) == 1, "the second call continues the exact tokens of the first"


@pytest.mark.extras
def test_verifiers_scores_a_taskset_that_a_token_limit_has_ended(tmp_path, monkeypatch):
    need("verifiers")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # of the processes of its tools
    replies = [call("lookup_look", '{"key": "k"}'), "7"]
    for trajectory in trajectories(
        tmp_path,
        lambda context, key: replies[key.turn],
        [{"task": 0}],
        "verifiers:verifiers_tools",
        max_turns=4,
        max_trajectory_tokens=len(replies[0]),  # at least a token of text has more than one letter
        environment_retries=0,
    ):
        assert trajectory.end == "length" and len(trajectory.calls) == 1
        assert trajectory.rewards == {"verifiers_tools": 0.0}
