"""The sandbox of a run: opened once for rewards and tools, named at the start, and a warning if it holds nothing."""

import json
from pathlib import Path

import pytest

import cohort
from cohort.chat import ResponseParser
from cohort.cli.evaluate import run_eval
from cohort.config import config_from_dict
from cohort.config.hardware import SandboxConfig
from cohort.sandbox import Sandbox, SharedSandbox
from cohort.sandbox import choose as shared
from cohort.sandbox.process import Limits, ProcessResult
from cohort.trainer.inputs import Inputs, build_inputs
from playing import save_turns_model
from runs import Notes, metric
from tiny import write_jsonl

WARNING = "warning: sandbox.confinement: none: code of the model runs with this user's rights and network"


class Unheld:
    """A backend in which all code ends at once."""

    name = "unheld"
    counts_processes = holds_sessions = True
    guest_filter = b""

    def run(self, settings, request, limits, *, toolchain):
        output = b'{"ready": true}\n{"begun": true}'
        return ProcessResult(output=output, errors=b"", ending="exited", exit_code=0, wall_s=0.0)


class Told(Notes):
    """Keeps the progress of rewards, too."""

    def __init__(self) -> None:
        super().__init__()
        self.judged: list[tuple[str, int, int]] = []

    def reward_progress(self, name: str, done: int, total: int) -> None:
        self.judged.append((name, done, total))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Sandbox]:
    """The sandboxes opened so far."""
    sandboxes: list[Sandbox] = []

    def open_sandbox(config: SandboxConfig) -> Sandbox:
        held = () if config.confinement == "none" else ("network", "reads outside")
        sandboxes.append(Sandbox(backend=Unheld(), limits=Limits.of(config), max_concurrent=1, protections=held))
        return sandboxes[-1]

    monkeypatch.setattr(shared, "open_sandbox", open_sandbox)
    # a random model calls by single letters, which is not how its chat template renders calls
    monkeypatch.setattr(ResponseParser, "check_tools", lambda self: None)
    return sandboxes


def settings(folder: Path, use: str, *, tools: tuple[str, ...] = ("python",), unsafe: bool = True):
    if not (folder / "model").exists():
        save_turns_model(folder / "model")
        write_jsonl(folder / "d.jsonl", [{"prompt": "?", "answer": "1", "tests": ["assert f() == 1"]}] * 2)
    lengths = {"max_prompt_tokens": 400, "max_completion_tokens": 4}
    of_turns = {"max_turns": 1, "max_trajectory_tokens": 600} if tools else {}
    return {
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "d.jsonl"), "prompt": "prompt"},
        "rewards": [{"use": use}],
        "rollout": {"tools": list(tools), "engine": "local", "num_generations": 2, **lengths, **of_turns},
        **({"sandbox": {"confinement": "none"}} if unsafe else {}),
        "train": {"steps": 1, "prompts_per_step": 2},
        "run": {"dir": str(folder / "run")},
    }


def inputs(folder: Path, use: str, **options) -> Inputs:
    return build_inputs(config_from_dict(settings(folder, use, **options), base_dir=folder))


def test_the_tool_alone_names_the_sandbox_and_warns(tmp_path, opened):
    of_tool = inputs(tmp_path, "exact")
    assert of_tool.notes(400) == ["sandbox: unheld, holds nothing", WARNING]
    assert of_tool.sandbox.warnings == [WARNING]
    held = inputs(tmp_path, "exact", unsafe=False)
    assert (held.notes(400), held.sandbox.warnings) == (["sandbox: unheld, holds network, reads outside"], [])
    assert len(opened) == 2


def test_a_run_that_does_not_need_it_opens_none(tmp_path, opened):
    neither = inputs(tmp_path, "exact", tools=(), unsafe=False)
    assert (neither.notes(400), neither.sandbox.warnings, opened) == ([], [], [])
    assert SharedSandbox().warnings == []


def test_a_run_with_the_reward_and_the_tool_opens_one(tmp_path, opened):
    display = Told()
    run = cohort.train(config_from_dict(settings(tmp_path, "code"), base_dir=tmp_path), display=display).run_dir
    assert len(opened) == 1
    assert [text for text in display.told if "sandbox" in text] == ["sandbox: unheld, holds nothing", WARNING]
    assert json.loads((run / "summary.json").read_text())["warnings"] == [WARNING]
    assert metric(run, "rewards/code/mean") == [0.0]
    (per_verdict,) = metric(run, "rewards/code/seconds_per_verdict")
    assert 0 < 4 * per_verdict <= metric(run, "time/reward_s")[0]
    assert ("code", 0, 4) in display.judged and display.judged[-1] == ("code", 4, 4)


def test_an_evaluation_names_the_sandbox_too(tmp_path, opened, capsys):
    config = settings(tmp_path, "code", tools=()) | {"eval": {"path": str(tmp_path / "d.jsonl"), "max_prompts": 1}}
    run_eval(config_from_dict(config, base_dir=tmp_path), out=None, as_json=True)
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-2:] == ["sandbox: unheld, holds nothing", WARNING]
    assert json.loads(printed.out)["accuracy"] == 0.0
