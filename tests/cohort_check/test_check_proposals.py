"""What a finding proposes and names, what is judged where something could not be read, and quantized weights."""

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from checks import COHORT, by_code, report
from cohort.config import config_from_dict
from cohort_check import FileReport, convert_file
from cohort_check.report import print_reports

VERL = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size={size} "
    "actor_rollout_ref.model.path=m actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=40 "
    "actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=1 trainer.n_gpus_per_node=8 trainer.nnodes=1 "
    "{more}"
)
SWIFT = "NPROC_PER_NODE=4 swift rlhf --rlhf_type grpo --model Qwen/Qwen2.5-7B-Instruct --num_generations 8 "
TRL = "reward_funcs: [accuracy]\nmodel_name_or_path: m\n"


def shown(result: FileReport, *, width: int = 80) -> str:
    console = Console(width=width, file=StringIO())
    with console.capture() as captured:
        print_reports([result], console)
    return captured.get()


# --- proposals


def test_what_verl_lacks_is_named(tmp_path: Path) -> None:
    finding = by_code(report(tmp_path, VERL.format(size=1023, more="")))["CHK002"]
    assert finding.field == "data.train_batch_size"
    key = "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"
    assert report(tmp_path, VERL.format(size=1024, more=f"{key}=40")).starts[8].starts
    assert key in by_code(report(tmp_path, VERL.format(size=1024, more="")))["CHK002"].says


def test_a_group_of_one_is_refused_in_the_words_of_cohort(tmp_path: Path) -> None:
    finding = by_code(report(tmp_path, COHORT + "rollout: {num_generations: 1}\n", "run.yaml"))["CHK002"]
    assert finding.field == "rollout.num_generations" and "use at least 2" in finding.message


@pytest.mark.parametrize(
    ("line", "nearest"),
    [
        ("per_device_train_batch_size: -4", ("per_device_train_batch_size=1",)),
        ("per_device_train_batch_size: 2.5", ("per_device_train_batch_size=2", "per_device_train_batch_size=3")),
        ("per_device_train_batch_size: abc", ("per_device_train_batch_size=8",)),
        ("generation_batch_size: abc", ("without generation_batch_size",)),
        ("use_vllm: perhaps", ("use_vllm=true", "use_vllm=false")),
    ],
)
def test_a_wrong_value_has_the_nearest_that_its_key_takes(line: str, nearest: tuple[str, ...], tmp_path: Path) -> None:
    assert by_code(report(tmp_path, TRL + line + "\n", "r.yaml"))["CHK010"].nearest == nearest


@pytest.mark.parametrize("version", ["0.16", "0.18", "1.16"])
def test_an_evaluation_batch_that_is_refused_is_named_and_changed(version: str, tmp_path: Path) -> None:
    text = TRL + "num_generations: 8\neval_strategy: steps\nper_device_eval_batch_size: 3\n"
    options: dict[str, Any] = {"launched_with": "accelerate launch --num_processes 2", "framework_version": version}
    finding = by_code(report(tmp_path, text, "r.yaml", **options))["CHK002"]
    assert finding.field == "per_device_eval_batch_size" and "per_device_eval_batch_size=4" in finding.nearest
    fixed = report(tmp_path, text.replace("size: 3", "size: 4"), "r.yaml", **options)
    assert fixed.starts[2].starts
    trains = by_code(report(tmp_path, TRL + "num_generations: 7\n", "r.yaml", **options))["CHK002"]
    assert trains.field == "num_generations" and not any("eval" in text for text in trains.nearest)


# --- what could not be read


def test_training_is_judged_where_only_evaluation_is_unread(tmp_path: Path) -> None:
    result = report(tmp_path, SWIFT + "--per_device_eval_batch_size $BS --val_dataset v")
    assert not result.starts[4].starts and result.starts[8].starts
    assert "evaluation is not checked" in by_code(result)["CHK004"].message


# --- the table


def test_equal_batches_share_a_line(tmp_path: Path) -> None:
    lines = shown(report(tmp_path, COHORT, "run.yaml")).splitlines()
    assert "  1 to 16, 24, 32, 64 GPUs: 128 completions per optimizer step, 16 prompts" in lines
    many = shown(report(tmp_path, TRL, "r.yaml")).splitlines()
    assert "  1 GPU: 8 completions per optimizer step, 1 prompt" in many
    assert "  and 13 other batch sizes; --json has all" in many


def test_the_verdict_comes_first(tmp_path: Path) -> None:
    def verdict(text: str, name: str, **options: Any) -> str:
        result = report(tmp_path, text, name, **options)
        first = shown(result, width=200).splitlines()[0]
        assert first == f"{tmp_path / name}: {result.verdict}" and result.verdict.startswith(result.outcome)
        return result.verdict

    four = {"launched_with": "accelerate launch --num_processes 4"}
    assert (
        verdict(TRL, "r.yaml", **four)
        == "starts: TRL 1.16 with 4 processes, 32 completions per optimizer step, 4 prompts"
    )
    assert verdict(TRL + "num_generations: 7\n", "r.yaml", **four) == "refused: TRL 1.16 with 4 processes"
    assert verdict(TRL + "num_generations: 7\n", "r.yaml", world_sizes=(7, 8)) == (
        "depends: TRL 1.16 starts with 7 GPUs, not with 8"
    )
    assert verdict(SWIFT + "--per_device_train_batch_size $BS", "run.sh") == (
        "not checked: ms-swift 4.6 with 4 processes, per_device_train_batch_size is only known at run time"
    )
    assert report(tmp_path, "x: 1\n", "x.yaml").outcome == "unreadable"


def test_a_report_fits_one_screen_with_errors_first(tmp_path: Path) -> None:
    unknown = "".join(f"unknown_{i}: 1\n" for i in range(40))
    result = report(tmp_path, TRL + "num_generations: 7\n" + unknown, "r.yaml", world_sizes=(8,))
    lines = shown(result, width=120).splitlines()
    assert len(result.findings) > 40 and len(lines) <= 26 and "CHK002" in lines[1]
    assert sum(len(line) > 120 for line in lines) == 0 or sum(-(-len(line) // 120) for line in lines) <= 26
    assert any(line.startswith("  and ") and line.endswith("more findings; --json lists all") for line in lines)


def test_one_process_and_one_gpu_are_singular(tmp_path: Path) -> None:
    one = report(tmp_path, TRL, "r.yaml", launched_with="accelerate launch --num_processes 1")
    assert one.verdict.startswith("starts: TRL 1.16 with 1 process,")
    some = report(tmp_path, TRL + "per_device_train_batch_size: 4\n", "r.yaml", world_sizes=(1, 2))
    assert "starts with 2 GPUs, not with 1 GPU; with 1" in by_code(some)["CHK003"].message


# --- conversion of quantized weights

QUANTIZED = TRL + "use_peft: true\nlora_r: 8\ntorch_dtype: bfloat16\n"


@pytest.mark.parametrize(("bits", "name"), [(4, "nf4"), (8, "int8")])
def test_quantized_weights_are_converted(bits: int, name: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(QUANTIZED + f"load_in_{bits}bit: true\nbnb_4bit_quant_type: nf4\n")
    text = convert_file(tmp_path / "r.yaml")
    assert config_from_dict(yaml.safe_load(text)).model.quantization == name
    assert ("torchao" in text) == (bits == 8)


@pytest.mark.parametrize(
    ("more", "processes", "why"),
    [
        ("", 2, "needs a single process"),
        ("use_vllm: true\n", 1, "servers load the unquantized base model"),
        ("use_peft: false\n", 1, "cannot be trained"),
    ],
)
def test_why_quantized_weights_have_no_equivalent(more: str, processes: int, why: str, tmp_path: Path) -> None:
    base = QUANTIZED.replace("use_peft: true\n", "") if "use_peft" in more else QUANTIZED
    (tmp_path / "r.yaml").write_text(base + "load_in_4bit: true\n" + more)
    text = convert_file(tmp_path / "r.yaml", launched_with=f"accelerate launch --num_processes {processes}")
    line = next(line for line in text.splitlines() if "4-bit weights" in line)
    assert line.startswith("- 'no equivalent") and why in line
    assert config_from_dict(yaml.safe_load(text)).model.quantization is None


def test_swift_is_quantized_too(tmp_path: Path) -> None:
    command = "swift rlhf --rlhf_type grpo --model m --dataset d --quant_method bnb --quant_bits 4 --num_generations 8"
    (tmp_path / "run.sh").write_text(command)
    assert config_from_dict(yaml.safe_load(convert_file(tmp_path / "run.sh"))).model.quantization == "nf4"
