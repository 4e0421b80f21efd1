"""What `cohort check` follows of a launch: modules, scripts beside, forks, `kwargs.update`, notebooks."""

import json
from pathlib import Path

import pytest

from checks import by_code, read, report
from cohort_check import convert_file

OWN = """
import argparse
from trl import GRPOConfig, GRPOTrainer
p = argparse.ArgumentParser()
p.add_argument("--batch", type=int, default=1)
p.add_argument("--grad_accum_steps", type=int, default=1)
a = p.parse_args()
config = GRPOConfig("o", per_device_train_batch_size=a.batch, gradient_accumulation_steps=a.grad_accum_steps)
GRPOTrainer("m", args=config, reward_funcs=f, train_dataset=load_dataset("d"))
"""


@pytest.mark.parametrize(
    "start",
    [
        "torchrun --nproc_per_node 4 -m swift.cli.rlhf",
        "python -m swift.cli.rlhf",
        "accelerate launch -m swift.cli.rlhf",
    ],
)
def test_modules_of_ms_swift_are_ms_swift(tmp_path: Path, start: str) -> None:
    launch = read(tmp_path, f"{start} --rlhf_type grpo --model m --dataset d --num_infer_workers 1\n", "run.sh")
    assert launch.framework == "ms-swift" and launch.settings["model"].value == "m"
    if "torchrun" in start:
        assert launch.processes and launch.processes.value == 4


def test_a_script_beside_is_judged_with_the_launchers_arguments(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OWN)
    text = "accelerate launch --num_processes 3 train.py --batch 16 --grad_accum_steps 4\n"
    found = report(tmp_path, text)
    assert "192 completions per optimizer step" in found.verdict
    assert found.launch and found.launch.settings["gradient_accumulation_steps"].value == 4


def test_keys_that_no_version_of_verl_has_are_those_of_another_program(tmp_path: Path) -> None:
    text = (
        "python -m verl.trainer.main_ppo data.train_batch_size=8 actor_rollout_ref.rollout.name=vllm "
        "actor_rollout_ref.actor.my_key=1 +data.seed=1 actor_rollout_ref.actor.use_dynamic_bsz=True\n"
    )
    found = report(tmp_path, text)
    assert (found.outcome, found.findings) == ("not checked", ())
    assert "no version of verl has actor_rollout_ref.actor.my_key, so this is a program of its own" in found.verdict
    assert "CHK006" in by_code(report(tmp_path, text, framework_version="0.9"))
    (tmp_path / "requirements.txt").write_text("verl==0.9.1\n")
    assert "CHK006" in by_code(report(tmp_path, text))


def test_a_copy_of_verl_may_be_beside_the_folder_of_the_script(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "src/verl/verl/version").mkdir(parents=True)
    (tmp_path / "src/verl/verl/version/version").write_text("0.7.0.dev\n")
    (tmp_path / "scripts/train").mkdir(parents=True)
    text = (
        "python -m verl.trainer.main_ppo data.train_batch_size=8 actor_rollout_ref.rollout.name=vllm "
        "+data.seed=1 actor_rollout_ref.actor.use_dynamic_bsz=True\n"
    )
    found = report(tmp_path / "scripts/train", text)
    assert found.rules and (found.rules.version, found.failed) == ("0.7.0", False)
    assert report(tmp_path / "scripts/train", text.replace("+data.seed", "data.mine")).outcome == "not checked"


@pytest.mark.parametrize("program", ["verl.trainer.main", "verl.trainer.main_mine", "recipe.mine.main"])
def test_a_module_beside_those_of_verl_is_a_program_of_its_own(tmp_path: Path, program: str) -> None:
    found = report(tmp_path, f"python -m {program} data.train_batch_size=7 trainer.nnodes=1 worker.actor.lr=1\n")
    assert (found.outcome, found.failed) == ("not checked", False) and program in found.verdict


BRANCHES = """
if [ "$1" = small ]; then
    SIZE=64; N=8
else
    SIZE=96; N={}
fi
accelerate launch --num_processes 4 -m trl.scripts.grpo --per_device_train_batch_size $SIZE --num_generations $N
"""


def test_a_run_is_judged_with_each_of_the_values_that_branches_choose(tmp_path: Path) -> None:
    found = report(tmp_path, BRANCHES.format(6))  # 64 with 6 would be refused, and is chosen by no branch
    assert found.outcome == "starts" and found.verdict.endswith(
        "with per_device_train_batch_size=64, num_generations=8; the script's other branches lead to the same"
    )
    found = report(tmp_path, BRANCHES.format(5))
    assert (found.outcome, found.failed) == ("depends", False)
    assert found.verdict == (
        "depends: starts with per_device_train_batch_size=64, num_generations=8; "
        "refused with per_device_train_batch_size=96, num_generations=5"
    )
    assert report(tmp_path, BRANCHES.format("$2")).outcome == "not checked"


@pytest.mark.parametrize(
    ("more", "version"),
    [
        ("actor_rollout_ref.rollout.name=vllm", "0.9.1"),
        ("", "0.5.0"),  # later versions have no default for the engine
        ("$@", "0.9.1"),  # where it may be
        ("actor_rollout_ref.rollout.name=vllm +actor_rollout_ref.actor.use_dynamic_bsz=True", "0.9.1"),  # in none
        ("actor_rollout_ref.rollout.name=vllm +data.train_max_samples=8", "0.5.0"),  # which later ones have
    ],
)
def test_signs_of_an_older_version_of_verl(tmp_path: Path, more: str, version: str) -> None:
    found = report(tmp_path, f"python -m verl.trainer.main_ppo data.train_batch_size=8 data.max_prompt_length=8 {more}")
    assert found.rules and found.rules.version == version


@pytest.mark.parametrize("start", ["-m verl.trainer.fsdp_sft_trainer", "verl/trainer/fsdp_sft_trainer.py"])
def test_sft_with_verl_is_not_checked(tmp_path: Path, start: str) -> None:
    text = f"torchrun --nproc_per_node=3 {start} data.train_batch_size=7 data.micro_batch_size=4 trainer.total_epochs=1"
    found = report(tmp_path, text)
    assert (found.outcome, found.failed) == ("not checked", False)
    assert "verl.trainer.fsdp_sft_trainer is a program of its own" in found.verdict
    assert "program: verl.trainer.fsdp_sft_trainer is a program of its own" in convert_file(tmp_path / "run.sh")


def test_an_override_that_is_empty_is_not_its_default(tmp_path: Path) -> None:
    text = (
        "docker run -e DEBUG=1 image python -m verl.trainer.main_ppo data.train_batch_size=8 trainer.nnodes=1 "
        "actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n= trainer.resume_from_path=\n"
    )
    found = report(tmp_path, text)
    assert (found.outcome, found.failed) == ("not checked", False)
    assert [(f.field, f.message) for f in found.findings if f.code == "CHK004"] == [
        (
            "actor_rollout_ref.rollout.n",
            "actor_rollout_ref.rollout.n: empty here; `python -m verl.trainer.main_ppo <the same overrides> --cfg job "
            "--resolve > resolved.yaml` makes a file to check in its place; whether the run starts is not checked",
        )
    ]
    assert found.launch and "DEBUG" not in found.launch.settings


@pytest.mark.parametrize("change", ["kwargs.update(other())", "setattr(a, k, 3)"])
def test_after_an_update_any_argument_may_have_another_value(tmp_path: Path, change: str) -> None:
    before, after = (change, "") if "kwargs" in change else ("", change)
    text = (
        f"from trl import GRPOConfig, GRPOTrainer\nkwargs = dict(per_device_train_batch_size=8)\n{before}\n"
        f'a = GRPOConfig("o", **kwargs)\n{after}\nwandb.config.update(a)\nGRPOTrainer("m", args=a, reward_funcs=f)\n'
    )
    assert report(tmp_path, text, "a.py").outcome == "not checked"
    assert [entry.key for entry in read(tmp_path, text, "a.py").unread] == ["(**arguments)"]
    assert report(tmp_path, text.replace(change, ""), "a.py").outcome == "starts"


@pytest.mark.parametrize(("place", "outcome"), [("before", "depends"), ("after", "starts")])
def test_an_update_with_known_keys_counts_for_what_is_below(tmp_path: Path, place: str, outcome: str) -> None:
    change = {place: 'kwargs.update({"num_generations": 3})'}
    text = (
        "from trl import GRPOConfig, GRPOTrainer\nkwargs = dict(per_device_train_batch_size=8)\n"
        f'{change.get("before", "")}\na = GRPOConfig("o", **kwargs)\n{change.get("after", "")}\n'
        'GRPOTrainer("m", args=a, reward_funcs=f)\n'
    )
    assert report(tmp_path, text, "a.py").outcome == outcome


def test_a_class_that_only_has_the_name_is_not_trls(tmp_path: Path) -> None:
    text = "class GRPOConfig:\n    clip = 0.2\nconfig = GRPOConfig(clip=0.1, group=3)\n"
    assert report(tmp_path, text, "a.py").outcome == "unreadable"
    assert report(tmp_path, "from trl import GRPOTrainer\n" + text, "a.py").outcome != "unreadable"


def test_a_fallback_is_no_second_run(tmp_path: Path) -> None:
    text = (
        "from trl import GRPOConfig, GRPOTrainer\ntry:\n    c = GRPOConfig('o', num_generations=4)\n"
        "except TypeError:\n    c = GRPOConfig('o')\nGRPOTrainer('m', args=c, reward_funcs=f)\n"
    )
    found = report(tmp_path, text, "a.py")
    assert not found.others and found.launch and found.launch.settings["num_generations"].value == 4


def test_notebooks_are_read_as_ipython_does(tmp_path: Path) -> None:
    cells = [
        "%%capture\n!pip install trl==0.19.0\nnot python",
        "import os\nif 'COLAB' not in os.environ:\n    !pip install trl \\\n      peft\nelse:\n    pass",
        "%pip install a \\\n  b\nfiles = !ls\nGRPOConfig?",
        "from trl import GRPOConfig, GRPOTrainer\nc = GRPOConfig('o', num_generations=8)\nGRPOTrainer('m', args=c)",
    ]
    book = {"cells": [{"cell_type": "code", "source": cell, "outputs": ["x" * 200_000]} for cell in cells]}
    found = report(tmp_path, json.dumps(book), "a.ipynb")
    assert found.launch and found.launch.settings["num_generations"].value == 8
    assert found.rules and found.rules.version == "0.19.0"


@pytest.mark.parametrize(
    ("assigned", "value"),
    [
        ("N=${B:-$((4 * 2))}", 8),
        ("G=${G:-}\nif [ -z $G ]; then G=2; fi\nN=${G:-8}", None),
        ("A=4; N=$((A*2))", 8),
    ],
)
def test_shell_values(tmp_path: Path, assigned: str, value: int | None) -> None:
    launch = read(tmp_path, f"{assigned}\nswift rlhf --rlhf_type grpo --model m --num_generations $N\n", "run.sh")
    found = launch.settings.get("num_generations")
    assert (int(found.value) if found else None) == value
    if value is None:
        assert any("2 or 8" in entry.reason or "8 or 2" in entry.reason for entry in launch.unread)
