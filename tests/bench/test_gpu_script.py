"""`bench/gpu.sh`: every part runs whatever becomes of the others, and one file says what was found."""

import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gpu
from cohort.errors import UserError
from comparisons import Check, attempt
from gpu_tables import TABLES
from harness import FailedError, SkippedError, run_apart, run_command
from selection import slow
from test_benches import BENCH, SCRIPTS, run

CPU = torch.device("cpu")
VERSIONS = {"torch", "cuda", "cudnn", "nccl", "triton", "transformers", "vllm", "driver", "flash-attn", "trl"}


def part(name: str, work: Callable[[], dict[str, Any]], **options: Any) -> gpu.Part:
    return gpu.Part(name=name, work=lambda _: work(), **options)


def raises(error: Exception) -> Callable[[], dict[str, Any]]:
    def work() -> dict[str, Any]:
        raise error

    return work


def run_parts(tmp_path: Path, *parts: gpu.Part) -> tuple[int, dict[str, Any]]:
    code = gpu.run_parts(parts, "quick", CPU, out=tmp_path, apart=False)
    return code, json.loads((tmp_path / gpu.FILE).read_text())


def checked(*checks: Check) -> Callable[[], dict[str, Any]]:
    return lambda: {"checks": [check.row() for check in checks]}


def test_every_part_runs_whatever_becomes_of_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right, wrong = (Check(name="product", error=error, limit=0.1) for error in (0.01, 0.2))
    code, found = run_parts(
        tmp_path,
        part("raises", raises(ValueError("a bug"))),
        part("out of memory", raises(torch.OutOfMemoryError("CUDA out of memory."))),
        part("wrong", checked(right, wrong)),
        part("not a number", checked(Check(name="gradient", error=float("nan"), limit=0.1))),
        part("named wrongly", raises(UserError("no vLLM there"))),
        part("right", checked(right)),
    )
    assert code == 1
    assert [result["status"] for result in found["parts"]] == ["failed"] * 5 + ["passed"]
    first, *others = found["failures"]
    assert first.startswith("raises: Traceback") and first.endswith("ValueError: a bug")
    assert others == [
        "out of memory: out of memory",
        "wrong: product: 0.2, at most 0.1",
        "not a number: gradient: the error is nan",
        "named wrongly: no vLLM there",
    ]
    said = capsys.readouterr().out
    assert all(f"- {line}" in said for line in found["failures"])
    assert "| product | 2.0e-01 | 1.0e-01 | **FAILED** |" in said


def test_what_is_missing_is_told_and_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run_parts(
        tmp_path,
        part("vLLM server", raises(SkippedError("not installed"))),
        part("attention", checked(Check(name="flash-attn", error=None, limit=1.0, note="no GPU", left_out=True))),
        part("script", lambda: {"output": "a table", "left_out": ["rows with trl: not installed"]}),
        part("another's step", raises(torch.OutOfMemoryError("CUDA out of memory.")), may_not_fit=True),
    )
    assert code == 0 and found["failures"] == []
    assert found["left_out"] == [
        "vLLM server: not installed",
        "attention: flash-attn: no GPU",
        "script: rows with trl: not installed",
        "another's step: out of memory",
    ]
    said = capsys.readouterr().out
    assert "Nothing failed." in said and "a table" in said and "- vLLM server: not installed" in said


def test_the_file_says_what_it_was_measured_with(tmp_path: Path) -> None:
    _, found = run_parts(tmp_path, part("right", checked()))
    assert set(found["versions"]) >= VERSIONS
    assert found["versions"]["torch"] == torch.__version__
    assert found["device"]["name"] == "CPU" and found["tiny"] and found["form"] == "quick"
    assert found["seconds"] >= found["parts"][0]["seconds"] >= 0


def test_a_comparison_that_raises_is_one_check_that_failed() -> None:
    def broken() -> dict[str, float]:
        raise RuntimeError("CUDA error: an illegal memory access\nmore")

    limits = {"values": 0.1, "gradient": 0.1}
    (failed,) = attempt("kernel", limits, broken)
    assert not failed.passed and failed.note == "RuntimeError: CUDA error: an illegal memory access"

    def gives_up() -> dict[str, float]:
        warnings.warn("kernels do not work here (no compiler). Falling back to PyTorch", RuntimeWarning, stacklevel=1)
        return {"values": 0.0, "gradient": 0.0}

    (failed,) = attempt("kernel", limits, gives_up)
    assert not failed.passed and "no compiler" in failed.note
    values, gradient = attempt("kernel", limits, lambda: {"values": 0.0, "gradient": 0.2})
    assert values.passed and not gradient.passed


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("import sys; sys.exit('wrong driver')", "ended with 1:\nwrong driver"),
        ("import time; time.sleep(60)", "within"),
    ],
)
def test_a_process_that_fails_or_hangs_is_told(tmp_path: Path, body: str, message: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(body)
    with pytest.raises(FailedError, match=message):
        run_apart(str(script), {}, timeout_s=1.0 if "sleep" in body else 60.0)


def test_a_process_that_is_killed_was_out_of_memory(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert run_apart(str(script), {})["out_of_memory"]


def test_what_a_command_has_started_ends_with_it(tmp_path: Path) -> None:
    child = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(60)"
    starts = f"import pathlib, subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}])"
    waits = "\nwhile not (p := pathlib.Path('pid')).exists() or not p.read_text(): time.sleep(0.01)"
    run_command([sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r})\n{starts}{waits}"])
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_command_inside_of_a_command_is_of_the_same_group(monkeypatch: pytest.MonkeyPatch) -> None:
    leads = "import os; print(os.getpgid(0) == os.getpid(), os.environ['COHORT_BENCH_GROUP'])"
    assert run_command([sys.executable, "-c", leads]).stdout == "True 1\n"
    monkeypatch.setenv("COHORT_BENCH_GROUP", "1")
    assert run_command([sys.executable, "-c", leads]).stdout == "False 1\n"
    with pytest.raises(FailedError, match="did not end within"):
        run_command([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=1.0)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_names_of_parts_are_distinct(tmp_path: Path) -> None:
    for tiny in (True, False):
        names = [part.name for part in gpu.parts_of("full", tiny=tiny, out=tmp_path)]
        assert len(names) == len(set(names))
        quick = [part.name for part in gpu.parts_of("quick", tiny=tiny, out=tmp_path)]
        assert names[: len(quick)] == quick


@slow("it imports everything once more")
def test_a_part_in_a_process_of_its_own(tmp_path: Path) -> None:
    (kernels,) = [part for part in gpu.parts_of("quick", tiny=True, out=tmp_path) if part.name == "kernels"]
    result = gpu.run_part(kernels, "quick", CPU, apart=True)
    assert result["status"] == "passed" and len(result["checks"]) == 6


@slow("every part of it; it runs for a minute")
def test_the_quick_form_on_a_cpu(tmp_path: Path) -> None:
    out = script("quick", "--tiny", out=tmp_path, COHORT_VLLM_PYTHON="")
    found = json.loads((tmp_path / gpu.FILE).read_text())
    status = {result["name"]: result["status"] for result in found["parts"]}
    assert status.pop("vLLM server") == "left out" and set(status.values()) == {"passed"}
    assert "- vLLM server: vLLM is not installed here" in out and "Nothing failed." in out
    assert "| tiny, LoRA: ours, shared | " in out
    names = {check["name"] for result in found["parts"] for check in result.get("checks", ())}
    assert (
        "shared, attention by default, float32: gradient" in names
        and "a budget of 1 tokens, float32: gradient" in names
    )
    (step,) = [result["step"] for result in found["parts"] if "step" in result]
    assert step["flops"] > 0 and {"mfu", "peak_bytes", "planned_bytes", "tokens_per_s"} <= set(step)


@slow("the scripts that it runs, of which each takes up to 20 s")
def test_the_full_form_on_a_cpu_goes_on_where_vllm_is_broken(tmp_path: Path) -> None:
    out = script("full", "--tiny", out=tmp_path, code=1, COHORT_VLLM_PYTHON="/no/python")
    found = json.loads((tmp_path / gpu.FILE).read_text())
    failed = [result["name"] for result in found["parts"] if result["status"] == "failed"]
    assert failed == ["vLLM server", "demo, vllm", "vllm_servers.py"]
    why = "'/no/python' is not a working Python"
    assert len(found["failures"]) == 3 and all(why in line for line in found["failures"])
    output = {result["name"]: result["output"] for result in found["parts"] if "output" in result}
    assert {table.script for table in TABLES} == {*output, "vllm_servers.py"} | {"trl_demo.py"}
    assert all(SCRIPTS[name] in text for name, text in output.items())
    if found["versions"]["trl"] is None:
        assert "- trl_demo.py: needs trl, not installed" in out
        assert "- training_step.py: rows with trl: not installed" in out
        assert "- step, tiny, TRL: needs trl 1.16 or newer" in out


def test_only_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["quick", "--tiny", "--only", "nothing"])
    assert "no part has such a name; there are kernels, attention" in capsys.readouterr().err


def script(*arguments: str, out: Path, code: int = 0, **environment: str) -> str:
    return run("bash", str(BENCH / "gpu.sh"), *arguments, code=code, OUT=str(out), PYTHON=sys.executable, **environment)
