"""Whole runs with KL, entropy and a reference that is refreshed: what they tell, and that they go on exactly."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cohort
from cohort.errors import UserError
from runs import assert_same_weights, changed, make_inputs, metric, stop_after, train
from selection import mostly_slow, slow
from tiny import make_policy

QUIET = {"eval": {"every": 0, "before_training": False}}
CASES: dict[str, dict[str, Any]] = {
    "kl in the loss, refreshed": {
        "algorithm": {"beta": 0.1, "kl_target": 0.001, "kl_horizon": 24, "kl_unbiased": True},
        "reference": {"refresh_every": 2, "mix": 0.5},
    },
    "kl in the reward, entropy": {
        "algorithm": {
            "name": "dapo",
            "beta": 0.1,
            "kl_in": "reward",
            "kl_estimator": "k1",
            "kl_target": 0.001,
            "kl_horizon": 24,
            "entropy_coef": 0.01,
            "entropy_target": 6.0,
            "top_entropy_quantile": 0.4,
            "off_policy_mask_threshold": 0.01,
        },
        "reference": {"refresh_every": 3},
    },
}


@pytest.mark.parametrize("name", mostly_slow(CASES, next(iter(CASES)), reason="the other case"))
def test_interrupted_and_resumed_is_uninterrupted_bit_for_bit(tmp_path: Path, name: str):
    config = changed(make_inputs(tmp_path), **CASES[name], **QUIET, train={"updates_per_rollout": 2})
    expected = train(changed(config, run={"dir": str(tmp_path / "whole")}))
    with pytest.raises(KeyboardInterrupt):
        cohort.train(config, display=stop_after(5))
    actual = train(config, resume=True)
    assert_same_weights(actual.final_dir, expected.final_dir)
    told = ["loss", "reward", "grad_norm", "kl", "kl_coef", "entropy", "entropy_coef"]
    for metric_name in told[: None if "entropy_coef" in CASES[name]["algorithm"] else -1]:
        values = metric(actual.run_dir, metric_name)
        assert values == metric(expected.run_dir, metric_name), metric_name
        assert len(set(values)) == 6, metric_name  # it moves: a run that forgot its state would be another one
    saved = json.loads((expected.run_dir / "checkpoints" / "step-6" / "trainer_state.json").read_text())
    assert saved["control"]["kl"] != 0.1


def test_the_reference_is_where_the_policy_was(tmp_path: Path):
    """refresh_every: 2 with mix: 1 makes the reference the policy, so that the next step's KL divergence is 0."""
    config = changed(make_inputs(tmp_path), **QUIET, algorithm={"beta": 0.1})
    config = changed(config, reference={"refresh_every": 2, "mix": 1.0})
    kl = np.array(metric(train(config).run_dir, "kl"))
    assert (kl[[0, 2, 4]] < 1e-10).all()
    assert (kl[[1, 3, 5]] > 1e-6).all()


def test_the_overlong_reward_is_told_like_any_other(tmp_path: Path):
    config = changed(make_inputs(tmp_path), **QUIET, train={"steps": 1})
    config["rewards"] = [*config["rewards"], {"use": "overlong", "args": {"buffer_tokens": 6}}]
    run = train(config).run_dir
    (mean,) = metric(run, "rewards/overlong/mean")
    assert -1 <= mean < 0


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"reference": {"refresh_every": 2}}, "reference has no effect with algorithm.beta: 0"),
        ({"reference": {"mix": 0.5}, "algorithm": {"beta": 0.1}}, "mix: 0.5 has no effect with refresh_every: 0"),
        (
            {"reference": {"device": "cpu"}, "algorithm": {"beta": 0.1}, "hardware": {"processes": 2}},
            "reference.device: cpu needs a single process, but hardware.processes is 2",
        ),
        (
            {"reference": {"device": "cpu"}, "algorithm": {"beta": 0.1}, "hardware": {"device": "cpu"}},
            "reference.device: cpu has no effect on CPU",
        ),
    ],
)
def test_reference_keys_without_an_effect_are_refused(tmp_path: Path, sections: dict[str, Any], message: str):
    with pytest.raises(UserError) as caught:
        train(changed(make_inputs(tmp_path), **sections))
    assert message in str(caught.value)


def test_terms_of_the_whole_step_do_not_depend_on_the_micro_batch(tmp_path: Path):
    """Which tokens have the highest entropy, what KL takes from rewards, and coefficients: the same for any split."""
    config = changed(make_inputs(tmp_path), **QUIET, **CASES["kl in the reward, entropy"], model={"dtype": "float64"})
    runs = [
        train(
            changed(config, train={"steps": 3, "micro_batch_tokens": budget}, run={"dir": str(tmp_path / str(budget))})
        )
        for budget in (32, 4096)
    ]
    for name in ("loss", "grad_norm", "kl", "entropy", "kl_coef", "entropy_coef"):
        few, one = (metric(run.run_dir, name) for run in runs)
        np.testing.assert_allclose(few, one, rtol=1e-5, atol=1e-9, err_msg=name)


def test_a_reference_in_host_memory_comes_to_compute_and_is_unchanged():
    policy, other = make_policy(), make_policy()
    other.model.requires_grad_(False)
    before = {name: weight.clone() for name, weight in other.model.state_dict().items()}
    other.offload_weights()
    with other.on_device():
        (inside,) = {parameter.device for parameter in other.model.parameters()}
        expected = policy.next_token_logits(input_ids=torch.tensor([[5, 6, 7]]))
        assert torch.equal(other.next_token_logits(input_ids=torch.tensor([[5, 6, 7]])), expected)
        with torch.no_grad():
            for parameter in other.model.parameters():
                parameter.data = parameter.data + 1  # what is on the device is a copy
    assert inside == policy.device
    assert all(torch.equal(weight, before[name]) for name, weight in other.model.state_dict().items())


@slow("two runs of real processes; test_launch has one")
def test_two_processes_have_the_terms_of_one(tmp_path: Path):
    """Coefficients that adapt, a reference that is refreshed and a loss of one's own reach every rank."""
    (tmp_path / "own.py").write_text("def loss(x): return -x.advantages * (x.logprobs - x.old_logprobs).exp()\n")
    config = changed(make_inputs(tmp_path), **QUIET, **CASES["kl in the loss, refreshed"], model={"dtype": "float64"})
    config = changed(config, algorithm={"policy_loss": f"{tmp_path}/own.py:loss", "entropy_coef": 0.01})
    for processes in (1, 2):
        hardware = {"processes": processes, "device": "cpu"}
        run = {"dir": str(tmp_path / f"run-{processes}")}
        cohort.train(changed(config, train={"steps": 4}, run=run, hardware=hardware))
    for name in ("loss", "grad_norm", "kl", "kl_coef", "entropy"):
        one, two = (metric(tmp_path / f"run-{processes}", name) for processes in (1, 2))
        np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-9, err_msg=name)
