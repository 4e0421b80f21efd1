"""docs/troubleshooting.md: errors print a section that exists, and the messages that it quotes are in the code."""

import ast
import pickle
import re
import traceback

import pytest

from cohort.errors import _SECTIONS, TROUBLESHOOTING, DoesNotFitError, UserError, explained_in
from pages import FENCED, ROOT, anchors

PAGE = (ROOT / TROUBLESHOOTING).read_text(encoding="utf-8")
OWN, OTHERS = (PAGE[: PAGE.index("\n## torch")], PAGE[PAGE.index("\n## torch") :])


def quoted(text: str) -> list[tuple[str, str]]:
    """Sections' anchors, each with a message that its block quotes."""
    parts = re.split(r"^### ", text, flags=re.MULTILINE)[1:]
    sections = [(anchors(f"### {part}")[0], part) for part in parts]
    return [
        (name, line)
        for name, section in sections
        for _, block in FENCED.findall(section)
        for line in block.splitlines()
    ]


def test_every_message_leads_to_its_section():
    messages = quoted(PAGE)
    assert {line: explained_in(line) for _, line in messages} == {
        line: f"See docs/troubleshooting.md#{name}" for name, line in messages
    }
    assert {*_SECTIONS} == {name for name, _ in messages} <= {*anchors(PAGE)}
    lines = "\n".join(line for _, line in messages)
    assert [part for parts in _SECTIONS.values() for part in parts if part not in lines] == []


def test_quoted_messages_of_cohort_are_in_its_source():
    files = [file for file in (ROOT / "src").rglob("*.py") if file.name != "errors.py"]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    strings = [n.value for t in trees for n in ast.walk(t) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    source = "\n".join(strings)
    pieces = [(piece.strip(" ,;:.()"), line) for _, line in quoted(OWN) for piece in line.split("...")]
    assert [(piece, line) for piece, line in pieces if piece not in source] == []
    assert "the model has run away" not in source


def test_an_error_has_its_section_as_a_note():
    error = DoesNotFitError("out of memory while sampling (docs/memory.md)")
    see = "See docs/troubleshooting.md#out-of-memory"
    assert error.__notes__ == pickle.loads(pickle.dumps(error)).__notes__ == [see]
    assert traceback.format_exception_only(error)[-1] == f"{see}\n"
    assert not hasattr(UserError("train.steps: -1: must be at least 1"), "__notes__")
    assert explained_in(f"rank 1 failed; its last lines:\nerror: {error}\n{see}") == ""


@pytest.mark.parametrize("text", [line for _, line in quoted(OTHERS)])
def test_messages_of_libraries_are_found_in_longer_output(text: str):
    assert explained_in(f"RuntimeError: {text}: more")


def test_the_command_prints_it(tmp_path, cohort):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").touch()
    run = {"dir": str(tmp_path / "run")}
    assert cohort("init", str(tmp_path / "first")).code == 0
    ended = cohort("train", str(tmp_path / "first" / "run.yaml"), f"run.dir={run['dir']}")
    assert ended.code == 2
    assert ended.err.splitlines()[1] == "See docs/troubleshooting.md#the-run-folder"
