"""Files of JSON lines are read once, then only what was appended."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort_view import json_lines as jsonl
from cohort_view.json_lines import JsonLines, parse_lines
from selection import examples


def read(lines: JsonLines) -> tuple[str, bytes]:
    return lines.check(), b"".join(lines.blocks()) if lines.exists else b""


def test_only_what_was_appended_is_read(tmp_path: Path):
    file = tmp_path / "m.jsonl"
    lines = JsonLines(file)
    assert read(lines) == ("unchanged", b"")
    file.write_bytes(b"1\n2\n")
    assert read(lines) == ("appended", b"1\n2\n")
    assert read(lines) == ("unchanged", b"")
    with file.open("ab") as stream:
        stream.write(b"3\n4")
    assert read(lines) == ("appended", b"3\n")  # the last line is incomplete
    with file.open("ab") as stream:
        stream.write(b"0\n")
    assert read(lines) == ("appended", b"40\n")


def test_a_shorter_file_is_read_again(tmp_path: Path):
    file = tmp_path / "m.jsonl"
    file.write_bytes(b"1\n2\n3\n")
    lines = JsonLines(file)
    read(lines)
    os.truncate(file, 2)
    assert read(lines) == ("rewritten", b"1\n")


def test_a_replaced_file_is_read_again(tmp_path: Path):
    file, other = tmp_path / "m.jsonl", tmp_path / "other"
    file.write_bytes(b"1\n2\n")
    lines = JsonLines(file)
    read(lines)
    other.write_bytes(b"1\n2\n3\n")  # as after a resume: the same lines, and more
    other.replace(file)
    assert read(lines) == ("rewritten", b"1\n2\n3\n")


def test_a_file_rewritten_in_place_is_read_again(tmp_path: Path):
    file = tmp_path / "m.jsonl"
    file.write_bytes(b"1\n2\n")
    lines = JsonLines(file)
    read(lines)
    with file.open("r+b") as stream:
        stream.write(b"1\n3\n4\n")
    assert read(lines) == ("rewritten", b"1\n3\n4\n")


def test_a_file_that_comes_back(tmp_path: Path):
    file = tmp_path / "m.jsonl"
    file.write_bytes(b"1\n")
    lines = JsonLines(file)
    read(lines)
    file.unlink()
    assert read(lines) == ("rewritten", b"")
    file.write_bytes(b"2\n")
    assert read(lines) == ("appended", b"2\n")


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_not_read(make, tmp_path: Path):
    make(tmp_path / "m.jsonl")
    with pytest.raises(OSError, match="not a regular file"):
        JsonLines(tmp_path / "m.jsonl").check()


def test_a_line_longer_than_a_block_is_cut(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(jsonl, "_BLOCK_BYTES", 8)
    file = tmp_path / "m.jsonl"
    file.write_bytes(b"1\n" + b"x" * 20 + b"\n2\n")
    lines = JsonLines(file)
    lines.check()
    blocks = list(lines.blocks())
    assert b"".join(blocks) == file.read_bytes()
    assert max(map(len, blocks)) == 8


@examples(300, quick=40)
@given(st.lists(st.binary(max_size=12), max_size=30), st.integers(1, 20))
def test_whatever_is_written_in_pieces_is_read_once(tmp_path_factory, pieces: list[bytes], block_bytes: int):
    file = tmp_path_factory.mktemp("lines") / "m.jsonl"
    lines, found, written = JsonLines(file), b"", b""
    with pytest.MonkeyPatch.context() as patch, file.open("ab", buffering=0) as stream:
        patch.setattr(jsonl, "_BLOCK_BYTES", block_bytes)
        for piece in pieces:
            stream.write(piece)
            written += piece
            change, more = read(lines)
            assert change != "rewritten"
            found += more
    assert written.startswith(found)
    assert len(found) >= written.rfind(b"\n") + 1


def test_lines_that_are_no_objects():
    deep = b'{"a":' * 100_000
    block = b'{"step": 1, "x": NaN}\n\n[1]\n{"step": \xff}\n' + deep + b'\n{"text": "\\ud800"}\n{"big": 1e999}\n'
    rows = list(parse_lines(block))
    assert [row is not None for row in rows] == [True, False, False, False, False, True, True]
    assert json.dumps(rows[5]) == '{"text": "\\ud800"}'
