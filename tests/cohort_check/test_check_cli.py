"""`cohort check` and `cohort convert` as commands: the shape of the JSON, exit codes, converted files, the page."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from check_findings import with_findings
from cohort.cli.app import app
from cohort.config import load_config
from cohort_check import RULES, convert_file

RECIPE = """
model_name_or_path: Qwen/Qwen2.5-1.5B
torch_dtype: bfloat16
dataset_name: org/data
num_generations: 14
per_device_train_batch_size: 16
gradient_accumulation_steps: 4
max_prompt_length: 1024
max_completion_length: 2048
learning_rate: 5.0e-06
reward_funcs: [accuracy, code]
reward_weights: [1.0, 0.1]
use_vllm: true
max_steps: 200
warmup_ratio: 0.1
lr_scheduler_type: cosine
hub_strategy: every_save
"""
SWIFT = "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model org/m --dataset org/d --learning_rate 1e-5 --beta 0.0\n"
VERL = (
    "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=256 data.train_files=t.parquet "
    "actor_rollout_ref.rollout.name=vllm "
    "actor_rollout_ref.model.path=org/m actor_rollout_ref.rollout.n=5 actor_rollout_ref.actor.ppo_mini_batch_size=64 "
    "actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.clip_ratio_high=0.28 "
    "trainer.n_gpus_per_node=8 "
    "actor_rollout_ref.actor.optim.lr=1e-6 trainer.total_epochs=2 trainer.nnodes=1 trainer.test_freq=5\n"
)
PYTHON = (
    'args = GRPOConfig("out", num_generations=8, per_device_train_batch_size=8, loss_type="dr_grpo", bf16=True,'
    " beta=0.01)\n"
    'GRPOTrainer(model="org/m", reward_funcs=[brevity], args=args, train_dataset=load_dataset("org/d", split="s"))\n'
)
COHORT = "model: {path: m}\ndata: {path: org/d}\nrewards: [{use: math}]\n"
FILES = {"trl.yaml": RECIPE, "swift.sh": SWIFT, "verl.sh": VERL, "trl.py": PYTHON, "cohort.yaml": COHORT}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return {name: tmp_path / name for name in FILES}


def run(*arguments: Any) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def test_json_has_the_documented_shape(files: dict[str, Path]):
    code, output = run("check", "--json", "--world-sizes", "1,7,8", *files.values())
    reports = json.loads(output)
    assert code == 0
    assert [(r["framework"], r["version"]) for r in reports] == [
        ("trl", "0.26.2"),
        ("ms-swift", "4.6"),
        ("verl", "0.9.1"),
        ("trl", "1.16"),
        ("cohort", metadata.version("cohort-rl")),
    ]
    for report, path in zip(reports, files.values(), strict=True):
        assert list(report) == ["file", "outcome", "verdict", "framework", "version", "starts", "findings"]
        assert report["file"] == str(path)
        assert list(report["starts"]) == ["1", "7", "8"]
        for start in report["starts"].values():
            assert list(start) == ["starts", "message", "generation_batch_size", "steps_per_generation"]
            assert start["starts"] == (start["message"] is None)
        for finding in report["findings"]:
            assert list(finding) == ["code", "severity", "where", "field", "message", "says", "nearest"]
            assert RULES[finding["code"]].severity == finding["severity"]
    assert reports[0]["starts"]["7"] == {
        "starts": True,
        "message": None,
        "generation_batch_size": 448,
        "steps_per_generation": 4,
    }


def test_the_default_table_has_the_documented_numbers_of_gpus(files: dict[str, Path]):
    _, output = run("check", "--json", files["cohort.yaml"])
    assert list(json.loads(output)[0]["starts"]) == [str(size) for size in (*range(1, 17), 24, 32, 64)]


def test_exit_codes(files: dict[str, Path], tmp_path: Path):
    assert run("check", files["swift.sh"])[0] == 0
    assert run("check", files["trl.yaml"])[0] == 0  # warnings are no errors
    assert run("check", files["trl.yaml"], "--world-sizes", "8")[0] == 1  # it starts with none of these
    assert run("check", files["trl.yaml"], "--launch", "accelerate launch --num_processes 8")[0] == 1
    assert run("check", files["cohort.yaml"], tmp_path / "missing.yaml")[0] == 1
    assert run("check")[0] == 2
    for wrong in ("0", "1,x", "", "-1"):
        assert run("check", files["cohort.yaml"], "--world-sizes", wrong)[0] == 2
    assert run("check", files["trl.yaml"], "--framework-version", "newest")[0] == 2
    assert "trl 0.18.0 (--framework-version)" in run("check", files["trl.yaml"], "--trl-version", "0.18.0")[1]
    assert run("check", files["trl.yaml"], "--launch", "a; b")[0] == 2
    assert run("convert", files["cohort.yaml"])[0] == 2  # nothing to convert
    assert run("convert", tmp_path / "missing.yaml")[0] == 2


def test_the_readable_report_says_what_is_computed_and_what_works(files: dict[str, Path]):
    code, output = run("check", files["trl.yaml"], "--launch", "accelerate launch --num_processes 8")
    assert code == 1
    lines = [" ".join(line.split()) for line in output.splitlines()]
    assert lines[0].endswith("trl.yaml: refused: TRL 0.26.2 with 8 processes")
    assert lines[1].endswith("error CHK002 The framework refuses to start: does not start with 8 processes (--launch)")
    assert lines[2] == "it says: generation_batch_size (512) must be divisible by num_generations (14)."
    assert lines[3].startswith("fix: num_generations=16; GPUs=7; per_device_train_batch_size=14; and ")
    assert "judged as TRL 0.18.2 to 0.26.2, the versions that know" in output
    assert "1 file: 1 error, 0 warnings" in output


@pytest.mark.parametrize(
    ("name", "text", "changes"),
    [
        ("r.yaml", RECIPE, {"num_generations: 14": "num_generations: 16"}),
        ("r.py", PYTHON.replace("batch_size=8", "batch_size=5"), {"batch_size=5": "batch_size=4"}),
        (
            "run.sh",
            'N="8"  # --num_generations 3\nNPROC_PER_NODE=3 swift rlhf --rlhf_type grpo --num_generations ${N} '
            "--per_device_train_batch_size 2 --model m --dataset d\n",
            {'N="8"': 'N="6"'},
        ),
        (
            "verl.sh",
            VERL.replace("use_dynamic_bsz=True", "ppo_micro_batch_size_per_gpu=8 actor_rollout_ref.rollout.")
            .replace("rollout. ", "rollout.log_prob_micro_batch_size_per_gpu=8 ")
            .replace("train_batch_size=256", "train_batch_size=255"),
            {"train_batch_size=255": "train_batch_size=256"},
        ),
    ],
)
def test_fix_writes_the_nearest_values_and_nothing_else(name: str, text: str, changes: dict[str, str], tmp_path: Path):
    (tmp_path / name).write_text(text)
    launch = ("--launch", f"accelerate launch --num_processes {2 if name == 'r.py' else 8}")
    options = launch if name in ("r.yaml", "r.py") else ()
    assert run("check", tmp_path / name, *options)[0] == 1
    code, output = run("check", "--fix", tmp_path / name, *options)
    assert code == 0, output
    expected = text
    for old, new in changes.items():
        assert expected.count(old) == 1
        expected = expected.replace(old, new)
    assert (tmp_path / name).read_text() == expected
    assert f"{tmp_path / name}: fixed line " in output
    assert run("check", "--fix", tmp_path / name, *options)[0] == 0 and (tmp_path / name).read_text() == expected


def test_what_cannot_be_fixed_in_the_file_is_left_to_a_person(tmp_path: Path):
    text = "per_device_train_batch_size: 3\nreward_funcs: [r]\nnum_generations: &n 8\nnum_iterations: *n\n"
    script = "swift rlhf --rlhf_type grpo --model m --dataset d --num_generations $((2 * 4)) --bogus 1\n"
    for name, content in (("r.yaml", text), ("run.sh", script)):
        (tmp_path / name).write_text(content)
    code, output = run("check", "--fix", tmp_path / "run.sh")
    assert code == 1 and "fix by hand: " in output and "without bogus" in output
    assert (tmp_path / "run.sh").read_text() == script


def test_brackets_in_files_do_not_become_styles(tmp_path: Path):
    (tmp_path / "[red]x.yaml").write_text("reward_funcs: [r]\n'[bold]': 1\n")
    code, output = run("check", tmp_path / "[red]x.yaml")
    assert code == 0 and "[red]x.yaml" in output and "[bold]" in output


def test_converted_files_are_valid_and_say_the_same(files: dict[str, Path], tmp_path: Path):
    configs = {}
    for name, path in [(name, path) for name, path in files.items() if name != "cohort.yaml"]:
        code, output = run("convert", path)
        decisions = yaml.safe_load(output.partition("decide_first: 1")[0]).get("decide_first", [])
        assert code == bool(decisions) and decisions == (
            ["rewards: fill them in; math stands in their place"] if path.suffix == ".sh" else []
        )
        (tmp_path / "out.yaml").write_text(convert_file(path))
        configs[name] = load_config(tmp_path / "out.yaml")
    trl, swift, verl, python = (configs[name] for name in ("trl.yaml", "swift.sh", "verl.sh", "trl.py"))
    assert (trl.rollout.num_generations, trl.train.prompts_per_step) == (14, 32)  # 16 x 4 x 7 completions
    assert (trl.train.steps, trl.train.warmup_ratio, trl.train.lr_schedule) == (200, 0.1, "cosine")
    assert (trl.model.dtype, trl.rollout.engine, trl.hardware.rollout_gpus) == ("bfloat16", "vllm", "auto")
    assert [(reward.use, reward.weight) for reward in trl.rewards] == [
        ("open_r1.accuracy", 1.0),
        ("code", 0.1),
    ]
    assert (trl.algorithm.name, trl.algorithm.clip_high, trl.algorithm.beta) == ("dapo", 0.2, 0.0)
    assert (swift.hardware.processes, swift.train.prompts_per_step, swift.train.learning_rate) == (8, 1, 1e-5)
    assert (swift.rollout.temperature, swift.algorithm.beta, swift.algorithm.name) == (0.9, 0.0, "grpo")
    assert (verl.train.prompts_per_step, verl.rollout.num_generations, verl.train.epochs) == (64, 5, 2)
    assert (verl.algorithm.clip_low, verl.algorithm.clip_high, verl.algorithm.beta) == (0.2, 0.28, 0.0)
    assert (python.algorithm.name, python.algorithm.beta, python.model.compute_dtype) == ("dr_grpo", 0.01, "bfloat16")
    assert (python.model.path, python.run.dir[-3:]) == ("org/m", "out")
    assert python.rewards[0].use == f"{tmp_path}/rewards.py:brevity"
    assert python.data.path == "org/d"


def test_what_samples_in_the_trainer_is_converted_to_that(tmp_path: Path):
    """And not left to `auto`, which would take vLLM where it is installed."""
    start = "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model org/m --dataset org/d --learning_rate 1e-5 "
    texts = {
        "trl.yaml": "reward_funcs: [accuracy]\nmax_steps: 10\n",
        "off.yaml": "reward_funcs: [accuracy]\nmax_steps: 10\nuse_vllm: false\n",
        "swift.sh": start,
        "hf.sh": VERL.replace("name=vllm", "name=hf"),
        "vllm.sh": start + "--use_vllm true --vllm_mode colocate\n",
        "sglang.sh": VERL.replace("name=vllm", "name=sglang"),  # which has servers too
    }
    engines, notes = {}, {}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        notes[name] = convert_file(tmp_path / name)
        engines[name] = yaml.safe_load(notes[name])["rollout"].get("engine", "auto")
    assert engines == {**dict.fromkeys(("trl.yaml", "off.yaml", "swift.sh", "hf.sh"), "local")} | {
        "vllm.sh": "vllm",
        "sglang.sh": "vllm",
    }
    assert [name for name, text in notes.items() if "sglang samples there, and vLLM here" in text] == ["sglang.sh"]


def test_what_has_no_equivalent_is_listed(files: dict[str, Path]):
    text = convert_file(files["trl.yaml"])
    notes = [line for line in text.splitlines() if line.startswith(("# - ", "- '"))]
    assert any(note.startswith("# - its default there: ") and "hub_strategy" in note for note in notes)
    assert any("7 training processes, the fewest that start there" in note for note in notes)
    assert "reward 'brevity'" in convert_file(files["trl.py"])
    assert not any("learning_rate" in note or "num_generations" in note for note in notes[1:])  # [0]: the version
    verl = convert_file(files["verl.sh"])
    assert "1280 completions are sampled together there, and 320 are trained in one optimizer step" in verl


def test_what_cohort_refuses_is_converted_and_told_first(tmp_path: Path):
    (tmp_path / "one.sh").write_text(VERL.replace("rollout.n=5", "rollout.n=1 actor_rollout_ref.rollout.temperature=0"))
    text = convert_file(tmp_path / "one.sh")
    assert "rollout.temperature" in yaml.safe_load(text)["decide_first"][0]
    assert yaml.safe_load(text)["rollout"]["temperature"] == 0
    assert "a group of one has its reward as its advantage there" in text


def test_comments_cannot_be_left_by_line_breaks_in_values(tmp_path: Path):
    (tmp_path / "r.yaml").write_text('reward_funcs: [r]\nhub_note: "a\\nmodel: {path: evil}\\u2028x"\n')
    text = convert_file(tmp_path / "r.yaml")
    assert yaml.safe_load(text)["model"]["path"] == "MODEL"


def test_secrets_are_not_repeated(tmp_path: Path):
    (tmp_path / "r.yaml").write_text("reward_funcs: [r]\nhub_token: hf_abc\nmy_api_key: hf_abc\n")
    text = convert_file(tmp_path / "r.yaml")
    assert "my_api_key: ... (" in text and "hf_abc" not in text


def test_the_page_is_up_to_date():
    page = Path(__file__).parents[2] / "docs/check.md"
    text = page.read_text(encoding="utf-8")
    assert "| `CHK001` |" in text and text == with_findings(text), "make docs"


def test_codes_are_stable():
    assert list(RULES) == [f"CHK{number:03d}" for number in range(1, 22) if number not in (9, 13, 18, 19)]
    errors = [code for code, rule in RULES.items() if rule.severity == "error"]
    assert errors == ["CHK001", "CHK002", "CHK006", "CHK008", "CHK010", "CHK012", "CHK017"]


def test_the_command_needs_no_torch(files: dict[str, Path]):
    script = (
        "import sys; from cohort.cli.app import app; app(['check', sys.argv[1]], standalone_mode=False); "
        "print(sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(files["cohort.yaml"])],
        capture_output=True,
        text=True,
        env=dict(os.environ),
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[]"
