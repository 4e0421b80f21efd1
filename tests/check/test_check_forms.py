"""Forms of files that are started with arguments, or computed: Open-R1's Slurm script, Python, what is missing."""

from pathlib import Path

import pytest

from cohort.check import FileReport, check_file, convert_file

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


def test_a_script_that_waits_for_arguments_names_them_and_is_judged_no_further(tmp_path: Path) -> None:
    found = report(tmp_path, JOB, "train.slurm")
    assert found.launch is not None and found.launch.framework == "open-r1" and not found.failed
    assert found.starts == {} and found.launch.processes is None  # nodes come with the recipe
    told = messages(found, "CHK004")
    assert [text.split(" could")[0] for text in told] == ["MODEL (line 8)", "CONFIG (line 11)", "recipe (line 15)"]
    assert "--config of the script's own arguments" in told[1]
    assert "sbatch --nodes=2 train.slurm --model ... --config ..." in told[2]


def test_sbatch_names_the_recipe_and_hands_further_options_on(tmp_path: Path) -> None:
    (tmp_path / "recipes/M/grpo").mkdir(parents=True)
    (tmp_path / "recipes/M/grpo/config_demo.yaml").write_text(RECIPE.format(14))
    (tmp_path / "scripts").mkdir()
    job = "sbatch --nodes=1 slurm/train.slurm --model M --task grpo --config demo --accelerator zero3"
    found = report(tmp_path / "scripts", job + "\n", world_sizes=(7, 8))
    assert [start.starts for start in found.starts.values()] == [True, False]
    assert "with 8 processes" in messages(found, "CHK002")[0]
    handed = report(tmp_path / "scripts", job + ' --args "--num_generations=16 --gradient_accumulation_steps 2"\n')
    assert not messages(handed, "CHK002") and handed.starts[8].generation_batch_size == 256
    unknown = report(tmp_path / "scripts", job.replace("--config demo", "--config $NAME") + "\n")
    assert unknown.starts == {} and "$NAME is not assigned" in messages(unknown, "CHK004")[0]


def test_the_last_node_of_open_r1_has_gpus_for_its_server(tmp_path: Path) -> None:
    (tmp_path / "recipes/M/grpo").mkdir(parents=True)
    (tmp_path / "recipes/M/grpo/config_demo.yaml").write_text(RECIPE.format(16) + "use_vllm: true\n")
    job = "sbatch --nodes=2 slurm/train.slurm --model M --task grpo --config demo --accelerator zero3 --tp {} --dp {}\n"
    assert "leaves GPU 2, 3, 4, 5, 6, 7" in messages(report(tmp_path, job.format(1, 2)), "CHK011")[0]
    assert "needs 16 GPUs and sees 8" in messages(report(tmp_path, job.format(4, 4)), "CHK012")[0]
    assert report(tmp_path, job.format(1, 8)).findings == ()


# --- what is missing is not made up


@pytest.mark.parametrize(
    ("arguments", "missing"), [("--config $1", "$1 is not assigned"), ("--config no.yaml", "no such file")]
)
def test_without_its_recipe_a_run_is_not_judged_by_defaults(arguments: str, missing: str, tmp_path: Path) -> None:
    found = report(tmp_path, f"accelerate launch --num_processes 7 src/open_r1/grpo.py {arguments}\n")
    (told,) = messages(found, "CHK004")
    assert found.starts == {} and missing in told and "whether it starts is not judged" in told


def test_a_number_of_processes_that_is_not_known_is_named(tmp_path: Path) -> None:
    found = report(tmp_path, "accelerate launch --num_processes $N grpo.py --num_generations 8\n")
    assert "num_processes (the command on line 1) could not be read: $N" in messages(found, "CHK004")[0]
    assert found.starts[8].starts


# --- Python


def test_python_reads_straight_lines_of_functions_and_its_own_classes(tmp_path: Path) -> None:
    text = """
from trl import GRPOConfig as Base, GRPOTrainer
class Mine(Base):
    num_generations: int = 6
    my_own: int = 1
def main(batch=4):
    size = 8
    args = Mine("out", per_device_train_batch_size=size, gradient_accumulation_steps=batch, my_own=2)
"""
    found = report(tmp_path, text, "a.py")
    assert found.launch is not None and not messages(found, "CHK006")
    read = {key: said.value for key, said in found.launch.settings.items()}
    assert (read["num_generations"], read["per_device_train_batch_size"], read["my_own"]) == (6, 8, 2)
    assert "computed: batch" in messages(found, "CHK004")[0] and found.starts == {}  # a caller sets it


def test_arguments_that_are_computed_as_a_whole_may_be_anything(tmp_path: Path) -> None:
    found = report(tmp_path, "def f(**more):\n    return GRPOConfig('out', num_generations=8, **more)\n", "a.py")
    assert found.starts == {} and "**arguments" in messages(found, "CHK004")[0]


def test_a_script_with_a_parser_points_to_what_starts_it(tmp_path: Path) -> None:
    text = "from trl import GRPOConfig, TrlParser\nparser = TrlParser((GRPOConfig,))\n"
    assert "the recipe or the shell script" in messages(report(tmp_path, text, "a.py"), "CHK001")[0]


BITS = "Q = BitsAndBytesConfig(load_in_4bit=True)\n"
QUANTIZED = """
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B", torch_dtype=torch.bfloat16, quantization_config=bnb)
bnb = BitsAndBytesConfig(load_in_4bit=True)
GRPOTrainer(model, args=GRPOConfig("out"), reward_funcs=[r]{})
"""


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        (QUANTIZED, "5.5 weights"),  # what is not quantized in bfloat16; below in float32
        ('GRPOTrainer("Qwen/Qwen2.5-7B", args=GRPOConfig("o"), quantization_config=Q{})\n' + BITS, "7.7 weights"),
        (
            'GRPOTrainer("Qwen/Qwen2.5-7B", args=GRPOConfig("o", model_init_kwargs=dict(quantization_config=Q)){})\n'
            + BITS,
            "7.7 weights",
        ),
    ],
)
def test_python_is_read_for_bitsandbytes_wherever_it_stands(text: str, weights: str, tmp_path: Path) -> None:
    found = report(tmp_path, text.format(", peft_config=LoraConfig(r=8)"), "a.py", gpu_memory="80GB")
    assert weights in str(found.memory)
    alone = report(tmp_path, text.format(""), "a.py")
    assert "purely quantized models" in messages(alone, "CHK008")[0] and not alone.starts[8].starts
    assert "no equivalent: weights of 4 bits by bitsandbytes" in convert_file(tmp_path / "a.py")


# --- facts of versions


@pytest.mark.parametrize(("loss", "first"), [("dapo", "0.22"), ("cispo", "0.26"), ("luspo", "0.28"), ("vespo", "1.0")])
def test_losses_are_known_from_a_version_on(loss: str, first: str, tmp_path: Path) -> None:
    text = f"reward_funcs: [r]\nloss_type: {loss}\nepsilon_high: 2.0\n"
    older = report(tmp_path, text, "r.yaml", trl_version="0.18.0")
    assert f'"Unknown loss type: {loss}"; TRL has it from {first} on' in messages(older, "CHK010")[0]
    assert not messages(report(tmp_path, text, "r.yaml", trl_version=f"{first}.0"), "CHK010")


@pytest.mark.parametrize(("version", "ignored"), [("0.25.1", True), ("0.26.0", False)])
def test_the_script_of_trl_quantizes_from_a_version_on(version: str, ignored: bool, tmp_path: Path) -> None:
    text = "reward_funcs: [r]\nload_in_4bit: true\nuse_peft: true\n"
    found = messages(report(tmp_path, text, "r.yaml", trl_version=version), "CHK005")
    assert any("`trl grpo` hands it to the model" in message for message in found) == ignored


def test_the_old_name_of_ms_swifts_tuner_leads_to_the_new_one(tmp_path: Path) -> None:
    found = report(tmp_path, "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model m --dataset d --train_type full\n")
    (finding,) = [finding for finding in found.findings if finding.code == "CHK006"]
    assert finding.nearest == ("tuner_type",) and "called tuner_type from 4.0 on" in finding.message
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


def test_what_verl_needs_and_nobody_set_is_proposed_and_works(tmp_path: Path) -> None:
    text = (
        "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=256 trainer.nnodes=1 "
        "actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.ppo_mini_batch_size=64 trainer.n_gpus_per_node=8 "
    )
    (found,) = [finding for finding in report(tmp_path, text).findings if finding.code == "CHK002"]
    assert "ppo_micro_batch_size_per_gpu=8" in found.nearest[0]
    assert report(tmp_path, text + found.nearest[0].replace(" and ", " ")).starts[8].starts


def test_without_a_gpu_only_what_none_holds_is_told(tmp_path: Path) -> None:
    swift = "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --tuner_type full --dataset d --model Qwen/{}\n"
    (found,) = [f for f in report(tmp_path, swift.format("Qwen2.5-32B")).findings if f.code == "CHK019"]
    assert "they have 191.0 GB" in found.message and found.nearest
    small = report(tmp_path, swift.format("Qwen2.5-7B"))
    assert small.memory is None and not messages(small, "CHK019")


def test_evaluation_batches_are_judged_where_the_file_speaks_of_them(tmp_path: Path) -> None:
    recipe = "reward_funcs: [r]\nnum_generations: 14\nper_device_train_batch_size: 14\n"
    assert not messages(report(tmp_path, recipe, "r.yaml"), "CHK009")
    (told,) = messages(report(tmp_path, recipe + "per_device_eval_batch_size: 7\n", "r.yaml"), "CHK009")
    assert "with it and 1 process TRL" in told and "(7 * 1)" in told  # 7 x 8, 7 x 4 and 7 x 2 hold whole groups
