"""Scripts of Unsloth: its defaults, and what `from_pretrained` says, in the converted configuration."""

import json
from pathlib import Path

import yaml

from cohort_check import check_file, convert_file

SCRIPT = """
from unsloth import FastLanguageModel
from trl import GRPOConfig, GRPOTrainer
PEFT = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "use_gradient_checkpointing": "unsloth"}
model, tokenizer = FastLanguageModel.from_pretrained("Qwen/Qwen2.5-0.5B", dtype=None, load_in_4bit=False,
    fast_inference=True, gpu_memory_utilization=0.6, max_lora_rank=8, max_seq_length=512, rope_scaling={"factor": 2})
model = FastLanguageModel.get_peft_model(model, **PEFT)
args = GRPOConfig("o", per_device_train_batch_size=1, num_generations=8, loss_type="dapo")
GRPOTrainer(model=model, processing_class=tokenizer, reward_funcs=[r], args=args, train_dataset=d)
"""


def test_defaults_of_unsloth_and_what_it_loads(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    output = convert_file(path)
    config = yaml.safe_load(output)
    assert config["train"]["learning_rate"] == 5e-5 and config["train"]["seed"] == 3407  # Unsloth's own
    assert config["train"]["prompts_per_step"] == 2  # raised to 8, accumulated twice
    assert config["algorithm"]["clip_high"] == 0.28 and config["algorithm"]["mask_truncated_completions"]  # for DAPO
    assert config["rollout"]["engine"] == "vllm" and config["rollout"]["gpu_memory_utilization"] == 0.6
    assert config["model"]["adapter"] == {"rank": 8, "alpha": 16, "targets": ["q_proj"]}
    assert any("rope_scaling" in entry for entry in config["decide_first"])
    assert "dtype" not in " ".join(config["decide_first"]) and "trainer.model.max_lora_rank" in output


def test_a_batch_of_whole_groups_is_not_raised(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("per_device_train_batch_size=1", "per_device_train_batch_size=4"))
    assert "Unsloth raises" not in convert_file(path)


def test_cells_whose_magic_runs_python_are_read(tmp_path: Path) -> None:
    path = tmp_path / "train.ipynb"
    install, text = "#@title Install\n%%capture\nG = 4\n!pip install trl==0.24.0", "a cell — of notes"
    cells = [install, "%%bash\necho ]]", text, SCRIPT.replace("num_generations=8", "num_generations=G")]
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": cell} for cell in cells]}))
    found = check_file(path)
    assert found.outcome == "starts" and found.launch and found.launch.settings["num_generations"].value == 4
