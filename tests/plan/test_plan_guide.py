"""The outputs of `cohort plan` in docs/guide-gpu-allocation.md are what it prints."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cohort.cli.app import app
from selection import mostly_slow

GUIDE = (Path(__file__).parents[2] / "docs" / "guide-gpu-allocation.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", GUIDE.replace("\\\n", " "), re.DOTALL | re.MULTILINE)


def outputs() -> Iterator[tuple[str, list[str]]]:
    """Each command of the page, and the lines that it shows."""
    for block in (text for language, text in BLOCKS if not language):
        for part in re.split(r"^\$ cohort ", block, flags=re.MULTILINE)[1:]:
            command, *lines = part.splitlines()
            if command.startswith("plan "):
                yield command, [" ".join(line.split()) for line in lines if line.strip()]


def differences(shown: list[str], printed: list[str]) -> list[str]:
    """Lines that were not printed, in this order; one that ends with dots is the beginning of one that was."""
    rest = iter(printed)
    return [
        line
        for line in shown
        if not any(p == line or (line.endswith("...") and p.startswith(line[:-3].rstrip())) for p in rest)
    ]


COMMANDS = dict(outputs())


def test_the_page_answers_the_five_questions() -> None:
    assert len(COMMANDS) >= 7
    assert {bool(lines) for lines in COMMANDS.values()} == {True}


@pytest.mark.parametrize("command", mostly_slow(COMMANDS, *list(COMMANDS)[:3], reason="the first three of the page"))
def test_what_is_shown_is_what_is_printed(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing was measured
    (config,) = (text for language, text in BLOCKS if language == "yaml")
    (tmp_path / "run.yaml").write_text(config)
    (tmp_path / "train.jsonl").write_text('{"prompt": "1"}\n' * 7500)
    done = CliRunner().invoke(app, shlex.split(command), env={"COLUMNS": "400"})
    printed = [" ".join(line.split()) for line in done.output.splitlines()]
    assert differences(COMMANDS[command], printed) == []


def test_a_line_that_is_not_printed_is_found() -> None:
    printed = ["a 1", "b 2 and more", "c 3"]
    assert differences(["a 1", "b 2 ..."], printed) == []
    assert differences(["a 2", "c 3"], printed) == ["a 2", "c 3"]
    assert differences(["b 2"], printed) == ["b 2"]
