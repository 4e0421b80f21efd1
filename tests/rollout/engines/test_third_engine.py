"""A rollout engine of one folder and one config class: the rest treats it by what the class says it can do."""

from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, Literal

import pyarrow.parquet as pq
import pytest

from cohort.config import SamplingConfig, ServersConfig, config_from_dict
from cohort.errors import TrainingError, UserError
from cohort.launch.serve import serve_command
from cohort.launch.slurm import plan_rollout_nodes
from cohort.plan.layout import plan_layout
from cohort.plan.shape import preset_shape
from cohort.plan.timing import step_times
from cohort.rollout.engines.servers import setup as servers_setup
from cohort.rollout.engines.servers.placement import Placement, split_machine
from cohort.run.folder import config_changes
from cohort.trainer.without_training import sample_rows
from cohort.trainer.worker import Worker
from cohort_check.launch import Launch, Setting
from cohort_check.rules.cohort import cohort_rules
from plans import EIGHT
from playing import save_turns_model, turns_tokenizer
from runs import changed, make_inputs, metric, train
from stub_engine.server import serving
from stub_engine.setup import StubHandle, StubSetup
from third_engine import known_engine
from tiny import make_tokenizer, write_jsonl

RUN: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "rewards": [{"use": "math"}]}


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    with known_engine():
        yield


def stub(**keys: Any) -> dict[str, Any]:
    return {**RUN, **{section: value for section, value in keys.items() if section != "rollout"}} | {
        "rollout": {"engine": "stub", **keys.get("rollout", {})}
    }


def test_a_run_samples_ahead_on_it_and_corrects_by_default(tmp_path: Path):
    tokenizer = make_tokenizer()
    with serving(len(tokenizer)) as server:
        rollout = {"engine": "stub", "urls": [server.url], "max_staleness": 1, "parity_every": 0}
        train(changed(make_inputs(tmp_path), rollout=rollout, train={"steps": 4}))
    assert server.versions == [0, 1, 2, 3, 4]  # the last for the evaluation at the end
    assert set(server.sampled_versions) <= set(server.versions)
    assert metric(tmp_path / "run", "rollout/staleness_max")[1:] == [1, 1, 1]
    assert len(metric(tmp_path / "run", "sampling/importance_weight/clipped_ratio")) == 4


def test_trajectories_of_several_turns_are_sampled_on_it(tmp_path: Path):
    """By a program, while earlier steps train."""
    save_turns_model(tmp_path / "base")
    (tmp_path / "program.py").write_text(
        "async def run(row, model):\n"
        "    first = await model.chat('hello')\n"
        "    go_on = {'role': 'user', 'content': 'go on'}\n"
        "    await model.chat([{'role': 'user', 'content': 'hello'}, first.message, go_on])\n"
        "    return float(len(first.content))\n"
    )
    with serving(len(turns_tokenizer())) as server:
        lengths = {
            "num_generations": 4,
            "max_prompt_tokens": 64,
            "max_completion_tokens": 6,
            "max_trajectory_tokens": 99,
        }
        train(
            {
                "model": {"path": str(tmp_path / "base")},
                "rollout": {
                    "engine": "stub",
                    "urls": [server.url],
                    "max_staleness": 1,
                    "parity_every": 0,
                    "environment": f"{tmp_path}/program.py:run",
                    "num_generations": 4,
                    **lengths,
                },
                "train": {"steps": 3, "prompts_per_step": 2, "learning_rate": 1e-3},
                "run": {"dir": str(tmp_path / "run"), "checkpoint_every": 0},
            }
        )
    assert server.versions == [0, 1, 2, 3]
    assert len(server.sampled_versions) >= 6 * (1 + 4), "calls of a group share a request in the first turn only"
    assert max(metric(tmp_path / "run", "completions/max_length")) > 6
    assert all(metric(tmp_path / "run", "rewards/run/std"))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"rollout": {"min_p": 0.1}},
            "rollout.min_p: 0.1 is not supported by stub; use 0, which is off, or rollout.engine: local",
        ),
        (
            {"eval": {"repetition_penalty": 1.2}},
            "eval.repetition_penalty: 1.2 is not supported by stub; use 1, which is off, or rollout.engine: local",
        ),
    ],
)
def test_sampling_that_its_program_does_not_have_is_refused(tmp_path: Path, sections: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        train(changed(changed(make_inputs(tmp_path), rollout={"engine": "stub", "parity_every": 0}), **sections))


def test_its_own_servers_are_started_published_to_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The keys of servers have an effect without a line of the engine's about them."""
    handles: list[StubHandle] = []
    make_server = StubSetup.make_server

    def remembered(*args: Any) -> StubHandle:
        handles.append(make_server(*args))
        return handles[-1]

    monkeypatch.setattr(StubSetup, "make_server", remembered)
    rollout = {"engine": "stub", "servers": 2, "gpu_memory_utilization": 0.3, "dtype": "bfloat16"}
    run = changed(make_inputs(tmp_path), rollout=rollout, train={"steps": 2}, hardware={"device": "cpu"})
    train(changed(run, rollout={"parity_tolerance": 100.0}))
    servers = [handle.server for handle in handles]
    assert [server.versions for server in servers] == [[0, 1, 2]] * 2
    assert all(
        server.gpu_memory_utilization == 0.3 and set(server.dtypes.values()) == {"torch.bfloat16"} for server in servers
    )
    with pytest.raises(TrainingError, match=r"parity: after step 0 the logprobs of http://127\.0\.0\.1:\d+ differ"):
        train(changed(run, rollout={"parity_tolerance": 1e-6}, run={"dir": str(tmp_path / "compared")}))


def test_on_shared_gpus_cached_memory_is_freed_before_servers_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On a resume, too, when the optimizer's state has just been loaded."""
    events: list[str] = []

    def log(cls: type, name: str) -> None:
        method = getattr(cls, name)
        called = wraps(method)(lambda *args: (events.append(name), method(*args))[1])
        monkeypatch.setattr(cls, name, called)

    shared = Placement(gpus=("",), shared=True, reason="shared")
    monkeypatch.setattr(servers_setup, "server_placement", lambda config: shared)
    run = changed(make_inputs(tmp_path), rollout={"engine": "stub", "parity_every": 0}, train={"steps": 1})
    run = changed(run, hardware={"device": "cpu"}, run={"checkpoint_every": 1})
    for name in ("empty_cache", "load_engine_state"):
        log(Worker, name)
    log(StubHandle, "start")
    train(run)
    assert events[:2] == ["empty_cache", "start"] and events.count("start") == 1
    events.clear()
    train(changed(run, train={"steps": 2}), resume=True)
    assert events[:3] == ["load_engine_state", "empty_cache", "start"]


SPANNING = """
import asyncio

async def run(row, model):
    first = await model.chat("one")
    while row["waits"]:
        newer = await model.chat("is there a newer version?", train=False)
        if newer.call.policy_version > first.call.policy_version:
            break
        await asyncio.sleep(0.01)
    second = await model.chat("two")
    return float(second.call.token_ids.sum() % 7)
"""


def test_each_call_of_a_trajectory_that_spans_updates_keeps_its_version(tmp_path: Path):
    (tmp_path / "e.py").write_text(SPANNING)
    write_jsonl(tmp_path / "rows.jsonl", [{"waits": waits} for waits in (False, True, False)])
    with serving(len(turns_tokenizer())) as server:
        lengths = {"max_prompt_tokens": 64, "max_completion_tokens": 4, "num_generations": 2}
        rollout = {"engine": "stub", "urls": [server.url], "max_staleness": 1, "parity_every": 0, **lengths}
        train(
            {
                "model": {"path": str(save_turns_model(tmp_path / "base"))},
                "data": {"path": str(tmp_path / "rows.jsonl"), "shuffle": False},
                "rollout": {**rollout, "environment": f"{tmp_path}/e.py:run"},
                "train": {"steps": 3, "prompts_per_step": 1},
                "run": {"dir": str(tmp_path / "run")},
            }
        )
    tables = [pq.read_table(file).to_pylist() for file in sorted((tmp_path / "run" / "completions").iterdir())]
    (step,) = [step for step, rows in enumerate(tables) if rows[0]["prompt_id"] == 1]
    assert step > 0
    for row in tables[step]:
        versions = [call["policy_version"] for call in row["calls"] if call["trained"]]
        assert versions[0] == 0 < versions[1]
        assert row["policy_version"] == 0
    assert metric(tmp_path / "run", "rollout/staleness_max")[step] == step


def test_trajectories_without_training_come_from_its_servers(tmp_path: Path):
    tokenizer = make_tokenizer()
    with serving(len(tokenizer)) as server:
        inputs = make_inputs(tmp_path)
        config = config_from_dict(changed(inputs, rollout={"engine": "stub", "urls": [server.url]}))
        sampled = sample_rows(config, rows=2, generations=3)
    assert server.versions == [0]
    assert [len(group.trajectories) for group in sampled.groups] == [3, 3]
    assert not (tmp_path / "run").exists()


def test_plan_and_placement_have_its_servers():
    config = config_from_dict(stub(rollout={"tensor_parallel": 2}, hardware={"rollout_gpus": 4}))
    layout = plan_layout(config, preset_shape("llama3-1b"), EIGHT)
    assert (layout.num_training, layout.num_sampling, layout.shared) == (4, 4, False)
    assert "(2 stub servers, 2 GPUs each)" in layout.reason
    times = {
        staleness: step_times(
            config_from_dict(stub(rollout={"max_staleness": staleness})),
            preset_shape("llama3-1b"),
            EIGHT,
            num_training=4,
            num_sampling=4,
        )
        for staleness in (0, 1)
    }
    assert not times[0].overlap and times[1].overlap and times[1].step_s < times[0].step_s
    split = split_machine(config_from_dict(stub(hardware={"device": "cpu"})))
    assert split is not None and split.reason == "1 process and 1 stub server share the CPU"
    assert split_machine(config_from_dict(stub(rollout={"urls": ["http://a:1"]}))) is None


def test_what_contradicts_its_capabilities_is_refused():
    adapter = {"path": "m", "adapter": {"rank": 4}, "quantization": "int8"}
    with pytest.raises(UserError, match=r"quantization: int8 with rollout\.engine: stub: servers load the unquant"):
        config_from_dict(stub(model=adapter))
    with pytest.raises(UserError, match=r"stale_completions: correct has no effect with"):
        config_from_dict(stub(rollout={"max_staleness": 1}, algorithm={"sampling_correction": "none"}))
    # `auto` truncates, so that the cap has an effect
    config_from_dict(stub(algorithm={"sampling_correction_cap": 3.0}))


def test_its_servers_are_not_started_as_vllm():
    config = config_from_dict(stub(hardware={"device": "cpu"}))
    with pytest.raises(UserError, match=r"rollout\.engine: stub: `cohort serve` cannot start a stub server; use vllm"):
        serve_command(config, host="127.0.0.1", port=8000)
    plan_rollout_nodes(config, nodes=2, rollout_nodes=0, gpus_per_node=0)
    with pytest.raises(UserError, match=r"--rollout-nodes: 1 with rollout\.engine: stub .* cannot start a stub server"):
        plan_rollout_nodes(config, nodes=2, rollout_nodes=1, gpus_per_node=0)


def test_a_run_resumes_with_what_servers_may_change():
    run = config_from_dict(stub())
    assert config_changes(run, config_from_dict(stub(rollout={"servers": 2, "start_timeout_s": 60}))) == {}
    other = {"rollout.dtype": ("auto", "float32")}
    assert config_changes(run, config_from_dict(stub(rollout={"dtype": "float32"}))) == other


def test_check_tells_who_samples():
    settings = {"rollout.engine": Setting("stub", ""), "model.path": Setting("m", "")}
    launch = Launch(framework="cohort", form="yaml", reason="", settings=settings)
    assert cohort_rules(launch).sampling == "by stub servers"


def test_an_engine_that_is_not_known_is_refused_where_the_configuration_is_read():
    message = r"rollout\.engine: 'sglang' is not one of auto, local, object, vllm, stub"
    with pytest.raises(UserError, match=message):
        config_from_dict({**RUN, "rollout": {"engine": "sglang"}})
    settings = {"rollout.engine": Setting("sglang", ""), "model.path": Setting("m", "")}
    judged = cohort_rules(Launch(framework="cohort", form="yaml", reason="", settings=settings))
    assert judged.blocked is not None


def test_an_engine_that_does_not_declare_its_capabilities_is_refused_where_it_is_defined():
    every = "default_correction, sampled_by, samples_ahead, shares_weights, uses_servers"
    with pytest.raises(TypeError, match=f"^rollout engine Forgetful must declare {every}$"):

        class Forgetful(SamplingConfig):
            engine: Literal["forgetful"] = "forgetful"

    some = "default_correction, has_serve_command, program, sampled_by"
    with pytest.raises(TypeError, match=f"^rollout engine OverServers must declare {some}$"):

        class OverServers(ServersConfig):
            server_name: ClassVar[str] = "new server"
            engine: Literal["new"] = "new"
