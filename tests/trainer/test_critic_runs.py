"""Whole runs with a critic."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cohort
from cohort.config import config_from_dict
from cohort.demo.run import demo_config, write_data
from cohort.display import Display
from cohort.errors import UserError
from cohort.models import load_tokenizer
from cohort.ranks.collectives import SINGLE_PROCESS
from cohort.ranks.worker_group import WorkerGroup
from cohort.records import ForwardOnlyOutputs
from cohort.trainer.build import WorkerSpec, build_worker
from cohort.trainer.worker import TrainedModel, pack_batches
from rank_critic import make_critic_sequences, make_updater, make_worker
from rank_engine import out_of_memory_over
from runs import assert_in_catalogue, assert_same_weights, changed, make_inputs, metric, stop_after, train, weights
from selection import slow
from tiny import save_model_folder


def ppo_inputs(folder: Path, **critic: Any) -> dict[str, Any]:
    """Six quick steps with one completion per prompt."""
    config = changed(make_inputs(folder), rollout={"num_generations": 1}, train={"prompts_per_step": 8})
    return {**config, "algorithm": {"name": "ppo"}, "critic": {"learning_rate": 1e-2, **critic}}


def test_a_run_with_a_critic_and_what_it_leaves_behind(tmp_path: Path):
    result = train(ppo_inputs(tmp_path, warmup_steps=2))
    run = result.run_dir
    names = ("value_loss", "value/mean", "value/explained_variance", "value/clip_ratio", "value/grad_norm")
    assert all(len(metric(run, name)) == 6 and np.isfinite(metric(run, name)).all() for name in names)
    assert metric(run, "value/mean")[0] == 0 and 0 not in metric(run, "value/mean")[1:]
    assert metric(run, "value/learning_rate") == [1e-2] * 6
    assert metric(run, "learning_rate") == [0.0, 0.0, 1e-2, 1e-2, 1e-2, 1e-2]
    steps = {n: run / "checkpoints" / f"step-{n}" for n in (2, 4, 6)}
    assert_same_weights(steps[2], tmp_path / "base")  # the policy waited for the critic
    assert any(not torch.equal(t, weights(steps[4])[name]) for name, t in weights(steps[2]).items())
    trained, base = weights(steps[2] / "critic"), weights(tmp_path / "base")
    assert trained["value_head.weight"].shape == (1, 32)
    assert any(not torch.equal(tensor, trained[name]) for name, tensor in base.items() if name in trained)
    assert not (result.final_dir / "critic").exists()
    assert metric(run, "completions/trained_ratio") == [1.0] * 6
    assert_in_catalogue(run)
    # another run goes on with that critic: its first values are not 0
    again = changed(ppo_inputs(tmp_path, path=str(steps[6] / "critic")), run={"dir": str(tmp_path / "b")})
    assert metric(train(again).run_dir, "value/mean")[0] != 0


def test_resumed_with_a_critic_is_uninterrupted_bit_for_bit(tmp_path: Path):
    config = changed(ppo_inputs(tmp_path, warmup_steps=1), train={"lr_schedule": "cosine", "updates_per_rollout": 2})
    config = changed(config, model={"gradient_checkpointing": True}, critic={"updates": 2})
    expected = train(changed(config, run={"dir": str(tmp_path / "whole")}))
    with pytest.raises(KeyboardInterrupt):
        cohort.train(config, display=stop_after(5))
    actual = train(config, resume=True)
    assert_same_weights(actual.final_dir, expected.final_dir)
    last = Path("checkpoints") / "step-6" / "critic"
    assert_same_weights(actual.run_dir / last, expected.run_dir / last)
    for name in ("loss", "reward", "value_loss", "value/mean", "value/grad_norm", "value/learning_rate"):
        assert metric(actual.run_dir, name) == metric(expected.run_dir, name), name


@pytest.mark.parametrize("model", [{"dtype": "bfloat16"}, {"compute_dtype": "bfloat16"}])
def test_values_in_bfloat16(tmp_path: Path, model: dict[str, str]):
    """Values are float32; weights and moments keep their dtype."""
    run = train(changed(ppo_inputs(tmp_path), model=model, train={"steps": 2})).run_dir
    assert np.isfinite(metric(run, "value_loss")).all() and metric(run, "value/mean")[1] != 0
    dtypes = {t.dtype for t in weights(run / "checkpoints" / "step-2" / "critic").values()}
    assert dtypes == {getattr(torch, model.get("dtype", "float32"))}


@slow("it learns for 20 steps; test_critic has a critic that learns")
def test_ppo_learns_the_demo_from_one_completion_per_prompt(tmp_path: Path):
    raw = demo_config(tmp_path / "run", seed=0).model_dump(mode="json")
    raw = changed(raw, rollout={"num_generations": 1}, train={"prompts_per_step": 128, "steps": 4})
    config = config_from_dict({**raw, "algorithm": {"name": "ppo"}, "critic": {"learning_rate": 1e-3}})
    write_data(tmp_path / "run", config, seed=0)
    summary = cohort.train(config, display=Display()).summary
    assert summary["accuracy_before"] < 0.25 and summary["accuracy_after"] > 0.4


def test_more_updates_of_the_critic_than_of_the_policy(tmp_path: Path):
    """As many passes over the same returns, of which the first has the old values."""
    folder = save_model_folder(tmp_path / "m")
    alone, worker = (make_worker(str(folder), SINGLE_PROCESS, dtype="float32") for _ in range(2))
    assert alone.critic is not None and alone.algorithm.critic is not None and worker.critic is not None
    sequences = make_critic_sequences([[3, 14, 9]], seed=0)
    (batch,) = pack_batches(alone.critic, sequences)
    expected = []
    for update in range(3):
        result = alone.critic.forward_backward(None if update else batch, alone.algorithm.critic.loss)
        expected.append((result.metrics["loss"], alone.critic.optim_step().grad_norm))
    updater = make_updater(WorkerGroup(worker, SINGLE_PROCESS), updates=3)
    updates = updater.update(updater.pack(sequences), ForwardOnlyOutputs(), num_trajectories=3, steps_done=1)
    actual = [updates.metrics[name] for name in ("value_loss", "value/grad_norm")]
    assert actual == pytest.approx(np.mean(expected, axis=0), rel=1e-12)
    assert {model: len(results) for model, results in updates.results.items()} == {"policy": 1, "critic": 3}
    weights = worker.critic.policy.model.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in alone.critic.policy.model.state_dict().items())


@pytest.mark.parametrize("unlucky", ["policy", "critic"])
def test_memory_that_runs_out_for_one_model_halves_the_budget_of_both(tmp_path: Path, unlucky: TrainedModel):
    """It is one number in a checkpoint."""
    config = config_from_dict(ppo_inputs(tmp_path))
    spec = WorkerSpec(folder=tmp_path, num_steps=1, checkpoint=None, micro_batch_tokens=200, longest_sequence_tokens=64)
    tokenizer = load_tokenizer(config.model)
    worker = build_worker(config, SINGLE_PROCESS, spec, device=torch.device("cpu"), tokenizer=tokenizer)
    updater = make_updater(WorkerGroup(worker, SINGLE_PROCESS))
    sequences = make_critic_sequences([[3, 14, 9], [20, 1, 6]], seed=0)
    with out_of_memory_over(30, "forward mlp 1", worker.engines[unlucky]):
        updates = updater.update(updater.pack(sequences), ForwardOnlyOutputs(), num_trajectories=6, steps_done=1)
    assert {model for model, results in updates.results.items() if results[0].num_out_of_memory} == {unlucky}
    assert worker.engines["policy"].budget.tokens == worker.engines["critic"].budget.tokens < 200


def test_a_critic_that_does_not_fit_the_policy(tmp_path: Path):
    with pytest.raises(UserError, match=r"critic.path: .*nowhere.*no such folder"):
        train(ppo_inputs(tmp_path, path="./nowhere"))
    save_model_folder(tmp_path / "other", vocab_size=50)
    with pytest.raises(UserError, match=r"critic.path: .*50 tokens, the policy for 101"):
        train(ppo_inputs(tmp_path, path=str(tmp_path / "other")))


def test_a_disk_too_small_for_two_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With room for the policy's checkpoints alone there is none for the critic's."""
    config = ppo_inputs(tmp_path)
    size = sum(t.numel() * 4 for t in weights(tmp_path / "base").values())
    free = type("Usage", (), {"free": 3 * 4 * size + size + 1000})
    monkeypatch.setattr("cohort.trainer.setup.shutil.disk_usage", lambda _: free)
    with pytest.raises(UserError, match="MB free"):
        train(config)
    train({**changed(config, rollout={"num_generations": 4}), "algorithm": {"name": "grpo"}, "critic": None})
