"""Trajectories of several turns over a real vLLM server: tools, an environment class, programs and an agent."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

import cohort
from cohort.chat import ResponseParser
from cohort.config import config_from_dict
from cohort.display import Display
from cohort.rollout.engines.vllm.server import ServerProcess, server_options
from playing import save_turns_model
from runs import Notes, metric
from selection import slow
from serving import HEADERS, SECRET, SIZES, secret_file, start
from test_turn_runs import CODE, config
from tiny import write_jsonl

ROWS = 8
WAYS = (
    CODE
    + '''
import json
from pathlib import Path

import httpx2

from cohort.records import join_calls
from serving import engine_of

def note(trajectories, **kwargs):
    """Keep what each trajectory was; the reward is its length."""
    with Path(__file__).with_name("notes").open("a") as file:
        for t in trajectories:
            calls = [[c.policy_version, len(c.context_ids), len(c.token_ids)] for c in t.calls if c.trained]
            print(json.dumps({"end": t.end, "calls": calls, "sequences": len(join_calls(t.calls))}), file=file)
    return [float(len(t.text)) for t in trajectories]

class Across:
    """Every second row goes on only after the weights of its first turn have been replaced."""

    async def run(self, row, model):
        messages = [{"role": "user", "content": row["prompt"]}]
        reply = await model.chat(messages)
        version = reply.call.policy_version
        while row["waits"] and version == reply.call.policy_version:
            version = (await model.generate([1, 2, 3], train=False, max_tokens=1)).policy_version
            await asyncio.sleep(0.05)
        await model.chat([*messages, reply.message, {"role": "user", "content": "go on"}])

class Kills:
    """Kills the server's engine, once, between two turns."""

    num_rows = 0

    async def run(self, row, model):
        messages = [{"role": "user", "content": row["prompt"]}]
        reply = await model.chat(messages)
        self.num_rows += 1
        if self.num_rows == 3:
            engine_of(Path("killed/logs/vllm-0.log")).kill()
        await model.chat([*messages, reply.message, {"role": "user", "content": "go on"}])

class Endless:
    async def run(self, row, model):
        messages = [{"role": "user", "content": row["prompt"]}]
        while True:
            reply = await model.chat(messages)
            messages += [reply.message, {"role": "user", "content": "go on " * 5}]

def solve(row, base_url, api_key):
    """Make one call too many, which is refused."""
    messages = [{"role": "user", "content": row["prompt"]}]
    with httpx2.Client(headers={"Authorization": f"Bearer {api_key}"}, trust_env=False, timeout=100) as client:
        while True:
            answer = client.post(f"{base_url}/chat/completions", json={"messages": messages})
            answer.raise_for_status()
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "go on"}]

def solve_with_sdk(row, base_url, api_key):
    from openai import OpenAI

    messages = [{"role": "user", "content": row["prompt"]}]
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        while True:
            answer = client.chat.completions.create(model="policy", messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": "go on"}]
'''
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("turns")
    save_turns_model(folder / "base", **SIZES | {"max_position_embeddings": 4096})
    (folder / "e.py").write_text(WAYS)
    long = " and".join(" what it is" for _ in range(12))  # more than a block of the prefix cache
    write_jsonl(folder / "train.jsonl", [{"prompt": f"say {n}{long}", "waits": n % 2} for n in range(ROWS)])
    with pytest.MonkeyPatch.context() as patch:
        # a random model calls by single letters, which is not how its chat template renders calls
        patch.setattr(ResponseParser, "check_tools", lambda self: None)
        yield folder


@pytest.fixture(scope="module")
def server(folder: Path, vllm_python: str) -> Iterator[dict[str, Any]]:
    """The keys of a server as `cohort serve` starts it for one of the runs."""
    rollout = {"environment": "e.py:Game", "engine": "vllm", "vllm_python": vllm_python}
    options = server_options(config_from_dict(config(folder, rollout=rollout), base_dir=folder), gpus="")
    process = ServerProcess(options, secret=SECRET, log_file=folder / "server.log")
    try:
        start(process)
        yield {"engine": "vllm", "urls": [process.url], "secret_file": secret_file(folder), "parity_every": 1}
    finally:
        process.stop()


def prefix_hits(url: str) -> float:
    """Tokens that the server found in its prefix cache."""
    text = httpx.get(f"{url}/metrics", headers=HEADERS, timeout=20).text
    return sum(float(value) for value in re.findall(r"^vllm:prefix_cache_hits_total\S* (\S+)$", text, re.MULTILINE))


def run(folder: Path, name: str, *, display: Display | None = None, **rollout: Any) -> list[dict[str, Any]]:
    """Train for two steps; return what its trajectories were."""
    raw = config(folder, run=name, data=True, rollout=rollout, rewards=[{"use": f"{folder}/e.py:note", "weight": 0.1}])
    raw["data"]["shuffle"] = False
    (folder / "notes").write_text("")
    cohort.train(raw, display=display)
    trajectories = [json.loads(line) for line in (folder / "notes").read_text().splitlines()]
    assert len(trajectories) == 2 * 2 * 4
    assert max(len(trajectory["calls"]) for trajectory in trajectories) > 1
    assert len(metric(folder / name, "sampling/parity/mean")) == 2
    assert all(0 < difference < 1e-5 for difference in metric(folder / name, "sampling/parity/mean"))
    assert all(norm > 0 for norm in metric(folder / name, "grad_norm"))
    return trajectories


WAYS_IN: dict[str, dict[str, Any]] = {
    "tools": {"tools": ["e.py:look"]},
    "class": {"environment": "e.py:Game"},
    "program": {"environment": "e.py:Talk"},
    "limit": {"environment": "e.py:Endless", "max_turns": 8, "max_trajectory_tokens": 150},
    "agent": {"agent": "e.py:solve", "max_turns": 3},
    "agent with the SDK": {"agent": "e.py:solve_with_sdk", "max_turns": 3},
}


def assert_as_sampled(folder: Path, trajectories: list[dict[str, Any]]) -> None:
    """Trained tokens have the server's logprobs, of both policy versions."""
    differences = metric(folder, "sampling/sampling_logp_difference/max")
    assert len(differences) == 2 and all(0 < difference < 1e-4 for difference in differences)
    assert {version for t in trajectories for version, *_ in t["calls"]} == {0, 1}
    assert all(1 <= t["sequences"] <= len(t["calls"]) for t in trajectories)


@pytest.mark.parametrize("name", WAYS_IN)
def test_what_a_server_samples_is_what_is_trained(
    name: str, folder: Path, server: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    if "SDK" in name:
        pytest.importorskip("openai")
    monkeypatch.chdir(folder)
    hits = prefix_hits(server["urls"][0])
    trajectories = run(folder, name, **server, **WAYS_IN[name])
    assert prefix_hits(server["urls"][0]) > hits, "a turn goes on in the cache of the turns before"
    assert_as_sampled(folder / name, trajectories)
    if name not in ("tools", "class"):  # whose second turns follow a call in text that was cut off: a new sequence
        assert any(t["sequences"] < len(t["calls"]) for t in trajectories)
    if "agent" in name:
        assert {(len(t["calls"]), t["end"]) for t in trajectories} == {(3, "max_turns")}
    if name == "limit":
        assert {t["end"] for t in trajectories} == {"length"}
        for (_, prompt, _), *_, (_, context, sampled) in (t["calls"] for t in trajectories):
            assert context + sampled - prompt <= 150


def test_calls_of_a_trajectory_keep_their_policy_versions(
    folder: Path, server: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(folder)
    trajectories = run(folder, "across", **server, environment="e.py:Across", max_staleness=1)
    versions = [[version for version, *_ in t["calls"]] for t in trajectories]
    assert versions[:8] == 8 * [[0, 0]] and versions[8:] == 8 * [[0, 1]]
    first, second = metric(folder / "across", "sampling/sampling_logp_difference/max")
    assert first < 1e-4 < second
    assert metric(folder / "across", "rollout/staleness_max") == [0, 1]


@slow("a server of its own, which starts twice; test_runs kills one with single turns")
def test_a_server_that_is_killed_between_two_turns_loses_nothing(
    folder: Path, vllm_python: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(folder)
    own = {"engine": "vllm", "vllm_python": vllm_python, "parity_every": 1}
    notes = Notes()
    trajectories = run(folder, "killed", display=notes, **own, environment="e.py:Kills")
    assert_as_sampled(folder / "killed", trajectories)
    assert {(len(t["calls"]), t["end"] in ("answer", "length")) for t in trajectories} == {(2, True)}
    assert "restarting in" in "\n".join(notes.told)
