"""TRL's rules against TRL: a committed table of many versions, and the installed one's own `GRPOConfig`."""

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock, patch

import pytest

from cohort_check import check_file
from cohort_check.rules.common import FRAMEWORKS, known_keys, parse_version
from cohort_check.rules.trl import TrlBatch, trl_start
from trl_truth import NAMES, Case, Verdict, cases

TABLE = json.loads(Path(__file__).with_name("trl_starts.json").read_text())
OPEN_R1_CODE = """
model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct
torch_dtype: bfloat16
dataset_prompt_column: problem
system_prompt: Answer with code.
bf16: true
use_vllm: true
gradient_accumulation_steps: 4
max_prompt_length: 1024
max_completion_length: 2048
num_generations: 14
num_train_epochs: 1
per_device_train_batch_size: 16
reward_funcs: [code, format]
reward_weights: [1.0, 0.1]
warmup_ratio: 0.1
"""
OPEN_R1_IOI = OPEN_R1_CODE.replace("[code, format]", "[ioi_code, code_format, format]").replace(
    "reward_weights: [1.0, 0.1]", "reward_weights: [1.0, 0.1, 0.1]\nioi_provider: piston"
)


def our_verdict(case: Case, version: str) -> Verdict:
    number = parse_version(version)
    later = number >= (0, 18)
    batch = TrlBatch(
        per_device=case["per_device_train_batch_size"],
        accumulation=case["gradient_accumulation_steps"],
        generations=case["num_generations"],
        generation_batch_size=case["generation_batch_size"] if later else None,
        steps_per_generation=case["steps_per_generation"] if later else None,
        evaluates=case["evaluates"],
        per_device_eval=case["per_device_eval_batch_size"],
        generations_eval=case["num_generations_eval"],
    )
    start = trl_start(batch, case["world_size"], number)
    return (start.starts, start.message, start.generation_batch_size, start.steps_per_generation)


@pytest.mark.parametrize("version", TABLE)
def test_every_version_of_the_table_is_agreed_with(version: str):
    disagreements = [
        row
        for row in TABLE[version]
        if list(our_verdict(dict(zip(NAMES, row, strict=False)), version)) != row[len(NAMES) :]
    ]
    assert disagreements == []
    assert {row[len(NAMES)] for row in TABLE[version]} == {True, False}


def test_the_versions_of_the_table_differ():
    """A negative control: with the rules of another regime the table is not agreed with."""
    regimes = ("0.16.0", "0.17.0", "0.18.0", "0.21.0", "0.22.0", "1.16.0")
    for version in regimes:
        for other in regimes:
            rows = [dict(zip(NAMES, row, strict=False)) for row in TABLE[version]]
            differ = any(our_verdict(row, version) != our_verdict(row, other) for row in rows)
            assert differ == (version != other), (version, other)


@pytest.mark.extras
def test_the_installed_trl_agrees_with_every_case_of_the_grid():
    """Its own class with its own parents, over thousands of combinations; only the number of processes is put in."""
    from trl import GRPOConfig, __version__

    grid, disagreements, started = cases(), [], 0
    with patch.object(GRPOConfig, "world_size", new_callable=PropertyMock) as world_size:
        for case in grid:
            world_size.return_value = case["world_size"]
            truth = _asked(GRPOConfig, case)
            started += truth[0]
            if our_verdict(case, __version__) != truth:
                disagreements.append((case, truth))
    assert disagreements == []
    assert len(grid) == 8064
    assert 1000 < started < 5000


def _asked(config_class: Any, case: Case) -> Verdict:
    arguments = {
        key: value for key, value in case.items() if key not in ("world_size", "evaluates") and value is not None
    }
    arguments |= {"eval_strategy": "steps", "eval_steps": 10} if case["evaluates"] else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = config_class(output_dir="unused", use_cpu=True, bf16=False, report_to="none", **arguments)
        except ValueError as error:
            return (False, str(error), None, None)
    return (True, None, config.generation_batch_size, config.steps_per_generation)


@pytest.mark.extras
def test_the_keys_of_the_installed_trl_are_known_and_no_others_of_its_own():
    from trl import GRPOConfig, ModelConfig, ScriptArguments, __version__
    from trl.scripts.grpo import GRPOScriptArguments

    known = set(known_keys("trl", parse_version(__version__)))
    classes = (GRPOConfig, ModelConfig, ScriptArguments, GRPOScriptArguments)
    theirs = {field.name for cls in classes for field in dataclasses.fields(cls) if not field.name.startswith("_")}
    assert theirs <= known
    assert not {"max_prompt_length", "vllm_device", "use_liger_loss", "torch_dtype"} & known


@pytest.mark.extras
def test_an_unknown_argument_gets_the_message_of_the_class(tmp_path: Path):
    from trl import GRPOConfig

    with pytest.raises(TypeError) as caught:
        GRPOConfig(output_dir="unused", max_prompt_length=512)
    (tmp_path / "a.py").write_text("from trl import GRPOConfig\nGRPOConfig(max_prompt_length=512)\n")
    (finding,) = [f for f in check_file(tmp_path / "a.py", framework_version="1.16").findings if f.code == "CHK006"]
    assert str(caught.value) == finding.says


@pytest.mark.parametrize("recipe", [OPEN_R1_CODE, OPEN_R1_IOI])
def test_recipes_of_fourteen_generations_start_with_seven_processes_only(recipe: str, tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text(recipe)
    report = check_file(path, world_sizes=(1, 2, 3, 4, 6, 7, 8, 16, 24))
    assert [size for size, start in report.starts.items() if start.starts] == [7]
    assert report.rules and report.rules.version == "0.18.0"
    (finding,) = [f for f in report.findings if f.code == "CHK003"]
    assert {"GPUs=7", "num_generations=16", "per_device_train_batch_size=14"} <= set(finding.nearest)
    assert report.starts[8].message == (
        "The effective train batch size (8 x 16 x 4) must be evenly divisible by the number of generations per prompt "
        "(14). Given the current effective train batch size, the valid values for the number of generations are: "
        "[2, 4, 8, 16, 32, 64, 128, 256, 512]."
    )
    assert not report.failed
    eight = check_file(path, launched_with="accelerate launch --num_processes=8")
    assert eight.failed
    assert [f.code for f in eight.findings if f.severity == "error"] == ["CHK002"]


def findings_of(tmp_path: Path, text: str, name: str = "r.yaml", **options: Any) -> dict[str, Any]:
    (tmp_path / name).write_text(text)
    return {finding.code: finding for finding in check_file(tmp_path / name, **options).findings}


BASE = "model_name_or_path: m\nnum_generations: 8\nper_device_train_batch_size: 8\n"


def test_the_check_of_0_18_lets_a_batch_pass_that_it_divides_to_nothing(tmp_path: Path):
    text = "num_generations: 2\nper_device_train_batch_size: 4\ngeneration_batch_size: 12\n"
    options = {"launched_with": "accelerate launch --num_processes 8"}
    found = findings_of(tmp_path, text, framework_version="0.18.0", **options)
    assert "steps_per_generation is 0" in found["CHK017"].message
    assert found["CHK017"].nearest == ("generation_batch_size=32",)
    later = findings_of(tmp_path, text, framework_version="1.0", **options)
    assert "CHK017" not in later
    assert "generation_batch_size (12) must be divisible by the global batch size (32)." in later["CHK002"].says


def test_cispo_is_warned_about_where_its_clip_is_at_most_one(tmp_path: Path):
    assert "0.2 times" in findings_of(tmp_path, BASE + "loss_type: cispo\n")["CHK015"].message
    assert "CHK015" in findings_of(tmp_path, BASE + "loss_type: cispo\nepsilon_high: 1.0\n")
    assert "CHK015" not in findings_of(tmp_path, BASE + "loss_type: cispo\nepsilon_high: 5.0\n")
    assert "CHK015" not in findings_of(tmp_path, BASE + "loss_type: dapo\n")


def test_the_scale_of_the_loss_is_told_for_the_versions_that_have_it_wrong(tmp_path: Path):
    text = BASE + "gradient_accumulation_steps: 2\nsteps_per_generation: 4\n"
    assert "0.5 times" in findings_of(tmp_path, text, framework_version="1.10")["CHK016"].message
    assert "CHK016" not in findings_of(tmp_path, text, framework_version="1.16")
    assert "CHK016" not in findings_of(tmp_path, text + "loss_type: grpo\n", framework_version="1.10")


def test_keys_are_checked_by_version_and_by_where_they_stand(tmp_path: Path):
    text = BASE + "max_prompt_length: 512\nvllm_max_model_len: 1024\nnum_genrations: 8\n"
    found = {f.field: f for f in _all_findings(tmp_path, text, "1.16")}
    assert found["max_prompt_length"].code == "CHK005"
    assert "from 0.15.2 to 0.27.2" in found["max_prompt_length"].message
    assert (found["vllm_max_model_len"].code, found["vllm_max_model_len"].nearest) == (
        "CHK007",
        ("vllm_max_model_length",),
    )
    assert found["num_genrations"].nearest == ("num_generations",)
    old = {f.field: f for f in _all_findings(tmp_path, text, "0.17.0")}
    assert "max_prompt_length" not in old
    assert "does nothing in this version" in old["vllm_max_model_len"].message


def _all_findings(tmp_path: Path, text: str, version: str) -> tuple[Any, ...]:
    (tmp_path / "keys.yaml").write_text(text)
    return check_file(tmp_path / "keys.yaml", framework_version=version).findings


def test_keys_of_another_way_of_sampling_have_no_effect(tmp_path: Path):
    keys = "vllm_gpu_memory_utilization: 0.7\nvllm_server_port: 8000\n"
    for extra, without_effect in (
        ("", {"vllm_gpu_memory_utilization", "vllm_server_port"}),
        ("use_vllm: true\nvllm_mode: server\n", {"vllm_gpu_memory_utilization"}),
        ("use_vllm: true\n", {"vllm_server_port"}),
    ):
        found = _all_findings(tmp_path, BASE + keys + extra, "1.16")
        assert {finding.field for finding in found if finding.code == "CHK005"} == without_effect


def test_both_batch_sizes_contradict_and_are_told_once(tmp_path: Path):
    (tmp_path / "r.yaml").write_text(BASE + "generation_batch_size: 64\nsteps_per_generation: 2\n")
    report = check_file(tmp_path / "r.yaml")
    assert [f.code for f in report.findings if f.severity == "error"] == ["CHK008"]
    assert not any(start.starts for start in report.starts.values())


def test_an_evaluation_batch_is_checked_where_there_is_evaluation(tmp_path: Path):
    launch = {"launched_with": "accelerate launch --num_processes 7"}
    text = "num_generations: 16\nper_device_train_batch_size: 16\n"
    assert "CHK002" not in findings_of(tmp_path, text, **launch)
    found = findings_of(tmp_path, text + "eval_strategy: steps\n", **launch)
    assert "The global eval batch size (8 * 7)" in found["CHK002"].says


def test_the_default_version_is_the_newest_of_the_rules():
    assert FRAMEWORKS["trl"]["default"] == "1.16"
    assert list(TABLE)[-1] == "1.16.0"
