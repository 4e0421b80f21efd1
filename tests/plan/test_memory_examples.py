"""The worked examples of docs/where-memory-goes.md: the page shows what the command says, and they run, small."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import cohort
from cohort.cli.app import app
from cohort.config import load_config
from cohort.display import Display
from harness import write_model
from modes import SIZES, measure
from selection import mostly_slow
from test_mode_memory import compare
from tiny import copy_task_rows, save_model_folder, write_jsonl

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
PAGE = (ROOT / "docs" / "where-memory-goes.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"^```\n\$ cohort (plan examples/.*)\n((?s:.*?))```$", PAGE, re.MULTILINE)
REWARD = """
def letters(completions, **columns):
    return [sum(c.isalpha() for c in text) / (1 + len(text)) for text in completions]
"""


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


def lines_of(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


@pytest.mark.parametrize(("command", "shown"), SHOWN, ids=[command for command, _ in SHOWN])
def test_the_page_shows_what_the_command_says(command: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(app, command.split(), env={"COLUMNS": "150"})
    said = lines_of(done.output)
    wanted = [line for line in lines_of(shown) if line]
    assert len(wanted) > 3
    assert [line for line in wanted if line not in said] == [], done.output
    assert ("does not fit" in shown) == (done.exit_code == 1)


def test_every_example_is_on_the_page() -> None:
    assert {command.split()[1] for command, _ in SHOWN} == {f"examples/{file.name}" for file in EXAMPLES}
    assert len(EXAMPLES) == 3


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_trains(example: Path, tmp_path: Path) -> None:
    """The same file with another model, other data and a reward that random weights can earn."""
    model = save_model_folder(tmp_path / "model", "qwen2", tie=False)
    data = write_jsonl(tmp_path / "train.jsonl", copy_task_rows(8))
    (tmp_path / "own.py").write_text(REWARD)
    overrides = [
        f"model.path={model}",
        f"data.path={data}",
        f"rewards.0.use={tmp_path}/own.py:letters",
        f"run.dir={tmp_path}/run",
        "rollout.max_prompt_tokens=64",
        "rollout.max_completion_tokens=8",
        "train.steps=2",
        "train.prompts_per_step=2",
        "hardware.device=cpu",
    ]
    result = cohort.train(load_config(example, overrides), display=Display())
    rows = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    norms = [row["grad_norm"] for row in rows if "grad_norm" in row]
    assert len(norms) == 2 and all(norm > 0 for norm in norms)


@pytest.mark.parametrize(
    "example",
    mostly_slow(EXAMPLES, EXAMPLES[0], reason="test_plan_memory and test_mode_memory measure other plans"),
    ids=lambda file: file.stem,
)
def test_memory_of_an_example_is_what_its_plan_says(example: Path, tmp_path: Path) -> None:
    size = SIZES["tiny"]
    overrides = {
        "model.path": write_model(size.shape, tmp_path / "model"),
        "rollout.max_prompt_tokens": size.prompt_tokens,
        "rollout.max_completion_tokens": size.completion_tokens,
        "rollout.num_generations": size.num_completions,
        "train.prompts_per_step": 2,
        "train.micro_batch_tokens": size.budget(1),
    }
    config = load_config(example, [f"{key}={value}" for key, value in overrides.items()])
    compare(measure(config, size))
