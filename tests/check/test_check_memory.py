"""Memory of ms-swift, verl and quantized models, by hand: Qwen2.5-7B has 7,615,616,512 weights.

Of these 28 x 233,046,016 are in linear layers of its 28 layers; the vocabulary is 152,064.
"""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cohort.check import Finding, check_file
from cohort.cli.app import app

LINEAR = 28 * (3584 * 3584 * 2 + 3584 * 512 * 2 + 3 * 3584 * 18944)
REST = 7_615_616_512 - LINEAR
SWIFT = "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model Qwen/Qwen2.5-7B --dataset d --max_length 512 "
VERL = (
    "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=1024 trainer.nnodes=1 "
    "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B actor_rollout_ref.rollout.n=8 trainer.n_gpus_per_node=8 "
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 actor_rollout_ref.rollout.name=vllm "
)
FSDP = "actor_rollout_ref.actor.fsdp_config"
MICRO = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"


def judged(folder: Path, text: str, name: str = "run.sh", *, memory: str = "80GB", **options: Any) -> tuple[str, Any]:
    """What is said of memory, and the finding if there is one."""
    (folder / name).write_text(text)
    report = check_file(folder / name, gpu_memory=memory, **options)
    return str(report.memory), next((f for f in report.findings if f.code == "CHK019"), None)


def fits_if_changed(folder: Path, text: str, found: Finding, **options: Any) -> None:
    """Every proposal that the command line can say is tried."""
    for proposal in found.nearest:
        if "GPUs=" in proposal:
            continue
        changes = proposal.split(" and ")
        added = " ".join(
            change if change.startswith("actor_") else f"--{change.replace('=', ' ')}" for change in changes
        )
        assert judged(folder, f"{text} {added}\n", **options)[1] is None, proposal


# --- ms-swift


def test_swift_trains_adapters_unless_told_otherwise(tmp_path: Path) -> None:
    told, found = judged(tmp_path, SWIFT)
    assert found is None and "15.2 weights" in told and "LoRA, ms-swift's default" in told
    assert "8 processes" in told and "optimizer state" in told and "reference" not in told
    full, _ = judged(tmp_path, SWIFT + "--tuner_type full --beta 0.04 --torch_dtype bfloat16")
    assert "15.2 weights, 15.2 gradients, 30.5 optimizer state, 15.2 reference" in full  # nothing is shared


@pytest.mark.parametrize(
    ("deepspeed", "state"),
    [
        ("zero2", "15.2 weights, 1.9 gradients, 11.4 optimizer state, 15.2 reference"),
        ("zero3", "1.9 weights, 1.9 gradients, 11.4 optimizer state, 1.9 reference"),
        ("zero2_offload", "(15.2 weights, 15.2 reference"),
        ("zero3_offload", "(0.5 activations"),  # no state at all
        ("ds.json", "15.2 weights, 15.2 gradients, 11.4 optimizer state"),
    ],
)
def test_swift_shares_its_state_as_deepspeed_says(deepspeed: str, state: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}}}')
    assert state in judged(tmp_path, SWIFT + f"--tuner_type full --deepspeed {deepspeed}", memory="200GB")[0]


def test_swift_holds_vllm_while_training_or_beside_what_stays(tmp_path: Path) -> None:
    script = SWIFT + "--tuner_type full --deepspeed zero3 --use_vllm true --vllm_mode colocate "
    _, awake = judged(tmp_path, script)
    assert "in training" in awake.message and "72.0 vLLM" in awake.message
    assert "vllm_gpu_memory_utilization=0.7" in awake.nearest
    fits_if_changed(tmp_path, script, awake)
    _, asleep = judged(tmp_path, script + "--sleep_level 1 ")
    assert "in sampling" in asleep.message and "11.4 optimizer state" in asleep.message
    assert "offload_model=true and offload_optimizer=true" in asleep.nearest
    fits_if_changed(tmp_path, script + "--sleep_level 1 ", asleep)


def test_swift_quantizes(tmp_path: Path) -> None:
    told, _ = judged(tmp_path, SWIFT + "--quant_method bnb --quant_bits 4")
    stored = LINEAR * 4.127 / 8 + 2 * REST
    assert f"({stored / 1e9:.1f} weights" in told and stored == pytest.approx(5.546e9, rel=1e-3)
    assert "not checked: quant_method hqq" in judged(tmp_path, SWIFT + "--quant_method hqq --quant_bits 4")[0]
    assert "not checked: tuner llamapro" in judged(tmp_path, SWIFT + "--tuner_type llamapro")[0]


# --- verl


def test_verl_shards_float32_weights_and_leaves_the_reference_on_the_host(tmp_path: Path) -> None:
    script = (
        VERL
        + f"{MICRO}=64 actor_rollout_ref.actor.use_kl_loss=True "
        + "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8 "
    )
    _, found = judged(tmp_path, script, memory="48GB")
    assert "3.8 weights, 3.8 gradients, 7.6 optimizer state" in found.message  # 7.6 billion x (4, 4, 8) / 8
    assert "19.9 logits" in found.message  # 64 x 1,024 x 152,064 x 2
    assert "reference" not in found.message and found.field == MICRO
    fits_if_changed(tmp_path, script, found, memory="48GB")


def test_verl_offloads_for_sampling_only(tmp_path: Path) -> None:
    script = VERL + f"{MICRO}=1 actor_rollout_ref.rollout.gpu_memory_utilization=0.9 "
    _, beside = judged(tmp_path, script, memory="48GB")
    assert "in sampling" in beside.message and "3.8 weights, 7.6 optimizer state, 43.2 vLLM" in beside.message
    away = script + f"{FSDP}.param_offload=True {FSDP}.optimizer_offload=True "
    assert judged(tmp_path, away, memory="48GB")[1] is None
    assert "7.6 optimizer state" in judged(tmp_path, away, memory="16GB")[1].message  # back for training
    policy = script + f"actor_rollout_ref.actor.strategy=fsdp2 {FSDP}.offload_policy=True "
    assert "optimizer" not in judged(tmp_path, policy, memory="16GB")[0]


def test_verl_counts_tokens_where_batches_are_dynamic(tmp_path: Path) -> None:
    script = VERL + "actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu="
    told, _ = judged(tmp_path, script + "16384 ")
    assert "5.0 logits" in judged(tmp_path, script + "16384 actor_rollout_ref.rollout.gpu_memory_utilization=0.1 ")[0]
    assert "adapter" not in told and "3.8 weights" in told
    entropy = script + "65536 actor_rollout_ref.actor.entropy_coeff=0.001 "
    _, found = judged(tmp_path, entropy)
    assert "59.8 logits" in found.message  # three copies
    assert found.field is not None and found.field.endswith("ppo_max_token_len_per_gpu")
    assert any(proposal.startswith(found.field + "=") for proposal in found.nearest)


def test_what_is_not_counted_is_said(tmp_path: Path) -> None:
    assert "no critic" in judged(tmp_path, VERL.replace("=grpo", "=gae") + f"{MICRO}=1 ")[0]
    assert "shape of model org/m" in judged(tmp_path, VERL.replace("Qwen/Qwen2.5-7B", "org/m") + f"{MICRO}=1 ")[0]


# --- TRL


RECIPE = "model_name_or_path: Qwen/Qwen2.5-7B\nper_device_train_batch_size: 2\nreward_funcs: [r]\ndtype: bfloat16\n"


@pytest.mark.parametrize(("bits", "stored"), [(4, LINEAR * 4.127 / 8 + 2 * REST), (8, LINEAR + 2 * REST)])
def test_trl_quantizes(bits: int, stored: float, tmp_path: Path) -> None:
    told, _ = judged(tmp_path, RECIPE + f"use_peft: true\nload_in_{bits}bit: true\n", "r.yaml")
    assert f"({stored / 1e9:.1f} weights" in told and "the whole quantized model in every process" in told


def test_quantizing_is_among_what_helps(tmp_path: Path) -> None:
    text = (
        "accelerate launch --multi_gpu --num_processes 2 grpo.py --num_generations 8 --use_peft true --dtype bfloat16 "
    )
    text += "--model_name_or_path Qwen/Qwen2.5-7B --per_device_train_batch_size 4 "
    _, found = judged(tmp_path, text, memory="16GB")
    assert "load_in_4bit=true" in found.nearest


def test_open_r1s_own_recipe_fits_where_it_was_run(tmp_path: Path) -> None:
    """The numbers of its recipe for Codeforces: ZeRO-3 over 8 GPUs of 80 GB, logits in bfloat16."""
    (tmp_path / "c.yaml").write_text(
        "model_name_or_path: Qwen/Qwen2.5-Coder-7B-Instruct\ntorch_dtype: bfloat16\nbeta: 0.0\nnum_generations: 16\n"
        "per_device_train_batch_size: 4\ngradient_accumulation_steps: 32\ngradient_checkpointing: true\n"
        "max_prompt_length: 2000\nmax_completion_length: 8192\nsystem_prompt: x\nbenchmarks: [lcb]\n"
    )
    (tmp_path / "zero3.yaml").write_text("deepspeed_config: {zero_stage: 3}\nnum_processes: 8\n")
    script = "accelerate launch --config_file zero3.yaml grpo.py --config c.yaml\n"
    told, found = judged(tmp_path, script)
    assert found is None and told.startswith("is enough: about 70.8 GB")
    assert judged(tmp_path, script.replace("zero3.yaml", "fsdp.yaml"), memory="40GB")[1] is not None


def test_trl_shares_its_state_as_its_own_keys_say(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    told, _ = judged(tmp_path, RECIPE + "deepspeed: ds.json\n", "r.yaml")
    assert "15.2 weights, 1.9 gradients, 11.4 optimizer state" in told and "ZeRO-3" not in told
    assert "1.9 weights, 1.9 gradients" in judged(tmp_path, RECIPE + "fsdp: full_shard auto_wrap\n", "r.yaml")[0]


def test_that_memory_suffices_is_told_as_well(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    done = CliRunner().invoke(app, ["check", str(tmp_path / "r.yaml"), "--gpu", "h200"])
    assert (
        done.exit_code == 0
        and "memory is enough: about" in done.output
        and "8 processes, as the file does not say" in done.output
    )
    assert "memory is enough" not in CliRunner().invoke(app, ["check", str(tmp_path / "r.yaml")]).output


def test_a_run_on_the_cpu_is_not_judged_by_gpus(tmp_path: Path) -> None:
    run = "model: {path: Qwen/Qwen2.5-7B}\ndata: {path: d.jsonl}\nrewards: [{use: math}]\n"
    on_gpu, too_large = judged(tmp_path, run, "run.yaml", memory="24GB")
    assert on_gpu.startswith("is not enough") and too_large is not None
    on_cpu, found = judged(tmp_path, run + "hardware: {device: cpu}\n", "run.yaml", memory="24GB")
    assert on_cpu == "not checked: hardware.device: cpu uses no GPU" and found is None
