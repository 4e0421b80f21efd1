"""Runs on quantized weights: resuming, a quantized reference, merging, plans and advice, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import cohort
from cohort.cli.merge import merge as merge_command
from cohort.config import config_from_dict
from cohort.errors import UserError
from cohort.models import check_quantization
from cohort.plan.advice import advise
from cohort.plan.hardware import Hardware
from cohort.plan.predict import predict_run
from cohort.plan.shape import preset_shape
from cohort.plan.state_memory import matrix_bytes
from cohort.trainer.inputs import build_inputs
from runs import changed, make_inputs, metric, stop_after, train
from tiny import make_tokenizer, save_model_folder


def run_config(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    config = make_inputs(folder, hidden_size=64, intermediate_size=64)
    return changed(config, train={"steps": 3, "learning_rate": 3e-3}, eval={"every": 0}, **sections)


QLORA = {"adapter": {"rank": 2}, "quantization": "nf4"}


def test_a_run_resumes_bit_for_bit_and_is_merged_into_its_own_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = run_config(tmp_path, model=QLORA, run={"checkpoint_every": 1})
    train(config)
    again = changed(config, run={"dir": str(tmp_path / "again")})
    with pytest.raises(KeyboardInterrupt):
        cohort.train(again, display=stop_after(2))
    train(again, resume=True)
    first, second = (load_file(tmp_path / name / "final" / "adapter_model.safetensors") for name in ("run", "again"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(tensor.any() for name, tensor in first.items() if "lora_B" in name)
    merge_command(tmp_path / "run", tmp_path / "merged")
    assert "was trained on a base quantized to nf4 but merged into the unquantized base" in capsys.readouterr().out
    base, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
    name = "model.layers.0.self_attn.q_proj"
    key = f"base_model.model.{name}.lora_"
    added = 16 * first[f"{key}B.weight"] @ first[f"{key}A.weight"]  # alpha / rank
    torch.testing.assert_close(merged[f"{name}.weight"], base[f"{name}.weight"] + added)


@pytest.mark.parametrize("kind", ["int8", None])
def test_a_quantized_reference_is_the_rounded_beginning(tmp_path: Path, kind: str | None):
    reference = {} if kind is None else {"reference": {"quantization": kind}}
    train(run_config(tmp_path, algorithm={"beta": 0.1}, **reference))
    first = metric(tmp_path / "run", "kl")[0]
    assert (first > 1e-6) == (kind is not None)


# Plans


def plan_config(**sections: Any) -> Any:
    raw = {
        "model": {"path": "m"},
        "data": {"path": "d", "prompt": "q"},
        "rewards": [{"use": "math"}],
        "rollout": {"max_prompt_tokens": 512, "max_completion_tokens": 1024},
    }
    return config_from_dict(changed(raw, **sections))


SMALL_GPU = Hardware(gpu_name="NVIDIA RTX 4090", gpu_memory_bytes=24 * 10**9, gpus_per_node=1, nodes=1)


def test_bits_of_a_weight():
    weight = (4096, 4096)
    assert matrix_bytes("nf4", weight) * 8 / 4096**2 == pytest.approx(4.127, abs=5e-4)
    assert matrix_bytes("int8", weight) == matrix_bytes("fp8", weight) == 4096**2 + 4 * 4096


def test_a_plan_counts_them():
    common = {"path": "m", "dtype": "bfloat16", "adapter": {"rank": 16}}
    shape = preset_shape("7b")
    plans = {
        kind: predict_run(plan_config(model={**common, "quantization": kind}), shape, SMALL_GPU)
        for kind in (None, "int8", "nf4")
    }
    weights = {kind: plan.memory.phases["optimizer"]["weights"] / 1e9 for kind, plan in plans.items()}
    # 6.525 billion weights in layers' matrices, and 1.09 billion others
    assert weights == pytest.approx({None: 15.23, "int8": 8.71, "nf4": 5.55}, rel=2e-3)
    assert plans[None].memory.peak_bytes > plans["int8"].memory.peak_bytes > plans["nf4"].memory.peak_bytes
    two = Hardware(gpu_name="NVIDIA H100 80GB HBM3", gpu_memory_bytes=80 * 10**9, gpus_per_node=2, nodes=1)
    one = predict_run(plan_config(model={**common, "quantization": "nf4"}), shape, two)
    assert (one.layout.num_training, one.num_idle) == (1, 1)
    with pytest.raises(UserError, match=r"nf4 needs a single process.*hardware.processes is 2"):
        plan_config(model={**common, "quantization": "nf4"}, hardware={"processes": 2})


def test_qlora_is_proposed_where_it_is_faster_than_lora():
    config, shape = plan_config(train={"micro_batch_tokens": "auto"}), preset_shape("7b")
    lora, qlora = (
        [
            a
            for a in advise(predict_run(config, shape, SMALL_GPU))
            if "model.adapter" in a.changes and ("model.quantization" in a.changes) == quantized
        ]
        for quantized in (False, True)
    )
    assert qlora and all(a.fits and a.saved_bytes > 0 for a in [*lora, *qlora])
    assert all((q.step_s or 0) < (a.step_s or 0) for q in qlora for a in lora)


# What is refused


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"path": "m", "quantization": "nf4"}}, "quantization: nf4 without adapter"),
        ({"model": {"path": "m", "dtype": "float64", **QLORA}}, "quantization: nf4 with dtype: float64"),
        ({"model": {"path": "m", **QLORA, "quantization": "int3"}}, "model.quantization: 'int3'"),
        (
            {"model": {"path": "m", **QLORA}, "hardware": {"processes": 2}},
            "model.quantization: nf4 needs a single process",
        ),
        (
            {"model": {"path": "m", **QLORA}, "rollout": {"engine": "vllm"}},
            "servers load the unquantized base model",
        ),
        (
            {"algorithm": {"beta": 0.1}, "reference": {"quantization": "int8", "refresh_every": 2}},
            "cannot move towards the policy",
        ),
        ({"algorithm": {"beta": 0.1}, "reference": {"quantization": "int8", "device": "cpu"}}, "save the same memory"),
    ],
)
def test_configurations(sections: dict[str, Any], message: str):
    with pytest.raises(UserError) as caught:
        plan_config(**sections)
    assert message in str(caught.value)


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cohort.models.quantization.find_spec", lambda name: None if name == "bitsandbytes" else name)
    with pytest.raises(UserError, match=r"nf4 needs the package bitsandbytes.*cohort-rl\[quantization\], or use int8"):
        check_quantization("nf4")


def test_what_does_not_go_with_the_model(tmp_path: Path):
    config = run_config(tmp_path, model={"adapter": {"rank": 2, "dora": True}, "quantization": "int8"})
    with pytest.raises(UserError, match=r"model.quantization: int8 .*dora: true.* use dora: false"):
        build_inputs(config_from_dict(config))
    path = save_model_folder(tmp_path / "done")
    own = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**own, "quantization_config": {"quant_method": "awq"}}))
    make_tokenizer().save_pretrained(path)
    with pytest.raises(UserError, match=r"is already quantized \(quantization_config in config.json: awq\)"):
        build_inputs(config_from_dict(changed(config, model={"path": str(path), "quantization": None})))
