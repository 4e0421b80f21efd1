"""`cohort plan --model` without a file prints a whole configuration, and GPUs that no table knows have numbers."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import cohort
from cohort.cli.app import app
from cohort.config import load_config
from cohort.display import Display
from cohort.plan.hardware import GPUS, memory_bandwidth, peak_flops
from cohort.plan.shape import HUB_IDS, PRESETS, read_shape
from plans import planned
from selection import slow
from tiny import copy_task_rows, save_model_folder, write_jsonl


def proposal(*arguments: str) -> str:
    return CliRunner().invoke(app, ["plan", *arguments]).stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "qwen2.5-7b", "--gpus", "4", "--gpu", "a100-80"), "fits: 85.9 s per step"),
        *(
            pytest.param(*case, marks=slow("other models and GPUs"))
            for case in (
                (("--model", "32b", "--gpus", "8", "--gpu", "h200"), "tensor_parallel: 2"),
                (("--model", "Qwen/Qwen3-8B-Base", "--gpus", "1", "--gpu", "rtx4090"), "fits with full checkpointing"),
            )
        ),
        (("--model", "7b", "--gpus", "1", "--gpu", "h100"), "  adapter: {rank: 64}"),
    ],
)
def test_a_proposal_fits_when_it_is_planned(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    text = proposal(*arguments)
    assert said in text and len(text.splitlines()) <= 90 and text.count("# <- your ") == 2
    (tmp_path / "run.yaml").write_text(text)
    plan = planned(str(tmp_path / "run.yaml"), *arguments[2:])
    assert plan["memory"]["fits"]
    seconds = float(f"{plan['timing']['step_s']['value']:.3g}")
    assert f": {seconds:,g} s per step" in text and "quantization" not in text


def test_a_proposal_trains_with_data_and_reward(tmp_path: Path) -> None:
    model = save_model_folder(tmp_path / "model", "qwen2", tie=False)
    text = proposal(
        "--model", str(model), "--gpus", "1", "rollout.max_prompt_tokens=64", "rollout.max_completion_tokens=8"
    )
    assert yaml.safe_load(text)["model"]["path"] == str(model)
    data = write_jsonl(tmp_path / "train.jsonl", copy_task_rows(8))
    (tmp_path / "own.py").write_text(
        "def score(completions, **columns):\n    return [float(len(c)) for c in completions]\n"
    )
    (tmp_path / "run.yaml").write_text(
        text.replace("train.jsonl, prompt: prompt", f"{data}, prompt: question").replace(
            "use: math", "use: own.py:score"
        )
    )
    small = ["train.steps=1", "train.prompts_per_step=2", "hardware.device=cpu", f"run.dir={tmp_path / 'run'}"]
    result = cohort.train(load_config(tmp_path / "run.yaml", [*small, "run.checkpoint_every=0"]), display=Display())
    assert (result.run_dir / "metrics.jsonl").exists()


def test_a_proposal_keeps_the_keys_that_are_given(tmp_path: Path) -> None:
    model = save_model_folder(tmp_path / "it's: o #d", "qwen2", tie=False)
    given = ["data.path=mine.jsonl", "rollout={num_generations: 4}", "train.learning_rate=3.0e-5"]
    text = proposal("--model", str(model), "--gpus", "2", "--gpu", "l40s", *given)
    (tmp_path / "run.yaml").write_text(text)
    config = load_config(tmp_path / "run.yaml")
    assert config.model.path == str(model) and config.rollout.num_generations == 4
    assert config.data.path == str(tmp_path / "mine.jsonl") and config.train.learning_rate == 3e-5
    seven = proposal("--model", "7b", "--gpus", "1", "--gpu", "l40s", "train.learning_rate=5.0e-5")
    assert "learning_rate: 5.0e-05" in seven and "adapter: {rank: " in seven
    assert "learning_rate: 1.0e-05" in proposal("--model", "7b", "--gpus", "1", "--gpu", "l40s", "train.steps=50")


def test_every_preset_has_an_id_of_its_shape() -> None:
    assert HUB_IDS.keys() == PRESETS.keys()
    assert [name for name, model_id in HUB_IDS.items() if read_shape(model_id).name != name] == []


def test_every_gpu_has_a_data_sheet_and_others_have_options(tmp_path: Path) -> None:
    for name, _ in GPUS.values():
        assert peak_flops(name, "bfloat16") and memory_bandwidth(name)
    (tmp_path / "run.yaml").write_text("{model: {path: m}, data: {path: d.csv}, rewards: [{use: math}]}")
    command = [str(tmp_path / "run.yaml"), "--model", "1.5b", "--gpus", "1"]
    other = planned(
        *command, "--gpu", "gaudi", "--gpu-memory", "85GB", "--gpu-tflops", "989.4", "--gpu-bandwidth", "3.35TB"
    )
    same = planned(*command, "--gpu", "h100", "--gpu-memory", "85GB")
    assert other["timing"]["step_s"] == same["timing"]["step_s"] and other["hardware"]["gpu"] == "gaudi"
    assert other["timing"]["products_tflops"]["how"] == "--gpu-tflops"
    refused = CliRunner().invoke(app, ["plan", *command, "--gpu", "gaudi", "--gpu-memory", "85GB"])
    assert refused.exit_code == 2 and "give --gpu-memory, --gpu-tflops and" in refused.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--json",), "--json needs a configuration file"),
        (("hardware.device=cpu",), "configurations are proposed for GPUs"),
        (("rollout.nothing=1",), "rollout.nothing"),
    ],
)
def test_what_a_proposal_does_not_take_is_refused(arguments: tuple[str, ...], said: str) -> None:
    done = CliRunner().invoke(app, ["plan", "--model", "1.5b", *arguments])
    assert done.exit_code == 2 and said in done.output


def test_without_file_and_model_nothing_is_planned() -> None:
    assert "give a configuration file, or --model" in CliRunner().invoke(app, ["plan"]).output
