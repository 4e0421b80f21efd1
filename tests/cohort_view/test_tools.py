"""Tool calls of a run, by tool and error."""

import json

from cohort_view import tools
from completions_files import RunFolder, a_row, answering, write_rows


def called(*answers, name="look_up", **columns):
    """A row in which a tool gave these answers."""
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": {"name": name}}]},
        *({"role": "tool", "tool_call_id": "1", "name": name, "content": answer} for answer in answers),
    ]
    errors = sum(answer.startswith("Error: ") for answer in answers)
    return a_row(1, messages=json.dumps(messages), tool_errors=errors, malformed_calls=0) | columns


def test_calls_are_counted_by_tool_and_error(tmp_path):
    write_rows(tmp_path, [called("Error: no entry 'Ada 3'\nat line 7"), called("5", group=2)], step=1)
    of_an_agent = [{"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "run"}}]}]
    of_an_agent += [{"role": "tool", "tool_call_id": "x", "content": "Error: its own words"}]
    rows = [
        called("Error: no entry 'Bob'", "Error: timed out after 12.5 s", "7"),
        called("Error: no entry 'Cy'", group=4, malformed_calls=3),
        called() | {"messages": json.dumps(of_an_agent), "malformed_calls": None},
        called() | {"messages": None, "tool_errors": None},
        called() | {"messages": '[3, {"role": "tool"}, {"role": "user"}]'},
    ]
    write_rows(tmp_path, rows, step=2)
    write_rows(tmp_path, [called("not looked at")], kind="eval", step=3)
    found = answering(tools.tools)(RunFolder(tmp_path))
    assert [(t.name, t.error, t.calls, t.steps) for t in found.tools] == [
        ("look_up", "no entry '…'", 3, [1, 2]),
        ("look_up", "timed out after #.# s", 1, [2, 2]),
        ("look_up", None, 2, [1, 2]),
        ("?", None, 1, [2, 2]),
        ("run", None, 1, [2, 2]),
    ]
    assert [t.example for t in found.tools[:2]] == [{"step": 2, "kind": "step", "group": 1, "row": 0}] * 2
    assert (found.malformed, found.steps, found.problems) == (3, [1, 2], [])


def test_only_the_newest_files_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(tools, "FILES_READ", 2)
    for step in (1, 2, 3):
        write_rows(tmp_path, [called("5"), called("6", group=9)], step=step)
    found = answering(tools.tools)(RunFolder(tmp_path))
    assert (found.tools[0].calls, found.steps, found.tools[0].example.row) == (4, [2, 3], 0)
    nothing = answering(tools.tools)(RunFolder(tmp_path / "none"))
    assert nothing == {"tools": [], "malformed": 0, "steps": None, "problems": []}
