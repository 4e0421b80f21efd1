"""`bench/gpu.sh`: every part runs whatever becomes of the others, and one file says what was found."""

import json
import re
import sys
import tarfile
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
from gpu_speed import shares
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


def test_a_later_call_adds_to_what_earlier_ones_found(tmp_path: Path) -> None:
    right, wrong = (Check(name="product", error=error, limit=0.1) for error in (0.01, 0.2))
    code, _ = run_parts(tmp_path, part("first", checked(wrong)), part("second", checked(right)))
    assert code == 1
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "table.txt").write_text("a table")
    code, found = run_parts(tmp_path, part("third", checked(right)), part("first", checked(right)))
    assert code == 0 and found["failures"] == []  # of a result that was replaced
    assert [(r["name"], r["call"]) for r in found["parts"]] == [("first", 2), ("second", 1), ("third", 2)]
    assert [call["form"] for call in found["calls"]] == ["quick", "quick"]
    with tarfile.open(tmp_path / gpu.ARCHIVE) as archive:
        assert archive.getnames() == ["folder/table.txt", gpu.FILE]
    with pytest.raises(SystemExit, match="is of --tiny; use another folder"):
        gpu.earlier(tmp_path, tiny=False)


def test_no_part_is_started_that_cannot_end_in_time(tmp_path: Path) -> None:
    def run(*parts: gpu.Part, within_s: float) -> dict[str, str]:
        gpu.run_parts(parts, "quick", CPU, out=tmp_path, apart=False, within_s=within_s)
        found = json.loads((tmp_path / gpu.FILE).read_text())
        return {r["name"]: r.get("skipped", r["status"]) for r in found["parts"]}

    quick, long = part("quick", checked(), about_s=1.0), part("long", checked(), about_s=100.0)
    found = run(quick, long, within_s=50.0)
    assert found["quick"] == "passed"
    assert re.fullmatch(r"not started: \d+ s were left, and it takes about 100 s", found["long"])
    assert run(long, within_s=1000.0)["long"] == "passed"
    assert run(long, within_s=50.0)["long"] == "passed"  # it took less than a second before
    assert run(quick, within_s=-1.0)["quick"] == "passed"  # what an earlier call has found stays


def test_a_script_gets_the_time_that_is_left_and_keeps_what_it_printed() -> None:
    given: list[float] = []

    def work(_: torch.device, most_s: float) -> dict[str, Any]:
        given.append(most_s)
        raise FailedError("modes.py ended with 1:\nint8: ImportError: torchao", "| a table |\n" * 999)

    script = gpu.Part(name="modes.py", work=work, is_script=True, most_s=900.0)
    result = gpu.run_part(script, "full", CPU, apart=True, left_s=300.0)
    assert given == [300.0] and result["status"] == "failed"
    assert result["output"] == "| a table |\n" * 999 and "torchao" in result["failed"]


def test_the_rest_is_what_has_no_result_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [part.name for part in gpu.parts_of("quick", tiny=True, out=tmp_path)]
    parts = [{"name": name, "status": "passed", "seconds": 1.0} for name in names]
    parts[names.index("ceilings")]["not_started"] = True
    (tmp_path / gpu.FILE).write_text(json.dumps({"tiny": True, "parts": parts}))
    gpu.main(["quick", "--tiny", "--rest", "--within", "0", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert [line.split()[-1] for line in said.splitlines() if line.startswith("left out")] == ["ceilings"]


def test_a_profile_says_where_the_time_goes() -> None:
    kernels = {
        "nvjet_tst_128x256": 0.5,
        "sm90_xmma_gemm_bf16": 0.1,
        "flash_fwd_kernel": 0.2,
        "_softmax_kernel": 0.05,
        "at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add>": 0.04,
        "Memcpy HtoD (Pinned -> Device)": 0.01,
        **{f"other {n}": 0.0001 for n in range(20)},
    }
    found = shares(kernels, 1.0)
    assert list(found.items())[:4] == [
        ("matrix products", "60.0% (600.0 ms)"),
        ("attention", "20.0% (200.0 ms)"),
        ("idle", "9.8% (98.0 ms)"),
        ("Triton", "5.0% (50.0 ms)"),
    ]
    assert found["elementwise"] == "4.0% (40.0 ms)" and found["copies"] == "1.0% (10.0 ms)"
    assert found["nvjet_tst_128x256"] == "50.0% (500.0 ms)"
    assert sum(name.startswith("other ") for name in found) == 15 - 6


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
    left_out = {name for name in status if status[name] == "left out"}
    assert left_out == {"vLLM server", "Triton compilations", "expandable segments"}
    assert {status[name] for name in status.keys() - left_out} == {"passed"}
    measured = {result["name"]: result["measured"] for result in found["parts"] if "measured" in result}
    assert measured["weights to another process"]["transport"] == "gloo"
    assert measured["ceilings"]["bfloat16, TFLOP/s"] > 0
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
    assert failed == ["vLLM server", "vllm_servers.py", "demo, vllm"]
    why = "'/no/python' is not a working Python"
    assert len(found["failures"]) == 3 and all(why in line for line in found["failures"])
    output = {result["name"]: result["output"] for result in found["parts"] if "output" in result}
    assert {table.name for table in TABLES} == {*output, "vllm_servers.py"} | {"trl_demo.py"}
    assert all(SCRIPTS[table.script] in output[table.name] for table in TABLES if table.name in output)
    steps = {result["name"]: result["step"] for result in found["parts"] if "step" in result}
    assert steps["QLoRA, tiny, nf4"]["tokens_per_s"] > 0
    assert steps["offload, tiny, parameters"]["moved_bytes"] > steps["offload, tiny, optimizer"]["moved_bytes"] > 0
    measured = {result["name"]: result["measured"] for result in found["parts"] if "measured" in result}
    assert measured["out of memory"]["failures"] == 1
    assert measured["out of memory"]["messages"] == ["OutOfMemoryError: CUDA out of memory. Made up for a CPU"]
    assert all(measured["sampling"][f"{name}: tokens"] == 8 * 8 * 4 for name in ("bfloat16", "float32, LoRA"))
    assert "idle" in measured["profile"]
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
