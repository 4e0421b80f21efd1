"""The blocks of docs/python.md and python-own.md run in turn, on a small model; docs/api.md is that of the code."""

import re
from pathlib import Path

import pytest

from api_page import render
from runs import metric
from tiny import save_model_folder

DOCS = Path(__file__).parents[2] / "docs"


def test_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    text = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("python.md", "python-own.md"))
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 4
    save_model_folder(tmp_path / "base", "qwen3")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks:
        exec(block.replace('"Qwen/Qwen3-0.6B"', '"base"'), names)
    assert metric(tmp_path / "runs" / "steps", "reward") == metric(tmp_path / "runs" / "digits", "reward")
    assert "runs/steps/final" in capsys.readouterr().out


def test_the_api_is_that_of_the_code():
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    assert "#### `Trainer.generate`" in text and text == render(), "make docs"
