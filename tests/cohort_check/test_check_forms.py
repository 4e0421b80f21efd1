"""Forms of files that are started with arguments, or computed: Open-R1's Slurm script, Python, what is missing."""

from pathlib import Path

import pytest

from checks import read
from cohort_check import FileReport, check_file, convert_file

RECIPE = (
    "model_name_or_path: Qwen/Qwen2.5-1.5B\nnum_generations: {}\nper_device_train_batch_size: 16\nsystem_prompt: x\n"
)
JOB = """#!/bin/bash
#SBATCH --gres=gpu:8
MODEL=""
CONFIG=""
while [[ $# -gt 0 ]]; do
  case $1 in
    --model)
      MODEL="$2"
      shift 2
      ;;
    -c|--config) CONFIG="$2"; shift 2 ;;
    *) exit 1 ;;
  esac
done
accelerate launch --num_processes 8 src/open_r1/$TASK.py --config recipes/$MODEL/grpo/config_$CONFIG.yaml
"""


def report(folder: Path, text: str, name: str = "run.sh", **options: object) -> FileReport:
    (folder / name).write_text(text)
    return check_file(folder / name, **options)  # type: ignore[arg-type]


def messages(found: FileReport, code: str) -> list[str]:
    return [finding.message for finding in found.findings if finding.code == code]


# --- Open-R1's slurm/train.slurm


def test_a_script_whose_arguments_name_the_recipe_is_not_checked(tmp_path: Path) -> None:
    found = report(tmp_path, JOB, "train.slurm")
    assert found.launch is not None and found.launch.framework == "open-r1" and not found.failed
    assert found.starts == {}
    assert any(told.startswith("recipe: $MODEL is nothing or $2") for told in messages(found, "CHK004"))


# --- frameworks and engines whose rules are not known

VERL = "python3 -m verl.trainer.main_ppo data.train_batch_size=8 actor_rollout_ref.rollout.n=5 {}\n"


@pytest.mark.parametrize(
    ("name", "text", "framework", "told"),
    [
        ("rl.toml", "[trainer]\n[orchestrator]\nbatch_size = 8\n", "prime-rl", "prime-rl"),
        ("run.sh", "uv run rl @ configs/rl.toml\n", "prime-rl", "prime-rl"),
        ("run.sh", "ray job submit -- python -m openrlhf.cli.train_ppo_ray --x 1\n", "openrlhf", "OpenRLHF"),
        ("run.sh", VERL.format("model_engine=megatron"), "verl", "Megatron"),
        ("run.sh", VERL.format("actor_rollout_ref.actor.strategy=megatron"), "verl", "Megatron"),
        ("run.sh", VERL.format("--config-name=ppo_megatron_trainer.yaml"), "verl", "Megatron"),
        ("run.sh", VERL.format("model_engine=veomni"), "verl", "verl's engine veomni"),
        ("run.sh", "NPROC_PER_NODE=8 megatron rlhf --rlhf_type grpo --x 1\n", "ms-swift", "Megatron"),
        ("run.sh", "megatron rlhf --use_ray true --config $DIR/r.yaml\n", "ms-swift", "Megatron"),
        ("run.yaml", "rlhf_type: grpo\ntrain: {gpus: 4}\n", "ms-swift", "ms-swift on Ray, which trains with Megatron"),
    ],
)
def test_what_is_only_recognized_is_told_and_no_error(
    name: str, text: str, framework: str, told: str, tmp_path: Path
) -> None:
    found = report(tmp_path, text, name)
    assert found.launch is not None and found.launch.framework == framework and found.starts == {}
    assert (found.outcome, found.findings) == ("not checked", ()) and told in found.verdict


# --- verl


def test_what_only_hydra_knows_comes_with_the_command_that_tells_it(tmp_path: Path) -> None:
    text = "EXTRA=()\nif a; then EXTRA+=(trainer.nnodes=2); fi\n" + VERL.format(
        'trainer.x=$X "${EXTRA[@]}" ++data.y=[a,{b:1}] "$@"'
    ).replace("verl.trainer.main_ppo", "recipe.dapo.main_dapo")
    launch = read(tmp_path, text, "run.sh")
    assert launch.settings["data.train_batch_size"].value == 8
    assert (launch.settings["data.y"].value, launch.settings["data.y"].added) == (["a", {"b:1": None}], "++")
    resolve = "`python -m recipe.dapo.main_dapo <the same overrides> --cfg job --resolve > resolved.yaml`"
    assert [(entry.key, entry.where, entry.reason) for entry in launch.unread] == [
        ("trainer.x", "run.sh:3", f"$X is set outside of this file; {resolve} makes a file to check in its place"),
        ("trainer.nnodes", "run.sh:2", "only a branch adds it to $EXTRA"),
        ("(arguments)", "run.sh:3", "$@ is set outside of this file"),
    ]
    based = report(tmp_path, VERL.format("--config-name=my_grpo"))
    assert based.starts == {} and not based.failed and "it starts from my_grpo" in messages(based, "CHK004")[0]
    unknown = report(tmp_path, VERL.format("$OPTIONS"))
    assert unknown.starts == {} and not unknown.failed


@pytest.mark.parametrize(
    ("more", "processes"),
    [
        ("", 8),  # verl's default
        ("trainer.nnodes=2", 16),
        ("trainer.n_gpus_per_node=4", 4),
        ("trainer.n_gpus_per_node=$N", None),
        ("--config-name=my_grpo", None),  # which may say it
    ],
)
def test_verl_has_eight_gpus_where_nothing_says_otherwise(more: str, processes: int | None, tmp_path: Path) -> None:
    launch = read(tmp_path, VERL.format(more), "run.sh")
    assert (launch.processes.value if launch.processes else None) == processes


def test_a_reference_in_the_yaml_of_verls_cfg_job_is_unread(tmp_path: Path) -> None:
    text = (
        "actor_rollout_ref:\n  rollout: {n: 5, name: '${oc.env:NAME}'}\n"
        "  actor: {strategy: fsdp2}\ntrainer: {n_gpus_per_node: 4}\n"
    )
    launch = read(tmp_path, text, "resolved.yaml")
    assert launch.settings["actor_rollout_ref.rollout.n"].value == 5
    assert [entry.key for entry in launch.unread] == ["actor_rollout_ref.rollout.name"]
    assert launch.processes and (launch.processes.value, launch.processes.where) == (4, "resolved.yaml:4")


# --- what is missing is not made up


@pytest.mark.parametrize(
    ("arguments", "missing"), [("--config $1", "$1 is set outside"), ("--config no.yaml", "no such file")]
)
def test_without_its_recipe_a_run_is_not_checked_by_defaults(arguments: str, missing: str, tmp_path: Path) -> None:
    found = report(tmp_path, f"accelerate launch --num_processes 7 src/open_r1/grpo.py {arguments}\n")
    (told,) = messages(found, "CHK004")
    assert found.starts == {} and missing in told and "whether the run starts is not checked" in told


def test_a_number_of_processes_that_is_not_known_is_named(tmp_path: Path) -> None:
    found = report(tmp_path, "accelerate launch --num_processes $N grpo.py --num_generations 8\n")
    assert "num_processes: $N is set outside" in messages(found, "CHK004")[0]
    assert found.starts[8].starts


# --- shell


def test_options_of_a_script_of_ones_own_are_not_refused(tmp_path: Path) -> None:
    command = "torchrun --nproc_per_node 8 {} --num_generations 8 --my_own 1\n"
    own = report(tmp_path, command.format("src/my_grpo.py"))
    assert not own.failed and own.launch is not None and own.launch.settings["my_own"].added
    assert messages(report(tmp_path, command.format("trl/scripts/grpo.py")), "CHK006")


def test_a_placeholder_is_a_word(tmp_path: Path) -> None:
    text = "swift rlhf --rlhf_type grpo --port <your-port> --beta 0.1\nswift rlhf --rlhf_type grpo --system 'a <b> c'\n"
    launch = read(tmp_path, text, "run.sh")
    assert launch.settings["port"].value == "<your-port>" and launch.settings["beta"].value == "0.1"
    assert launch.others[0].settings["system"].value == "a <b> c"


def test_a_script_beside_its_sampling_server_is_not_checked_and_no_error(tmp_path: Path) -> None:
    text = "CUDA_VISIBLE_DEVICES=0 trl vllm-serve --model m &\nCUDA_VISIBLE_DEVICES=1 accelerate launch train.py\n"
    found = report(tmp_path, text)
    assert not found.failed and found.starts == {} and "train.py sets what it trains" in messages(found, "CHK004")[0]
    assert found.launch is not None and (found.launch.training_gpus, found.launch.server_gpus) == (("1",), ("0",))


# --- quantization
BITS = "Q = BitsAndBytesConfig(load_in_4bit=True)\n"
QUANTIZED = """
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B", torch_dtype=torch.bfloat16, quantization_config=bnb)
bnb = BitsAndBytesConfig(load_in_4bit=True)
GRPOTrainer(model, args=GRPOConfig("out"), reward_funcs=[r]{})
"""


@pytest.mark.parametrize(
    "text",
    [
        QUANTIZED,
        'GRPOTrainer("m", args=GRPOConfig("o"), quantization_config=Q{})\n' + BITS,
        'GRPOTrainer("m", args=GRPOConfig("o", model_init_kwargs=dict(quantization_config=Q)){})\n' + BITS,
    ],
)
def test_python_is_read_for_bitsandbytes_wherever_it_stands(text: str, tmp_path: Path) -> None:
    assert not report(tmp_path, text.format(", peft_config=LoraConfig(r=8)"), "a.py").failed
    alone = report(tmp_path, text.format(""), "a.py")
    (refusal,) = [finding for finding in alone.findings if finding.code == "CHK008"]
    assert "purely quantized models" in str(refusal.says) and not alone.starts[8].starts
    assert "4-bit weights by bitsandbytes" in convert_file(tmp_path / "a.py")


# --- facts of versions


@pytest.mark.parametrize(("loss", "first"), [("dapo", "0.22"), ("cispo", "0.26"), ("luspo", "0.28"), ("vespo", "1.0")])
def test_losses_are_known_from_a_version_on(loss: str, first: str, tmp_path: Path) -> None:
    text = f"reward_funcs: [r]\nloss_type: {loss}\nepsilon_high: 2.0\n"
    older = report(tmp_path, text, "r.yaml", framework_version="0.18.0")
    (refusal,) = [finding for finding in older.findings if finding.code == "CHK010"]
    assert refusal.says == f"Unknown loss type: {loss}" and f"TRL has it from {first} on" in refusal.message
    assert not messages(report(tmp_path, text, "r.yaml", framework_version=f"{first}.0"), "CHK010")


def test_the_old_name_of_ms_swifts_tuner_leads_to_the_new_one(tmp_path: Path) -> None:
    found = report(
        tmp_path,
        "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model m --dataset d --train_type full\n",
        framework_version="4.6",
    )
    (finding,) = [finding for finding in found.findings if finding.code == "CHK006"]
    assert finding.nearest == ("tuner_type",) and "called tuner_type now" in finding.message
    assert found.starts[8].starts and not found.starts[1].starts and not found.starts[4].starts


def test_a_contradiction_stands_in_the_table(tmp_path: Path) -> None:
    found = report(tmp_path, "reward_funcs: [r]\ngeneration_batch_size: 8\nsteps_per_generation: 1\n", "r.yaml")
    assert {start.starts for start in found.starts.values()} == {False}
    vllm = report(tmp_path, "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model m --dataset d --use_vllm true\n")
    assert vllm.starts[8].message == "vllm_mode is required when use_vllm is true"
    assert "must be evenly divisible" in str(vllm.starts[4].message)


# --- GPUs


def test_where_nodes_are_not_known_no_number_of_processes_is_taken(tmp_path: Path) -> None:
    text = "torchrun --nproc_per_node=8 --nnodes=$NODES grpo.py --num_generations 48 --per_device_train_batch_size 4\n"
    found = report(tmp_path, text)
    assert found.launch is not None and found.launch.processes is None and not found.failed
    assert messages(found, "CHK003") and "nnodes" in messages(found, "CHK004")[0]


@pytest.mark.parametrize(("host", "shared"), [("127.0.0.1", True), ("node-7", False)])
def test_gpus_of_another_machine_may_have_the_same_numbers(host: str, shared: bool, tmp_path: Path) -> None:
    text = (
        "CUDA_VISIBLE_DEVICES=0,1 swift rollout --model m --vllm_data_parallel_size 2\n"
        "CUDA_VISIBLE_DEVICES=0,1,2,3 NPROC_PER_NODE=4 swift rlhf --rlhf_type grpo --model m --dataset d "
        f"--num_generations 4 --use_vllm true --vllm_mode server --vllm_server_host {host}\n"
    )
    found = [finding for finding in report(tmp_path, text).findings if finding.code == "CHK012"]
    assert [finding.nearest for finding in found] == ([("CUDA_VISIBLE_DEVICES=2,3 for training",)] if shared else [])


def test_what_verl_needs_and_nobody_set_is_named(tmp_path: Path) -> None:
    text = (
        "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.name=vllm "
        "data.train_batch_size=256 trainer.nnodes=1 "
        "actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.ppo_mini_batch_size=64 trainer.n_gpus_per_node=8 "
    )
    (found,) = [finding for finding in report(tmp_path, text).findings if finding.code == "CHK002"]
    assert "at least one of 'actor.ppo_micro_batch_size' or 'actor.ppo_micro_batch_size_per_gpu'" in str(found.says)


# --- commands that only look like one of TRL or verl


def test_a_program_of_others_is_not_refused_by_the_rules_of_verl(tmp_path: Path) -> None:
    text = VERL.format("trainer.n_gpus_per_node=7")
    assert report(tmp_path, text).outcome == "refused"
    found = report(tmp_path, text.replace("verl.trainer.main_ppo", "mine.main_grpo"))
    assert (found.outcome, found.failed) == ("not checked", False)
    assert "mine.main_grpo is a program of its own" in found.verdict
    own = report(tmp_path, text.replace("data.", "--config-name mine data.").replace("trainer.n_gpus_per_node=7", ""))
    (tmp_path / "run.sh").write_text("export CUDA_VISIBLE_DEVICES=0\n" + (tmp_path / "run.sh").read_text())
    assert not own.failed and not check_file(tmp_path / "run.sh").failed  # as its configuration names the GPUs


def test_overrides_for_another_script_and_those_of_hydra(tmp_path: Path) -> None:
    text = VERL.format("trainer.n_gpus_per_node=8 hydra.run.dir=out actor_rollout_ref.rollout.name=vllm")
    assert not messages(report(tmp_path, text), "CHK006")
    found = report(tmp_path, text.replace("python3 -m verl.trainer.main_ppo", "exec ./scripts/run.sh"))
    assert (found.outcome, found.failed) == ("not checked", False) and "scripts.run.sh" in found.verdict


def test_ms_swift_by_its_own_option_and_openrlhf_by_its_module(tmp_path: Path) -> None:
    swift = (
        "SCRIPT=$(python -c 'import swift')\npython -m torch.distributed.run --nproc_per_node 2 $SCRIPT \\\n"
        "  --rlhf_type grpo  --model org/m --tuner_type lora --num_generations 4 --per_device_train_batch_size 8\n"
    )
    found = report(tmp_path, swift)
    assert found.launch and found.launch.framework == "ms-swift" and found.outcome == "starts"
    assert found.starts[2].generation_batch_size == 16
    other = report(tmp_path, "deepspeed --module openrlhf.cli.train_grpo --num_generations 4\n")
    assert other.launch and other.launch.framework == "openrlhf"


def test_a_script_beside_that_prepares_data_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "to_grpo.py").write_text("import json\n")
    assert report(tmp_path, "python to_grpo.py --input a --output b\n").outcome == "unreadable"
    assert report(tmp_path, "accelerate launch to_grpo.py --beta 0.1\n").outcome == "not checked"
    assert report(tmp_path, "python elsewhere_grpo.py --input a\n").outcome != "unreadable"


def test_a_script_in_the_folder_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "rl").mkdir()
    (tmp_path / "rl/main.py").write_text("from trl import *\nGRPOTrainer(args=GRPOConfig(num_generations=4))\n")
    text = 'HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\ntorchrun --nproc_per_node 1 "$HERE/rl/main.py"\n'
    found = report(tmp_path, text)
    assert found.outcome == "starts" and found.launch and found.launch.settings["num_generations"].value == 4
