"""Runs that train with an agent, over both engines."""

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cohort
from agents import LIMITS, post
from cohort import launch
from cohort.chat import ChatTemplate, ResponseParser
from cohort.config import config_from_dict
from cohort.errors import TrainingError, UserError
from cohort.records import join_calls
from cohort.rollout import RolloutCollector
from cohort.rollout.endpoint.agent import AgentProgram
from cohort.rollout.environments.trajectory import TrajectoryRunner
from fake_vllm import ThreadServer, logprob_of
from runs import Notes, changed, in_a_process, make_inputs, metric, stop_after, train
from selection import slow
from tiny import make_tokenizer
from vllm_runs import KEY, SAMPLING, prompts, run_with

# With the standard library alone, as an agent in another environment would be
AGENT = """
import json
import os
import urllib.request

def ask(base_url, api_key, messages):
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    body = json.dumps({"model": "gpt-5", "messages": messages, "temperature": 0.3}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request) as response:
        return json.load(response)["choices"][0]["message"]

def solve(row, base_url, api_key):
    messages = [{"role": "user", "content": row["question"]}]
    messages.append(ask(base_url, api_key, messages))
    messages.append({"role": "user", "content": f"sure? {row['level'] % 2}"})
    reply = ask(base_url, api_key, messages)["content"]
    return {"reward": sum(c.isdigit() for c in reply) / 12, "length": len(reply)}

def crash(row, base_url, api_key):
    ask(base_url, api_key, [{"role": "user", "content": "hi"}])
    if row["level"] % 2:
        os._exit(7)
    return float(os.getppid())

def idle(row, base_url, api_key):
    return 1.0
"""


def agent_config(folder: Path, agent: str = "solve") -> dict[str, Any]:
    (folder / "my_agent.py").write_text(AGENT)
    rollout = {"agent": f"{folder}/my_agent.py:{agent}", "max_turns": 3}
    return changed(make_inputs(folder), rollout=rollout, train={"steps": 2}, eval={"max_prompts": 3, "every": 0})


@slow("`cohort rollout` plays an agent over the local engine")
def test_a_run_trains_with_an_agent_over_the_local_engine(tmp_path):
    notes = Notes()
    run = cohort.train(agent_config(tmp_path), display=notes).run_dir
    assert [note for note in notes.told if "'temperature'" in note] == [
        "rollout.agent: solve sends 'temperature', which is ignored: sampling is set by the run, because its loss "
        "assumes it"
    ]
    assert len(metric(run, "rewards/solve/mean")) == 2 and any(metric(run, "grad_norm"))
    assert metric(run, "rollout/unauthorized_requests") == [0, 0]
    assert metric(run, "completions/broken") == [0, 0]


@slow("`make test` trains once, with the same agent")
def test_the_same_seed_gives_the_same_trajectories_on_three_ranks_and_after_a_resume(tmp_path):
    """Agents run in threads, whose timing decides which calls share a batch."""
    config = changed(agent_config(tmp_path), train={"steps": 4}, eval={"every": 2}, run={"checkpoint_every": 1})
    whole = train(config).run_dir
    resumed = changed(config, run={"dir": str(tmp_path / "resumed")})
    with pytest.raises(KeyboardInterrupt):
        cohort.train(resumed, display=stop_after(2))
    train(resumed, resume=True)
    ranks = changed(config, run={"dir": str(tmp_path / "ranks")}, hardware={"processes": 3})
    assert in_a_process(launch_and_train, ranks) == 0
    for run in (tmp_path / "resumed", tmp_path / "ranks"):
        for name in ("reward", "num_tokens", "completions/mean_length", "eval/accuracy", "eval/reward"):
            assert metric(run, name) == metric(whole, name), (run, name)
        np.testing.assert_allclose(metric(run, "grad_norm"), metric(whole, "grad_norm"), rtol=1e-3)


def launch_and_train(config: dict[str, Any]) -> None:
    """Train on the configured number of ranks."""
    launch.train(config_from_dict(config))


@slow("tests of agents have one that never calls")
def test_a_run_whose_agent_never_calls_the_model_ends_and_says_why(tmp_path):
    why = r"max_failed_ratio: 0\.5: 12 of 12 trajectories failed; the first errors:\n\nthe environment ended without"
    with pytest.raises(TrainingError, match=why):
        train({**agent_config(tmp_path, "idle"), "eval": None})
    with pytest.raises(TrainingError, match=r"evaluation ended with environment_error; .*\n\nthe environment ended"):
        train(agent_config(tmp_path, "idle"))


@slow("tests of child processes have functions that crash")
def test_an_agent_in_a_process_of_its_own_may_crash(tmp_path):
    config = changed(agent_config(tmp_path, "crash"), rollout={"isolate": True, "environment_retries": 0})
    config = changed(config, rollout={"max_failed_ratio": 1.0}, train={"steps": 1, "prompts_per_step": 4})
    run = train(config).run_dir
    (broken,) = metric(run, "completions/broken")
    assert 0 < broken < 16 and broken % 4 == 0  # the groups of odd rows
    assert metric(run, "rewards/crash/mean") == [os.getpid()]


def test_an_agent_that_does_not_exist_is_found_before_anything_is_loaded(tmp_path):
    with pytest.raises(UserError, match=r"rollout.agent: .* has no 'solver'; did you mean solve"):
        train(agent_config(tmp_path, "solver"))


def test_agents_run_over_vllm():
    tokenizer = make_tokenizer()

    def solve(row: Any, base_url: str, api_key: str) -> float:
        messages: list[Any] = [{"role": "user", "content": f"prompt {row['answer']}"}]
        for _ in range(2):
            answer = post(base_url, api_key, {"messages": messages, "logprobs": True}).json()["choices"][0]
            messages += [answer["message"], {"role": "user", "content": "go on"}]
        return 1.0

    runner = TrajectoryRunner(
        AgentProgram(solve, name="solve"),
        template=ChatTemplate(tokenizer),
        parser=ResponseParser(tokenizer),
        limits=LIMITS,
        prompt_column="question",
        retries=0,
    )
    with run_with(ThreadServer(max_model_len=4096)) as run:
        collector = RolloutCollector(run.engine, tokenizer, rollout_function=runner, close_environments=runner.close)
        with closing(collector):
            groups = collector.collect(prompts(2), SAMPLING, KEY)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    assert [len(trajectory.calls) for trajectory in trajectories] == [2] * 6
    for trajectory in trajectories:
        assert trajectory.error is None and trajectory.calls[0].policy_version == 7
        assert len(join_calls(trajectory.calls)) == 1  # the second call continues the first
        for call in trajectory.calls:
            np.testing.assert_array_equal(call.sampling_logprobs, [logprob_of(token) for token in call.token_ids])
