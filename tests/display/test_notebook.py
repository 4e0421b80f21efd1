"""Progress in a notebook's cell, with a stand-in for IPython's display."""

import re
import sys
import types
from pathlib import Path
from types import SimpleNamespace
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
        self.execution_count = 1

    def display(self, page: str, *, display_id: bool) -> "Cell":
        self.num_outputs += 1
        self.update(page)
        return self

    def update(self, page: str) -> None:
        self.shown.append(page)


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    found, module, top = Cell(), types.ModuleType("IPython.display"), types.ModuleType("IPython")
    vars(module).update(HTML=str, display=found.display)
    vars(top).update(get_ipython=lambda: found)
    monkeypatch.setitem(sys.modules, "IPython", top)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return found


def test_a_run_is_shown_in_one_output(tmp_path: Path, cell: Cell):
    config = changed(make_inputs(tmp_path), train={"steps": 2}, eval={"every": 2})
    cohort.train(config, display=NotebookDisplay(tmp_path / "run"))
    assert cell.num_outputs == 1
    assert "<b>step 0 of 2</b>" in cell.shown[0]
    last = cell.shown[-1]
    assert "held-out accuracy" in last and "step 2 of 2: reward" in last and last.count("<svg") == 5
    assert "; evaluation" in "".join(cell.shown)


def test_what_takes_long_is_shown_until_it_is_done(tmp_path: Path, cell: Cell):
    display = NotebookDisplay(tmp_path)
    display.started(SimpleNamespace(num_steps=2), steps_done=1)
    display.phase("checkpoint")
    display.phase("pack")
    display.saved(1)
    assert [re.findall("<b>(.*)</b>", page) for page in cell.shown] == [
        ["step 1 of 2"],
        ["step 1 of 2; checkpoint"],
        ["step 1 of 2"],
    ]


def test_a_run_that_goes_on_in_another_cell_is_shown_there(tmp_path: Path, cell: Cell):
    display = NotebookDisplay(tmp_path)
    display.notify("first")
    cell.execution_count = 2
    display.notify("second")
    assert cell.num_outputs == 2 and "first" in cell.shown[0] and "first" not in cell.shown[1]


def test_notes_are_text(tmp_path: Path, cell: Cell):
    NotebookDisplay(tmp_path).notify("<script>alert(1)</script>")
    assert "&lt;script&gt;" in cell.shown[0] and "<script>" not in cell.shown[0]


def test_only_notebooks_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config: Any = config_from_dict(make_inputs(tmp_path))
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert isinstance(default_display(config), ConsoleDisplay)
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    assert isinstance(default_display(config), NotebookDisplay)
