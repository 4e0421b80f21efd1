"""The parity gate without servers: what it lets pass, what it says when it does not, and what it compares."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from cohort.config import Config, config_from_dict
from cohort.errors import TrainingError, UserError
from cohort.ranks.collectives import SINGLE_PROCESS
from cohort.ranks.worker_group import WorkerGroup
from cohort.records import Prompt, RolloutGroup, Trajectory
from cohort.rollout import LocalEngine, SamplingParams, StepKey
from cohort.rollout.engines.local.setup import LocalSetup
from cohort.rollout.engines.servers import setup as servers_setup
from cohort.rollout.engines.servers.placement import Placement
from cohort.rollout.engines.setup import StartedEngine
from cohort.rollout.engines.vllm import setup as vllm_setup
from cohort.trainer.inputs import Inputs, build_inputs
from cohort.trainer.parity import check_parity, make_parity_gate, probe_prompts, probe_sampling
from cohort.trainer.setup import open_engine
from cohort.trainer.worker import Worker, sample
from engines import generate
from rank_workers import workers_of
from runs import changed, make_inputs
from test_laws import make_engine
from tiny import make_policy

SAMPLING = SamplingParams(num_generations=8, max_completion_tokens=6, temperature=0.9)  # the engine's temperature


def prompts(*lengths: int) -> list[Prompt]:
    return [
        Prompt(id=n, epoch=0, content="", token_ids=np.arange(length) % 50 + 5, columns={})
        for n, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def workers() -> WorkerGroup[Worker]:
    return workers_of(make_engine(make_policy()), SINGLE_PROCESS)


@pytest.fixture(scope="module")
def groups(workers: WorkerGroup[Worker]) -> list[RolloutGroup]:
    """What a server that has the trainer's weights gives: three groups of eight."""
    key = StepKey(purpose="parity", seed=0, step=0)
    return generate(LocalEngine(partial(sample, workers)), prompts(4, 9, 2), SAMPLING, key)


def shifted(groups: list[RolloutGroup], by: float, *, tokens: slice = slice(None)) -> list[RolloutGroup]:
    """The groups with other logprobs for some tokens of their completions."""

    def shift(trajectory: Trajectory) -> Trajectory:
        (call,) = trajectory.calls
        logprobs = call.sampling_logprobs.copy()
        logprobs[tokens] += by
        return replace(trajectory, calls=(replace(call, sampling_logprobs=logprobs),))

    return [replace(group, trajectories=tuple(map(shift, group.trajectories))) for group in groups]


def num_tokens(groups: list[RolloutGroup]) -> int:
    return sum(len(c.sampled_token_ids) for group in groups for c in group.trajectories)


def test_equal_logprobs_pass(workers: WorkerGroup[Worker], groups: list[RolloutGroup]):
    metrics = check_parity(workers, {"http://a": groups}, tolerance=1e-4, steps_done=0)
    assert 0 <= metrics["sampling/parity/mean"] <= metrics["sampling/parity/max"] < 1e-4


@pytest.mark.parametrize(("by", "said"), [(0.1, "0.1"), (-0.1, "0.1"), (math.nan, "nan"), (-math.inf, "inf")])
def test_other_logprobs_stop_the_run_with_the_numbers(
    workers: WorkerGroup[Worker], groups: list[RolloutGroup], by: float, said: str
):
    with pytest.raises(TrainingError) as error:
        check_parity(workers, {"http://a:8000": shifted(groups, by)}, tolerance=0.05, steps_done=150)
    assert str(error.value).startswith(
        f"parity: after step 150 the logprobs of http://a:8000 differ from the trainer's by {said} nats on average "
        f"and {said} at most, over {num_tokens(groups)} tokens of 24 completions; the mean must be at most 0.05. The "
        f"server does not sample from this policy."
    )
    assert "raise rollout.parity_tolerance" in str(error.value)


def test_one_logprob_that_is_nan_is_enough(workers: WorkerGroup[Worker], groups: list[RolloutGroup]):
    group = replace(groups[2], trajectories=(*groups[2].trajectories[1:], shifted(groups, math.nan)[2].trajectories[0]))
    with pytest.raises(TrainingError, match="by nan nats"):
        check_parity(workers, {"http://a": [*groups[:2], group]}, tolerance=1e9, steps_done=0)


def test_the_mean_is_over_tokens_and_decides(workers: WorkerGroup[Worker], groups: list[RolloutGroup]):
    """The first token of each completion alone is off, by 0.1."""
    mean = 0.1 * 24 / num_tokens(groups)
    sampled = {"http://a": shifted(groups, 0.1, tokens=slice(1))}
    metrics = check_parity(workers, sampled, tolerance=mean + 1e-4, steps_done=0)
    assert metrics["sampling/parity/mean"] == pytest.approx(mean, abs=1e-4)
    assert metrics["sampling/parity/max"] == pytest.approx(0.1, abs=1e-4)
    with pytest.raises(TrainingError):
        check_parity(workers, sampled, tolerance=mean - 1e-4, steps_done=0)


def test_of_several_servers_the_worst_counts(workers: WorkerGroup[Worker], groups: list[RolloutGroup]):
    sampled = {"http://a": groups, "http://b": shifted(groups, 0.02), "http://c": shifted(groups, 0.01)}
    metrics = check_parity(workers, sampled, tolerance=0.03, steps_done=0)
    assert metrics["sampling/parity/mean"] == pytest.approx(0.02, abs=1e-4)
    assert metrics["sampling/parity/max"] == pytest.approx(0.02, abs=1e-4)
    with pytest.raises(TrainingError, match="the logprobs of http://b differ"):
        check_parity(workers, sampled, tolerance=0.015, steps_done=0)


def test_a_probe_is_of_the_longest_prompt_and_others_and_of_the_whole_distribution():
    chosen = probe_prompts(prompts(5, 70, 8, 300, 2, 300, 40))
    assert [len(prompt.token_ids) for prompt in chosen] == [300, 70, 8, 2]
    assert chosen[0].id == 3
    cut = replace(SAMPLING, max_completion_tokens=1000, top_p=0.5, top_k=3, min_p=0.2, repetition_penalty=2.0)
    assert probe_sampling(cut) == SamplingParams(
        num_generations=2, max_completion_tokens=64, temperature=0.9, top_p=1.0, top_k=0
    )


def test_a_probe_of_few_prompts_and_short_completions():
    assert [prompt.id for prompt in probe_prompts(prompts(5, 9))] == [1, 0]
    assert probe_sampling(SAMPLING).max_completion_tokens == 6


# Of a run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the configuration of a run that samples with vLLM, and what it reads."""
    raw = changed(make_inputs(tmp_path), rollout={"engine": "vllm"}, hardware={"device": "cpu"})
    monkeypatch.setattr(vllm_setup, "check_vllm", lambda python: "0.32.0")

    def make(*overrides: str) -> tuple[Config, Inputs]:
        config = config_from_dict(raw, overrides)
        return config, build_inputs(config)

    return make


def test_servers_of_a_run_have_room_for_its_longest_sequence_and_no_more(run: Any, tmp_path: Path):
    config, inputs = run("rollout.max_prompt_tokens=64")
    setup = open_engine(config, inputs)
    assert setup.placement is not None and setup.placement.gpus == ("",) and setup.dtype == torch.float32
    options = setup.make_server("", tmp_path / "log").options
    longest = max(len(p.token_ids) for p in (*inputs.prompts.prompts, *inputs.evaluation.prompts))
    assert options.max_model_len == longest + 12 < 64  # 12 is max_completion_tokens
    assert (options.device, options.dtype) == ("cpu", "float32")


def test_servers_of_someone_else_are_neither_placed_nor_checked(run: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(vllm_setup, "check_vllm")
    setup = open_engine(*run("rollout.urls=[http://a:1, http://b:1]", "model.compute_dtype=bfloat16"))
    assert setup.placement is None and setup.dtype == torch.bfloat16


def test_the_local_engine_has_no_servers(tmp_path: Path):
    config = config_from_dict(make_inputs(tmp_path))
    assert isinstance(open_engine(config, build_inputs(config)), LocalSetup)


def test_sampling_ahead_needs_gpus_that_only_sample(run: Any, monkeypatch: pytest.MonkeyPatch):
    shared = Placement(gpus=("0",), shared=True, reason="one GPU for both")
    monkeypatch.setattr(servers_setup, "server_placement", lambda config: shared)
    with pytest.raises(UserError, match=r"rollout.max_staleness: 1 needs dedicated rollout GPUs.*\(one GPU for both\)"):
        open_engine(*run("rollout.max_staleness=1"))


@pytest.mark.parametrize(
    ("servers_dtype", "dtype", "compute_dtype", "overrides", "expected"),
    [
        (torch.float32, torch.float32, torch.float32, (), 1e-3),
        (torch.float32, torch.float64, torch.float64, (), 1e-3),
        (torch.bfloat16, torch.float32, torch.float32, (), 0.05),
        (torch.float32, torch.bfloat16, torch.float32, (), 0.05),
        (torch.float32, torch.float32, torch.bfloat16, (), 0.05),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16, ("rollout.parity_tolerance=0.2",), 0.2),
    ],
)
def test_the_tolerance_is_that_of_the_coarsest_dtype(
    run: Any, workers: WorkerGroup[Worker], servers_dtype, dtype, compute_dtype, overrides, expected
):
    config, inputs = run(*overrides)
    policy: Any = SimpleNamespace(dtype=dtype, compute_dtype=compute_dtype)
    probed = WorkerGroup(replace(workers.local, policy=policy), SINGLE_PROCESS)
    prompts = inputs.prompts.prompts
    started = StartedEngine(engine=Mock(), sample_on_each_server=Mock(), servers_dtype=servers_dtype)
    gate = make_parity_gate(config, prompts, probed, started, Mock())
    assert gate is not None and gate.tolerance == expected


def test_when_the_gate_compares(run: Any, workers: WorkerGroup[Worker], groups: list[RolloutGroup]):
    sample_on_each = Mock(return_value={"http://a": shifted(groups, 0.5)})
    config, inputs = run("rollout.parity_every=3", "rollout.temperature=0.9", "rollout.top_p=0.5", "train.seed=5")
    collector = Mock()
    started = StartedEngine(engine=Mock(), sample_on_each_server=sample_on_each, servers_dtype=torch.float32)
    gate = make_parity_gate(config, inputs.prompts.prompts, workers, started, collector)
    assert gate is not None
    assert [gate.is_due(n) for n in range(1, 7)] == [False, False, True, False, False, True]
    with pytest.raises(TrainingError, match="after step 3 the logprobs of http://a differ"):
        gate.check(3)
    key = StepKey(purpose="parity", seed=5, step=3)
    sample_on_each.assert_called_once_with(collector, gate.prompts, gate.sampling, key)
    assert (gate.sampling.temperature, gate.sampling.top_p) == (0.9, 1.0)
    off = run("rollout.parity_every=0")
    assert make_parity_gate(off[0], off[1].prompts.prompts, workers, started, collector) is None
    local = StartedEngine(engine=Mock())
    assert make_parity_gate(config, inputs.prompts.prompts, workers, local, collector) is None
