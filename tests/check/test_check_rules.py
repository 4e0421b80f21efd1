"""The rules of ms-swift, verl and Cohort, GPUs, lengths, and the nearest values that work."""

from pathlib import Path
from typing import Any

import pytest

from checks import COHORT, SEVEN, by_code, report
from cohort.check.rules.swift import MegatronBatch, SwiftBatch, megatron_start, swift_start
from cohort.check.rules.verl import VerlBatch, verl_start

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


def test_cohort_starts_with_every_number_of_gpus_or_with_none(tmp_path: Path):
    text = COHORT + "rollout: {num_generations: 7}\ntrain: {prompts_per_step: 3}\nhardware: {processes: 5}\n"
    result = report(tmp_path, text, "c.yaml")
    assert result.findings == ()
    assert {(start.starts, start.generation_batch_size) for start in result.starts.values()} == {(True, 21)}
    wrong = report(tmp_path, COHORT + "rollout: {num_generations: 1}\n", "c.yaml")
    assert not any(start.starts for start in wrong.starts.values())
    assert "a group of one has nothing to compare with" in by_code(wrong)["CHK002"].message
    unknown = report(tmp_path, COHORT + "train: {learning_rat: 1}\n", "c.yaml")
    assert "did you mean learning_rate?" in by_code(unknown)["CHK002"].message
    missing = by_code(report(tmp_path, COHORT.replace("use: math", "weight: 1"), "c.yaml"))["CHK002"]
    assert missing.message.startswith("rewards.0.use: ") and missing.field == "rewards.0.use"  # as it is
    long = "rollout: {engine: vllm, max_completion_tokens: 4096, vllm_args: {max_model_len: 2048}}\n"
    assert "use rollout.max_prompt_tokens" in by_code(report(tmp_path, COHORT + long, "c.yaml"))["CHK002"].message


def test_files_of_cohorts_own_that_are_not_there(tmp_path: Path):
    text = COHORT.replace("org/d", "d.jsonl").replace("use: math", "use: 'r.py:judge'") + "eval: {path: ./e.jsonl}\n"
    found = [f for f in report(tmp_path, text, "c.yaml").findings if f.code == "CHK021"]
    assert [(f.field, f.message.split(";")[0]) for f in found] == [
        ("data.path", "data.path: 'd.jsonl': no such file"),
        ("eval.path", "eval.path: './e.jsonl': no such file"),
        ("rewards.0.use", "rewards.0.use: 'r.py:judge': no such file"),
    ]
    for name in ("d.jsonl", "e.jsonl", "r.py"):  # beside the configuration
        (tmp_path / name).touch()
    assert report(tmp_path, text, "c.yaml").findings == ()


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
