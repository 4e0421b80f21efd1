"""The plan of weights and states in host memory, of gathered weights that stay, and what it proposes of them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cohort.config import AdamwConfig, Config, config_from_dict
from cohort.errors import UserError
from cohort.learner.optimizer import Optimizers
from cohort.models.activation_checkpointing import enable_offload
from cohort.plan.advice import advise, replan
from cohort.plan.backward import activation_bytes, saved_bytes_per_token
from cohort.plan.hardware import hardware
from cohort.plan.memory import Workload, host_bytes, plan_memory
from cohort.plan.predict import Plan, predict_run
from cohort.plan.shape import PRESETS, preset_shape, read_shape, shape_from_config
from cohort.ranks.collectives import SINGLE_PROCESS
from cohort.trainer.preflight import preflight_on
from rank_engine import STEPS, batches_of, step_sequences
from rank_offload import make_engine
from test_activation_checkpointing import make_row, make_trained
from test_optimizers import Model, train
from test_plan_memory import workload
from tiny import save_model_folder

N = 7_615_616_512  # weights of the preset "7b"


def config(**sections: Any) -> Config:
    raw: dict[str, Any] = {
        "model": {"path": "somewhere", "gradient_checkpointing": True},
        "data": {"path": "data.jsonl"},
        "rewards": [{"use": "math"}],
        "rollout": {"max_prompt_tokens": 512, "max_completion_tokens": 4096, "num_generations": 8, "max_num_seqs": 8},
        "train": {"micro_batch_tokens": "auto"},
    }
    return config_from_dict({**raw, **{k: {**raw.get(k, {}), **v} for k, v in sections.items()}})


def planned(wanted: Config, gpu: str = "h200", gpus: int = 1) -> Plan:
    return predict_run(wanted, preset_shape("7b"), hardware(gpu=gpu, gpus=gpus, nodes=1, gpu_memory=None))


def test_seven_billion_weights_by_hand():
    """bfloat16 weights and float32 gradients on the GPU; float32 masters and two moments on the host."""
    plan = planned(config(optim={"offload": True}))
    optimizer = plan.memory.phases["optimizer"]
    assert (optimizer["weights"], optimizer["gradients"], optimizer["optimizer state"]) == (2 * N, 4 * N, 0)
    assert host_bytes(plan.workload) == 12 * N
    (note,) = [note for note in plan.notes if "91.4 GB in host memory" in note]
    assert note.endswith(": weights, the optimizer's state")
    visiting = planned(config(model={"parameter_offload": True}), gpu="4090")
    assert visiting.fits and visiting.memory.total("optimizer") == visiting.memory.phases["optimizer"]["framework"]
    assert host_bytes(visiting.workload) == 16 * N


@pytest.mark.parametrize("mode", ["offloaded", "mixed, offloaded"])
def test_what_is_allocated_is_what_was_planned(tmp_path: Path, mode: str):
    """Tensors of a real update, counted: on the device, and on the host."""
    folder = str(save_model_folder(tmp_path / "model"))
    engine = make_engine(folder, SINGLE_PROCESS, mode)
    algorithm, sequences = step_sequences("dapo", *STEPS["uneven"])
    (batch,) = batches_of(engine, sequences, SINGLE_PROCESS, 30)
    engine.forward_backward(batch, algorithm.policy_loss)
    parameters = list(engine.policy.model.parameters())
    on_device = {
        "weights": sum(p.nbytes for p in parameters),
        "gradients": sum(p.grad.nbytes for p in parameters),
    }
    engine.optim_step()
    states = engine.state_dict()["optimizer"]["state"].values()
    on_host = sum(x.nbytes for state in states for x in state.values())
    on_host += sum(p.nbytes for p in engine.policy.master_weights.tree.parameters())
    workload = _tiny_work(folder, compute_bytes=2 if mode.startswith("mixed") else 4)
    parts = plan_memory(workload).phases["backward"]
    for part, counted in on_device.items():
        assert parts[part] == pytest.approx(counted, rel=0.05), part
    assert host_bytes(workload) == pytest.approx(on_host, rel=0.05)


def test_gradients_of_bfloat16_weights_are_float32_in_the_plan(tmp_path: Path):
    """Literal, for Qwen2.5-7B: 2 bytes for a weight and for each of two moments, and 4 for its gradient."""
    optimizer = planned(config(model={"dtype": "bfloat16"})).memory.phases["optimizer"]
    expected = (2 * N, 4 * N, 4 * N)
    assert (optimizer["weights"], optimizer["gradients"], optimizer["optimizer state"]) == expected
    folder = str(save_model_folder(tmp_path / "model"))
    engine = make_engine(folder, SINGLE_PROCESS, "bfloat16")
    algorithm, sequences = step_sequences("dapo", *STEPS["uneven"])
    (batch,) = batches_of(engine, sequences, SINGLE_PROCESS, 30)
    engine.forward_backward(batch, algorithm.policy_loss)
    parameters = list(engine.policy.model.parameters())
    assert sum(p.grad.nbytes for p in parameters) == 2 * sum(p.nbytes for p in parameters)
    visiting = planned(config(model={"dtype": "bfloat16", "parameter_offload": True}), gpu="4090")
    assert host_bytes(visiting.workload) == (2 + 4 + 2 * 2) * N


@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_activations_that_move_are_what_was_planned(checkpointing: bool | str):
    """Of a real forward pass. What selective checkpointing chooses stays on the device."""
    policy = make_trained(checkpointing, num_hidden_layers=6)
    offload, row = enable_offload(policy.model, device_type="cpu", min_bytes=1), make_row(policy)
    policy.logprobs(row, temperature=1.0)
    wanted = workload(
        shape_from_config(policy.model.config.to_dict(), name="tiny"),
        processes=1,
        compute_bytes=4,
        checkpointing=checkpointing,
        offload=True,
        packed_tokens=len(row.input_ids),
        on_gpu=False,
    )
    assert host_bytes(wanted) == pytest.approx(offload.num_bytes_moved, rel=0.03)
    kept = saved_bytes_per_token(wanted) * wanted.shape.layers * wanted.packed_tokens
    if checkpointing == "selective":
        assert activation_bytes(wanted) > kept - host_bytes(wanted) > 3 * host_bytes(wanted)


def test_activations_and_a_reference_in_host_memory_by_hand():
    """28 hidden states of 3,584 numbers in float32 for each token of a prompt and its completions; 4 N bytes."""
    plan = planned(
        config(
            model={"activation_offload": True},
            algorithm={"name": "grpo", "beta": 0.1},
            reference={"device": "cpu"},
            train={"micro_batch_tokens": 10_000},
        )
    )
    expected = 28 * 3584 * 4 * (plan.workload.packed_tokens + plan.workload.shared_prefix_tokens) + 4 * N
    assert host_bytes(plan.workload) == expected and plan.workload.packed_tokens > 4000
    (note,) = [note for note in plan.notes if "host memory" in note]
    assert note == (f"each training process keeps {expected / 1e9:.1f} GB in host memory: the reference, activations")


def _tiny_work(folder: str, *, compute_bytes: int) -> Workload:
    wanted = config(model={"path": folder, "compute_dtype": "float32"}, optim={"offload": True})
    there = hardware(gpu="h100", gpus=1, nodes=1, gpu_memory=None)
    return replace(predict_run(wanted, read_shape(folder), there).workload, compute_bytes=compute_bytes)


def test_moments_of_weights_that_are_rounded_at_random_are_wide():
    wide = AdamwConfig(stochastic_rounding=True)
    for optim, expected in ((wide, 8), (AdamwConfig(), 4)):
        model = Model(width=64, dtype=torch.bfloat16)
        optimizers = Optimizers(model, optim)
        train(model, optimizers, 1)
        assert optimizers.state_bytes() == expected * sum(p.numel() for p in model.parameters())
        kept = [x for state in optimizers.state_dict()["state"].values() for x in state.values() if x.ndim]
        assert sum(x.nbytes for x in kept) == optimizers.state_bytes()


def test_gathered_weights_that_stay_are_in_the_plan():
    """Of 28 layers, of which two at a time are there in any case, 26 more; spread over two ranks half of all."""
    shape = preset_shape("7b")
    parts = {
        wanted: planned(config(hardware={"processes": 4, "reshard_after_forward": wanted}), gpus=4).workload
        for wanted in (True, False, 2)
    }
    gathered = {
        wanted: plan_memory(workload).phases["logprobs"]["gathered weights"] for wanted, workload in parts.items()
    }
    assert gathered[False] - gathered[True] == 2 * 26 * shape.layer_parameters
    assert gathered[2] - gathered[True] == 26 * shape.layer_parameters
    assert gathered[False] == 2 * N


def test_it_is_proposed_first_and_makes_the_run_fit():
    plan = predict_run(config(), preset_shape("7b"), hardware(gpu="h100", gpus=1, nodes=1, gpu_memory=None))
    assert not plan.fits
    told = [advice.as_arguments() for advice in advise(plan)]
    assert "optim.offload=true" in told[0]
    assert replan(plan, {"optim.offload": True}).fits


def test_a_run_that_cannot_fit_is_told_so_at_its_start(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(dict(PRESETS["qwen2.5-7b"])), encoding="utf-8")
    wanted = config(model={"path": str(tmp_path)})
    about: dict[str, Any] = {"shared": False, "longest_prompt_tokens": 512, "num_prompts": 100, "notify": print}
    one = hardware(gpu="h100", gpus=1, nodes=1, gpu_memory=None)
    with pytest.raises(UserError, match=r"optim\.offload=true"):
        preflight_on(wanted, one, **about)
    assert preflight_on(config(model={"path": str(tmp_path)}, optim={"offload": True}), one, **about) is not None
