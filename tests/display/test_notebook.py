"""Progress in a notebook's cell, with a stand-in for IPython's display."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest

import cohort
from cohort.config import config_from_dict
from cohort.display import ConsoleDisplay, default_display
from cohort.display.notebook import NotebookDisplay
from runs import changed, make_inputs


class Cell:
    """Keeps what the cell shows."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.num_outputs = 0

    def display(self, page: str, *, display_id: bool) -> "Cell":
        self.num_outputs += 1
        self.update(page)
        return self

    def update(self, page: str) -> None:
        self.shown.append(page)


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    found, module = Cell(), types.ModuleType("IPython.display")
    vars(module).update(HTML=str, display=found.display)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return found


def test_a_run_is_shown_in_one_output(tmp_path: Path, cell: Cell):
    config = changed(make_inputs(tmp_path), train={"steps": 2}, eval={"every": 2})
    cohort.train(config, display=NotebookDisplay(tmp_path / "run"))
    assert cell.num_outputs == 1
    assert "<b>step 0 of 2</b>" in cell.shown[0]
    last = cell.shown[-1]
    assert "held-out accuracy" in last and "step 2 of 2: reward" in last and last.count("<svg") == 5
    assert "; evaluation" in "".join(cell.shown) and "; checkpoint" in "".join(cell.shown)


def test_notes_are_text(tmp_path: Path, cell: Cell):
    NotebookDisplay(tmp_path).notify("<script>alert(1)</script>")
    assert "&lt;script&gt;" in cell.shown[0] and "<script>" not in cell.shown[0]


def test_only_notebooks_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config: Any = config_from_dict(make_inputs(tmp_path))
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert isinstance(default_display(config), ConsoleDisplay)
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    assert isinstance(default_display(config), NotebookDisplay)
