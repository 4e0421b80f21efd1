"""The block of docs/from-trl.md runs, and the table of docs/trl-fields.md is that of the code."""

import re
from pathlib import Path

import pytest

from tiny import save_model_folder
from trl_fields import with_fields

DOCS = Path(__file__).parents[2] / "docs"


def test_the_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (block,) = re.findall(r"```python\n(.*?)```", (DOCS / "from-trl.md").read_text(encoding="utf-8"), re.DOTALL)
    save_model_folder(tmp_path / "base", "qwen3")
    monkeypatch.chdir(tmp_path)
    exec(block.replace('"Qwen/Qwen3-0.6B"', '"base"'), {"__name__": "__main__"})
    assert (tmp_path / "out" / "final" / "model.safetensors").exists()


def test_the_table_is_that_of_the_code():
    text = (DOCS / "trl-fields.md").read_text(encoding="utf-8")
    assert "| `beta` | works | `algorithm.beta` |" in text and text == with_fields(text), "make docs"
