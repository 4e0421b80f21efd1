"""The rules of ms-swift, verl and Cohort, GPUs, lengths, and the nearest values that work."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.check import FileReport, check_file
from cohort.check.nearest import GPUS, nearest_starts
from cohort.check.rules.start import Start
from cohort.check.rules.swift import MegatronBatch, SwiftBatch, megatron_start, swift_start
from cohort.check.rules.trl import TrlBatch, trl_start
from cohort.check.rules.verl import VerlBatch, verl_start
from cohort.errors import UserError


def report(tmp_path: Path, text: str, name: str = "run.sh", **options: Any) -> FileReport:
    (tmp_path / name).write_text(text)
    return check_file(tmp_path / name, **options)


def by_code(result: FileReport) -> dict[str, Any]:
    return {finding.code: finding for finding in result.findings}


# --- ms-swift


def test_the_defaults_of_ms_swift_fail_on_one_and_four_gpus_and_start_on_eight(tmp_path: Path):
    for processes, starts in ((1, False), (4, False), (8, True)):
        text = f"NPROC_PER_NODE={processes} swift rlhf --rlhf_type grpo --model m --dataset d\n"
        result = report(tmp_path, text, world_sizes=(1, 4, 8))
        assert result.failed != starts
        assert {size: start.starts for size, start in result.starts.items()} == {1: False, 4: False, 8: True}
    assert (
        result.starts[1].message
        == "generation_batch_size (1) must be evenly divisible by num_generations (8). Valid values: []."
    )


@pytest.mark.parametrize(
    ("numbers", "world_size", "message"),
    [
        (
            {"generation_batch_size": 12},
            8,
            "generation_batch_size (12) must be divisible by the global batch size (8).",
        ),
        (
            {"generation_batch_size": 16, "steps_per_generation": 4},
            8,
            "generation_batch_size (16) must equal per_device_train_batch_size * world_size * steps_per_generation = "
            "32.",
        ),
        (
            {"generations": 16, "accumulation": 2, "evaluates": True},
            8,
            "The global eval batch size (8 x 1) must be evenly divisible by num_generations_eval (16). "
            "Valid values: [1, 2, 4, 8].",
        ),
        ({"generations": 1}, 8, "num_generations must be greater than 1 for GRPO"),
        ({"tensor_parallel": 3}, 8, "vllm_tensor_parallel_size (3) must divide world size (8) evenly."),
        ({"generation_batch_size": 32, "steps_per_generation": 4}, 8, None),
        ({"generations": 1, "has_teacher": True}, 3, None),
    ],
)
def test_ms_swift_on_transformers(numbers: dict[str, Any], world_size: int, message: str | None):
    start = swift_start(SwiftBatch(**numbers), world_size)
    assert (start.starts, start.message) == (message is None, message)


@pytest.mark.parametrize(
    ("numbers", "world_size", "message"),
    [
        (
            {"global_batch_size": 32},
            8,
            "num_rollout_prompt (4) = generation_batch_size (32) // num_generations (8) must be divisible by dp_size "
            "(8).",
        ),
        (
            {"global_batch_size": 64, "micro_batch_size": 4},
            8,
            "Per-device rollout prompt count (1) = (generation_batch_size (64) // num_generations (8)) // dp_size (8) "
            "must be divisible by micro_batch_size (4).",
        ),
        ({"global_batch_size": 64, "model_parallel": 2}, 8, None),
        ({"global_batch_size": 64, "generations": 1}, 8, None),
    ],
)
def test_ms_swift_on_megatron(numbers: dict[str, Any], world_size: int, message: str | None):
    start = megatron_start(MegatronBatch(**numbers), world_size)
    assert (start.starts, start.message) == (message is None, message)


SERVER = """
CUDA_VISIBLE_DEVICES=0,1 swift rollout --model m --vllm_tensor_parallel_size 1 --vllm_max_model_len 2048 &
CUDA_VISIBLE_DEVICES=1,2,3 NPROC_PER_NODE=2 swift rlhf --rlhf_type grpo --model m --num_generations 2 \\
    --use_vllm true --vllm_mode server --vllm_server_host 127.0.0.1 --sleep_level 1 --vllm_max_model_len 4096 \\
    --max_length 1024 --max_completion_length 2048
"""


def test_a_server_script_of_ms_swift(tmp_path: Path):
    result = report(tmp_path, SERVER)
    told = [(finding.code, finding.field) for finding in result.findings]
    assert told == [
        ("CHK012", "CUDA_VISIBLE_DEVICES"),  # GPU 1 twice
        ("CHK005", "sleep_level"),
        ("CHK005", "vllm_max_model_len"),
        ("CHK011", "CUDA_VISIBLE_DEVICES"),  # GPU 3 idle
        ("CHK011", "vllm_data_parallel_size"),  # the server uses one of two
        ("CHK013", "max_completion_length"),
    ]
    assert result.findings[-1].message == (
        "max_length 1024 + max_completion_length 2048 = 3072 tokens exceed swift rollout's vllm_max_model_len 2048"
    )
    assert result.findings[-1].nearest == ("swift rollout's vllm_max_model_len=3072", "max_completion_length=1024")


def test_contradictions_and_colocation_of_ms_swift(tmp_path: Path):
    start = "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model m "
    assert by_code(report(tmp_path, start + "--use_vllm true\n"))["CHK008"].message == (
        "vllm_mode is required when use_vllm is true"
    )
    assert (
        "not supported when use_vllm is false"
        in by_code(report(tmp_path, start + "--vllm_mode server\n"))["CHK008"].message
    )
    found = by_code(report(tmp_path, start + "--use_vllm true --vllm_mode colocate --vllm_server_host 10.0.0.1\n"))
    assert "90% of every GPU" in found["CHK018"].message and found["CHK005"].field == "vllm_server_host"
    assert "CHK018" not in by_code(report(tmp_path, start + "--use_vllm true --vllm_mode colocate --sleep_level 1\n"))
    assert "CHK015" in by_code(report(tmp_path, start + "--loss_type cispo\n"))


RAY = """
rlhf_type: grpo
use_vllm: true
vllm_mode: colocate
sleep_level: 1
colocate_groups: [[train, rollout]]
train: {gpus: 8, global_batch_size: 64, micro_batch_size: 1, num_generations: 1}
rollout: {gpus: 4}
"""


def test_groups_for_ray_that_are_none(tmp_path: Path):
    for groups in ("[[{a: 1}, rollout]]", "[1, null]", "{a: b}", "train"):
        text = RAY.replace("[[train, rollout]]", groups)
        assert "CHK014" in by_code(report(tmp_path, text, "ray.yaml"))


def test_groups_for_ray_and_a_group_of_one_on_megatron(tmp_path: Path):
    found = by_code(report(tmp_path, RAY, "ray.yaml"))
    assert "accepted on Megatron" in found["CHK014"].message
    assert "but got {'train': 8, 'rollout': 4}" in found["CHK008"].message
    right = RAY.replace("gpus: 4", "gpus: 8").replace("num_generations: 1", "num_generations: 8")
    result = report(tmp_path, right, "ray.yaml")
    assert result.findings == () and result.starts[8].starts and not result.starts[3].starts


# --- verl


MICRO = {"micro_batch_size_per_gpu": 4, "rollout_micro": (None, 4)}


@pytest.mark.parametrize(
    ("numbers", "num_gpus", "message"),
    [
        (
            {**MICRO, "generations": 5},
            24,
            "real_train_batch_size (5120) must be divisible by minimal possible batch size (24)",
        ),
        ({**MICRO, "train_batch_size": 128}, 8, "train_batch_size (128) must be >= actor.ppo_mini_batch_size (256)"),
        (
            {"micro_batch_size": 24, "rollout_micro": (None, 4)},
            8,
            "ppo_mini_batch_size (256) must be divisible by ppo_micro_batch_size (24)",
        ),
        ({**MICRO, "rollout_tensor_parallel": 3}, 8, "rollout world_size: 8 is not divisible by infer_world_size: 3"),
        (
            {"dynamic": True, "generations": 5, "rollout_tensor_parallel": 1},
            3,
            "Got mini_batch_size=1280 and self.engine.get_data_parallel_size()=3",
        ),
        ({**MICRO, "generations": 5}, 8, None),
        ({"dynamic": True}, 8, None),
    ],
)
def test_verl(numbers: dict[str, Any], num_gpus: int, message: str | None):
    start = verl_start(VerlBatch(**numbers), num_gpus)
    assert (start.starts, start.message) == (message is None, message)


def test_a_script_and_a_yaml_of_verl_are_judged_alike(tmp_path: Path):
    script = (
        "N=${N:-8}\npython3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=$((8 * 128)) "
        "\\\n"
        "  data.max_prompt_length=1024 data.max_response_length=3072 actor_rollout_ref.rollout.max_model_len=2048 \\\n"
        "  actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.rollout.mode=sync trainer.nnodes=2 \\\n"
        "  trainer.n_gpus_per_node=$N +data.val_batch_size=64 data.train_files=$FILES $@\n"
    )
    shell = report(tmp_path, script)
    assert [finding.code for finding in shell.findings] == ["CHK006", "CHK014", "CHK004", "CHK005", "CHK013"]
    assert shell.launch and shell.launch.processes and shell.launch.processes.value == 16
    assert "$FILES" in by_code(shell)["CHK004"].message
    yaml = (
        "algorithm: {adv_estimator: grpo}\ndata: {train_batch_size: 1024, max_prompt_length: 1024, "
        "max_response_length: 3072,"
        " val_batch_size: 64, train_files: '${oc.env:FILES}'}\nactor_rollout_ref:\n  actor: {use_dynamic_bsz: true}\n"
        "  rollout: {mode: sync, max_model_len: 2048}\ntrainer: {nnodes: 2, n_gpus_per_node: 8}\n"
    )
    other = report(tmp_path, yaml, "run.yaml")
    assert [finding.code for finding in other.findings] == [finding.code for finding in shell.findings]
    assert other.starts == shell.starts


# --- Cohort


COHORT = "model: {path: m}\ndata: {path: d.jsonl}\nrewards: [{use: math}]\n"


def test_cohort_starts_with_every_number_of_gpus_or_with_none(tmp_path: Path):
    text = COHORT + "rollout: {num_generations: 7}\ntrain: {prompts_per_step: 3}\nhardware: {processes: 5}\n"
    result = report(tmp_path, text, "c.yaml")
    assert result.findings == ()
    assert {(start.starts, start.generation_batch_size) for start in result.starts.values()} == {(True, 21)}
    wrong = report(tmp_path, COHORT + "rollout: {num_generations: 1}\n", "c.yaml")
    assert not any(start.starts for start in wrong.starts.values())
    assert "a group of one has no peers" in by_code(wrong)["CHK002"].message
    unknown = report(tmp_path, COHORT + "train: {learning_rat: 1}\n", "c.yaml")
    assert "did you mean learning_rate?" in by_code(unknown)["CHK002"].message
    missing = by_code(report(tmp_path, COHORT.replace("use: math", "weight: 1"), "c.yaml"))["CHK002"]
    assert missing.message.startswith("rewards.0.use: ") and missing.field == "rewards.0.use"  # as it is
    long = "rollout: {engine: vllm, max_completion_tokens: 4096, vllm_args: {max_model_len: 2048}}\n"
    assert "use rollout.max_prompt_tokens" in by_code(report(tmp_path, COHORT + long, "c.yaml"))["CHK002"].message


# --- the nearest values


COUNTS = st.integers(1, 24)


@settings(max_examples=60, deadline=None)
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


SEVEN = """
model_name_or_path: Qwen/Qwen2.5-7B-Instruct
torch_dtype: bfloat16
num_generations: 8
per_device_train_batch_size: 16
max_prompt_length: 1024
max_completion_length: 4096
gradient_checkpointing: true
beta: 0.0
"""


def memory_finding(tmp_path: Path, text: str, name: str = "c.yaml", **options: Any) -> Any:
    (tmp_path / name).write_text(text)
    report = check_file(tmp_path / name, **{"gpu_memory": "80GB", "trl_version": "0.18.0", **options})
    return next((f for f in report.findings if f.code == "CHK019"), None)


def test_whole_logits_do_not_fit_and_the_nearest_changes_do(tmp_path: Path) -> None:
    """16 completions of 4,097 tokens and 152,064 logits in bfloat16, as under DeepSpeed, three times: 59.8 GB."""
    found = memory_finding(tmp_path, SEVEN)
    assert "with 8 processes" in found.message and "59.8 logits" in found.message
    assert "1.9 weights, 1.9 gradients, 11.4 optimizer state" in found.message  # 7.6 billion x (2, 2, 12) / 8
    assert "assumes float32 master weights" in found.message
    assert "per_device_train_batch_size=8" in found.nearest and "use_liger_kernel=true" in found.nearest
    assert memory_finding(tmp_path, SEVEN.replace("size: 16", "size: 4")) is None
    assert memory_finding(tmp_path, SEVEN + "use_liger_loss: true\n") is None
    assert memory_finding(tmp_path, SEVEN, trl_version="1.16") is None  # makes no whole logits


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


# --- keys that ms-swift and verl do not know


def test_an_argument_that_ms_swift_does_not_know_stops_it(tmp_path: Path) -> None:
    known = "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model m --dataset d --beta 0.04 --lora_rank 8 --bf16 true "
    assert "CHK006" not in by_code(report(tmp_path, known + "--vllm_mode colocate --use_vllm true\n"))
    found = by_code(report(tmp_path, known + "--num_generation 8\n"))["CHK006"]
    assert "remaining_argv: ['--num_generation', ...]" in found.message
    assert found.nearest == ("num_generations",)
    ignored = by_code(report(tmp_path, known + "--num_generation 8 --ignore_args_error true\n"))
    assert "CHK006" not in ignored and ignored["CHK005"].field == "num_generation"
    on_megatron = "NPROC_PER_NODE=8 megatron rlhf --rlhf_type grpo --model m --dataset d --micro_batch_size 1 "
    assert "CHK006" not in by_code(report(tmp_path, on_megatron + "--expert_model_parallel_size 2\n"))
    assert by_code(report(tmp_path, on_megatron + "--deepspeed zero3\n"))["CHK006"].field == "deepspeed"


@pytest.mark.parametrize(
    ("override", "refused"),
    [
        ("actor_rollout_ref.rollout.n=8", False),
        ("actor_rollout_ref.rollout.num=8", True),
        ("+actor_rollout_ref.rollout.num=8", False),  # added
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.anything=8", False),  # into an empty mapping
        ("actor_rollout_ref.actor.megatron.param_offload=True", False),  # of another engine
        ("actor_rollout_ref.rollout.agent.num_workers=8", False),
        ("mine.key=8", False),  # a section that was not read
    ],
)
def test_a_key_that_verl_does_not_have_stops_hydra(tmp_path: Path, override: str, refused: bool) -> None:
    text = f"python -m verl.trainer.main_ppo data.train_batch_size=8 algorithm.adv_estimator=grpo {override}\n"
    found = by_code(report(tmp_path, text)).get("CHK006")
    assert (found is not None) == refused
    if found is not None:
        assert "Key 'num' is not in struct" in found.message and "+actor_rollout_ref.rollout.num" in found.nearest


# --- versions, and what only some of them know


@pytest.mark.parametrize(
    ("version", "taken"), [("99.1", "1.16"), ("0.1", "0.15"), ("0.15.2", None), ("1.16.3", None), ("0.18.0", None)]
)
def test_rules_of_another_version_are_told(tmp_path: Path, version: str, taken: str | None) -> None:
    found = by_code(report(tmp_path, SEVEN, "c.yaml", trl_version=version)).get("CHK020")
    assert (found is None) == (taken is None)
    assert found is None or f"those of {taken}, the nearest" in found.message


@pytest.mark.parametrize(
    ("version", "capped"), [("0.16.0", False), ("0.18.0", False), ("0.26.0", True), ("1.16", True)]
)
def test_cispo_is_capped_where_it_is_known(tmp_path: Path, version: str, capped: bool) -> None:
    found = by_code(report(tmp_path, SEVEN + "loss_type: cispo\nepsilon_high: 0.28\n", "c.yaml", trl_version=version))
    assert ("CHK015" in found) == capped


def test_missing_micro_batches_of_verl_are_proposed_as_large_as_the_actors(tmp_path: Path) -> None:
    text = (
        "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=1024 trainer.nnodes=1 "
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=40 actor_rollout_ref.rollout.n=5 "
        "trainer.n_gpus_per_node=8 actor_rollout_ref.actor.use_kl_loss={}\n"
    )
    key = "log_prob_micro_batch_size_per_gpu=40"
    without = by_code(report(tmp_path, text.format(False)))["CHK002"]
    assert without.nearest == (f"actor_rollout_ref.rollout.{key}",)
    both = by_code(report(tmp_path, text.format(True)))["CHK002"]
    assert both.nearest == (f"actor_rollout_ref.rollout.{key} and actor_rollout_ref.ref.{key}",)
    mended = text.format(False).strip() + " " + without.nearest[0] + "\n"
    assert "CHK002" not in by_code(report(tmp_path, mended))
