"""What `cohort plan` answers besides: activations by checkpointing, why nothing fits, and models by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cohort.cli.app import app
from cohort.errors import UserError
from cohort.plan.advice import explain_no_limit, largest
from cohort.plan.memory import checkpointed_activations
from cohort.plan.predict import predict_run
from cohort.plan.shape import PRESETS, preset_shape, read_shape
from plans import EIGHT, config, on_gpus, without_advice
from selection import slow

TINY = on_gpus(1, "4090", "1GB")
ONE = "hardware.processes=1"


@pytest.mark.parametrize("more", [(), ("algorithm.name=ppo",), ("model.adapter={rank: 8}",)], ids=str)
def test_activations_by_checkpointing_are_those_of_a_plan_that_has_it(more: tuple[str, ...]) -> None:
    shape = preset_shape("1.5b")
    for planned in ("false", "true"):
        plan = predict_run(config(f"model.gradient_checkpointing={planned}", *more), shape, EIGHT)
        found = checkpointed_activations(plan.workload)
        for kind in (False, "selective", True):
            wanted = config(f"model.gradient_checkpointing={str(kind).lower()}", *more)
            other = predict_run(wanted, shape, EIGHT)
            assert other.micro_batches == plan.micro_batches
            assert found[kind] == other.memory.phases["backward"]["activations"]
        assert found[False] > found["selective"] > found[True] > 0
        assert plan.as_json()["memory"]["activations_by_checkpointing"] == {
            "false": found[False],
            "selective": found["selective"],
            "true": found[True],
        }


@pytest.mark.parametrize(
    ("limit", "why"),
    [
        ("model", "even the smallest known model, qwen2.5-0.5b, needs "),
        ("length", "even rollout.max_completion_tokens: 1 needs "),
        ("generations", "even rollout.num_generations: 2 needs "),
    ],
)
def test_where_nothing_fits_the_plan_says_why(limit: Any, why: str) -> None:
    plan = predict_run(config(ONE), preset_shape("7b"), TINY)
    assert largest(plan, limit) is None
    told = explain_no_limit(plan, limit)
    assert told.startswith(why) and told.endswith("of 1.0 GB available")
    with_vllm = predict_run(config("rollout.engine=vllm"), preset_shape("7b"), TINY)
    assert "GB" in explain_no_limit(with_vllm, limit)


def test_other_reasons_than_memory() -> None:
    long = predict_run(config(ONE, "rollout.max_prompt_tokens=32768"), preset_shape("7b"), TINY)
    assert "leave no positions for completions" in explain_no_limit(long, "length")
    impossible = replace(long, config=config("hardware.processes=2"))
    assert "hardware.processes: 2 exceeds" in explain_no_limit(impossible, "generations")


def limits(tmp_path: Path, *arguments: str) -> str:
    """What `cohort plan --why` says of a 7B model on one GPU."""
    file = tmp_path / "run.yaml"
    file.write_text("{model: {path: Qwen/Qwen2.5-7B}, data: {path: d.jsonl}, rewards: [{use: math}]}")
    keys = ["rollout.engine=local", "train.steps=1"]
    return CliRunner().invoke(app, ["plan", str(file), "--gpus", "1", *keys, *arguments]).output


def test_the_command_tells_what_would_fit(tmp_path: Path) -> None:
    narrow = limits(tmp_path, "--gpu", "4090", "--model", "3b", "rollout.max_completion_tokens=4096")
    assert "cohort-rl[quantization]" in narrow  # which is not markup
    small = ["--gpu", "h200", "--gpu-memory", "1GB", "--max", "length"]
    with without_advice():
        assert "longest completion that fits: none: even" in limits(tmp_path, *small)
        answer = json.loads(limits(tmp_path, *small, "--json"))
    assert answer["max"] == {"length": None} and answer["max_problem"].startswith("even")


@slow("where nothing fits")
def test_the_command_tells_the_largest_that_fits(tmp_path: Path) -> None:
    told = limits(tmp_path, "--gpu", "h200", "--why", "--max", "generations")
    assert "largest group that fits: " in told and " generations\n" in told and "derived: 1 step " in told
    assert "longest completion that fits: " in limits(tmp_path, "--gpu", "h200", "--max", "length")


@pytest.mark.parametrize(
    ("model_id", "parameters"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
        ("Qwen/Qwen2.5-Coder-1.5B", 1_543_714_304),
        ("Qwen/Qwen3-30B-A3B", 30_532_122_624),
        ("Qwen/Qwen3-8B-Base", 8_190_735_360),
        ("meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400),
        ("google/gemma-2-2b-it", 2_614_341_888),
        ("Qwen/Qwen2.5-72B-Instruct", 72_706_203_648),
        ("Qwen/Qwen2-7B-Instruct", 7_615_616_512),
        ("Qwen/Qwen2.5-Math-1.5B", 1_543_714_304),
        ("Qwen/Qwen2.5-Math-7B-Instruct", 7_615_616_512),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", 1_777_088_000),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", 7_615_616_512),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", 14_770_033_664),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", 32_763_876_352),
    ],
)
def test_models_of_the_hub_are_known_by_their_id(model_id: str, parameters: int) -> None:
    assert read_shape(model_id).num_parameters == parameters


@pytest.mark.parametrize("model_id", ["Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "Qwen/Qwen2.5-VL-7B-Instruct", "org/model"])
def test_models_of_other_shapes_are_not(model_id: str) -> None:
    with pytest.raises(UserError, match="--model"):
        read_shape(model_id)


def test_positions_of_models_with_the_same_weights() -> None:
    positions = {name: preset_shape(name).max_positions for name in ("7b", "qwen2.5-math-7b", "r1-qwen-7b", "72b")}
    assert positions == {"7b": 32_768, "qwen2.5-math-7b": 4_096, "r1-qwen-7b": 131_072, "72b": 32_768}


def test_help_names_the_models() -> None:
    told = CliRunner().invoke(app, ["plan", "--help"], env={"COLUMNS": "1000"}).output
    assert all(name in told for name in PRESETS)
