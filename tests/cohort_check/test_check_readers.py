"""Launchers, recipes and YAML; and files that are broken, hostile or something else."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks import read
from cohort.errors import UserError
from cohort_check import check_file
from cohort_check.readers import read_launch
from cohort_check.readers.files import read_yaml_tree
from selection import examples

# --- launchers


def test_a_shell_script_brings_its_recipe_and_its_accelerate_file(tmp_path: Path):
    (tmp_path / "zero3.yaml").write_text("distributed_type: DEEPSPEED\nnum_processes: 6\n")
    (tmp_path / "recipe.yaml").write_text("reward_funcs: [r]\nnum_generations: 12\nuse_vllm: true\nvllm_mode: server\n")
    script = (
        "ACC=zero3.yaml\nCUDA_VISIBLE_DEVICES=0,1,2,3,4,5 accelerate launch --config_file=$ACC \\\n"
        "  src/grpo.py --config recipe.yaml --per_device_train_batch_size 4\n"
        "CUDA_VISIBLE_DEVICES=5 vllm serve m --max-model-len 4096\n"
    )
    launch = read(tmp_path, script, "run.sh")
    assert launch.processes and launch.processes.value == 6
    assert launch.settings["per_device_train_batch_size"].value == "4"
    assert launch.settings["num_generations"].where == "recipe.yaml:2"
    assert launch.server["max_model_len"].value == "4096"
    codes = {finding.code: finding.message for finding in check_file(tmp_path / "run.sh").findings}
    assert codes["CHK012"] == "GPU 5 is given to training and to the sampling server"


@pytest.mark.parametrize("arguments", ["grpo.yaml --beta 0.1", "--config grpo.yaml"])
def test_a_config_file_of_ms_swift_is_to_be_checked_itself(arguments: str, tmp_path: Path):
    (tmp_path / "run.sh").write_text(f"NPROC_PER_NODE=4 swift rlhf {arguments}\n")
    report = check_file(tmp_path / "run.sh")
    assert (report.outcome, report.failed) == ("not checked", False)
    assert any("check the configuration file that it names" in finding.message for finding in report.findings)


def test_the_configuration_file_of_ms_swift_is_read(tmp_path: Path):
    (tmp_path / "grpo.yaml").write_text("rlhf_type: grpo\nmodel: m\nnum_generations: 3\n")
    (tmp_path / "run.sh").write_text("NPROC_PER_NODE=4 swift rlhf --config grpo.yaml --beta 0.1\n")
    report = check_file(tmp_path / "run.sh")
    assert report.outcome == "refused" and report.launch is not None
    assert report.launch.settings["num_generations"].where == "grpo.yaml:3"


def test_the_last_value_of_an_option_counts(tmp_path: Path):
    launch = read(tmp_path, "trl grpo --num_generations $G --beta 0.1 --beta $B --num_generations 8\n", "run.sh")
    assert {key: said.value for key, said in launch.settings.items()} == {"num_generations": "8"}
    assert [entry.key for entry in launch.unread] == ["beta"]
    text = "python -m verl.trainer.main_ppo data.x=$X data.y=1 data.y=$Y data.x=2 trainer.nnodes=1\n"
    launch = read(tmp_path, text, "run.sh")
    assert {key: said.value for key, said in launch.settings.items()} == {"data.x": 2, "trainer.nnodes": 1}
    assert [entry.key for entry in launch.unread] == ["data.y"]


@pytest.mark.parametrize("unread", ["--num_generations $G", "--per_device_train_batch_size $B"])
def test_a_number_that_decides_and_is_missing_leaves_it_unjudged(unread: str, tmp_path: Path):
    (tmp_path / "run.sh").write_text(f"NPROC_PER_NODE=1 swift rlhf --rlhf_type grpo --model m {unread}\n")
    report = check_file(tmp_path / "run.sh")
    assert report.starts == {} and [finding.code for finding in report.findings] == ["CHK004"]
    assert "whether the run starts is not checked" in report.findings[0].message


def test_what_does_not_decide_may_be_missing(tmp_path: Path):
    command = "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model $M --dataset $D --val_dataset $V\n"
    (tmp_path / "run.sh").write_text(command)
    report = check_file(tmp_path / "run.sh")
    assert [finding.code for finding in report.findings] == ["CHK004"] * 3
    assert report.starts[8].starts


@pytest.mark.parametrize(
    ("command", "processes"),
    [
        ("accelerate launch --num_processes 7", 7),
        ("accelerate launch --num_processes=16 --num_machines 2 train.py --num_processes 3", 16),
        ("torchrun --nproc_per_node 4 --nnodes=2 train.py", 8),
        ("NNODES=2 NPROC_PER_NODE=8 swift rlhf", 16),
        ("CUDA_VISIBLE_DEVICES=0,1 accelerate launch --multi_gpu train.py", 2),
        ("python -m torch.distributed.run --nproc_per_node 4 train.py", 4),
        ("deepspeed --num_gpus=4 --num_nodes 2 train.py", 8),
        ("CUDA_VISIBLE_DEVICES=1,2,3 deepspeed train.py", 3),
        ("python train.py", 1),
    ],
)
def test_the_launch_command_says_how_many_processes(command: str, processes: int, tmp_path: Path):
    (tmp_path / "r.yaml").write_text("reward_funcs: [r]\n")
    launch = read_launch(tmp_path / "r.yaml", launched_with=command)
    assert launch.processes and launch.processes.value == processes


def test_a_launch_command_that_names_no_processes_changes_nothing(tmp_path: Path):
    (tmp_path / "r.yaml").write_text("reward_funcs: [r]\n")
    for command in ("accelerate launch train.py", "srun x"):
        assert check_file(tmp_path / "r.yaml", launched_with=command).starts[8].starts
    with pytest.raises(UserError, match="--launch"):
        check_file(tmp_path / "r.yaml", launched_with="a; b")


@pytest.mark.parametrize(
    ("command", "processes"),
    [
        ("accelerate launch --num_processes 4 -m trl.scripts.grpo --num_generations 8", 4),
        ("accelerate launch --num_processes 4 train.py --num-generations=8", 4),
        ("trl grpo --num_generations 8 --num_processes 4 --accelerate_config zero2", 4),
        ("trl grpo --num_generations 8", None),
    ],
)
def test_a_run_is_known_by_its_options_too(command: str, processes: int | None, tmp_path: Path):
    launch = read(tmp_path, command + "\n", "run.sh")
    assert launch.settings["num_generations"].value == "8"
    assert (launch.processes and launch.processes.value) == processes
    other = read(tmp_path, "accelerate launch --num_processes 4 train.py --max_length 8\n", "sft.sh")
    assert other.framework == "other" and not other.settings  # another way of training


# --- YAML and bad input


def test_yaml_merges_anchors_and_tells_lines_and_duplicates():
    text = "base: &b {x: 1, y: 2}\nmore: &m {x: 5, z: 6}\nrun:\n  y: 3\n  <<: [*b, *m]\n  y: 4\nlist: [*b, 2]\n"
    tree = read_yaml_tree(text, "a.yaml")
    assert tree is not None
    assert {key: said.value for key, said in tree.values.items() if not key.startswith(("base", "more"))} == {
        "run.x": 1,
        "run.y": 4,
        "run.z": 6,
        "list": [{"x": 1, "y": 2}, 2],
    }
    assert tree.values["run.y"].where == "a.yaml:6"
    assert [(finding.field, finding.message) for finding in tree.findings] == [
        ("run.y", "run.y is there twice; the value on line 6 counts and the earlier one is dropped")
    ]


def test_a_key_with_a_value_and_a_section_is_the_later_one():
    for text, value in (("a: 1\na: {b: 2}\n", {"b": 2}), ("a: {b: 2}\na: 1\n", 1)):
        tree = read_yaml_tree(text, "a.yaml")
        assert tree is not None and {key: said.value for key, said in tree.top.items()} == {"a": value}


BOMB = "a0: &a0 {x: 1, y: 2}\n" + "".join(f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}\n" for i in range(1, 40))
SHELL_BOMB = "a=xxxxxxxx\n" + 'a="$a$a"\n' * 9 + "run $a\n" * 2000


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.yaml", b"a: [1, 2", "line 1"),
        ("a.yaml", b"a: &x\n  b: *x\nnum_generations: 8\n", "contains itself"),
        ("a.yaml", b"a: &x [1, *x]\nnum_generations: 8\n", "contains itself"),
        ("a.yaml", BOMB.encode(), "more than 100,000 values"),
        ("a.yaml", b"[" * 1000, "nested too deeply"),
        ("a.yaml", b"- 1\n- 2\n", "none of the formats"),
        ("a.yaml", b"", "none of the formats"),
        ("a.yaml", b"learning_rate: 1\n", "none of the formats"),
        ("a.yaml", b"a: !!python/object/apply:os.system [x]\n", "none of the formats"),
        ("a.yaml", b"\xff\xfe\x00", "not UTF-8"),
        ("a.yaml", b"caf\xe9: 1\n", "not UTF-8"),
        ("a.yaml", b"a: 1\n" * 500_000, "larger than"),
        ("a.py", b"GRPOConfig(", "not valid Python"),
        ("a.py", b"print('no configuration')\n", "none of the formats"),
        ("a.py", b"GRPOConfig(" + b"(" * 5000 + b")" * 5000 + b")", "Python"),
        ("a.sh", b"echo hello\n", "none of the formats"),
        ("a.sh", b" \n", "none of the formats"),
        ("a.sh", SHELL_BOMB.encode(), "variables expand to more than"),
        ("a.sh", b"true && " * 3000 + b"false\n", "nested too deeply"),
        ("a.toml", b"a = " + b"[" * 5000, "none of the formats"),
        ("a.toml", b"a = 1\n", "none of the formats"),
        ("sft.yaml", b"model_name_or_path: m\nper_device_train_batch_size: 4\n", "none of the formats"),
        ("a.json", json.dumps({"a": 1}).encode(), "none of the formats"),
    ],
)
def test_bad_files_are_told_in_one_finding(name: str, content: bytes, says: str, tmp_path: Path):
    (tmp_path / name).write_bytes(content)
    report = check_file(tmp_path / name)
    (finding,) = report.findings
    assert finding.code == "CHK001" and report.failed and report.starts == {}
    assert says in finding.message


def test_missing_files_folders_and_pipes_are_told(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    for name, says in (("none.yaml", "no such file"), (".", "folder"), ("pipe", "plain file"), ("x" * 999, "")):
        (finding,) = check_file(tmp_path / name).findings
        assert finding.code == "CHK001" and says in finding.message


@pytest.mark.parametrize(
    "value", ["eight", "-1", "0", "1.5", "true", "[1, 2]", "{a: 1}", "1e99", ".nan", "99999999999"]
)
def test_a_count_that_is_none_is_told_and_nothing_is_judged(value: str, tmp_path: Path):
    (tmp_path / "r.yaml").write_text(f"reward_funcs: [r]\nper_device_train_batch_size: {value}\n")
    report = check_file(tmp_path / "r.yaml")
    assert [f.code for f in report.findings] == ["CHK010"]
    assert report.starts == {}


def test_more_processes_than_anybody_has_are_told_and_not_computed(tmp_path: Path):
    (tmp_path / "run.yaml").write_text(
        "{model: {path: m}, data: {path: d}, rewards: [{use: math}], hardware: {processes: 99999999999}}"
    )
    finding = next(f for f in check_file(tmp_path / "run.yaml").findings if f.code == "CHK002")
    assert "hardware.processes: 99999999999: must be a whole number from 1 to 100000" in finding.message


@examples(150)
@given(st.text(max_size=120), st.sampled_from(["a.yaml", "a.py", "a.sh"]))
def test_no_file_makes_it_fail(tmp_path_factory: pytest.TempPathFactory, text: str, name: str):
    path = tmp_path_factory.mktemp("any") / name
    start = {"a.yaml": "num_generations: 8\n", "a.py": "GRPOConfig(a=1)\n", "a.sh": "swift rlhf --rlhf_type grpo "}[
        name
    ]
    path.write_text(start + text, encoding="utf-8", errors="replace")
    report = check_file(path)
    json.dumps(report.as_json())
