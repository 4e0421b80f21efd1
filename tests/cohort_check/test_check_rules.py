"""The rules of ms-swift, verl and Cohort, GPUs, lengths, and the nearest values that work."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checks import COHORT, SEVEN, by_code, report
from cohort_check.rules.common import unknown_key
from cohort_check.rules.swift import UNSET, swift_start
from cohort_check.rules.verl import VerlBatch, verl_start

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
def test_ms_swift(numbers: dict[str, Any], world_size: int, message: str | None):
    start = swift_start(replace(UNSET, **numbers), world_size)
    assert (start.starts, start.message) == (message is None, message)


def test_older_versions_of_ms_swift_check_batches_as_trl_did():
    batch = replace(UNSET, accumulation=8, evaluates=True)
    assert "The global train batch size (4 x 1) must be" in str(swift_start(batch, 4, (3, 3)).message)
    assert "The global eval batch size (1 * 4) must be" in str(swift_start(batch, 4, (3, 10)).message)
    assert swift_start(replace(batch, evaluates=False), 4, (3, 10)).starts


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
        ("CHK008", "CUDA_VISIBLE_DEVICES"),  # 2 processes of 3 GPUs
        ("CHK012", "CUDA_VISIBLE_DEVICES"),  # GPU 1 twice
        ("CHK005", "sleep_level"),
        ("CHK005", "vllm_max_model_len"),
        ("CHK011", "CUDA_VISIBLE_DEVICES"),  # GPU 3 idle
    ]


@pytest.mark.parametrize(
    ("said", "version", "says"),
    [
        ("--use_vllm true", "4.6", "vllm_mode is required when use_vllm is true"),
        ("--use_vllm true", "3.10", None),  # colocate was the default
        ("--use_vllm true --vllm_mode $MODE", "4.6", None),
        ("--vllm_mode server", "4.6", "vllm_mode is not supported when use_vllm is false"),
        ("--use_vllm true --vllm_mode server", "4.6", "an assertion: vllm_mode server needs vllm_server_host"),
        ("--async_generate true", "3.8", "async generate require vllm_mode == server, "),
        (
            "--truncation_strategy right",
            "4.6",
            "GRPO requires `truncation_strategy 'left' or 'delete'`, Current value: ",
        ),
        ("--reward_funcs accuracy soft_overlong", "4.6", "The soft_cache_length must be set"),
        ("--packing true --attn_impl sdpa", "4.6", 'The "packing" feature requires a flash attention'),
        ("--padding_free true --attn_impl flash_attn", "4.6", None),
        ("--warmup_ratio 0.1 --warmup_steps 5", "4.6", "`warmup_ratio` and `warmup_steps` cannot be set"),
        ("--warmup_ratio 0.1 --warmup_steps 5", "4.4", None),
        ("--use_liger_kernel true --delta 1.5", "4.6", "Liger loss does not support two-sided GRPO loss yet."),
        ("--use_liger_kernel true --top_entropy_quantile 1.0", "4.6", None),
        ("--fsdp fsdp2 --deepspeed zero3", "4.6", "FSDP2 is not compatible with DeepSpeed."),
    ],
)
def test_settings_that_ms_swift_refuses_together(tmp_path: Path, said: str, version: str, says: str | None):
    text = f"NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model m {said}\n"
    found = by_code(report(tmp_path, text, framework_version=version)).get("CHK008")
    assert (found is None) == (says is None)
    if found is not None and says is not None:
        assert found.says.startswith(says)


@pytest.mark.parametrize(
    ("start", "said", "version", "says"),
    [
        (
            "CUDA_VISIBLE_DEVICES=0,1 ",
            "--deepspeed zero2",
            "4.6",
            "DeepSpeed is not compatible with `device_map`. n_gpu: 2",
        ),
        (
            "CUDA_VISIBLE_DEVICES=0,1 ",
            "--use_vllm true --vllm_mode colocate",
            "4.6",
            "GRPO with vLLM is not compatible",
        ),
        ("CUDA_VISIBLE_DEVICES=0,1,2 NPROC_PER_NODE=2 ", "", "4.6", "n_gpu: 3, local_world_size: 2"),
        ("CUDA_VISIBLE_DEVICES=0,1,2 NPROC_PER_NODE=2 ", "--use_vllm true", "3.3", None),  # one for vLLM
        (
            "CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=2 ",
            "--use_vllm true --num_infer_workers 2",
            "3.3",
            None,
        ),  # colocate
    ],
)
def test_gpus_that_ms_swift_refuses(tmp_path: Path, start: str, said: str, version: str, says: str | None):
    text = f"{start}swift rlhf --rlhf_type grpo --model m {said}\n"
    found = by_code(report(tmp_path, text, framework_version=version)).get("CHK008")
    assert (found.says.startswith(says) if found else None) == (None if says is None else True)


def test_a_server_that_nobody_asks_and_the_bound_of_cispo_in_ms_swift(tmp_path: Path):
    start = "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model m "
    found = by_code(report(tmp_path, start + "--use_vllm true --vllm_mode colocate --vllm_server_host 10.0.0.1\n"))
    assert found["CHK005"].field == "vllm_server_host"
    assert "CHK015" in by_code(report(tmp_path, start + "--loss_type cispo\n"))


# --- verl
MICRO = {"micro": (None, 4), "rollout_micro": (None, 4)}
DYNAMIC = {"dynamic": True, "rollout_dynamic": True}


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
            {"micro": (24, None), "rollout_micro": (None, 4)},
            8,
            "ppo_mini_batch_size (256) must be divisible by ppo_micro_batch_size (24)",
        ),
        ({**MICRO, "rollout_tensor_parallel": 3}, 8, "rollout world_size: 8 is not divisible by infer_world_size: 3"),
        (
            {**DYNAMIC, "generations": 5, "rollout_tensor_parallel": 1},
            3,
            "Got mini_batch_size=1280 and self.engine.get_data_parallel_size()=3",
        ),
        ({**MICRO, "generations": 5}, 8, None),
        (DYNAMIC, 8, None),
        ({**DYNAMIC, "generations": 5}, 24, "Got mini_batch_size=1280 and self.engine.get_data_parallel_size()=24"),
        (
            {**DYNAMIC, "version": (0, 5, 0)},
            12,
            "real_train_batch_size (1024) must be divisible by minimal possible batch size (12)",
        ),
        (
            {"dynamic": True, "rollout_dynamic": False},
            8,
            "assert self.config.actor.use_dynamic_bsz == self.config.rollout.log_prob_use_dynamic_bsz",
        ),
        ({**MICRO, "micro": (64, None)}, 8, "assert self.config.actor.ppo_micro_batch_size_per_gpu is not None"),
        ({**MICRO, "micro": (64, None), "version": (0, 7, 1)}, 8, None),
        (
            {**MICRO, "micro": (None, 24), "version": (0, 6, 1)},
            8,
            "normalized ppo_mini_batch_size 32 should be divisible by ppo_micro_batch_size_per_gpu 24",
        ),
        (
            {**MICRO, "uses_reference": True},
            8,
            "[actor_rollout_ref.ref] Please set at least one of 'actor_rollout_ref.ref.log_prob_micro_batch_size' or "
            "'actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu'.",
        ),
    ],
)
def test_verl(numbers: dict[str, Any], num_gpus: int, message: str | None):
    start = verl_start(VerlBatch(**numbers), num_gpus)
    assert (start.starts, start.message) == (message is None, message)


def test_a_script_and_a_yaml_of_verl_are_checked_alike(tmp_path: Path):
    script = (
        "N=${N:-8}\npython3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=$((8 * 128)) "
        "\\\n"
        "  data.max_prompt_length=1024 data.max_response_length=3072 actor_rollout_ref.rollout.max_model_len=2048 \\\n"
        "  actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.rollout.mode=sync trainer.nnodes=2 \\\n"
        "  trainer.n_gpus_per_node=$N +data.val_batch_size=64 data.train_files=$FILES $@\n"
    )
    shell = report(tmp_path, script)
    assert [finding.code for finding in shell.findings] == ["CHK006", "CHK004", "CHK004", "CHK005", "CHK014"]
    assert shell.launch and shell.launch.processes and shell.launch.processes.value == 16
    assert [finding.field for finding in shell.findings if finding.code == "CHK004"] == ["data.train_files", None]
    yaml = (
        "algorithm: {adv_estimator: grpo}\ndata: {train_batch_size: 1024, max_prompt_length: 1024, "
        "max_response_length: 3072,"
        " val_batch_size: 64, train_files: '${oc.env:FILES}'}\nactor_rollout_ref:\n  actor: {use_dynamic_bsz: true}\n"
        "  rollout: {mode: sync, max_model_len: 2048}\ntrainer: {nnodes: 2, n_gpus_per_node: 8}\n"
    )
    other = report(tmp_path, yaml, "run.yaml")
    assert {finding.code for finding in other.findings} == {finding.code for finding in shell.findings}
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
        ("data.path", f"data.path: '{tmp_path}/d.jsonl': no such file"),
        ("eval.path", f"eval.path: '{tmp_path}/e.jsonl': no such file"),
        ("rewards.0.use", f"rewards.0.use: '{tmp_path}/r.py:judge': no such file"),
    ]
    for name in ("d.jsonl", "e.jsonl", "r.py"):  # beside the configuration
        (tmp_path / name).touch()
    assert report(tmp_path, text, "c.yaml").findings == ()


# --- keys that ms-swift and verl do not know


def test_an_argument_that_ms_swift_does_not_know_stops_it(tmp_path: Path) -> None:
    known = "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model m --dataset d --beta 0.04 --lora_rank 8 --bf16 true "
    # argparse takes the start of a single name
    assert "CHK006" not in by_code(report(tmp_path, known + "--vllm_mode colocate --use_vllm true --reward_weight 1\n"))
    found = by_code(report(tmp_path, known + "--num_generaions 8 --system Think, then answer.\n"))["CHK006"]
    assert found.says == "remaining_argv: ['--num_generaions', '8', 'then', 'answer.']"
    assert found.nearest == ("num_generations",)
    ignored = by_code(report(tmp_path, known + "--num_generaions 8 --ignore_args_error true\n"))
    assert "CHK006" not in ignored and ignored["CHK005"].field == "num_generaions"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("actor_rollout_ref.rollout.n=8", None),
        ("actor_rollout_ref.rollout.num=8", "Could not override 'actor_rollout_ref.rollout.num'."),
        ("+actor_rollout_ref.rollout.num=8", None),
        ("+actor_rollout_ref.rollout.n=8", "Could not append to config. An item is already at"),
        ("++actor_rollout_ref.rollout.n=8", None),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.any=8", "Could not override"),  # an empty mapping
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.any=8", None),
        ("actor_rollout_ref.rollout.agent.num_workers=8", None),
        ("+actor_rollout_ref.actor.policy_loss.tau_pos=1", "Error in call to target"),
        ("actor_rollout_ref.rollout.mode=sync", "Rollout mode 'sync' has been removed."),
        ("actor_rollout_ref.actor.loss_agg_mode=mean", "Invalid loss_agg_mode: mean"),
        ("actor_rollout_ref.model.lora_rank=1024", "lora_rank must be less than or equal to 512, but got 1024"),
        (
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 actor_rollout_ref.model.use_remove_padding=False",
            "When using sequence parallelism for actor/ref policy, you must enable `use_remove_padding`.",
        ),
        (
            "actor_rollout_ref.rollout.val_kwargs.do_sample=True actor_rollout_ref.rollout.temperature=0",
            "validation gen temperature should be greater than 0 when enabling do_sample",
        ),
    ],
)
def test_what_verl_refuses_whatever_the_gpus(tmp_path: Path, override: str, says: str | None) -> None:
    text = f"python -m verl.trainer.main_ppo data.train_batch_size=8 actor_rollout_ref.rollout.name=vllm {override}\n"
    findings = report(tmp_path, text, framework_version="0.9").findings
    found = [finding.says for finding in findings if finding.code != "CHK002" and finding.says]
    assert [str(text)[: len(says)] for text in found] == [says] if says else found == []


def test_verls_keys_and_rules_are_those_of_its_version(tmp_path: Path) -> None:
    text = "python -m verl.trainer.main_ppo data.train_batch_size=8 actor_rollout_ref.rollout.mode=sync\n"
    assert "CHK006" not in by_code(report(tmp_path, text, framework_version="0.5.0"))
    unnamed = by_code(report(tmp_path, text.replace("mode=sync", "n=5"), framework_version="0.9"))["CHK006"]
    assert unnamed.says == "Missing mandatory value: actor_rollout_ref.rollout.name"
    unknown = "actor_rollout_ref.rollout.update_weights_bucket_megabytes=512 actor_rollout_ref.rollout.name=vllm\n"
    found = by_code(
        report(tmp_path, text.replace("actor_rollout_ref.rollout.mode=sync\n", unknown), framework_version="0.9")
    )["CHK006"]
    assert found.message.endswith("which is there from 0.5.0 to 0.7.0")
    text, _ = unknown_key("verl", (0, 9), "actor_rollout_ref.profiler._target_", {})
    assert text.endswith("which is there from 0.5.0 to 0.5.0")  # the only version that has it
    own = text.replace("verl.trainer.main_ppo", "recipe.dapo.main_dapo").replace("mode=sync", "any=1")
    assert "CHK006" not in by_code(report(tmp_path, own))  # whose configuration may have the key


# --- versions, and what only some of them know


@pytest.mark.parametrize(
    ("version", "taken"), [("99.1", "1.16"), ("0.1", "0.15"), ("0.15.2", None), ("1.16.3", None), ("0.18.0", None)]
)
def test_rules_of_another_version_are_told(tmp_path: Path, version: str, taken: str | None) -> None:
    found = by_code(report(tmp_path, SEVEN, "c.yaml", framework_version=version)).get("CHK020")
    assert (found is None) == (taken is None)
    assert found is None or f"those of {taken}, the nearest" in found.message


def test_rules_of_another_version_of_ms_swift_or_verl_are_told(tmp_path: Path) -> None:
    swift = "swift rlhf --rlhf_type grpo --model M\n"
    verl = "python -m verl.trainer.main_ppo data.train_batch_size=8 actor_rollout_ref.rollout.name=vllm\n"
    for text, known, unknown, taken in ((swift, "4.6.1", "9.9", "4.6"), (verl, "0.5.0", "0.4.1", "0.5")):
        assert "CHK020" not in by_code(report(tmp_path, text, framework_version=known))
        found = by_code(report(tmp_path, text, framework_version=unknown))["CHK020"]
        assert found.nearest == (f"--framework-version {taken}",)


@pytest.mark.parametrize(
    ("version", "capped"), [("0.16.0", False), ("0.18.0", False), ("0.26.0", True), ("1.16", True)]
)
def test_cispo_is_capped_where_it_is_known(tmp_path: Path, version: str, capped: bool) -> None:
    found = by_code(
        report(tmp_path, SEVEN + "loss_type: cispo\nepsilon_high: 0.28\n", "c.yaml", framework_version=version)
    )
    assert ("CHK015" in found) == capped
