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
from cohort.distributed import ALONE
from cohort.errors import UserError
from cohort.trainer.worker import Worker
from cohort.trainer.worker_calls import pack_batches
from rank_critic import critic_sequences, make_worker
from runs import assert_same_weights, changed, make_inputs, metric, stop_after, train, weights
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
    once, thrice = (replace_updates(make_worker(str(folder), ALONE, dtype="float32"), updates) for updates in (1, 3))
    assert once.critic is not None
    (batch,) = pack_batches(once.critic, critic_sequences([[3, 14, 9]], seed=0))
    single = [once.train_critic(None if update else batch) for update in range(3)]
    done = thrice.train_critic(batch)
    for name, value in done.metrics.items():
        assert value == pytest.approx(np.mean([result.metrics[name] for result in single]), rel=1e-12), name
    assert done.num_inputs == sum(result.num_inputs for result in single)
    actual, expected = (worker.critic.policy.model.state_dict() for worker in (thrice, once) if worker.critic)
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


def replace_updates(worker: Worker, updates: int) -> Worker:
    worker.critic_updates = updates
    return worker


def test_a_critic_that_does_not_fit_the_policy(tmp_path: Path):
    with pytest.raises(UserError, match=r"critic.path: .*nowhere.*no such folder"):
        train(ppo_inputs(tmp_path, path="./nowhere"))
    save_model_folder(tmp_path / "other", vocab_size=50)
    with pytest.raises(UserError, match=r"critic.path: .*50 tokens, and the policy for 101"):
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
