"""Scripts for TRL as people write them, in `scripts/`, with the import changed and nothing else."""

import importlib.metadata
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from cohort.errors import UserError
from cohort.trl import GRPOTrainer
from commands import run_script
from reward_models import save_reward_model
from runs import assert_same_weights, metric
from selection import mostly_slow, slow
from tiny import copy_task_rows, save_model_folder, write_jsonl

SCRIPTS = {path.stem: path for path in sorted((Path(__file__).parent / "scripts").glob("*.py"))}
IMPORT = re.compile(r"from trl import GRPOConfig, GRPOTrainer(, .*)?")

pytestmark = pytest.mark.filterwarnings("ignore:.*(gradient_checkpointing|is a field of earlier versions).*")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that the scripts name."""
    folder = tmp_path_factory.mktemp("inputs")
    save_model_folder(folder / "base", "qwen3")
    save_reward_model(folder / "judge")
    write_jsonl(folder / "rows.jsonl", copy_task_rows(8))
    return folder


@pytest.fixture
def run(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """Runs a script in this process; returns its names."""
    for path in inputs.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])

    def run(name: str) -> dict[str, Any]:
        return runpy.run_path(write(name, tmp_path), run_name="__main__")

    return run


def write(name: str, folder: Path) -> str:
    """Write a script with the other import, and return its path."""
    text, number = IMPORT.subn(
        lambda found: (
            "from cohort.trl import GRPOConfig, GRPOTrainer"
            + (f"\nfrom trl import {found[1].removeprefix(', ')}" if found[1] else "")
        ),
        SCRIPTS[name].read_text(),
    )
    assert number == 1
    script = folder / f"{name}.py"
    script.write_text(text)
    return str(script)


def logs(trainer: GRPOTrainer) -> list[dict[str, Any]]:
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def has_files(*names: str) -> Callable[[dict[str, Any]], bool]:
    return lambda found: all(Path(name).exists() for name in names)


def of_trainer(check: Callable[[GRPOTrainer], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda found: check(found["trainer"])


def is_merged(trainer: GRPOTrainer, adapter: Path, merged: Path) -> bool:
    """Whether the files of both give the logits of the trained model."""
    base = AutoModelForCausalLM.from_pretrained("base")
    ids = torch.tensor([[1, 2, 3]])
    models = (trainer.model, PeftModel.from_pretrained(base, adapter), AutoModelForCausalLM.from_pretrained(merged))
    with torch.no_grad():
        trained, with_adapter, alone = (model.eval()(ids).logits for model in models)
        plain = AutoModelForCausalLM.from_pretrained("base")(ids).logits
    torch.testing.assert_close(with_adapter, trained)
    torch.testing.assert_close(alone, trained, atol=1e-4, rtol=1e-4)
    return not torch.allclose(plain, trained, atol=1e-4)


_TOLD = {1: ["log"], 2: ["log", "save"], 3: ["log"]}  # by step

# by script, what it leaves besides a finished run
CHECKS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "quickstart": of_trainer(lambda trainer: trainer.args.num_generations == 8),
    "gsm8k": has_files("final/adapter_model.safetensors", "out/cohort/final/adapter_config.json"),
    "closures": of_trainer(lambda trainer: trainer.reward_func_names == ["length_reward", "contains", "<lambda>"]),
    "async_rewards": of_trainer(lambda trainer: {"num_math", "rewards/judge/mean"} <= logs(trainer)[0].keys()),
    "peft_model": has_files("adapter", "final/adapter_model.safetensors"),
    "qlora": of_trainer(lambda trainer: trainer._built().config.model.quantization == "nf4"),
    "callbacks": lambda found: (
        found["printer"].events == [("begin", 5, True), *[(what, n) for n in (1, 2, 3) for what in _TOLD[n]]]
    ),
    "custom_tokenizer": lambda found: "[assistant]" in Path("final/chat_template.jinja").read_text(),
    "subclass_trainer": of_trainer(lambda trainer: all({"capped", "reward_cap"} <= e.keys() for e in logs(trainer))),
    "subclass_config": of_trainer(
        lambda trainer: trainer.args.target_length == 3 and trainer.args.learning_rate == 1e-4
    ),
    "hf_parser": of_trainer(lambda trainer: trainer._built().config.train.warmup_steps == 1),
    "trl_parser": of_trainer(lambda trainer: trainer.beta == 0.01 and Path("out/adapter_config.json").exists()),
    "old_fields": of_trainer(lambda trainer: trainer._built().config.rollout.max_prompt_tokens == 64),
    "recipe_main": has_files(
        "out/README.md", "out/all_results.json", "out/trainer_state.json", "out/model.safetensors"
    ),
    "reward_models": of_trainer(
        lambda trainer: logs(trainer)[0]["rewards/judge/mean"] == logs(trainer)[0]["rewards/judge_2/mean"]
    ),
    "streaming": of_trainer(lambda trainer: "eval_reward" in trainer.state.log_history[0]),
    "evaluations": lambda found: "test_reward" in found["metrics"] and found["trainer"].state.best_metric is not None,
    "dr_grpo": of_trainer(lambda trainer: [entry["step"] for entry in logs(trainer)] == [1, 2, 3, 4]),
    "model_kwargs": has_files("final/model.safetensors"),
    "beta_schedule": of_trainer(lambda trainer: [entry["kl_coef"] for entry in logs(trainer)] == [0.1, 0.05]),
    "merged_adapter": lambda found: is_merged(found["trainer"], Path("adapter"), Path("merged")),
    "rendered_prompts": of_trainer(
        lambda trainer: (
            (trainer._built().config.rollout.max_completion_tokens, trainer._built().config.rollout.top_k) == (5, 20)
            and trainer._built()._open()[0].inputs.prompts.prompts[0].content.startswith("<user>")
        )
    ),
    "gathered_metrics": lambda found: (
        "share_long" in logs(found["trainer"])[0] and "eval_pass@2" not in found["metrics"]
    ),
    "loop_of_runs": lambda found: len(found["results"]) == 2,
}


QUICK = ("quickstart", "gsm8k", "peft_model", "callbacks", "closures", "recipe_main", "evaluations", "loop_of_runs")


@pytest.mark.parametrize(
    "name",
    mostly_slow((name for name in CHECKS if name != "trl_parser"), *QUICK, reason="eight scripts of other kinds"),
)
def test_script(name: str, run: Callable[[str], dict[str, Any]]):
    found = run(name)
    trainer = found["trainer"]
    assert trainer.state.global_step == trainer.state.max_steps or name == "callbacks"
    assert CHECKS[name](found)


@pytest.mark.extras
def test_a_script_with_trls_parser(run: Callable[[str], dict[str, Any]]):
    assert importlib.metadata.version("trl")
    assert CHECKS["trl_parser"](run("trl_parser"))


def test_a_script_that_resumes(run: Callable[[str], dict[str, Any]], monkeypatch: pytest.MonkeyPatch):
    """Its second run goes on from the last checkpoint; without it, both begin anew."""
    first = run("resume")["trainer"]
    assert len(logs(first)) == 4
    again = run("resume")["trainer"]
    assert again.state.global_step == 4 and logs(again) == logs(first) and not Path("out/cohort-2").exists()


def test_a_script_with_vllm_where_there_is_none(run: Callable[[str], dict[str, Any]], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("COHORT_VLLM_PYTHON", raising=False)
    with pytest.raises(UserError, match=r"vllm|vLLM"):
        run("vllm_colocate")


def test_every_script_is_run():
    assert SCRIPTS.keys() == CHECKS.keys() | {"resume", "vllm_colocate"} and len(SCRIPTS) >= 20


@slow("test_script runs the same scripts in this process")
@pytest.mark.parametrize("name", ["quickstart", "recipe_main"])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_script_in_processes_of_its_own(inputs: Path, tmp_path: Path, monkeypatch: Any, name: str, processes: int):
    for path in inputs.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    done = run_script(Path(write(name, tmp_path)), processes=processes)
    assert metric(tmp_path / "out" / "cohort", "processes") == [processes] * 2
    if name == "recipe_main":
        assert_same_weights(tmp_path / "out", tmp_path / "out" / "cohort" / "final")
        assert len(re.findall(r"\*\*\*\*\* train metrics", done.stdout)) == 1, "on rank 0"
