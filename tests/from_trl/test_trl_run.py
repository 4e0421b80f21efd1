"""`cohort convert SCRIPT --run` and `cohort check SCRIPT --run`: the script is run up to `.train()`."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from cohort.cli.app import app
from cohort.config import config_from_dict
from cohort.errors import UserError
from cohort.trl.config import TRL_VERSION
from cohort.trl.scripts import as_yaml, run_script
from cohort_check import check_file
from cohort_check.readers import read_arguments
from cohort_check.rules.common import FRAMEWORKS
from tiny import save_model_folder

SCRIPT = """
import argparse
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

def digits(completions, **kwargs):
    return [float(len(text)) for text in completions]

def make(n):
    return lambda completions, **kwargs: [n for _ in completions]

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lora", action="store_true")
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained("org/base", torch_dtype="bfloat16")
    if options.lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
    given = dict(learning_rate=2e-6, num_iterations=2, num_generations=4, save_steps=10)
    for name, value in [("max_steps", 40), ("per_device_train_batch_size", 4)]:
        given[name] = value
    args = GRPOConfig("out", **given)
    args.beta = 0.01
    rows = Dataset.from_list([{"prompt": "a"}] * 5)
    trainer = GRPOTrainer(model, [digits, make(2)], args=args, train_dataset=rows)
    trainer.train()
    raise SystemExit("nothing after it runs")
"""


def test_the_trainer_that_the_script_builds_is_converted_and_judged(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    processes, arguments = read_arguments("torchrun --nproc_per_node 3 train.py --lora", script)
    assert (processes, arguments) == (3, ["--lora"])
    ran = run_script(script, arguments, processes=processes)
    config = config_from_dict(yaml.safe_load(as_yaml(script, ran)))
    assert config.model.path == "org/base" and config.model.adapter is not None and config.model.adapter.rank == 4
    assert (config.train.steps, config.run.checkpoint_every, config.train.prompts_per_step) == (20, 5, 3)
    assert (config.algorithm.beta, config.train.learning_rate, config.hardware.processes) == (0.01, 2e-6, 3)
    assert [reward.use for reward in config.rewards] == ["train.py:digits", "rewards.py:reward_12"]
    data, closure = config.decide_first
    assert "data.path: 5 rows with the columns prompt" in data and "train_dataset.to_json('train.jsonl')" in data
    assert closure.startswith("rewards: reward_12 (train.py:12) is a closure")
    found = check_file(script, ran=ran)
    assert found.verdict == "starts: TRL 1.16 with 3 processes, 12 completions per optimizer step, 3 prompts"


UNSLOTH = """
from datasets import Dataset
from unsloth import FastLanguageModel
from vllm import SamplingParams
from trl import GRPOConfig, GRPOTrainer

model, tokenizer = FastLanguageModel.from_pretrained(model_name="base", load_in_4bit=True, fast_inference=True)
model = FastLanguageModel.get_peft_model(model, r=32, target_modules=["q_proj"])
args = GRPOConfig(
    "out", num_generations=4, per_device_train_batch_size=1, use_vllm=True, max_steps=3, unsloth_num_chunks=-1,
    vllm_sampling_params=SamplingParams(min_p=0.1),
)
rows = Dataset.from_list([{"prompt": "a"}] * 5)
GRPOTrainer(model, lambda completions, **_: [0.0 for _ in completions], args, rows, processing_class=tokenizer).train()
"""


@pytest.mark.slow("test_the_trainer_that_the_script_builds_is_converted_and_judged")
def test_a_script_of_unsloth_is_run_without_unsloth_and_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model_folder(tmp_path / "base", "qwen3")
    (tmp_path / "train.py").write_text(UNSLOTH)
    (tmp_path / "requirements.txt").write_text("trl==0.22.2\n")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["convert", "train.py", "--run"])
    assert result.exit_code == 1, result.stderr
    assert "those of TRL 1.16, which cohort.trl has; the script is for 0.22.2 (requirements.txt:1)" in result.stdout
    assert "# - per_device_train_batch_size: 1 as written, which Unsloth raises to num_generations 4" in result.stdout
    config = yaml.safe_load(result.stdout)
    assert (config["model"]["adapter"]["rank"], config["train"]["prompts_per_step"]) == (32, 1)
    sampling, quantization, *_ = config["decide_first"]
    assert sampling.startswith("vllm_sampling_params: SamplingParams(min_p=0.1)") and "quantization" in quantization


def test_the_defaults_are_those_of_the_version_that_is_told() -> None:
    assert FRAMEWORKS["trl"]["default"] == TRL_VERSION


@pytest.mark.slow("test_the_trainer_that_the_script_builds_is_converted_and_judged")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("print(1)\n", "it ends without GRPOTrainer"),
        ("import trl\nraise KeyError('a')\n", "train.py:2: KeyError: 'a'"),
        ("import sys\nsys.exit(3)\n", "ended with 3 before .train()"),
    ],
)
def test_a_script_that_trains_nothing_is_an_error(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "train.py").write_text(text)
    with pytest.raises(UserError, match="--run: ") as caught:
        run_script(tmp_path / "train.py")
    assert said in str(caught.value)


def test_a_launch_that_does_not_start_the_script_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must start train"):
        read_arguments("torchrun other.py", tmp_path / "train.py")
