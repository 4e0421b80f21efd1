"""`cohort view RUN --export FILE`: one file with everything that fits."""

import base64
import json
import re
import zlib
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from cohort.errors import UserError
from cohort_view import export
from cohort_view.export import export_run
from completions_files import a_row, write_rows
from view_server import make_run

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \u2028 😀 <!--"


def write_step(run: Path, step: int, texts: list[str]) -> None:
    """Write a step of two groups."""
    rows = [
        a_row(i // (len(texts) // 2), float(i % 2), prompt=f"prompt {HOSTILE}", completion=text, advantage=0.123456789)
        for i, text in enumerate(texts)
    ]
    write_rows(run, rows, step=step)


def data_of(page: str) -> dict[str, Any]:
    packed = re.findall(r'<script type="text/plain" id="cohort-data">([^<]*)</script>', page)
    return json.loads(zlib.decompress(base64.b64decode(packed[-1])))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_run(tmp_path_factory.mktemp("runs") / "run")
    (run / "events.jsonl").write_text(
        '{"timestamp": 1.0, "step": 1, "event": "warning", "text": "warning: http://me:hunter2@host/ is slow"}\n'
    )
    for step in (1, 2):
        write_step(run, step, [f"{HOSTILE} {step} {i}" for i in range(4)])
    return run


@pytest.fixture(scope="module")
def page(run: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("out") / "report.html"
    report = export_run(run, file)
    assert report.num_bytes == file.stat().st_size < export.MAX_BYTES
    assert report.note in file.read_text()
    return file.read_text()


def test_the_page_finds_its_answers_by_their_paths(page: str) -> None:
    data = data_of(page)
    assert {
        f"/api/runs/run/{name}" for name in ("now", "metrics", "config", "questions?kind=step", "questions?kind=eval")
    } < data.keys()
    assert [entry["id"] for entry in data["/api/runs"]["runs"]] == ["run"]
    assert {(c["name"], tuple(c["y"])) for c in data["/api/curves?x=step"]["curves"]} == {
        ("reward", (0.5, None)),
        ("loss", (None, -0.001)),
        ("eval/accuracy", (0.25,)),
    }
    steps = data["/api/runs/run/steps"]
    assert (steps["first"], steps["last"], [entry["step"] for entry in steps["steps"]]) == (1, 2, [1, 2])
    assert data["/api/runs/run/steps/2"]["num_groups"] == 2
    group = data["/api/runs/run/steps/2/groups/1"]
    assert [completion["text"] for completion in group["completions"]] == [f"{HOSTILE} 2 2", f"{HOSTILE} 2 3"]
    assert group["completions"][0]["advantage"] == 0.123457
    assert data["/api/runs/run/questions?kind=step"]["num_questions"]["always"] == 2
    assert not [path for path in data if "/completions/" in path]


def test_only_its_own_scripts_run(page: str) -> None:
    [policy] = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)
    assert policy.startswith("default-src 'none'; script-src 'strict-dynamic' 'sha256-")
    assert "unsafe" not in policy
    scripts = re.findall(r"<script(?: type=\"importmap\")?>(.*?)</script>", page, re.S)
    styles = re.findall(r"<style>(.*?)</style>", page, re.S)
    hashes = [base64.b64encode(sha256(text.encode()).digest()).decode() for text in (*scripts, *styles)]
    assert re.findall("'sha256-([^']*)'", policy) == hashes
    assert page.index("Content-Security-Policy") < page.index("<style>") < page.index("<script")
    # nothing is loaded, and nothing of the run is markup
    assert not re.findall(r'<(?:link|script|img)[^>]* (?:src|href)="(?!data:)', page)
    assert not re.findall(r"@import|url\((?!\"?data:)", "".join(styles))
    assert "alert(1)" not in page
    assert page.count("<script") == len(scripts) + 1 == 4


def test_each_module_is_in_the_import_map(page: str) -> None:
    [text] = re.findall(r'<script type="importmap">(.*?)</script>', page)
    imports = json.loads(text)["imports"]
    prefix = "data:text/javascript;base64,"
    assert {url[: len(prefix)] for url in imports.values()} == {prefix}
    modules = {name: base64.b64decode(url[len(prefix) :]).decode() for name, url in imports.items()}
    assert modules["cohort/app.js"] == (export.STATIC / "js" / "app.js").read_text()
    for name, source in modules.items():
        used = re.findall(r'^import\b[^;"]*?"([^"]+)";|^export\b[^;"(]* from "([^"]+)";', source, re.M)
        assert {a or b for a, b in used} <= set(imports), name
        assert not re.search(r"\bimport\s*\(", source), name


def test_passwords_are_left_out(page: str) -> None:
    data = json.dumps(data_of(page))
    assert "hunter2" not in data
    assert "http://***@host/ is slow" in data


def test_what_does_not_fit_is_left_out_and_said(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "bundle_page", lambda static, data, footer: f"{data}\n{footer}")
    for step in (3, 4, 5):
        write_step(run, step, ["".join(sha256(bytes([step, i, j])).hexdigest() for j in range(20)) for i in range(4)])
    for limit in (13000, 15000):
        report = export_run(run, tmp_path / "report.html", max_bytes=limit)
        assert (tmp_path / "report.html").stat().st_size == report.num_bytes <= limit
        assert re.search(r"Completions: [1-4] of 5 steps: .*5", report.note)  # the last step is wanted first
    with pytest.raises(UserError, match=r"--export: the run's metrics and configuration alone exceed 0\.0 MB"):
        export_run(run, tmp_path / "report.html", max_bytes=2200)


def test_damaged_runs_are_exported(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "completions" / "step-000001.parquet").write_bytes(b"PAR1 no")
    (run / "config.yaml").unlink()
    export_run(run, tmp_path / "report.html")
    data = data_of((tmp_path / "report.html").read_text())
    assert "config.yaml is missing" in data["/api/runs/run/now"]["problems"]
    assert data["/api/runs/run/steps/1"]["problems"]


def test_a_file_that_cannot_be_written_is_named(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--export: '.*/file/report\.html' cannot be written: "):
        export_run(run, tmp_path / "file" / "report.html")
