"""The nearest values that work, and memory as a rule."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks import COHORT, SEVEN
from cohort.check import check_file
from cohort.check.nearest import GPUS, nearest_starts
from cohort.check.rules.start import Start
from cohort.check.rules.trl import TrlBatch, trl_start
from cohort.errors import UserError
from selection import examples

# --- the nearest values
COUNTS = st.integers(1, 24)


@examples(60)
@given(COUNTS, COUNTS, COUNTS, st.integers(2, 24), st.sampled_from([(0, 16), (0, 17), (0, 18), (0, 22), (1, 16)]))
def test_what_is_proposed_starts_and_is_sorted_by_distance(
    world_size: int, per_device: int, accumulation: int, generations: int, version: tuple[int, ...]
):
    def start(processes: int, knobs: Any) -> Start:
        return trl_start(TrlBatch(**knobs), processes, version)

    knobs = {"per_device": per_device, "accumulation": accumulation, "generations": generations}
    if start(world_size, knobs).starts:
        return
    proposals = nearest_starts(start, world_size, knobs)
    assert proposals
    assert [p.distance for p in proposals] == sorted(p.distance for p in proposals)
    for proposal in proposals:
        changes = dict(proposal.changes)
        assert start(changes.pop(GPUS, world_size), {**knobs, **changes}).starts


@given(st.integers(2, 40), st.integers(1, 8), st.integers(1, 8))
def test_no_nearer_value_of_a_number_works(generations: int, world_size: int, per_device: int):
    def start(processes: int, knobs: Any) -> Start:
        return trl_start(TrlBatch(**knobs), processes, (1, 16))

    knobs = {"per_device": per_device, "generations": generations}
    if start(world_size, knobs).starts:
        return
    sizes = [
        dict(p.changes)["per_device"]
        for p in nearest_starts(start, world_size, knobs)
        if "per_device" in dict(p.changes)
    ]
    for value in range(1, max(sizes, default=0) + 1):
        works = start(world_size, {**knobs, "per_device": value}).starts
        between = min(sizes) < value < max(sizes)
        assert not (works and between)


def test_the_nearest_of_three_gpus_with_eight_generations():
    def start(processes: int, knobs: Any) -> Start:
        return trl_start(TrlBatch(per_device=knobs["B"], generations=knobs["G"]), processes, (1, 16))

    proposals = nearest_starts(start, 3, {"B": 1, "G": 8})
    assert [str(p) for p in proposals] == ["GPUs=8", "G=3", "B=8"]


def test_two_numbers_change_where_no_single_one_helps():
    def start(processes: int, knobs: Any) -> Start:
        return Start(starts=processes == 4 and knobs["B"] == 2)

    (proposal,) = nearest_starts(start, 2, {"B": 1})
    assert str(proposal) == "GPUs=4 and B=2"
    assert proposal.distance == 2.0


def memory_finding(tmp_path: Path, text: str, name: str = "c.yaml", **options: Any) -> Any:
    (tmp_path / name).write_text(text)
    report = check_file(tmp_path / name, **{"gpu_memory": "80GB", "framework_version": "0.18.0", **options})
    return next((f for f in report.findings if f.code == "CHK019"), None)


def test_whole_logits_do_not_fit_and_the_nearest_changes_do(tmp_path: Path) -> None:
    """16 completions of 4,097 tokens and 152,064 logits in bfloat16, as under DeepSpeed, three times: 59.8 GB."""
    found = memory_finding(tmp_path, SEVEN)
    assert "with 8 processes" in found.message and "59.8 logits" in found.message
    assert "1.9 weights, 1.9 gradients, 11.4 optimizer state" in found.message  # 7.6 billion x (2, 2, 12) / 8
    assert "assumes float32 master weights" in found.message
    assert "per_device_train_batch_size=8" in found.nearest and "use_liger_loss=true" in found.nearest
    assert memory_finding(tmp_path, SEVEN.replace("size: 16", "size: 4")) is None
    assert memory_finding(tmp_path, SEVEN + "use_liger_loss: true\n") is None
    assert memory_finding(tmp_path, SEVEN, framework_version="1.16") is None  # makes no whole logits


def test_memory_is_judged_only_where_gpu_and_model_are_known(tmp_path: Path) -> None:
    assert memory_finding(tmp_path, SEVEN, gpu_memory=None) is None
    assert memory_finding(tmp_path, SEVEN.replace("Qwen/Qwen2.5-7B-Instruct", "org/unknown")) is None
    with pytest.raises(UserError, match="--gpu-memory"):
        memory_finding(tmp_path, SEVEN, gpu_memory="plenty")


def test_the_accelerate_file_says_what_is_sharded(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(SEVEN.replace("size: 16", "size: 1"))
    (tmp_path / "ddp.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 8\n")
    (tmp_path / "zero3.yaml").write_text("deepspeed_config: {zero_stage: 3}\nnum_processes: 8\n")
    command = "accelerate launch --config_file {} grpo.py --config c.yaml\n"
    found = memory_finding(tmp_path, command.format("ddp.yaml"), "run.sh", gpu_memory="48GB")
    assert "15.2 weights, 15.2 gradients, 30.5 optimizer state" in found.message
    assert "ZeRO-3 or FSDP" in found.nearest
    assert memory_finding(tmp_path, command.format("zero3.yaml"), "run.sh", gpu_memory="48GB") is None


@pytest.mark.parametrize(
    ("accelerate", "state"),
    [
        ("deepspeed_config: {zero_stage: 2}", "15.2 weights, 1.9 gradients, 11.4 optimizer state"),
        ("deepspeed_config: {zero_stage: 3}", "1.9 weights, 1.9 gradients, 11.4 optimizer state"),
        ("distributed_type: FSDP", "1.9 weights, 1.9 gradients, 11.4 optimizer state"),
        ("deepspeed_config: {zero_stage: 3, offload_optimizer_device: none}", "11.4 optimizer state"),
        ("deepspeed_config: {zero_stage: 3, offload_optimizer_device: cpu}", "(1.9 weights, 42.3 activations"),
    ],
)
def test_master_weights_are_counted_and_what_is_offloaded_is_not(tmp_path: Path, accelerate: str, state: str) -> None:
    (tmp_path / "c.yaml").write_text(SEVEN)
    (tmp_path / "a.yaml").write_text(f"num_processes: 8\n{accelerate}\n")
    script = "accelerate launch --config_file a.yaml grpo.py --config c.yaml\n"
    found = memory_finding(tmp_path, script, "run.sh")
    assert state in found.message
    assert ("master weights" in found.message) == ("cpu" not in accelerate)


def test_memory_of_cohorts_own_files_is_that_of_the_plan(tmp_path: Path) -> None:
    text = COHORT.replace("path: m", "path: Qwen/Qwen2.5-7B-Instruct") + "hardware: {processes: 8}\n"
    assert memory_finding(tmp_path, text) is None
    found = memory_finding(tmp_path, text, gpu="4090", gpu_memory=None)
    assert "by `cohort plan`" in found.message and found.nearest
